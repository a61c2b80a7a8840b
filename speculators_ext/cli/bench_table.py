"""`speculators-ext bench table`: results of several runs, as of several engines, in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators_ext.cli.common import CliError, one_line_errors

if TYPE_CHECKING:
    from speculators_ext.cli.rows import Row

FilesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="RESULT.json...", help="Files that `bench serve --json` wrote."),
]
# What must be the same for rows to stand side by side.
SAME = ("model", "dtype", "num_prompts", "max_tokens")
_ACCEPTED = "a file that `bench serve --json` wrote"


@one_line_errors
def table(files: FilesArgument) -> None:
    """Print the rows of several results of the same model and prompts as one table."""
    from rich.console import Console

    from speculators_ext.cli import report

    results = [_read(file) for file in files]
    for key in SAME:
        values = [result[key] for result in results]
        if any(value != values[0] for value in values):
            raise CliError(f"{key} differs: {', '.join(map(str, values))}; give runs that share it")
    first = results[0]
    title = f"{first['model']}, {first['dtype']}: {first['num_prompts']} prompts, " + (
        f"up to {first['max_tokens']} tokens"
    )
    rows = [row for result in results for row in _rows(result)]
    Console().print(report.table(rows, title))


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise CliError(f"{file}: no such file; accepted: {_ACCEPTED}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(
            f"{file}: cannot be read ({error.strerror}); accepted: {_ACCEPTED}"
        ) from error
    except ValueError as error:
        raise CliError(f"{file}: not JSON; accepted: {_ACCEPTED}") from error
    if not isinstance(found, dict) or not {"rows", *SAME} <= set(found):
        raise CliError(f"{file}: not a result; accepted: {_ACCEPTED}")
    return found


def _rows(result: dict[str, Any]) -> list[Row]:
    from speculators_ext.cli.rows import Row

    return [Row(**row | {"method": f"{row['engine']}: {row['method']}"}) for row in result["rows"]]
