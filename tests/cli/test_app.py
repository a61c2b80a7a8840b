"""The console script itself: light to import, one-line errors, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speculators_ext import __version__
from speculators_ext.cli import app

run = CliRunner().invoke
ROOT = Path(__file__).parents[2]


def test_import_is_light():
    """Catches a start that takes seconds, or fails, because torch or an engine is imported."""
    heavy = {"torch", "vllm", "sglang", "triton", "transformers", "matplotlib", "httpx", "numba"}
    script = f"import sys, speculators_ext.cli; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_version():
    """Catches a version option that needs a command."""
    result = run(app, ["--version"])
    assert result.exit_code == 0
    assert __version__ in result.output


@pytest.mark.parametrize(
    "command",
    [["assets"], ["doctor"], ["config"], ["demo"], ["bench", "serve"], ["sglang-cpu-env"]],
)
def test_every_command_has_help(command):
    """Catches a command that typer cannot build, or one without a word of help."""
    result = run(app, [*command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.split()) > 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "serve", "--model", "./none"], "'./none' is not a folder"),
        (["bench", "serve", "--model", "m", "--engine", "tensorrt"], "--engine 'tensorrt'"),
        (["bench", "serve", "--model", "m", "--methods", "claps"], "did you mean 'clasp'"),
        (["bench", "serve", "--model", "m", "--methods", ","], "--methods"),
        (["bench", "serve", "--model", "m", "--concurrency", "0"], "--concurrency"),
        (["bench", "serve", "--model", "m", "--prompts", "./none"], "--prompts none"),
        (["bench", "serve", "--model", "m", "--chart", "./none/c.png"], "does not exist"),
        (
            ["bench", "serve", "--model", "m", "--variant", 'plain={"method":"ngram"}'],
            "another row",
        ),
        (["assets", "no-such-asset"], "unknown asset 'no-such-asset'"),
        (["doctor", "--target", "./none"], "'./none' is not a folder"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(arguments, says):
    """Catches tracebacks, and servers started on a request that cannot be met."""
    result = run(app, arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_assets_prints_json_on_stdout_alone():
    """Catches progress mixed into what a program reads."""
    result = run(app, ["assets", "tiny-llama", "--json"])
    assert result.exit_code == 0, result.stderr
    [(name, folder)] = json.loads(result.stdout).items()
    assert name == "tiny-llama"
    assert folder.endswith("tiny-llama")


def test_first_words_name_both_engines_and_promise_no_more_than_all_methods_keep():
    """Catches SGLang left unsaid, and "lossless" said of a package that has a lossy method."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (project["description"], run(app, ["--help"]).output):
        assert "vLLM and SGLang" in text
        assert "wrong token" not in text
    assert "lossless unless" in project["description"]


def test_make_lists_its_targets_in_one_column():
    """Catches a target longer than the column, whose words then start further right."""
    command = ["make", "--no-print-directory", "help"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = made.stdout.splitlines()
    assert len(lines) > 10
    starts = {re.match(r"make \S+ +", line).end() for line in lines}
    assert len(starts) == 1
