"""GPU hosts: what a user must say first, and what of SGLang our methods go with there."""

from __future__ import annotations

import os
from typing import Any

from speculators_ext.config import ConfigError
from speculators_ext.engines.sglang.log import logger

__all__ = [
    "BACKENDS",
    "OPT_IN",
    "UNTRIED",
    "check_gpu",
    "is_allowed",
    "is_supported",
    "warn_untried",
]

OPT_IN = "SPECULATORS_EXT_SGLANG_ON_GPU"
UNTRIED = "has never run on a GPU with SGLang"
# Their metadata of decode steps and of verification has been read through with our inputs.
BACKENDS = ("triton", "flashinfer", "fa3")

# What a flag must stand at, since its paths have not been read with our inputs.
_FIXED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "a quantized cache has scales we do not read"),
    ("attn_cp_size", (1,), "rows of a batch are not split"),
    ("dcp_size", (1,), "a request's cache is not split"),
    ("enable_torch_compile", (False,), "layers are left out of the model at run time"),
    ("enable_deterministic_inference", (False,), "its attention has not been read with drafts"),
    ("enable_unified_memory", (False,), "cache slots would have two numberings"),
    ("enable_page_major_kv_layout", (False,), "the cache is read slot by slot"),
    ("enable_kv_cache_sharding", (False,), "the cache is read on one device"),
    ("enable_hisparse", (False,), "the cache is read as a whole"),
    ("enable_pdmux", (False,), "drafts run on the stream of the verification"),
)


def is_allowed() -> bool:
    """Whether the user has said that he wants our methods on a GPU."""
    return os.environ.get(OPT_IN, "").strip() == "1"


def is_supported(gpu: str) -> bool:
    """Whether our methods were written for ``gpu``, as `find_gpu` names it."""
    return gpu.startswith("an NVIDIA GPU")


def warn_untried(name: str) -> None:
    """Say what the user has opted into, once, where he looks."""
    logger.warning(
        "%s %s, only in Triton's interpreter: compare its text and speed with plain decoding "
        "before you rely on it",
        name,
        UNTRIED,
    )


def check_gpu(name: str, server_args: Any, gpu: str) -> None:
    """Refuse, in one line, what algorithm ``name`` does not go with on a host that has ``gpu``.

    Raises:
        ConfigError: one line.
    """
    asked = f"--speculative-algorithm {name}"
    if not is_allowed():
        raise ConfigError(
            f"{asked}: {UNTRIED}, and {gpu} is here; "
            f"set {OPT_IN}=1 to try it all the same, or use vLLM"
        )
    if not is_supported(gpu):
        raise ConfigError(
            f"{asked}: {gpu} is not supported on SGLang; accepted: an NVIDIA GPU; use vLLM"
        )
    if server_args.device != "cuda":
        raise ConfigError(
            f"{asked}: --device {server_args.device} is not supported where {gpu} is; "
            "accepted: --device cuda"
        )
    _check_backends(asked, server_args)
    _check_environment(asked)
    for argument, accepted, reason in _FIXED:
        given = getattr(server_args, argument)
        if given not in accepted:
            raise ConfigError(
                f"{asked}: --{argument.replace('_', '-')}={given} is not supported on GPUs, "
                f"{reason}; accepted: {', '.join(map(str, accepted))}; leave it out"
            )


def _check_environment(asked: str) -> None:
    """A graph of SGLang's own preparations would keep the masks of the round it was made in."""
    name = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    given = os.environ.get(name, "").lower()
    if given not in ("", "0", "false", "n", "no"):
        raise ConfigError(f"{asked}: {name}={given} is not supported; accepted: 0; unset it")


def _check_backends(asked: str, server_args: Any) -> None:
    """One attention backend that we know, for prompts and verification alike."""
    both = server_args.attention_backend
    chosen = {
        server_args.prefill_attention_backend or both,
        server_args.decode_attention_backend or both,
    }
    if len(chosen) > 1 or not chosen <= set(BACKENDS):
        given = " and ".join(sorted(str(one) for one in chosen))
        raise ConfigError(
            f"{asked}: attention by {given} is not supported; accepted: --attention-backend "
            f"{', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, one for all"
        )
