"""What a user may ask of SGLang, and the one line he gets where it cannot be."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins

from speculators_ext.assets import build
from speculators_ext.engines.sglang import requested
from speculators_ext.engines.sglang.clasp.requested import DEFAULT_NUM_STEPS, clasp_settings

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402 - as SGLang does: plugins come first


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """The flag writes to the environment: no test may leave settings to the next."""
    monkeypatch.setenv(requested.ENVIRONMENT, "")


def resolve(*words: str, model: str | Path = "tiny-llama"):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    folder = model if isinstance(model, Path) else build(model)
    shared = ["--model-path", str(folder), "--device", "cpu"]
    shared += ["--attention-backend", "torch_native", "--speculative-algorithm", "clasp"]
    args = ServerArgs.from_cli_args(parser.parse_args([*shared, *words]))
    args.resolve_once()
    return resolving_view(args)


def test_a_chain_is_filled_in():
    """Catches a verify width that does not fit the drafts, or overlap scheduling switched off."""
    found = resolve()
    assert found.speculative_algorithm == "CLASP"
    assert found.speculative_num_steps == DEFAULT_NUM_STEPS
    assert found.speculative_num_draft_tokens == DEFAULT_NUM_STEPS + 1
    assert found.speculative_eagle_topk == 1
    assert not found.disable_overlap_schedule


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-num-steps", "3"),
        ("--speculative-num-draft-tokens", "4"),
        ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"),
    ],
    ids=["steps", "tokens", "both"],
)
def test_the_number_of_drafts_is_the_users(words):
    """Catches SGLang's own flags ignored where they mean the same."""
    found = resolve(*words)
    assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (3, 4)


def test_settings_come_from_the_flag_and_from_the_environment(monkeypatch):
    """Catches a flag that does not reach the processes which the server starts."""
    found = resolve(requested.FLAG, '{"num_skip_layers": 3}')
    assert json.loads(os.environ[requested.ENVIRONMENT]) == {"num_skip_layers": 3}
    assert clasp_settings(found).num_skip_layers == 3
    monkeypatch.setenv(requested.ENVIRONMENT, '{"num_skip_layers": 2}')
    assert clasp_settings(resolve()).num_skip_layers == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((requested.FLAG, '{"num_skip_layer": 3}'), "did you mean 'num_skip_layers'"),
        ((requested.FLAG, "{3}"), "is not JSON"),
        ((requested.FLAG, "[3]"), "is not an object"),
        ((requested.FLAG, '{"num_skip_layers": 80}'), "too many for the target's 8 layers"),
        ((requested.FLAG, '{"skip_unit": "sublayer"}'), "accepted: 'layer'"),
        (("--speculative-num-steps", "0"), "--speculative-num-steps=0 is too small"),
        (
            ("--speculative-num-steps", "4", "--speculative-num-draft-tokens", "9"),
            "accepted: 5",
        ),
        (("--speculative-eagle-topk", "4"), "--speculative-eagle-topk=4"),
        (("--tp-size", "2"), "--tp-size=2"),
        (("--enable-mixed-chunk",), "--enable-mixed-chunk"),
        (("--enable-return-hidden-states",), "--enable-return-hidden-states"),
        (("--disaggregation-mode", "decode"), "--disaggregation-mode=decode"),
        (("--speculative-accept-threshold-acc", "0.5"), "--speculative-accept-threshold-acc=0.5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_one_line(words, says):
    """Catches a server that dies of it after loading, or silently does something else."""
    with pytest.raises(ValueError, match=r"accepted|remove") as raised:
        resolve(*words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_target_whose_layers_cannot_be_skipped_is_refused():
    """Catches a model that is served with layers in the wrong places."""
    with pytest.raises(ValueError, match="Phi3ForCausalLM is not among LlamaForCausalLM"):
        resolve(model="tiny-phi3")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 4}, "linear_attention"),
        ({"vision_config": {"hidden_size": 8}}, "nothing but text"),
        ({"is_hybrid_swa": True}, "a second cache"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_target_of_another_kind_of_cache_is_refused(tmp_path, changes, says):
    """Catches drafts verified on a state that cannot be rolled back, or in the wrong cache."""
    config = json.loads((build("tiny-llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=says):
        resolve(model=tmp_path)


def test_a_gpu_host_is_refused(monkeypatch):
    """Catches an adapter that was tried on CPUs only at work on a GPU."""
    monkeypatch.setattr(requested, "find_gpu", lambda: "an NVIDIA GPU")
    with pytest.raises(ValueError, match="an NVIDIA GPU is here"):
        resolve()
