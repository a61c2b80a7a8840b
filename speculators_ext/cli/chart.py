"""Draws a benchmark's result as a PNG: speed by concurrency, acceptance by draft position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import need

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from speculators_ext.cli.rows import Row

# Okabe and Ito's palette, told apart with every common colour blindness; plain is first: grey.
COLOURS = ("#7f7f7f", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write the chart of `rows` to `path` as PNG, whatever its suffix.

    Left: tokens a second, one group of bars a concurrency, each bar labelled with its speed-up.
    Right: share of drafts accepted at each position, at the lowest concurrency that drafted.
    """
    need("matplotlib", "bench")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    methods = list(dict.fromkeys(row.method for row in rows))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(methods)}
    _speed(left, rows, colours)
    _acceptance(right, rows, colours)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path, format="png")


def _speed(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    groups = sorted({row.concurrency for row in rows})
    width = 0.8 / len(colours)
    for at, (method, colour) in enumerate(colours.items()):
        mine = {row.concurrency: row for row in rows if row.method == method}
        places = [g + (at - (len(colours) - 1) / 2) * width for g in range(len(groups))]
        heights = [mine[c].output_tok_s if c in mine else 0.0 for c in groups]
        labels = [_bar_label(mine.get(c)) for c in groups]
        bars = axes.bar(places, heights, width * 0.92, color=colour, label=method)
        axes.bar_label(bars, labels, padding=2, fontsize=8)
    axes.set_xticks(range(len(groups)), [f"{c} at once" for c in groups])
    axes.set_ylabel("answer tokens a second, all requests")
    axes.set_title("Speed (speed-up over plain)", fontsize=10)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _bar_label(row: Row | None) -> str:
    if row is None:
        return ""
    speed = f"{row.output_tok_s:.{1 if row.output_tok_s < 100 else 0}f}"
    return speed if row.speedup is None else f"{speed}\n{row.speedup:.2f}x"


def _acceptance(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    axes.set_title("Drafts accepted, by position", fontsize=10)
    drafted: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: r.concurrency):
        if row.acceptance_per_position:
            drafted.setdefault(row.method, row)
    if not drafted:
        axes.text(0.5, 0.5, "no step was drafted for", ha="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    deepest = 1
    for method, row in drafted.items():
        shares = row.acceptance_per_position or []
        deepest = max(deepest, len(shares))
        label = (
            f"{method}, {row.concurrency} at once: {row.mean_acceptance_length:.2f} tokens a step"
        )
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=colours[method], label=label)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1.18)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of drafts accepted")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
