"""Every place where this package touches vLLM: six hooks, probed first, set once, inert otherwise.

1. ``EngineArgs.create_speculative_config`` builds our config when a method of ours is named.
2. ``EngineArgs.add_cli_args`` adds our names to the choices of ``--spec-method``.
3. ``init_speculator`` (as the model runner imported it) builds our speculator.
4. ``DraftTokensHandler`` (likewise) returns ragged drafts under synchronous scheduling.
5. ``resolve_model_state_cls`` gets a mixin: per-request options, and what trees need.
6. Attention: our backend over the CPU's, chosen by ``init_speculator``, for packed rows and trees.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from speculators_ext.config import METHODS, ConfigError
from speculators_ext.engines.vllm.import_hook import when_imported
from speculators_ext.engines.vllm.methods import build_speculator, extend_model_state
from speculators_ext.engines.vllm.source_probe import Expectation, engine_root, find_problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

__all__ = ["HOOKS", "Hook", "HookStatus", "install", "probe"]

TESTED_VERSIONS = ("0.32.0", "0.33.0")

_ARGS = "vllm.engine.arg_utils"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_STATES = "vllm.v1.worker.gpu.model_states"
_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"
_SPECULATOR = f"{_SPEC_DECODE}.speculator"
_MARK = "_speculators_ext_hooked"


class Hook(NamedTuple):
    """A hook's name, what it does, and every engine name it relies on."""

    name: str
    purpose: str
    expectations: tuple[Expectation, ...]


class HookStatus(NamedTuple):
    """Whether one hook can be set here; ``detail`` says what is wrong when it cannot."""

    name: str
    target: str
    ok: bool
    detail: str


HOOKS = (
    Hook(
        "config",
        "build our speculative config",
        (
            Expectation(
                _ARGS,
                "EngineArgs.create_speculative_config",
                ("self", "target_model_config", "target_parallel_config"),
            ),
            Expectation(_ARGS, "EngineArgs.spec_method"),
            Expectation(_ARGS, "EngineArgs.spec_tokens"),
            Expectation(_ARGS, "EngineArgs.speculative_config"),
            Expectation(
                "vllm.config.speculative",
                "SpeculativeConfig.max_num_new_slots_for_drafting",
                ("self",),
            ),
            Expectation("vllm.config.speculative", "SpeculativeConfig.draft_sample_method"),
        ),
    ),
    Hook(
        "flags",
        "accept our names in --spec-method",
        (Expectation(_ARGS, "EngineArgs.add_cli_args", ("parser",)),),
    ),
    Hook(
        "speculator",
        "build our speculator",
        (
            Expectation(_RUNNER, "init_speculator"),
            Expectation(
                "vllm.v1.worker.gpu.spec_decode",
                "init_speculator",
                ("vllm_config", "device", "req_states"),
            ),
            Expectation(
                _SPECULATOR,
                "DraftModelSpeculator.set_attn",
                ("self", "model_state", "kv_cache_config", "block_tables", "target_input_buffers"),
            ),
            Expectation(
                _SPECULATOR,
                "DraftModelSpeculator._build_uniform_attn_metadata",
                ("self", "batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound"),
            ),
            Expectation(
                _SPECULATOR,
                "DraftModelSpeculator.sample_draft",
                ("self", "hidden_states", "sample_src_positions", "idx_mapping", "temperature"),
            ),
            Expectation(
                _SPECULATOR,
                "BaseSpeculator.propose",
                ("self", "input_batch", "attn_metadata", "num_sampled", "num_rejected"),
            ),
        ),
    ),
    Hook(
        "ragged drafts",
        "return 0 to K drafts a request",
        (
            Expectation(_RUNNER, "DraftTokensHandler"),
            Expectation(
                "vllm.v1.worker.gpu.spec_decode.utils",
                "DraftTokensHandler.set_draft_tokens",
                ("self", "input_batch", "draft_tokens"),
            ),
            Expectation(
                "vllm.v1.worker.gpu.spec_decode.utils",
                "DraftTokensHandler.get_draft_tokens",
                ("self",),
            ),
        ),
    ),
    Hook(
        "model state",
        "read per-request options, sample and compact draft trees",
        (
            Expectation(_STATES, "resolve_model_state_cls", ("vllm_config", "model")),
            Expectation(f"{_STATES}.interface", "ModelState.add_request", ("self", "req_index")),
            Expectation(f"{_STATES}.interface", "ModelState.custom_sampler", ("self", "sampler")),
            Expectation(
                f"{_STATES}.interface",
                "ModelState.prepare_inputs",
                ("self", "input_batch", "req_states"),
            ),
            Expectation(
                f"{_STATES}.interface",
                "ModelState.prepare_attn",
                ("self", "input_batch", "cudagraph_mode", "block_tables"),
            ),
            Expectation(
                f"{_STATES}.interface",
                "ModelState.postprocess_state",
                ("self", "idx_mapping", "num_sampled", "num_computed_tokens"),
            ),
            Expectation(f"{_SPEC_DECODE}.rejection_sampler", "RejectionSampler._verify"),
            Expectation(
                f"{_SPEC_DECODE}.rejection_sampler", "RejectionSampler._get_logprobs_tensors"
            ),
        ),
    ),
    Hook(
        "attention",
        "attend packed rows and draft trees",
        (
            Expectation("vllm.v1.attention.backends.registry", "register_backend"),
            Expectation(
                "vllm.v1.attention.backends.cpu_attn",
                "CPUAttentionBackendImpl.forward",
                ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
            ),
            Expectation(
                "vllm.v1.attention.backends.cpu_attn",
                "CPUAttentionBackendImpl.do_kv_cache_update",
                ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
            ),
        ),
    ),
)


def probe(root: Path | None = None) -> list[HookStatus]:
    """Check every hook against the vLLM sources below ``root`` (default: the installed vLLM)."""
    root = root or engine_root("vllm")
    if root is None:
        return [HookStatus(h.name, h.purpose, False, "vLLM is not installed") for h in HOOKS]
    return [_probe_hook(hook, root) for hook in HOOKS]


def _probe_hook(hook: Hook, root: Path) -> HookStatus:
    problems = [p for e in hook.expectations if (p := find_problem(e, root)) is not None]
    return HookStatus(hook.name, hook.purpose, not problems, "; ".join(problems))


def install() -> None:
    """Arrange for the hooks to be set as soon as vLLM's modules are imported; repeatable."""
    when_imported(_ARGS, _hook_engine_args)
    when_imported(_RUNNER, _hook_model_runner)
    when_imported(_STATES, _hook_model_states)


def refuse_everywhere(problem: str) -> None:
    """On a vLLM that lacks a hook: our methods get a clear error, everything else is untouched."""
    when_imported(_ARGS, functools.partial(_hook_refusal, problem=problem))


def _set_once(holder: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(holder, name)
    if getattr(original, _MARK, False):
        return
    replacement = make(original)
    setattr(getattr(replacement, "__func__", replacement), _MARK, True)
    setattr(holder, name, replacement)


def _hook_engine_args(module: ModuleType) -> None:
    _set_once(module.EngineArgs, "create_speculative_config", _wrap_create_speculative_config)
    _set_once(module.EngineArgs, "add_cli_args", _wrap_add_cli_args)


def _hook_refusal(module: ModuleType, problem: str) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            from speculators_ext.engines.vllm.requested import read_request

            method = read_request(self).get("method")
            if method in METHODS:
                raise ConfigError(f"speculative method '{method}' cannot run: {problem}")
            return original(self, *args, **kwargs)

        return create_speculative_config

    _set_once(module.EngineArgs, "create_speculative_config", make)


def _hook_model_runner(module: ModuleType) -> None:
    _set_once(module, "init_speculator", _wrap_init_speculator)
    _set_once(module, "DraftTokensHandler", _wrap_draft_tokens_handler)


def _hook_model_states(module: ModuleType) -> None:
    _set_once(module, "resolve_model_state_cls", _wrap_resolve_model_state_cls)


def _wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        from speculators_ext.engines.vllm import requested

        request = requested.read_request(self)
        if request.get("method") not in METHODS:
            requested.refuse_misspelled(request)
            return original(self, target_model_config, target_parallel_config)
        return requested.build_speculative_config(
            self, request, target_model_config, target_parallel_config
        )

    return create_speculative_config


def _wrap_add_cli_args(original: Callable[..., Any]) -> staticmethod:
    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, *(m for m in METHODS if m not in action.choices)]
        return parser

    return staticmethod(add_cli_args)


_ragged_next = False
"""Set by init_speculator, consumed by the DraftTokensHandler the same runner builds next."""


def _wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        global _ragged_next
        from speculators_ext.engines.vllm.spec_config import is_ours

        if not is_ours(vllm_config.speculative_config):
            return original(vllm_config, device, req_states)
        _ragged_next = not vllm_config.scheduler_config.async_scheduling
        return build_speculator(vllm_config, device, req_states)

    return init_speculator


def _wrap_draft_tokens_handler(original: type) -> Callable[..., Any]:
    def make_draft_tokens_handler(device: Any = None) -> Any:
        global _ragged_next
        if not _ragged_next:
            return original(device)
        _ragged_next = False
        from speculators_ext.engines.vllm.drafts import RaggedDraftTokensHandler

        return RaggedDraftTokensHandler(device)

    return make_draft_tokens_handler


def _wrap_resolve_model_state_cls(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve_model_state_cls(vllm_config: Any, model: Any) -> Any:
        from speculators_ext.engines.vllm.spec_config import is_ours

        state_cls = original(vllm_config, model)
        if not is_ours(vllm_config.speculative_config):
            return state_cls
        return extend_model_state(vllm_config, state_cls)

    return resolve_model_state_cls
