"""``calibrate: true``: which hidden states the module is fed, chosen by acceptance at load.

The target answers a few built-in prompts greedily, in KV blocks that no request owns yet; then the
module drafts at every position of the answers with every choice of states, and what it would have
had accepted is counted. The cache it leaves behind belongs to no request and is overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

from speculators_ext.engines.vllm.log import logger
from speculators_ext.engines.vllm.mtp_reuse.chains import ChainSteps
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.proposers.head_rounds import HeadRows
from speculators_ext.proposers.mtp_norms import CHOICES, HiddenNorms
from speculators_ext.proposers.mtp_reuse import StopRule, draft_chains

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["choose_norms", "encode_prompts"]

PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n        return",
    "The main reasons why people learn a second language are",
    "Question: what is 17 + 25? Answer:",
    "import os\nimport sys\n\nclass Stack:\n    def __init__(self):\n        self.items =",
)
ANSWER, DEPTH, LONGEST = 48, 3, 48


class _Answer(NamedTuple):
    """One prompt and its greedy answer.

    Attributes:
        tokens: all of it.
        states: [len(tokens) - 1, H], what the target hands out at each but the last.
        start: position of the prompt's last token.
    """

    tokens: list[int]
    states: torch.Tensor
    start: int


def encode_prompts(model_config: Any) -> list[list[int]]:
    """Ids of the built-in prompts, 1 to ``LONGEST`` each, by the target's tokenizer.

    Raises:
        ValueError: one line, where the engine was started without one.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    if model_config.skip_tokenizer_init:
        raise ValueError(
            "speculative method_config: calibrate=true needs the target's tokenizer; remove "
            "skip_tokenizer_init, or give first_hidden and recycled_hidden"
        )
    tokenizer = cached_tokenizer_from_config(model_config)
    return [tokenizer.encode(prompt)[:LONGEST] for prompt in PROMPTS]


def choose_norms(speculator: Any, target: Any, prompts: Sequence[Sequence[int]]) -> HiddenNorms:
    """The choice of states whose drafts are accepted most, among those the user left open.

    Where the cache is too small to try, as while vLLM measures its own needs, nothing is chosen.

    Args:
        speculator: ours, its caches bound and no request in them.
        target: the target's model.
        prompts: token ids, at most ``max_num_reqs`` prompts of 1 to ``LONGEST`` ids.
    """
    if not _own_blocks(speculator, len(prompts)):
        logger.warning("mtp_reuse: too few KV blocks to calibrate in")
        return speculator.module.norms
    answers = _answer(speculator, target, prompts)
    options, table = speculator.speculative_config.method_config, {}
    for norms in CHOICES:
        if norms.first != (options.first_hidden or norms.first):
            continue
        if norms.recycled != (options.recycled_hidden or norms.recycled):
            continue
        speculator.module.choose(norms)
        table[norms] = _acceptance(speculator, answers)
    best = decided_on_rank_0(max(table, key=lambda norms: sum(table[norms])))
    for norms, accepted in table.items():
        logger.info(
            "mtp_reuse: first_hidden=%s recycled_hidden=%s: acceptance by position %s%s",
            norms.first,
            norms.recycled,
            " ".join(f"{share:.2f}" for share in accepted),
            " (taken)" if norms == best else "",
        )
    return best


def _own_blocks(speculator: Any, count: int) -> bool:
    """Give the first slots blocks of their own, where there are enough; 0 is vLLM's null block."""
    tables = speculator.block_tables
    needed = [-(-(LONGEST + ANSWER + DEPTH) // size) for size in tables.block_sizes]
    if 1 + count * sum(needed) > speculator.kv_cache_config.num_blocks:
        return False
    free = iter(range(1, 1 + count * sum(needed)))
    for slot in range(count):
        blocks = tuple([next(free) for _ in range(number)] for number in needed)
        tables.append_block_ids(slot, blocks, overwrite=True)
    tables.apply_staged_writes()
    return True


def _answer(speculator: Any, target: Any, prompts: Sequence[Sequence[int]]) -> list[_Answer]:
    tokens = [list(prompt) for prompt in prompts]
    states: list[list[torch.Tensor]] = [[] for _ in prompts]
    new = [list(prompt) for prompt in prompts]
    for _ in range(ANSWER):
        starts = [len(all_) - len(own) for all_, own in zip(tokens, new, strict=True)]
        hidden = _run_target(speculator, target, new, starts).split([len(own) for own in new])
        for row, piece in enumerate(hidden):
            states[row].append(piece)
        last = torch.stack([piece[-1] for piece in hidden])
        new = [[token] for token in target.compute_logits(last).argmax(-1).tolist()]
        for row, own in enumerate(new):
            tokens[row] += own
    return [
        _Answer(tokens[row], torch.cat(states[row]), len(prompt) - 1)
        for row, prompt in enumerate(prompts)
    ]


def _run_target(
    speculator: Any, target: Any, tokens: Sequence[Sequence[int]], starts: Sequence[int]
) -> torch.Tensor:
    """The target over consecutive tokens of every prompt: [n, H] as handed out."""
    of, counts, device = speculator, [len(own) for own in tokens], speculator.device
    first = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([s + c for s, c in zip(starts, counts, strict=True)]).int()
    total, num_reqs, buffers = int(first[-1]), len(counts), of.input_buffers
    places = [torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
    buffers.positions[:total].copy_(torch.cat(places))
    buffers.query_start_loc[: num_reqs + 1].copy_(first)
    buffers.seq_lens[:num_reqs].copy_(lengths)
    slots = torch.arange(num_reqs, device=device)
    tables = of.block_tables.gather_block_tables(slots, num_reqs_padded=num_reqs)
    mapping = of.block_tables.compute_slot_mappings(
        slots, buffers.query_start_loc[: num_reqs + 1], buffers.positions[:total], total
    )
    metadata = build_attn_metadata(
        attn_groups=of.target_attn_groups,
        num_reqs=num_reqs,
        num_tokens=total,
        query_start_loc_gpu=buffers.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=first,
        max_query_len=max(counts),
        seq_lens=buffers.seq_lens[:num_reqs],
        max_seq_len=int(lengths.max()),
        block_tables=tables,
        slot_mappings=mapping,
        kv_cache_config=of.kv_cache_config,
        seq_lens_cpu_upper_bound=lengths,
        positions=buffers.positions[:total],
        is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
    )
    with set_forward_context(
        metadata,
        of.vllm_config,
        num_tokens=total,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        slot_mapping=build_slot_mappings_by_layer(mapping, of.kv_cache_config),
    ):
        ids = torch.tensor([token for own in tokens for token in own], device=device).int()
        return target(input_ids=ids, positions=buffers.positions[:total])


def _acceptance(speculator: Any, answers: Sequence[_Answer]) -> list[float]:
    """Share of positions whose first 1, 2, .. drafts are all as the target had it."""
    slots = torch.arange(len(answers), device=speculator.device)
    accepted, tried = [0] * DEPTH, 0
    for step in range(ANSWER - DEPTH - 1):
        pieces, lengths = [], []
        for answer in answers:
            stop = answer.start + step + 1
            start = 0 if step == 0 else stop - 1
            behind = torch.tensor(answer.tokens[start + 1 : stop + 1], device=speculator.device)
            pieces.append(HeadRows(start, behind, answer.states[start:stop]))
            lengths.append(stop)
        hidden, features = speculator._forward(slots, pieces)
        ends = torch.tensor([len(piece.tokens) for piece in pieces]).cumsum(0) - 1
        chains, _ = draft_chains(
            ChainSteps(speculator, slots, lengths),
            hidden[ends],
            features[ends],
            [DEPTH] * len(answers),
            StopRule(),
            num_rows=len(answers),
        )
        for chain, answer, length in zip(chains, answers, lengths, strict=True):
            tried += 1
            for depth, token in enumerate(chain.tokens):
                if token != answer.tokens[length + 1 + depth]:
                    break
                accepted[depth] += 1
    return [count / tried for count in accepted]
