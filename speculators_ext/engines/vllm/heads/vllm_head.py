"""The head as growth sees it: one forward of vLLM's draft model a level, writing no KV."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context

from speculators_ext.engines.vllm.trees.metadata import DraftLevel

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow
    from speculators_ext.proposers.eagle2 import Level

__all__ = ["VllmHead"]


class VllmHead:
    """A round of draft levels of some requests, over vLLM's draft model.

    Args:
        model: vLLM's draft model.
        vllm_config: of the engine.
        owners: ids of the requests that draft.
        block_tables: [R, max_blocks] int32 of theirs, by attention layer.
        prefix_lens: tokens each request has in the head's cache: the root's position.
        max_places: nodes a request may run in a round.
        shadow: plain copies of the requests' prefixes in the head's cache.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        owners: list[str],
        block_tables: dict[str, torch.Tensor],
        prefix_lens: list[int],
        max_places: int,
        shadow: PrefixShadow,
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._tables = block_tables
        self._prefix_lens = prefix_lens
        device = next(iter(block_tables.values())).device
        self._prefix = torch.tensor(prefix_lens, device=device)
        self._max_places = max_places
        self._owners = owners
        self._shadow = shadow
        self.num_steps = 0
        self._memory: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last_position = vllm_config.model_config.max_model_len - 1
        self.draft_to_target = getattr(model, "draft_id_to_target_id", None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V_draft], without the detour over the target's vocabulary."""
        if self.draft_to_target is None:
            return self._model.compute_logits(hidden)
        return self._model.logits_processor(self._model.lm_head, hidden)

    def step(self, level: Level) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a level; token t+1 sits at position t, as EAGLE heads are trained."""
        self.num_steps += 1
        num_requests = len(self._prefix_lens)
        if level.each is None:
            counts = torch.bincount(level.requests, minlength=num_requests).tolist()
        else:  # known without a look at the device
            counts = [level.each] * num_requests
        ends = [0, *accumulate(counts)]
        rows = [slice(start, stop) for start, stop in pairwise(ends)]
        positions = self._prefix[level.requests] + (level.depth - 1)
        positions.clamp_(max=self._last_position)
        metadata = {
            name: DraftLevel(
                owners=self._owners,
                block_table=table,
                prefix_lens=self._prefix_lens,
                prefix=self._prefix,
                depth=level.depth,
                topk=level.sees.shape[1] // level.depth,
                requests=level.requests,
                rows=rows,
                places=level.places,
                sees=level.sees,
                max_places=self._max_places,
                shadow=self._shadow,
                memory=self._memory,
            )
            for name, table in self._tables.items()
        }
        with set_forward_context(
            metadata, self._vllm_config, num_tokens=len(level.tokens), slot_mapping={}
        ):
            out = self._model(
                input_ids=level.tokens.int(), positions=positions, hidden_states=level.features
            )
        return self.read(out)

    def read(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What `logits` takes and the features, of what the model returned."""
        return out if isinstance(out, tuple) else (out, out)
