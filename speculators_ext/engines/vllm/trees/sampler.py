"""Acceptance of draft trees, inside vLLM's rejection sampler.

vLLM's own sampler names one token at every node, exactly as it would in plain decoding at that
position: processed logits, noise keyed by the request's seed and the node's position. The accepted
path is the one these tokens spell (``kernels/accept_tree_ref.py``). So the text is the target's:
greedy token for token, and sampled with the very tokens plain decoding draws from the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from speculators_ext.kernels.accept_tree import accept_tree
from speculators_ext.kernels.accept_tree_ref import accept_tree_ref

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.outputs import LogprobsTensors

    from speculators_ext.engines.vllm.trees.store import TreeStore

__all__ = ["TreeRejectionSampler"]


class TreeRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler with the acceptance rule of trees; a chain is a tree.

    Args:
        sampler: vLLM's sampler, which draws the target's token at each node.
        spec_config: ours.
        device: of the logits.
        trees: shapes of the drafts; accepted paths are left in its running step.
    """

    def __init__(
        self, sampler: Any, spec_config: Any, device: torch.device, trees: TreeStore
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self._trees = trees
        self._chunk_path: torch.Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Verify a batch; see vLLM's."""
        step = self._trees.step
        step.path_chunks.clear()
        output = super().__call__(*args, **kwargs)
        step.paths = torch.cat(step.path_chunks)
        return output

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        local = expanded_local_pos.long()
        parents = self._trees.parents[expanded_idx_mapping, local]
        depths = self._trees.depths[expanded_idx_mapping, local]
        chosen, processed_logits = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos - local + depths,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )
        chosen = chosen.view(-1)
        accept = accept_tree if chosen.is_cuda else accept_tree_ref
        accepted = accept(
            verify_draft_sampled.long(),
            parents,
            cu_num_logits,
            chosen,
            max_nodes=self._trees.num_rows,
            max_depth=self._trees.max_depth,
        )
        self._chunk_path = accepted.path
        self._trees.step.path_chunks.append(accepted.path)
        rows = cu_num_logits[:-1].unsqueeze(1) + accepted.path.clamp(min=0)
        return processed_logits, chosen[rows], accepted.num_accepted + 1

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """vLLM's, over logits in path order: a request's row j is what its token j came from."""
        if max_num_logprobs == NO_LOGPROBS or self._chunk_path is None:
            return None
        path = self._chunk_path
        column = torch.arange(path.shape[1], device=path.device)
        start = cu_num_logits[:-1].unsqueeze(1).long()
        on_path = path >= 0
        order = torch.arange(logits.shape[0], device=path.device)
        order[(start + column)[on_path]] = (start + path)[on_path]
        return super()._get_logprobs_tensors(
            sampled, num_sampled, logits[order], cu_num_logits, cu_num_logits_np, max_num_logprobs
        )
