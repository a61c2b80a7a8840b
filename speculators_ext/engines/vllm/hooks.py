"""Every place where this package touches vLLM: six hooks, set once, inert otherwise.

1. ``EngineArgs.create_speculative_config`` builds our config when a method of ours is named.
2. ``EngineArgs.add_cli_args`` adds our names to the choices of ``--spec-method``.
3. ``init_speculator`` (as the model runner imported it) builds our speculator.
4. ``DraftTokensHandler`` (likewise) returns ragged drafts under synchronous scheduling.
5. ``resolve_model_state_cls`` gets a mixin: per-request options, and what trees need.
6. Attention: our backend over the CPU's, chosen by ``init_speculator``, for packed rows and trees.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from speculators_ext.config import METHODS, ConfigError
from speculators_ext.engines.vllm.expected import ARGS, RUNNER, STATES
from speculators_ext.engines.vllm.import_hook import when_imported
from speculators_ext.engines.vllm.methods import build_speculator, extend_model_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["install", "refuse_everywhere"]

_MARK = "_speculators_ext_hooked"


def install() -> None:
    """Arrange for the hooks to be set as soon as vLLM's modules are imported; repeatable."""
    when_imported(ARGS, _hook_engine_args)
    when_imported(RUNNER, _hook_model_runner)
    when_imported(STATES, _hook_model_states)


def refuse_everywhere(problem: str) -> None:
    """On a vLLM that lacks a hook: our methods get a clear error, everything else is untouched."""
    when_imported(ARGS, functools.partial(_hook_refusal, problem=problem))


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
