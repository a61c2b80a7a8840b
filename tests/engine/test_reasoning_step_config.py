"""What reasoning_step refuses before anything is loaded, and the config it becomes."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from speculators_ext.assets import build
from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm import plugin

if TYPE_CHECKING:
    from pathlib import Path

TARGET, SMALL, OTHER = "tiny-llama", "tiny-mistral", "mimo-tiny-mtp"


def engine_config(speculative: dict[str, Any], target: str = TARGET, **kwargs: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    args = {"dtype": "float32", "enforce_eager": True, "max_model_len": 384} | kwargs
    model = str(build(target))
    return EngineArgs(model=model, speculative_config=speculative, **args).create_engine_config()


def reasoning_step(draft: str | None = SMALL, **changes: Any) -> dict[str, Any]:
    options = {"lossy": True, "judge_suffix": "grade"} | changes.pop("method_config", {})
    model = {} if draft is None else {"model": str(build(draft))}
    return {
        "method": "reasoning_step",
        "num_speculative_tokens": 16,
        "method_config": options,
        **model,
    } | changes


class Bad(NamedTuple):
    """A config that must be refused, and what the refusal must say."""

    id: str
    changes: dict[str, Any]
    says: tuple[str, ...]
    engine: dict[str, Any] | None = None


BAD = [
    Bad("consent", {"method_config": {"lossy": False}}, ("lossy=false", "accepted: true")),
    Bad("nameless", {"model": ""}, ("model=''", "the target's tokenizer", "leave it out")),
    Bad(
        "two writers",
        {"method_config": {"clasp": {"num_skip_layers": 3}}},
        ("clasp={'num_skip_layers': 3}", "remove one"),
    ),
    Bad(
        "revision of nothing",
        {"draft": None, "revision": "main"},
        ("'revision' is of a draft model", "both or neither"),
    ),
    Bad(
        "layers",
        {"draft": None},
        ("'model' is missing", "cannot be skipped: MiMo", "LlamaForCausalLM", "give as 'model'"),
        {"target": OTHER},
    ),
    Bad(
        "half layers",
        {"draft": None, "method_config": {"clasp": {"skip_unit": "sublayer"}}},
        ("skip_unit='sublayer'", "accepted: 'layer'"),
        {"target": "tiny-phi3"},
    ),
    Bad("tokenizer", {"draft": OTHER}, ("another tokenizer", "target's family")),
    Bad(
        "suffix",
        {"num_speculative_tokens": 2, "method_config": {"judge_suffix": "is it right? I say"}},
        ("judge_suffix has", "num_speculative_tokens=2", "shorten it"),
    ),
    Bad(
        "span",
        {"method_config": {"reasoning_start": "<think>"}},
        ("reasoning_start='<think>'", "one token"),
    ),
    Bad("drawn", {"draft_sample_method": "probabilistic"}, ("accepted: greedy",)),
    Bad("async", {}, ("async_scheduling=True", "remove it"), {"async_scheduling": True}),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_a_bad_config_is_refused_in_one_line(case: Bad) -> None:
    """Catches a mistake that is accepted, found only after loading, or explained in a page."""
    with pytest.raises(ConfigError) as refusal:
        engine_config(reasoning_step(**case.changes), **(case.engine or {}))
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in case.says if part not in message] == [], message


def test_the_small_model_is_loaded_as_vllms_draft_model_on_every_copy() -> None:
    """Catches a copy that lost what was decided, and slots reserved for fewer drafts."""
    from vllm.config.utils import replace

    whole = engine_config(reasoning_step())
    assert whole.num_lookahead_tokens == 16
    made = whole.speculative_config
    for config in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert (config.method, config.ext_method) == ("draft_model", "reasoning_step")
        assert config.draft_model_config.model == str(build(SMALL))
        assert config.max_num_new_slots_for_drafting == 1
        assert config.method_config == made.method_config


def test_without_a_model_the_target_is_its_own_on_every_copy() -> None:
    """Catches vLLM left to load a draft model, or to keep room for a token that one would read."""
    from vllm.config.utils import replace

    whole = engine_config(reasoning_step(None, method_config={"clasp": {"num_skip_layers": 3}}))
    assert whole.num_lookahead_tokens == 16
    made = whole.speculative_config
    for config in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert (config.method, config.ext_method) == ("draft_model", "reasoning_step")
        assert config.draft_model_config.model == str(build(TARGET))
        assert config.draft_model_config is not config.target_model_config
        assert config.max_num_new_slots_for_drafting == 0
        assert config.method_config.clasp.num_skip_layers == 3


def test_a_padded_vocabulary_is_the_same_vocabulary(tmp_path: Path) -> None:
    """Qwen pads 151,936 and 152,064 over the same tokens; vLLM's own check would refuse it."""
    folder = tmp_path / "padded"
    shutil.copytree(build(SMALL), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 640}))
    made = engine_config(reasoning_step() | {"model": str(folder)}).speculative_config
    assert made.draft_model_config.get_vocab_size() == 640


@pytest.mark.parametrize(
    ("options", "draft", "says"),
    [
        ({"judge": "score", "threshold": 6}, SMALL, "judge 'score' gives at least 6"),
        ({"judge": "score"}, None, "steps of the target itself, with layers skipped, that"),
        ({"judge": "exact"}, SMALL, ""),
    ],
)
def test_the_log_says_lossy_once(options: dict[str, Any], draft: str | None, says: str) -> None:
    """With the judge and its threshold; the control, which is lossless, has nothing to warn of."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, keep = logging.getLogger("vllm.speculators_ext"), Keep()
    log.addHandler(keep)
    try:
        engine_config(reasoning_step(draft, method_config=options))
    finally:
        log.removeHandler(keep)
    assert not any("\n" in line for line in lines)
    warned = [line for line in lines if "is LOSSY" in line]
    assert len(warned) == bool(says)
    assert all(says in line for line in warned)
