"""What a user may ask of SGLang, and the one line he gets where it cannot be."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins

from speculators_ext.assets import build
from speculators_ext.config import ConfigError
from speculators_ext.engines.sglang import gpus, requested
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
    with pytest.raises(ValueError, match="an NVIDIA GPU is here") as raised:
        resolve()
    assert f"set {gpus.OPT_IN}=1" in str(raised.value)
    assert "\n" not in str(raised.value)


ON_GPU = {
    "device": "cuda", "attention_backend": "triton", "prefill_attention_backend": None,
    "decode_attention_backend": None, "kv_cache_dtype": "auto", "attn_cp_size": 1, "dcp_size": 1,
    "enable_torch_compile": False, "enable_deterministic_inference": False,
    "enable_unified_memory": False, "enable_page_major_kv_layout": False,
    "enable_kv_cache_sharding": False, "enable_hisparse": False, "enable_pdmux": False,
}  # fmt: skip


def on_gpu(monkeypatch, changes=None, environment=None, gpu="an NVIDIA GPU"):
    for name, value in ({gpus.OPT_IN: "1"} | (environment or {})).items():
        monkeypatch.setenv(name, value)
    gpus.check_gpu("CLASP", SimpleNamespace(**ON_GPU | (changes or {})), gpu)


@pytest.mark.parametrize("backend", gpus.BACKENDS)
def test_a_gpu_may_be_tried_where_the_user_says_so(monkeypatch, backend):
    """Catches an opt-in that does not open anything."""
    on_gpu(monkeypatch, {"attention_backend": backend})
    stock, told = resolve(), {"device", "attention_backend"}
    assert {name: getattr(stock, name) for name in ON_GPU.keys() - told} == {
        name: value for name, value in ON_GPU.items() if name not in told
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "cpu"}, "accepted: --device cuda"),
        ({"attention_backend": "trtllm_mha"}, "triton, flashinfer or fa3"),
        ({"attention_backend": None}, "--attention-backend triton, flashinfer or fa3"),
        ({"prefill_attention_backend": "fa3"}, "fa3 and triton"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype=fp8_e5m2"),
        ({"enable_torch_compile": True}, "--enable-torch-compile=True"),
        ({"enable_unified_memory": True}, "two numberings"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_was_not_read_for_gpus_is_one_line(monkeypatch, changes, says):
    """Catches a cache read as what it is not, or masks laid out for another attention."""
    with pytest.raises(ConfigError, match="accepted") as raised:
        on_gpu(monkeypatch, changes)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "gpu", "says"),
    [
        ({gpus.OPT_IN: "no"}, "an NVIDIA GPU", "has never run on a GPU"),
        ({"SGLANG_ENABLE_METADATA_GLUE_GRAPH": "1"}, "an NVIDIA GPU", "METADATA_GLUE_GRAPH=1"),
        ({}, "an AMD GPU", "accepted: an NVIDIA GPU"),
    ],
    ids=["not-said", "glue", "amd"],
)
def test_other_gpu_hosts_are_one_line(monkeypatch, environment, gpu, says):
    """Catches an opt-in that means more than it says."""
    with pytest.raises(ConfigError, match=says):
        on_gpu(monkeypatch, environment=environment, gpu=gpu)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, "sliding window"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
    ids=["windows", "mla"],
)
def test_caches_that_were_not_read_for_gpus(monkeypatch, tmp_path, changes, says):
    """Catches a mask of the whole prefix laid over a window of it."""
    monkeypatch.setattr(requested, "find_gpu", lambda: "an NVIDIA GPU")
    monkeypatch.setattr(requested, "check_gpu", lambda *args: None)
    config = json.loads((build("tiny-llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=says):
        resolve(model=tmp_path)


def test_the_interpreter_runs_what_gpus_run(monkeypatch):
    """Catches the code for GPUs that cannot be tried without one."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("--attention-backend", "triton").attention_backend == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="accepted: torch_native"):
        resolve("--attention-backend", "triton")
