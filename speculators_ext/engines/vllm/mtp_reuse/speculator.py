"""Hook 3 for ``mtp_reuse``: the target's own MTP module drafts, see ``heads`` for a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from speculators_ext.engines.checkpoints import count_modules
from speculators_ext.engines.vllm.attention.packed_rows import replace_backends
from speculators_ext.engines.vllm.heads.tree_speculator import TreeSpeculator
from speculators_ext.engines.vllm.heads.vllm_head import VllmHead
from speculators_ext.engines.vllm.log import warn_untried_on_gpus
from speculators_ext.engines.vllm.mtp_reuse.chain_speculator import ChainReuseSpeculator
from speculators_ext.engines.vllm.mtp_reuse.reuse import ReuseSpeculator
from speculators_ext.engines.vllm.mtp_reuse.several import SeveralReuseSpeculator
from speculators_ext.engines.vllm.trees.devices import use_tree_backends

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.engines.vllm.heads.speculator import HeadSpeculator
    from speculators_ext.engines.vllm.mtp_reuse.module import MtpModule
    from speculators_ext.proposers.head_rounds import Roots

__all__ = ["TreeReuseSpeculator", "build_speculator"]

_ATTENTION = "speculators_ext.engines.vllm.attention"


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> HeadSpeculator:
    """The speculator for our config; called before the target's layers are built."""
    config: Any = vllm_config.speculative_config
    if config.method_config.topk > 1:
        use_tree_backends(device, "mtp_reuse")
        return TreeReuseSpeculator(vllm_config, device, req_states)
    if device.type == "cpu":
        replace_backends({"CPU_MLA": f"{_ATTENTION}.decode_rows_mla.DecodeRowsCPUMLABackend"})
    else:
        warn_untried_on_gpus("mtp_reuse")
    modules = count_modules(vllm_config.model_config.hf_config)
    several = min(modules, config.num_speculative_tokens) > 1
    chains = SeveralReuseSpeculator if several else ChainReuseSpeculator
    return chains(vllm_config, device, req_states)


class _ModuleHead(VllmHead):
    module: MtpModule

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.logits(hidden)

    def read(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.module.read(out)


class TreeReuseSpeculator(ReuseSpeculator, TreeSpeculator, MTPSpeculator):
    """Drafts trees, a level of the module's own states after another."""

    _head_type = _ModuleHead

    def _make_head(self, input_batch: InputBatch, roots: Roots) -> VllmHead:
        head = super()._make_head(input_batch, roots)
        assert isinstance(head, _ModuleHead)
        head.module = self.module
        if self.module.reduced is not None:
            self.module.reduced.update()
            head.draft_to_target = self.module.reduced.vocabulary.offsets
        return head
