"""What mtp_reuse refuses before anything is loaded, and the config it becomes."""

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
from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.vllm import plugin

if TYPE_CHECKING:
    from pathlib import Path

MLA, DENSE = "tiny-deepseek-v3", "tiny-mimo"


def engine_config(speculative: dict[str, Any], model: str, **kwargs: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    args = {"dtype": "float32", "enforce_eager": True, "max_model_len": 384} | kwargs
    return EngineArgs(model=model, speculative_config=speculative, **args).create_engine_config()


def mtp_reuse(num_speculative_tokens: int = 4, **changes: Any) -> dict[str, Any]:
    return {"method": "mtp_reuse", "num_speculative_tokens": num_speculative_tokens} | changes


class Bad(NamedTuple):
    """A config that must be refused, and what the refusal must say."""

    id: str
    changes: dict[str, Any]
    says: tuple[str, ...]
    model: str = MLA
    engine: dict[str, Any] | None = None


BAD = [
    Bad("no-module", {}, ("no MTP module", "num_nextn_predict_layers"), "tiny-llama"),
    Bad("model", {"model": "x"}, ("'model' is not used", "remove it")),
    Bad("depth-of-a-chain", {"method_config": {"depth": 3}}, ("depth=3", "topk > 1", "remove it")),
    Bad(
        "more-nodes-than-grow",
        {"num_speculative_tokens": 12, "method_config": {"topk": 2, "depth": 2}},
        ("num_speculative_tokens=12", "the 6 nodes"),
        DENSE,
    ),
    Bad("side", {"method_config": {"first_hidden": "past"}}, ("first_hidden='past'", "'pre'")),
    Bad(
        "nothing-to-calibrate",
        {"method_config": {"calibrate": True, "first_hidden": "pre", "recycled_hidden": "post"}},
        ("calibrate=true", "remove one"),
    ),
    Bad(
        "vocabulary",
        {"method_config": {"draft_vocab_size": 512}},
        ("draft_vocab_size=512", "vocabulary of 512", "2 to 511", "try 128"),
    ),
    Bad(
        "drawn-trees",
        {"draft_sample_method": "probabilistic", "method_config": {"topk": 2}},
        ("draft_sample_method='probabilistic'", "accepted: greedy"),
        DENSE,
    ),
    Bad(
        "async-trees",
        {"method_config": {"topk": 2}},
        ("async_scheduling=True",),
        DENSE,
        {"async_scheduling": True},
    ),
    Bad("floor", {"method_config": {"min_path_probability": 2.0}}, ("min_path_probability=2.0",)),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_a_bad_config_is_refused_in_one_line(case: Bad) -> None:
    """Catches a mistake that is accepted, found only after loading, or explained in a page."""
    with pytest.raises(ConfigError) as refusal:
        engine_config(mtp_reuse(**case.changes), str(build(case.model)), **(case.engine or {}))
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in case.says if part not in message] == [], message


def edited(folder: Path, model: str, **changes: Any) -> str:
    """A copy of a model's folder, its config.json changed."""
    shutil.copytree(build(model), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


def test_a_checkpoint_saved_without_its_module_is_refused(tmp_path: Path) -> None:
    """Catches a module of random weights: vLLM would load it, and nothing would be accepted."""
    from safetensors.numpy import load_file, save_file

    model = edited(tmp_path / "m", DENSE)
    path = tmp_path / "m" / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if "mtp" not in n}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="has no tensor of any") as refusal:
        engine_config(mtp_reuse(), model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("drafts", "options", "says"),
    [
        (3, {}, r"num_speculative_tokens=3 .* 2 MTP modules; accepted: up to 2, and multiples"),
        (2, {"topk": 2, "depth": 2}, r"topk=2 is not possible, the target has 2 MTP modules"),
        (2, {"calibrate": True}, r"calibrate=true is not possible, the target has 2 MTP modules"),
    ],
)
def test_several_modules_draft_chains_of_their_number(
    tmp_path: Path, drafts: int, options: dict[str, Any], says: str
) -> None:
    """Catches a tree grown with the first of several modules, and vLLM's own page of an error."""
    model = edited(tmp_path / "m", MLA, num_nextn_predict_layers=2)
    with pytest.raises(ConfigError, match=says) as refusal:
        engine_config(mtp_reuse(drafts, method_config=options), model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model", [MLA, DENSE])
def test_the_module_is_loaded_as_vllms_mtp_on_every_copy(model: str) -> None:
    """Catches a copy that lost what was decided, and a target that is its own draft model."""
    from vllm.config.utils import replace

    made = engine_config(mtp_reuse(), str(build(model))).speculative_config
    for config in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert (config.method, config.ext_method) == ("mtp", "mtp_reuse")
        assert "MTP" in config.draft_model_config.architectures[0]
        assert config.method_config == made.method_config


def test_one_module_is_reused_for_any_number_of_drafts() -> None:
    """Catches the number of drafts held to what the module was trained for."""
    assert engine_config(mtp_reuse(8), str(build(MLA))).num_lookahead_tokens == 8


def test_a_chain_takes_async_scheduling() -> None:
    """Catches what only trees cannot do refused to chains as well (CPUs switch it off)."""
    made = engine_config(mtp_reuse(), str(build(DENSE)), async_scheduling=True)
    assert made.speculative_config.ext_method == "mtp_reuse"


def test_trees_on_latent_attention_need_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tree promised where no backend of ours attends it."""
    from vllm.platforms import current_platform

    from speculators_ext.engines.vllm.mtp_reuse.requested import _check_tree

    options: Any = parse_method_config("mtp_reuse", {"topk": 2, "depth": 3}, target=None)
    target: Any = SimpleNamespace(hf_text_config=SimpleNamespace(kv_lora_rank=512))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ConfigError, match=r"topk=2 .*MLA.*accepted: 1") as refusal:
        _check_tree(mtp_reuse(), options, SimpleNamespace(), target)
    assert "\n" not in str(refusal.value)


def test_trees_on_latent_attention_need_the_reference_backend() -> None:
    """Catches a backend that cannot attend trees found out only when the model is loaded."""
    import torch

    tree = mtp_reuse(method_config={"topk": 2})
    reference = {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16}
    engine_config(tree, str(build(MLA)), **reference)
    if torch.cpu._is_amx_tile_supported():
        with pytest.raises(ConfigError, match=r"topk=2 .*CPU_MLA.*attention_config"):
            engine_config(tree, str(build(MLA)))


def test_defaults_are_a_chain_of_any_vocabulary() -> None:
    """Catches a default that not every target takes."""
    config: Any = parse_method_config("mtp_reuse", None, target=None)
    assert (config.topk, config.draft_vocab_size, config.calibrate) == (1, None, False)
    assert config.adaptive
