"""What every command shares: one-line errors with an exit code, the log console, model names."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

FAILED = 1
USAGE = 2
INTERRUPTED = 130


class CliError(Exception):
    """An error the user can act on, told in one line.

    Args:
        message: what was given, what is accepted, what to do.
        code: the exit code; 2 for usage, 1 for what failed while running.
        details: further lines shown under the message, such as the end of a log.
    """

    def __init__(self, message: str, *, code: int = USAGE, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class ServerFailure(CliError):
    """A running server broke: it went away, or answered that it failed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=FAILED)


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: CliError becomes one line on stderr and an exit code, never a traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except CliError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            if error.details:
                typer.secho(error.details, dim=True, err=True)
            raise typer.Exit(error.code) from None
        except KeyboardInterrupt:
            typer.secho("interrupted; everything this command started was stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapper


def log_console() -> Console:
    """Console for progress and remarks: stderr, so that stdout holds results only."""
    from rich.console import Console

    return Console(stderr=True)


def print_table(
    out: Console, title: str, headings: tuple[str, ...], rows: Iterable[tuple[Any, ...]]
) -> None:
    """Print a table whose cells wrap: nothing is cut off, however narrow the terminal.

    Args:
        out: where to.
        title: above the table.
        headings: of the columns.
        rows: cells, each a rich `Text` or a plain string; an empty one is shown as `-`.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell or "-") for cell in row))
    out.print(table)


def need(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra of ours brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CliError(
            f"{module} cannot be imported ({error}): pip install 'speculators-ext[{extra}]'"
        ) from error


def resolve_model(name: str, log: Callable[[str], None]) -> str:
    """Turn what the user typed into what an engine takes.

    A folder stays a folder, the name of an asset becomes its folder (built where it is missing),
    and everything else is taken for a hub name. What looks like a path must exist. `log` is told
    the stages of a build.
    """
    if Path(name).is_dir():
        return str(Path(name))
    if name.startswith((".", "/", "~")):
        expanded = Path(name).expanduser()
        if expanded.is_dir():
            return str(expanded)
        raise CliError(
            f"model {name!r} is not a folder: give a model folder, an asset or a hub name"
        )
    from speculators_ext import assets

    if name in assets.names():
        try:
            return str(assets.build(name, lambda name, stage: _log_build(log, name, stage)))
        except assets.AssetError as error:
            raise CliError(str(error), code=FAILED) from error
    return name


def _log_build(log: Callable[[str], None], name: str, stage: str) -> None:
    if stage != "cached":
        log(f"asset {name}: {stage}")
