"""Engines in this process, each built once: plain ones and ones that draft with clasp."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from speculators_ext.assets import build

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Set before vLLM is imported: its engine core must live in this process to be looked into.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# vLLM binds an engine in process to one core; more threads would only spin on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

K = 4
MAX_MODEL_LEN = 384
BLOCK = 32
OPTIONS = {"num_skip_layers": 3, "adaptive": False, "refresh_interval": 2, "exit_threshold": 0.0}


def clasp_config(num_speculative_tokens: int = K, **options: Any) -> dict[str, Any]:
    stock = {k: options.pop(k) for k in ("draft_sample_method",) if k in options}
    return {
        "method": "clasp",
        "num_speculative_tokens": num_speculative_tokens,
        "method_config": OPTIONS | options,
        **stock,
    }


def eagle2_config(head: str = "tiny-llama-eagle3", **options: Any) -> dict[str, Any]:
    stock = {k: options.pop(k) for k in ("num_speculative_tokens",) if k in options}
    return {
        "method": "eagle2",
        "model": str(build(head)),
        "num_speculative_tokens": 12,
        "method_config": {"depth": 4, "topk": 3, "adaptive": False} | options,
        **stock,
    }


def mtp_reuse_config(**options: Any) -> dict[str, Any]:
    stock = {"num_speculative_tokens": K}
    for key in ("num_speculative_tokens", "draft_sample_method"):
        if key in options:
            stock[key] = options.pop(key)
    return {"method": "mtp_reuse", "method_config": {"adaptive": False} | options, **stock}


@dataclass
class Engine:
    """An `LLM` and what tests ask of it."""

    llm: Any
    counts: Counter[str]
    answers: dict[str, Any] = field(default_factory=dict)

    @property
    def runner(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.model_runner

    @property
    def speculator(self) -> Any:
        return self.runner.speculator

    def generate(self, prompts: Sequence[Any], params: Any) -> list[Any]:
        return self.llm.generate(list(prompts), params, use_tqdm=False)

    def remembered(self, prompts: Sequence[Any], params: Any) -> list[Any]:
        """Greedy answers of a plain engine, computed once for the same question."""
        key = repr((list(prompts), params))
        if key not in self.answers:
            self.answers[key] = self.generate(prompts, params)
        return self.answers[key]

    def counters(self) -> dict[str, int]:
        """What the scheduler has counted since the engine started."""
        return dict(self.counts)


def watch_scheduler(scheduler: Any) -> Counter[str]:
    """Count drafts and preemptions; vLLM's own metrics are one a process, not one an engine."""
    counts: Counter[str] = Counter(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    counts["preemptions"] = 0
    make_stats, preempt = scheduler.make_spec_decoding_stats, scheduler._preempt_request

    def make_spec_decoding_stats(*args: Any, **kwargs: Any) -> Any:
        given = signature(make_stats).bind(*args, **kwargs).arguments
        if given["num_draft_tokens"]:
            counts["num_drafts"] += 1
            counts["num_draft_tokens"] += given["num_draft_tokens"]
            counts["num_accepted_tokens"] += given["num_accepted_tokens"]
        return make_stats(*args, **kwargs)

    def preempt_request(*args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    scheduler._preempt_request = preempt_request
    return counts


class Engines:
    """Engines by configuration; plain ones first, so that they are stock throughout."""

    def __init__(self) -> None:
        self._built: dict[str, Engine] = {}

    def get(self, speculative: dict[str, Any] | None = None, **changes: Any) -> Engine:
        key = json.dumps([speculative, changes], sort_keys=True, default=repr)
        if not self._built:
            # vLLM makes a process's expert group with its first model, or never.
            mixtral = {"model": "tiny-mixtral"}
            self._built[json.dumps([None, mixtral])] = self._start(None, mixtral)
        if key not in self._built:
            self._built[key] = self._start(speculative, changes)
        return self._built[key]

    def end(self) -> None:
        """Drop all engines, which ends them."""
        self._built.clear()

    def _start(self, speculative: dict[str, Any] | None, changes: dict[str, Any]) -> Engine:
        import torch
        from vllm import LLM

        torch.set_num_threads(1)  # where torch was loaded before this file
        defaults = {
            "model": "tiny-llama",
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 256,
            "seed": 0,
            # A random model would fill its answer with blanks for ever.
            "structured_outputs_config": {
                "backend": "xgrammar",
                "disable_any_whitespace": True,
            },
        }
        args = defaults | changes
        if not Path(args["model"]).is_dir():
            args["model"] = str(build(args["model"]))
        llm = LLM(**args, speculative_config=speculative)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        return Engine(llm, watch_scheduler(scheduler))


@dataclass
class Twins:
    """The same model without and with speculation."""

    plain: Engine
    clasp: Engine

    def check(self, prompts: Sequence[Any], params: Any, *, drafts: bool = True) -> list[Any]:
        """Both give the same tokens, text and finish reason; returns what clasp gave."""
        expected = self.plain.remembered(prompts, params)
        before = self.clasp.counters()["num_draft_tokens"]
        got = self.clasp.generate(prompts, params)
        assert summary(got) == summary(expected)
        if drafts:
            assert self.clasp.counters()["num_draft_tokens"] > before, "nothing was drafted"
        return got


def summary(outputs: list[Any]) -> list[Any]:
    """What must be equal: every completion's tokens, text and reasons to stop."""
    return [
        [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    pytest.importorskip("vllm")
    built = Engines()
    yield built
    # An engine that ends collects garbage among the objects of all others: minutes in all. Many end
    # with the process only, so this holds until then.
    pytest.MonkeyPatch().setattr(gc, "collect", lambda *_: 0)
    built.end()


@pytest.fixture(scope="session")
def plain(engines: Engines) -> Engine:
    return engines.get()


@pytest.fixture(scope="session")
def clasp(engines: Engines, plain: Engine) -> Engine:
    return engines.get(clasp_config())


@pytest.fixture(scope="session")
def twins(plain: Engine, clasp: Engine) -> Twins:
    return Twins(plain, clasp)


@pytest.fixture(scope="session")
def make_twins(engines: Engines) -> Any:
    """`make_twins({"policy": "even"}, alike={"model": "tiny-phi3"}, max_num_seqs=1)`.

    Options of clasp, engine arguments of both, and engine arguments of the drafting one alone.
    """

    def make(
        options: dict[str, Any] | None = None,
        *,
        alike: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Twins:
        alike = alike or {}
        plain = engines.get(**alike)
        return Twins(plain, engines.get(clasp_config(**(options or {})), **alike, **changes))

    return make


@pytest.fixture(scope="session")
def make_eagle2_twins(engines: Engines) -> Any:
    """The same for eagle2: options of the method, engine arguments of both, of the drafting one."""

    def make(
        options: dict[str, Any] | None = None,
        *,
        alike: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Twins:
        alike = alike or {}
        plain = engines.get(**alike)
        return Twins(plain, engines.get(eagle2_config(**(options or {})), **alike, **changes))

    return make


@pytest.fixture(scope="session")
def make_mtp_reuse_twins(engines: Engines) -> Any:
    """The same for mtp_reuse, on a tiny trained model where `alike` names none."""

    def make(
        options: dict[str, Any] | None = None,
        *,
        alike: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Twins:
        alike = {"model": "mimo-tiny-mtp"} | (alike or {})
        plain = engines.get(**alike)
        return Twins(plain, engines.get(mtp_reuse_config(**(options or {})), **alike, **changes))

    return make


@pytest.fixture(scope="session", params=["eagle2", "mtp_reuse", "mtp_reuse-tree"])
def make_head_twins(
    request: pytest.FixtureRequest, make_eagle2_twins: Any, make_mtp_reuse_twins: Any
) -> Any:
    """The same for every method that drafts with a head, given eagle2's options."""
    if request.param == "eagle2":
        return make_eagle2_twins
    shape = {"num_speculative_tokens": 8, "topk": 3, "depth": 3}

    def make(options: dict[str, Any] | None = None, **engine: Any) -> Twins:
        own = options or {}
        if request.param == "mtp_reuse-tree":
            own = shape | own
        if own.get("topk", 1) == 1 or request.param == "mtp_reuse":
            own = {key: value for key, value in own.items() if key not in ("topk", "depth")}
        return make_mtp_reuse_twins(own, **engine)

    return make


@pytest.fixture(scope="session", params=["eagle2", "mtp_reuse"])
def make_tree_twins(
    request: pytest.FixtureRequest, make_eagle2_twins: Any, make_mtp_reuse_twins: Any
) -> Any:
    """The same for every method that drafts trees, of one size."""
    if request.param == "eagle2":
        return make_eagle2_twins

    def make(options: dict[str, Any] | None = None, **engine: Any) -> Twins:
        shape = {"num_speculative_tokens": 12, "topk": 3, "depth": 4}
        return make_mtp_reuse_twins(shape | (options or {}), **engine)

    return make
