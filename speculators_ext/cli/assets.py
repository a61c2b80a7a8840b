"""`speculators-ext assets`: the models the demo and the tests use, built once and cached."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads annotations when it builds the command
from typing import Annotated

import typer

from speculators_ext.cli.common import FAILED, CliError, log_console, one_line_errors


@one_line_errors
def assets(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which assets; all of them when left out.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, name to folder.")
    ] = False,
    only_folders: Annotated[
        bool, typer.Option("--folder", help="Print the folders only, for a shell to take.")
    ] = False,
) -> None:
    """Build the demo's and the tests' models (cached) and print name -> folder."""
    folders = build_assets(names or None)
    if as_json:
        typer.echo(json.dumps({name: str(folder) for name, folder in folders.items()}, indent=2))
        return
    for name, folder in folders.items():
        typer.echo(str(folder) if only_folders else f"{name} -> {folder}")


def build_assets(names: list[str] | None) -> dict[str, Path]:
    """Build the named assets (None: all) with a status line on stderr.

    Raises:
        CliError: an unknown name (exit code 2), or a build that failed (1).
    """
    from speculators_ext.assets import AssetError, build_all
    from speculators_ext.assets import names as known

    for name in names or ():
        if name not in known():
            raise CliError(f"unknown asset {name!r}: known assets are {', '.join(known())}")
    console = log_console()
    with console.status("assets") as status:
        try:
            return build_all(names, lambda name, stage: status.update(f"{name}: {stage}"))
        except AssetError as error:
            raise CliError(str(error), code=FAILED) from error
