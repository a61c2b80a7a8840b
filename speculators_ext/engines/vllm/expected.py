"""What the hooks rely on in vLLM, checked in its sources before one of them is set."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculators_ext.engines.source_probe import Expectation, engine_root, find_problem

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ARGS", "HOOKS", "RUNNER", "STATES", "TESTED_VERSIONS", "Hook", "HookStatus", "probe"]

TESTED_VERSIONS = ("0.32.0", "0.33.0")

ARGS = "vllm.engine.arg_utils"
RUNNER = "vllm.v1.worker.gpu.model_runner"
STATES = "vllm.v1.worker.gpu.model_states"
_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"
_SPECULATOR = f"{_SPEC_DECODE}.speculator"


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
                ARGS,
                "EngineArgs.create_speculative_config",
                ("self", "target_model_config", "target_parallel_config"),
            ),
            Expectation(ARGS, "EngineArgs.spec_method"),
            Expectation(ARGS, "EngineArgs.spec_tokens"),
            Expectation(ARGS, "EngineArgs.speculative_config"),
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
        (Expectation(ARGS, "EngineArgs.add_cli_args", ("parser",)),),
    ),
    Hook(
        "speculator",
        "build our speculator",
        (
            Expectation(RUNNER, "init_speculator"),
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
            Expectation(f"{_SPEC_DECODE}.mtp.speculator", "MTPSpeculator.load_draft_model"),
            Expectation(
                f"{_SPEC_DECODE}.standalone_ar.speculator",
                "StandaloneARSpeculator._prefill",
                ("self", "input_batch", "num_rejected", "last_sampled", "num_reqs", "skip_attn"),
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
            Expectation(RUNNER, "DraftTokensHandler"),
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
            Expectation(STATES, "resolve_model_state_cls", ("vllm_config", "model")),
            Expectation(f"{STATES}.interface", "ModelState.add_request", ("self", "req_index")),
            Expectation(f"{STATES}.interface", "ModelState.custom_sampler", ("self", "sampler")),
            Expectation(
                f"{STATES}.interface",
                "ModelState.prepare_inputs",
                ("self", "input_batch", "req_states"),
            ),
            Expectation(
                f"{STATES}.interface",
                "ModelState.prepare_attn",
                ("self", "input_batch", "cudagraph_mode", "block_tables"),
            ),
            Expectation(
                f"{STATES}.interface",
                "ModelState.postprocess_state",
                ("self", "idx_mapping", "num_sampled", "num_computed_tokens"),
            ),
            Expectation(f"{STATES}.interface", "ModelState.initialize_kv_cache", ("self",)),
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
