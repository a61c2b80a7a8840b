"""The list of settings: what it says is what the models of the settings hold."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from speculators_ext.cli import app
from speculators_ext.cli.config import describe_settings
from speculators_ext.config import METHODS, SkipConfig

run = CliRunner().invoke


def test_every_setting_of_every_method_is_listed():
    """Catches a setting left out, a wrong default, and text mixed into the JSON."""
    result = run(app, ["config", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert list(found) == list(METHODS)
    for name, rows in found.items():
        fields = METHODS[name].config_model.model_fields
        own = {row["key"]: row for row in rows if "." not in row["key"]}
        assert list(own) == list(fields)
        assert {key: row["default"] for key, row in own.items()} == {
            key: field.default for key, field in fields.items()
        }
        assert all(row["description"] and row["accepted"] for row in rows)
    inner = [row["key"] for row in found["reasoning_step"] if row["key"].startswith("clasp.")]
    assert inner == [f"clasp.{key}" for key in SkipConfig.model_fields]


@pytest.mark.parametrize(
    ("method", "key", "accepted", "outside"),
    [
        ("clasp", "exit_threshold", "a number from 0 to 1", 1.5),
        ("eagle2", "topk", "an integer from 1 to 32", 33),
        ("mtp_reuse", "first_hidden", "'pre' or 'post'", "both"),
        ("reasoning_step", "delimiter", "string of 1 to 32 characters", "x" * 33),
        ("reasoning_step", "judge_suffix", "a string of 1 or more characters", ""),
    ],
)
def test_bounds_are_those_that_are_enforced(method, key, accepted, outside):
    """Catches a bound that the list says and the model does not hold to, or the reverse."""
    [row] = [row for row in describe_settings(method) if row["key"] == key]
    assert accepted in row["accepted"]
    with pytest.raises(ValidationError, match=key):
        METHODS[method].config_model.model_validate({"lossy": True, key: outside})


def test_table_of_one_method():
    """Catches a table that cuts a key or a bound off, and methods nobody asked for."""
    result = run(app, ["config", "clasp"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    for text in ("clasp: the target drafts", "exit_threshold", "0.7", "a number from 0 to 1"):
        assert text in result.stdout
    assert "min_path_probability" not in result.stdout
    assert "…" not in result.stdout


def test_unknown_method_is_one_line():
    """Catches a list of nothing for a name that was mistyped."""
    result = run(app, ["config", "claps"])
    assert result.exit_code == 2
    [line] = result.stderr.strip().splitlines()
    assert "did you mean 'clasp'" in line
    assert ", ".join(METHODS) in line
