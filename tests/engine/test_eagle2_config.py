"""What eagle2 refuses before anything is loaded, and the config it becomes."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from speculators_ext.assets import build
from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm import plugin
from speculators_ext.engines.vllm.trees.requested import find_tree_obstacle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEAD = "tiny-llama-eagle3"
MISSING = object()


def engine_config(
    speculative: dict[str, Any] | None, model: str = "tiny-llama", **kwargs: Any
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    args = {"dtype": "float32", "enforce_eager": True, "max_model_len": 384} | kwargs
    return EngineArgs(
        model=str(build(model)), speculative_config=speculative, **args
    ).create_engine_config()


def eagle2(**changes: Any) -> dict[str, Any]:
    config = {"method": "eagle2", "model": str(build(HEAD)), "num_speculative_tokens": 12} | changes
    return {key: value for key, value in config.items() if value is not MISSING}


class Bad(NamedTuple):
    """A config that must be refused, and what the refusal must say."""

    id: str
    changes: dict[str, Any]
    says: tuple[str, ...]
    engine: dict[str, Any] | None = None
    model: str = "tiny-llama"


BAD = [
    Bad("no-model", {"model": MISSING}, ("'model' is missing", "EAGLE-3 checkpoint")),
    Bad("model-nowhere", {"model": "/nowhere/head"}, ("model='/nowhere/head'", "is no folder")),
    Bad(
        "asset-name", {"model": "tiny-llama-eagle3"}, ("'tiny-llama-eagle3' is an asset", "assets")
    ),
    Bad("unknown-key", {"modle": "x"}, ("'modle'", "did you mean 'model'?")),
    Bad("many-nodes", {"num_speculative_tokens": 256}, ("=256", "from 1 to 255")),
    Bad(
        "more-nodes-than-grow",
        {"num_speculative_tokens": 12, "method_config": {"depth": 2, "topk": 2}},
        ("num_speculative_tokens=12", "the 6 nodes", "depth=2 and topk=2", "raise depth or topk"),
    ),
    Bad("depth", {"method_config": {"depth": 0}}, ("depth=0", "from 1 to 16")),
    Bad("floor", {"method_config": {"min_path_probability": 2.0}}, ("min_path_probability=2.0",)),
    Bad("option", {"method_config": {"top_k": 3}}, ("'top_k'", "did you mean 'topk'?")),
    Bad(
        "drawn-drafts",
        {"draft_sample_method": "probabilistic"},
        ("draft_sample_method='probabilistic'", "accepted: greedy"),
    ),
    Bad(
        "block",
        {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"},
        ("accepted: greedy",),
    ),
    Bad("mla", {}, ("MLA", "another target"), model="tiny-deepseek-v3"),
    Bad("no-aux-states", {}, ("MixtralForCausalLM", "EAGLE-3"), model="tiny-mixtral"),
    Bad(
        "kv-transfer",
        {},
        ("kv_transfer_config", "remove it"),
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    ),
    Bad("async", {}, ("async_scheduling=True", "remove it"), {"async_scheduling": True}),
    Bad("fast-prefill", {}, ("kv_sharing_fast_prefill",), {"kv_sharing_fast_prefill": True}),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_a_bad_config_is_refused_in_one_line(case: Bad) -> None:
    """Catches a mistake that is accepted, found only after loading, or explained in a page."""
    with pytest.raises(ConfigError) as refusal:
        engine_config(eagle2(**case.changes), case.model, **(case.engine or {}))
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in case.says if part not in message] == [], message


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_tensor(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


HEADS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "map-missing": (lambda f: drop_tensor(f, "d2t"), ("draft vocabulary of 256", "no 'd2t'")),
    "map-of-another-size": (
        lambda f: edit(f, draft_vocab_size=200),
        ("maps 256 draft ids", "vocabulary of 200"),
    ),
    "hidden-size": (lambda f: edit(f, hidden_size=64), ("size 64", "the target gives 128")),
    "vocabulary": (lambda f: edit(f, vocab_size=1000), ("vocabulary of 1000", "one of 512")),
    "no-config": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "broken-weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"not a checkpoint at all"),
        ("model.safetensors", "no safetensors file"),
    ),
}


@pytest.mark.parametrize("name", list(HEADS))
def test_a_head_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    """Catches a head whose fault shows only as text that is never accepted."""
    spoil, says = HEADS[name]
    folder = tmp_path / "head"
    shutil.copytree(build(HEAD), folder)
    spoil(folder)
    with pytest.raises(ConfigError) as refusal:
        engine_config(eagle2(model=str(folder)))
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in says if part not in message] == [], message


def test_a_model_that_is_no_head_is_refused() -> None:
    """Catches a draft model given where a head belongs."""
    with pytest.raises(ConfigError, match="not an EAGLE head"):
        engine_config(eagle2(model=str(build("tiny-llama"))))


@pytest.mark.parametrize(("head", "rides"), [(HEAD, "eagle3"), ("tiny-llama-eagle", "eagle")])
def test_the_heads_format_is_ridden_on_every_copy(head: str, rides: str) -> None:
    """Catches a format guessed from a path, and a copy that lost what was decided."""
    from vllm.config.utils import replace

    made = engine_config(eagle2(model=str(build(head)))).speculative_config
    for config in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert config.method == rides
        assert config.ext_method == "eagle2"
        assert config.method_config == made.method_config
        assert config.draft_model_config.architectures == made.draft_model_config.architectures


OBSTACLES = {
    "it has latent attention (MLA)": {"kv_lora_rank": 512},
    "it is an encoder-decoder": {"is_encoder_decoder": True},
    "a recurrent state (linear_attention) has no branches": {
        "layer_types": ["linear_attention", "full_attention"]
    },
    "a recurrent state (mamba) has no branches": {"layer_types": ["mamba", "attention"]},
    None: {"layer_types": ["full_attention", "sliding_attention"], "kv_lora_rank": None},
}


@pytest.mark.parametrize("obstacle", list(OBSTACLES), ids=str)
def test_targets_without_trees_are_known_from_their_config(obstacle: str | None) -> None:
    """Catches a target that doctor promises and the engine then refuses, or the reverse."""
    assert find_tree_obstacle(SimpleNamespace(**OBSTACLES[obstacle])) == obstacle
