"""What the documents tell a reader to type exists, and every number has a command."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from speculators_ext.config import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = README + (ROOT / "CONTRIBUTING.md").read_text()
# Text in backquotes, on one line or fenced.
CODE = "\n".join(
    fenced or inline
    for fenced, inline in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", DOCUMENTS, re.S)
)
TARGETS = sorted(set(re.findall(r"^make ([a-z-]+)", CODE, re.M)))
COMMANDS = sorted(set(re.findall(r"^speculators-ext ([a-z]+(?: [a-z]+)?)", CODE, re.M)))


MEASURED = {
    "README.md": README.split("## Measured")[1].split("\n## ")[0],
    "benchmarks/README.md": (ROOT / "benchmarks" / "README.md").read_text(),
}


def measured_rows(section: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_two_commands_are_named() -> None:
    """Catches a README that no longer says how to start (and a pattern that finds nothing)."""
    assert {"demo", "test"} <= set(TARGETS)
    assert {"doctor", "assets"} <= set(COMMANDS)
    assert "Not affiliated with vLLM, SGLang or the speculators project." in README


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists(target: str) -> None:
    """Catches a renamed make target that a document still names."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_exists(name: str) -> None:
    """Catches a renamed command that a document still names."""
    from typer.testing import CliRunner

    from speculators_ext.cli import app

    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("section", MEASURED.values(), ids=MEASURED)
def test_every_number_has_its_command(section: str) -> None:
    """Catches a result in a table that nobody can run again."""
    rows = measured_rows(section)
    assert rows
    for what, result, command in rows:
        assert result, what
        words = re.fullmatch(r"`([^`]+)`", command)
        assert words, f"{what}: the last column is one command in backquotes, not {command!r}"
        for script in re.findall(r"\S+\.py\b", words[1]):
            assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.name)
def test_a_benchmark_can_be_run_by_make(path: Path) -> None:
    """Catches a benchmark without --json: `make bench` calls each as `NAME.py --json OUT`."""
    assert '"--json"' in path.read_text()


def test_folders_exist() -> None:
    """Catches a map of the repository that names a folder which has moved."""
    section = README.split("## Where things are")[1].split("\n## ")[0]
    folders = re.findall(r"`([a-z_/]+/)`", section)
    assert len(folders) > 5
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


def test_configurations_are_json() -> None:
    """Catches a --speculative-config that a shell would pass and vLLM would not parse."""
    configs = re.findall(r"--speculative-config '([^']*)'", README)
    assert configs
    for config in configs:
        assert json.loads(config)["method"] in METHODS


def test_make_alone_lists_the_targets() -> None:
    """Catches a target without a help line: `make` alone is how one finds it."""
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [target for target in TARGETS if f"make {target} " not in listed] == []
