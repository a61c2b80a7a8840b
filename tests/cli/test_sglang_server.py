"""SGLang's command line from a variant's speculative config, and its counters."""

from __future__ import annotations

import pytest

from speculators_ext.cli import sglang_server
from speculators_ext.cli.common import CliError
from speculators_ext.cli.metrics import SpecCounters, sglang_counters
from speculators_ext.cli.sglang_server import sglang_command, speculative_flags


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (
            {"method": "clasp", "num_speculative_tokens": 6},
            "--speculative-algorithm CLASP --speculative-num-steps 6",
        ),
        (
            {"method": "clasp", "num_speculative_tokens": 2, "method_config": {"adaptive": False}},
            "--speculative-algorithm CLASP --speculative-num-steps 2 "
            '--speculative-method-config {"adaptive": false}',
        ),
        (
            {"method": "eagle2", "model": "head", "num_speculative_tokens": 8},
            "--speculative-algorithm EAGLE2 --speculative-draft-model-path head "
            "--speculative-num-draft-tokens 9",
        ),
        (
            {"method": "mtp_reuse", "num_speculative_tokens": 8, "method_config": {"topk": 2}},
            "--speculative-algorithm MTP_REUSE --speculative-num-draft-tokens 9 "
            '--speculative-method-config {"topk": 2}',
        ),
        (
            {"method": "eagle3", "model": "head", "num_speculative_tokens": 2},
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path head "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
        ),
        (
            {"method": "eagle3", "model": "h", "num_speculative_tokens": 8, "depth": 2, "topk": 6},
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path h "
            "--speculative-num-draft-tokens 9 --speculative-num-steps 2 --speculative-eagle-topk 6",
        ),
        (
            {"method": "eagle", "model": "h", "num_speculative_tokens": 3, "adaptive": True},
            "--speculative-algorithm EAGLE --speculative-draft-model-path h "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
            "--speculative-adaptive",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 1},
            "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 2",
        ),
    ],
    ids=lambda value: value["method"] if isinstance(value, dict) else "",
)
def test_a_speculative_config_becomes_flags(config, flags):
    """Catches a tree asked for as a chain, or a setting that never reaches the server."""
    assert " ".join(speculative_flags(config)) == flags


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "ngram", "num_speculative_tokens": 2}, "method 'ngram'"),
        ({"method": "clasp", "num_speculative_tokens": 2, "revision": "x"}, "key 'revision'"),
    ],
)
def test_what_sglang_has_nothing_for_is_refused(config, says):
    """Catches a variant that is served as something else."""
    with pytest.raises(CliError, match=says):
        speculative_flags(config)


def test_extra_arguments_win(monkeypatch):
    """Catches arguments of the user's that ours override, and CPU flags on a GPU host."""
    monkeypatch.setattr("speculators_ext.engines.devices.find_gpu", lambda: None)
    words = ("model", 1234)
    command = sglang_command(*words, dtype="float32", speculative=None, extra=("--port", "1"))
    assert command[-2:] == ["--port", "1"]
    assert "torch_native" in command
    monkeypatch.setattr("speculators_ext.engines.devices.find_gpu", lambda: "a GPU")
    assert "--device" not in sglang_command(*words, dtype="float32", speculative=None)


def test_a_missing_engine_is_one_line(monkeypatch):
    """Catches a server that is started and waited for where SGLang is not installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CliError, match="SGLang is not installed"):
        sglang_server.sglang_environment()


def test_answers_counters_add_up():
    """Catches rounds by drafts accepted taken for drafts accepted by position."""
    one = sglang_counters(
        {
            "spec_verify_ct": 6,
            "spec_num_correct_drafts": 7,
            "spec_correct_drafts_histogram": [2, 1, 3],
        }
    )
    assert one == SpecCounters(drafts=6, drafted=0, accepted=7, accepted_at=(4, 3))
    other = SpecCounters(drafts=2, accepted=1, accepted_at=(1,))
    assert one + other == SpecCounters(drafts=8, accepted=8, accepted_at=(5, 3))
    assert (one + other).mean_acceptance_length == 2.0
