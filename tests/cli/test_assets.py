"""`speculators-ext assets`."""

from __future__ import annotations

from typer.testing import CliRunner

from speculators_ext.assets import build
from speculators_ext.cli.app import app


def test_folders_alone_are_for_a_shell_to_take():
    """Catches a name or an arrow in front of the folder."""
    names = ["tiny-llama", "tiny-qwen3"]
    result = CliRunner().invoke(app, ["assets", *names, "--folder"])
    assert result.stdout.splitlines() == [str(build(name)) for name in names]
