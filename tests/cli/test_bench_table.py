"""Results of several engines in one table."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from speculators_ext.cli import app

ROW = {
    "engine": "vllm", "method": "plain", "concurrency": 1, "output_tok_s": 10.0, "speedup": 1.0,
    "mean_acceptance_length": None, "acceptance_per_position": None, "identical_to_plain": "2/2",
    "num_drafts": 0, "num_draft_tokens": 0, "output_tokens": 20, "seconds": 2.0,
}  # fmt: skip
RESULT = {"model": "m", "dtype": "float32", "num_prompts": 2, "max_tokens": 16, "rows": [ROW]}


def written(folder, name, result):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result))
    return str(path)


def test_rows_of_both_engines_stand_together(tmp_path):
    """Catches rows of one engine that cannot be told from those of the other."""
    other = ROW | {"engine": "sglang", "method": "eagle2", "speedup": 1.5, "num_drafts": 7}
    files = [
        written(tmp_path, "a", RESULT),
        written(tmp_path, "b", RESULT | {"rows": [ROW | {"engine": "sglang"}, other]}),
    ]
    result = CliRunner().invoke(app, ["bench", "table", *files])
    assert result.exit_code == 0, result.output
    for text in ("vllm: plain", "sglang: plain", "sglang: eagle2", "1.50x"):
        assert text in result.output
    assert "No step was drafted" not in result.output


@pytest.mark.parametrize(
    ("change", "says"), [({"max_tokens": 8}, "max_tokens differs: 16, 8"), (None, "not a result")]
)
def test_what_cannot_be_compared_is_refused(tmp_path, change, says):
    """Catches runs over other prompts side by side."""
    other = {"rows": 3} if change is None else RESULT | change
    files = [written(tmp_path, "a", RESULT), written(tmp_path, "b", other)]
    result = CliRunner().invoke(app, ["bench", "table", *files])
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"# A heading", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1]", "not a result"),
    ],
)
def test_what_is_no_result_is_said_in_one_line(tmp_path, content, says):
    """Catches a parser's or the system's own words where the user gave the wrong file."""
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["bench", "table", str(path)])
    assert result.exit_code == 2
    [line] = result.stderr.strip().splitlines()
    assert line == f"error: {path}: {says}; accepted: a file that `bench serve --json` wrote"
    folder = CliRunner().invoke(app, ["bench", "table", str(tmp_path)])
    assert "cannot be read (Is a directory)" in folder.stderr
