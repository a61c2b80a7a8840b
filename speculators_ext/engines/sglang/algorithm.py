"""Our algorithms, as SGLang's registry of speculative algorithms holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from speculators_ext.engines.sglang.clasp.requested import prepare_clasp
from speculators_ext.engines.sglang.eagle2.requested import prepare_eagle2, reads_several_layers
from speculators_ext.engines.sglang.mtp_reuse.requested import (
    mtp_reuse_settings,
    prepare_mtp_reuse,
)
from speculators_ext.engines.sglang.reasoning_step.requested import (
    prepare_reasoning_step,
    widest_round,
)

if TYPE_CHECKING:
    import torch

__all__ = ["is_ours", "register_algorithms"]


class ExtAlgorithm(CustomSpecAlgo):
    """An algorithm of ours."""

    def has_draft_kv(self) -> bool:
        """Whether drafting needs slots beyond those its verification writes: it does not."""
        return False


class ClaspAlgorithm(ExtAlgorithm):
    """Chains drafted by the target itself, on its own KV pool."""

    def handle_server_args(self, server_args: Any) -> None:
        """Check the arguments and fill in what the user left open."""
        prepare_clasp(server_args)


class HeadAlgorithm(ExtAlgorithm):
    """Drafts of a head, which SGLang loads and allots a cache as for its EAGLE."""

    def is_eagle(self) -> bool:
        """Whether a head with a cache of its own reads the target's hidden states: it does."""
        return True


class Eagle2Algorithm(HeadAlgorithm):
    """Trees drafted by an EAGLE head."""

    def is_eagle3(self) -> bool:
        """Whether it reads those of several layers."""
        return reads_several_layers()

    def handle_server_args(self, server_args: Any) -> None:
        """Check the arguments and fill in what the user left open."""
        prepare_eagle2(server_args)


class MtpReuseAlgorithm(HeadAlgorithm):
    """Chains or trees drafted by the target's own MTP module."""

    def handle_server_args(self, server_args: Any) -> None:
        """Check the arguments and fill in what the user left open."""
        prepare_mtp_reuse(server_args)


class ReasoningStepAlgorithm(ExtAlgorithm):
    """Steps of a small model, which SGLang loads and allots a cache as for its STANDALONE, or of
    the target itself.
    """

    def is_standalone(self) -> bool:
        """Whether a whole model with a cache of its own drafts."""
        return get_spec().speculative_draft_model_path is not None

    def handle_server_args(self, server_args: Any) -> None:
        """Check the arguments and fill in what the user left open."""
        prepare_reasoning_step(server_args)

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int | None:
        """So many slots a round may write: as many are reserved behind each request."""
        width = super().resolve_max_speculative_num_draft_tokens(server_args)
        return widest_round(server_args, width)


def _carries_draft_hidden_states(self: ExtAlgorithm) -> bool:
    """Whether hidden states travel with a prefill sent to another server: none do."""
    return False


def _need_topk(self: ExtAlgorithm) -> bool:
    """Whether top-k drafts are relayed from round to round: only the bonus token is."""
    return False


def _create_future_map(
    self: ExtAlgorithm,
    device: torch.device,
    req_to_token_pool: Any,
    needs_cpu_seq_lens: bool = True,
    needs_confidence_relay: bool = False,
) -> Any:
    """What carries the bonus tokens to the next round: SGLang's own."""
    from sglang.srt.managers.overlap_utils import FutureMap

    return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


# The scheduler calls these on every algorithm, but 0.5.23's base class lacks them.
for _name, _method in (
    ("carries_draft_hidden_states", _carries_draft_hidden_states),
    ("create_future_map", _create_future_map),
    ("need_topk", _need_topk),
):
    if not hasattr(ExtAlgorithm, _name):
        setattr(ExtAlgorithm, _name, _method)


def is_ours(algorithm: Any) -> bool:
    """Whether this is one of our algorithms."""
    return isinstance(algorithm, ExtAlgorithm)


def register_algorithms() -> None:
    """Make ``--speculative-algorithm CLASP`` and the others known."""

    @SpeculativeAlgorithm.register("CLASP", supports_overlap=True, spec_class=ClaspAlgorithm)
    def _clasp(server_args: Any) -> type:
        from speculators_ext.engines.sglang.clasp.worker import ClaspWorker

        return ClaspWorker

    @SpeculativeAlgorithm.register("EAGLE2", supports_overlap=True, spec_class=Eagle2Algorithm)
    def _eagle2(server_args: Any) -> type:
        from speculators_ext.engines.sglang.eagle2.worker import Eagle2Worker

        return Eagle2Worker

    @SpeculativeAlgorithm.register("MTP_REUSE", supports_overlap=True, spec_class=MtpReuseAlgorithm)
    def _mtp_reuse(server_args: Any) -> type:
        from speculators_ext.engines.sglang.mtp_reuse import worker

        trees = mtp_reuse_settings(server_args).topk > 1
        return worker.TreeReuseWorker if trees else worker.ChainReuseWorker

    @SpeculativeAlgorithm.register(
        "REASONING_STEP", supports_overlap=True, spec_class=ReasoningStepAlgorithm
    )
    def _reasoning_step(server_args: Any) -> type:
        from speculators_ext.engines.sglang.reasoning_step.worker import ReasoningStepWorker

        return ReasoningStepWorker
