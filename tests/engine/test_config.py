"""The speculative config as vLLM builds it: pinned for good, and refused early and in one line."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from speculators_ext.assets import build
from speculators_ext.config import METHODS, ConfigError, parse_method_config
from speculators_ext.engines.vllm import plugin

if TYPE_CHECKING:
    from pathlib import Path

MAX_MODEL_LEN = 256
DEFAULT = {"method": "clasp", "num_speculative_tokens": 4}


def engine_config(model: str | Path, speculative: dict[str, Any] | None, **kwargs: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    args = {"dtype": "float32", "enforce_eager": True, "max_model_len": MAX_MODEL_LEN} | kwargs
    return EngineArgs(
        model=str(model), speculative_config=speculative, **args
    ).create_engine_config()


def clasp(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (DEFAULT | changes).items() if v is not MISSING}


def options(**keys: Any) -> dict[str, Any]:
    return clasp(method_config=keys)


MISSING = object()


class Bad(NamedTuple):
    """A config that must be refused, and what the refusal must say."""

    id: str
    speculative: dict[str, Any] | None
    says: tuple[str, ...]
    engine: dict[str, Any] | None = None
    model: str = "tiny-llama"
    environment: dict[str, str] | None = None


ONE_TO_LIMIT = f"from 1 to {MAX_MODEL_LEN - 1}"
BAD = [
    Bad("near-miss", clasp(method="claps"), ("'claps'", "did you mean 'clasp'?")),
    Bad("near-miss-case", clasp(method="CLASP"), ("'CLASP'", "did you mean 'clasp'?")),
    Bad("near-miss-flag", None, ("'claps'", "'clasp'"), {"spec_method": "claps", "spec_tokens": 4}),
    Bad(
        "unknown-key",
        clasp(method_confg={}),
        ("'method_confg'", "accepted: method", "did you mean 'method_config'?"),
    ),
    Bad("unknown-key-far", clasp(prompt_lookup_max=3), ("'prompt_lookup_max'", "accepted: method")),
    Bad("model-given", clasp(model="some/draft"), ("'model'", "drafts for itself", "remove it")),
    Bad("k-missing", clasp(num_speculative_tokens=MISSING), ("num_speculative_tokens", "missing")),
    Bad("k-zero", clasp(num_speculative_tokens=0), ("num_speculative_tokens=0", ONE_TO_LIMIT)),
    Bad("k-negative", clasp(num_speculative_tokens=-1), ("num_speculative_tokens=-1", "small")),
    Bad("k-bool", clasp(num_speculative_tokens=True), ("num_speculative_tokens=True", "integer")),
    Bad("k-text", clasp(num_speculative_tokens="6"), ("num_speculative_tokens='6'", "integer")),
    Bad(
        "k-over-max-model-len",
        clasp(num_speculative_tokens=MAX_MODEL_LEN),
        (f"num_speculative_tokens={MAX_MODEL_LEN}", f"max_model_len={MAX_MODEL_LEN}", ONE_TO_LIMIT),
    ),
    Bad(
        "option-unknown",
        options(num_skip_layer=3),
        ("'num_skip_layer'", "accepted: num_skip_layers", "did you mean 'num_skip_layers'?"),
    ),
    Bad("options-not-an-object", clasp(method_config=[1]), ("method_config", "object", "[1]")),
    Bad("options-without-method", {"method_config": {}}, ("'method_config' needs 'method'",)),
    Bad(
        "options-for-vllms-method",
        {"method": "ngram", "num_speculative_tokens": 4, "method_config": {}},
        ("'method_config' belongs to clasp", "'ngram'", "remove it"),
    ),
    Bad("skip-text", options(num_skip_layers="3"), ("num_skip_layers='3'", "integer >= 0")),
    Bad("skip-bool", options(num_skip_layers=True), ("num_skip_layers=True", "integer >= 0")),
    Bad("skip-fraction", options(num_skip_layers=2.5), ("num_skip_layers=2.5", "integer >= 0")),
    Bad("skip-negative", options(num_skip_layers=-1), ("num_skip_layers=-1", "integer >= 0")),
    Bad("skip-all", options(num_skip_layers=8), ("num_skip_layers=8", "0 to 7", "lower it")),
    Bad(
        "skip-more-than-free",
        options(num_skip_layers=5, pinned_first=4),
        ("num_skip_layers=5", "0 to 4", "pinned"),
    ),
    Bad(
        "pinned-too-many",
        options(pinned_first=5, pinned_last=4),
        ("pinned_first=5", "pinned_last=4", "at most 8"),
    ),
    Bad("threshold", options(exit_threshold=1.5), ("exit_threshold=1.5", "from 0 to 1")),
    Bad("refresh", options(refresh_interval=0), ("refresh_interval=0", "integer >= 1")),
    Bad("policy", options(policy="best"), ("policy='best'", "'dp' or 'even'")),
    Bad("grouping", options(grouping="all"), ("grouping='all'", "'batch' or 'per_request'")),
    Bad("skip-unit", options(skip_unit="head"), ("skip_unit='head'", "'layer' or 'sublayer'")),
    Bad("adaptive-text", options(adaptive="no"), ("adaptive='no'", "true or false")),
    Bad("set-out-of-range", options(skip_layers=[1, 8]), ("skip_layers=[1, 8]", "0 to 7")),
    Bad("set-unsorted", options(skip_layers=[3, 1]), ("skip_layers=[3, 1]", "[1, 3]", "sort it")),
    Bad("set-everything", options(skip_layers=list(range(8))), ("skip_layers=", "at most 7")),
    Bad(
        "set-and-count",
        options(skip_layers=[1], num_skip_layers=1),
        ("skip_layers=[1]", "num_skip_layers=1", "remove one"),
    ),
    Bad(
        "set-pinned",
        options(skip_layers=[0], pinned_first=1),
        ("skip_layers=[0]", "pinned_first", "remove one"),
    ),
    Bad(
        "sublayer-on-mixtral",
        options(skip_unit="sublayer"),
        ("skip_unit='sublayer'", "MixtralForCausalLM", "accepted: 'layer'"),
        model="tiny-mixtral",
    ),
    Bad(
        "architecture",
        clasp(),
        ("MiMoForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "choose"),
        model="tiny-mimo",
    ),
    Bad(
        "pipeline-parallel",
        clasp(),
        ("pipeline_parallel_size=2", "accepted: 1"),
        {"pipeline_parallel_size": 2},
    ),
    Bad(
        "context-parallel",
        clasp(),
        ("decode_context_parallel_size=2", "accepted: 1"),
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    Bad("lora", clasp(), ("enable_lora=True", "not supported", "remove it"), {"enable_lora": True}),
    Bad(
        "watermark",
        clasp(),
        ("watermark", "not supported", "remove it"),
        {"watermark_config": {"algorithm": "kgw"}},
    ),
    Bad(
        "v1-runner",
        clasp(),
        ("VLLM_USE_V2_MODEL_RUNNER=0", "unset it"),
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Bad(
        "synthetic-rejection",
        clasp(rejection_sample_method="synthetic"),
        ("rejection_sample_method='synthetic'", "accepted: standard, block"),
    ),
    Bad(
        "block-without-distribution",
        clasp(rejection_sample_method="block"),
        ("rejection_sample_method='block'", "draft_sample_method", "'probabilistic'"),
    ),
    Bad(
        "draft-sampling",
        clasp(draft_sample_method="top1"),
        ("draft_sample_method='top1'", "accepted: greedy, probabilistic"),
    ),
    Bad(
        "flag-against-config",
        clasp(),
        ("--spec-tokens", "num_speculative_tokens", "accepted: one of them"),
        {"spec_tokens": 5},
    ),
    Bad(
        "method-flag-against-config",
        clasp(),
        ("--spec-method", "method", "accepted: one of them"),
        {"spec_method": "ngram"},
    ),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_a_bad_config_is_refused_in_one_line(case: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mistake that is accepted, found only after loading, or explained in a page."""
    from vllm import envs

    for name, value in (case.environment or {}).items():
        monkeypatch.setenv(name, value)
        envs.disable_envs_cache()  # an engine of this process keeps what it has read
    with pytest.raises(ConfigError) as refusal:
        engine_config(build(case.model), case.speculative, **(case.engine or {}))
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in case.says if part not in message] == [], message


def test_the_switched_off_cpu_runner_is_named() -> None:
    """Catches a method that starts on V1, or a message that hides which switch is off."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("the switch is for vLLM on a CPU")
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs(model={str(build('tiny-llama'))!r}, dtype='float32', max_model_len=256, "
        f"speculative_config={DEFAULT!r}).create_engine_config()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"SPECULATORS_EXT_CPU_V2": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "SPECULATORS_EXT_CPU_V2" in last
    assert "unset" in last


@pytest.fixture(scope="module")
def eagle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose path makes vLLM guess that it is an EAGLE head."""
    folder = tmp_path_factory.mktemp("targets") / "my-eagle-llama"
    shutil.copytree(build("tiny-llama"), folder)
    return folder


def speculative_of(model: Path) -> Any:
    """Our config for any target, built past the check of its architecture."""
    from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig

    target = engine_config(model, None)
    return ExtSpeculativeConfig(
        num_speculative_tokens=4,
        ext_method="clasp",
        method_config=parse_method_config("clasp", {"num_skip_layers": 3}, target=None),
        target_model_config=target.model_config,
        target_parallel_config=target.parallel_config,
    )


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-mimo", "my-eagle-llama"])
def pinned(request: pytest.FixtureRequest) -> Any:
    if request.param == "my-eagle-llama":
        return speculative_of(request.getfixturevalue("eagle_folder"))
    return speculative_of(build(request.param))


def copies() -> dict[str, Any]:
    from vllm.config.utils import replace

    return {
        "itself": lambda config: config,
        "pickle": lambda config: pickle.loads(pickle.dumps(config)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "replace": replace,
        "replaced twice": lambda config: replace(replace(config)),
        "pickled copy": lambda config: replace(pickle.loads(pickle.dumps(config))),
    }


@pytest.mark.parametrize("how", list(copies()))
def test_the_ridden_method_stays_pinned(pinned: Any, how: str) -> None:
    """Catches vLLM guessing `mtp` or `eagle` from the target's type or path, on any copy."""
    made = copies()[how](pinned)
    assert type(made) is type(pinned)
    assert made.method == METHODS["clasp"].rides == "draft_model"
    assert made.num_speculative_tokens == 4
    assert made.method_config == pinned.method_config
    assert made.draft_model_config is not made.target_model_config
    assert made.draft_model_config.architectures == made.target_model_config.architectures


def test_an_eagle_like_path_is_served(eagle_folder: Path) -> None:
    """Catches a whole engine config that lost the pin on its way through vLLM's checks."""
    config = engine_config(eagle_folder, clasp())
    assert config.speculative_config.method == "draft_model"
    assert config.num_lookahead_tokens == 4
    assert pickle.loads(pickle.dumps(config)).speculative_config.method == "draft_model"


def test_flags_and_config_mean_the_same() -> None:
    """Catches `--spec-method clasp --spec-tokens 6` read otherwise than the JSON."""
    model = build("tiny-llama")
    flags = engine_config(model, None, spec_method="clasp", spec_tokens=6).speculative_config
    keys = engine_config(model, clasp(num_speculative_tokens=6)).speculative_config
    assert repr(flags) == repr(keys)
    assert flags.num_speculative_tokens == 6


def test_vllms_own_methods_are_left_alone() -> None:
    """Catches our config built for a method that is vLLM's."""
    from vllm.config.speculative import SpeculativeConfig

    config = engine_config(
        build("tiny-llama"),
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        enable_lora=True,
    )
    assert type(config.speculative_config) is SpeculativeConfig
    assert config.speculative_config.method == "ngram"


def test_the_log_says_what_is_on(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a server that does not say which method runs, how, and that it is lossless."""
    with caplog.at_level("INFO", logger="vllm.speculators_ext"):
        plugin_logger = logging.getLogger("vllm.speculators_ext")
        plugin_logger.addHandler(caplog.handler)
        try:
            engine_config(build("tiny-llama"), options(num_skip_layers=3))
        finally:
            plugin_logger.removeHandler(caplog.handler)
    (line,) = {record.getMessage() for record in caplog.records if "is on" in record.getMessage()}
    assert "'clasp'" in line
    assert "up to 4 drafts" in line
    assert "num_skip_layers=3" in line
    assert "lossless" in line
    assert "\n" not in line


def test_two_numbers_of_drafts_are_one_line_with_what_is_accepted() -> None:
    """Catches a refusal that shows neither number."""
    from speculators_ext.engines.vllm.requested import read_request

    args = SimpleNamespace(speculative_config={"num_speculative_tokens": 4}, spec_tokens=5)
    says = r"--spec-tokens=5 and .*num_speculative_tokens'\]=4 differ; accepted: one of them"
    with pytest.raises(ConfigError, match=says):
        read_request(args)
