"""The typer application: names, help texts and nothing else; the work is in the sibling modules."""

from __future__ import annotations

from typing import Annotated

import typer

from speculators_ext import __version__
from speculators_ext.cli.assets import assets
from speculators_ext.cli.bench import serve
from speculators_ext.cli.bench_table import table
from speculators_ext.cli.config import config
from speculators_ext.cli.demo import demo
from speculators_ext.cli.doctor import doctor
from speculators_ext.cli.sglang_env import sglang_cpu_env

app = typer.Typer(
    name="speculators-ext",
    help="Speculative-decoding methods for stock vLLM and SGLang: check, measure and try them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    help="Measure methods against plain decoding.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command()(assets)
app.command()(doctor)
app.command()(config)
app.command()(demo)
app.command()(sglang_cpu_env)
bench.command()(serve)
bench.command()(table)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speculators-ext {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Speculative-decoding methods for stock vLLM and SGLang: check, measure and try them."""


@bench.callback()
def bench_group() -> None:
    """Measure methods against plain decoding."""
