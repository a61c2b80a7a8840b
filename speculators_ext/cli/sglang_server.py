"""SGLang's server for a benchmark: its command line, from the speculative config of a variant."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import FAILED, CliError
from speculators_ext.cli.server import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.cli.plan import Variant

__all__ = ["check_variants", "sglang_command", "sglang_environment", "speculative_flags"]

# Methods of SGLang's own, by the name vLLM has for them.
_BUILT_IN = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
_TREE_KEYS = {"depth": "--speculative-num-steps", "topk": "--speculative-eagle-topk"}
_CONFIG_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "method_config",
    "adaptive",
    *_TREE_KEYS,
)


def sglang_command(
    model: str,
    port: int,
    *,
    dtype: str,
    speculative: dict[str, Any] | None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The server's command line; `extra` comes last, so it wins over ours.

    The prefix cache is off: the same prompts are sent once for every concurrency, and a second
    pass served from it would not measure what the first did.
    """
    from speculators_ext.engines.devices import find_gpu

    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--host", HOST, "--port", str(port), "--dtype", dtype, "--disable-radix-cache"]
    command += ["--enable-metrics"]  # vLLM's server has its page anyway
    if find_gpu() is None:
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--max-total-tokens", "32768"]
    if speculative is not None:
        command += speculative_flags(speculative)
    return [*command, *extra]


def speculative_flags(config: dict[str, Any]) -> list[str]:
    """SGLang's flags for a speculative config as vLLM takes it.

    `num_speculative_tokens` is the length of a chain or the nodes of a tree. `eagle` and `eagle3`,
    SGLang's own, draft trees with the keys `depth` and `topk` beside it; with `adaptive` the length
    of their chains follows acceptance.

    Raises:
        CliError: a method or a key that SGLang has nothing for.
    """
    method, drafts = config["method"], config["num_speculative_tokens"]
    unknown = sorted(set(config) - set(_CONFIG_KEYS))
    if unknown or method not in (*_ours(), *_BUILT_IN):
        what = f"key {unknown[0]!r}" if unknown else f"method {method!r}"
        accepted = _CONFIG_KEYS if unknown else (*_ours(), *_BUILT_IN)
        raise CliError(
            f"--engine sglang: {what} of a speculative config is not known there; accepted: "
            f"{', '.join(accepted)}"
        )
    flags = ["--speculative-algorithm", _BUILT_IN.get(method, method.upper())]
    if config.get("model"):
        flags += ["--speculative-draft-model-path", config["model"]]
    settings = config.get("method_config") or {}
    trees = method == "eagle2" or settings.get("topk", 1) > 1 or config.get("topk", 1) > 1
    if trees:
        flags += ["--speculative-num-draft-tokens", str(drafts + 1)]
    else:
        flags += ["--speculative-num-steps", str(drafts)]
    if method in _BUILT_IN and not trees:
        flags += ["--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(drafts + 1)]
    for key, flag in _TREE_KEYS.items():
        if key in config:
            flags += [flag, str(config[key])]
    if config.get("adaptive"):
        flags += ["--speculative-adaptive"]
    if settings:
        flags += ["--speculative-method-config", json.dumps(settings)]
    return flags


def check_variants(variants: Sequence[Variant]) -> None:
    """Refuse, before any server is started, a variant that SGLang has no flags for."""
    for variant in variants:
        if variant.speculative is not None:
            speculative_flags(variant.speculative)


def _ours() -> list[str]:
    from speculators_ext.cli.plan import known_methods

    return known_methods()


def sglang_environment() -> dict[str, str]:
    """This process's environment, with what makes SGLang run where no GPU is.

    Raises:
        CliError: SGLang is not installed here.
    """
    from speculators_ext.engines.devices import find_gpu
    from speculators_ext.engines.sglang.cpu.environment import variables
    from speculators_ext.errors import ConfigError

    if find_gpu() is not None:
        return dict(os.environ)
    try:
        return dict(os.environ) | variables(os.environ)
    except ConfigError as error:
        raise CliError(str(error), code=FAILED) from error
