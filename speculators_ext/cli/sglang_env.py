"""`speculators-ext sglang-cpu-env`: what a shell must set for SGLang on a machine without a GPU."""

from __future__ import annotations

import typer

from speculators_ext.cli.common import FAILED, CliError, one_line_errors


@one_line_errors
def sglang_cpu_env() -> None:
    """Print the variables that make SGLang run on a machine without a GPU.

    In a shell: `eval "$(speculators-ext sglang-cpu-env)"`. Then
    `python -m sglang.launch_server --device cpu --attention-backend torch_native ...` and
    `sglang.Engine` work. Nothing is printed, and the exit code is 1, where there is a GPU.
    """
    from speculators_ext.engines.sglang.cpu.environment import assignments
    from speculators_ext.errors import ConfigError

    try:
        found = assignments()
    except ConfigError as error:
        raise CliError(str(error), code=FAILED) from error
    for name, value in found.items():
        typer.echo(f"export {name}={value}")
