"""Acceptance of draft trees against the target's own tokens, one program a request.

    row = 0;  while some child c of row has tokens[c] == chosen[row]: row = c;  bonus = chosen[row]

``accept_tree_ref`` says why this is lossless. A program holds its request's tokens and parents and
finds a child by one reduction a level, so that its time grows with the depth and not with the
nodes. ``accept_tree`` is given the token chosen at each node. ``accept_tree_lazily`` is given
logits and finds the token at the nodes it visits, so that of N rows of the vocabulary it reads at
most ``max_depth + 1`` a request: the largest logit, or the first id t with

    sum_{i <= t} exp(a_i - max a) > u sum_i exp(a_i - max a)

Nothing is read back to the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.accept_tree_ref import TreeAcceptance
from speculators_ext.kernels.tree_checks import check_per_row, check_tree, check_vocab_rows

__all__ = ["accept_tree", "accept_tree_lazily"]

_BLOCK_V = 2048
_DRAW_WARPS = 4  # to read logits; with 8 a word spills


@triton.jit
def load_tree(  # type: ignore[no-untyped-def]
    tokens_ptr,  # [N]
    parents_ptr,  # [N]
    cu_nodes_ptr,  # [R + 1]
    request,
    BLOCK_N: tl.constexpr,
) -> tuple:
    """(first global row, number of rows, tokens, parents); parents are -2 where no row is."""
    first = tl.load(cu_nodes_ptr + request).to(tl.int64)
    count = (tl.load(cu_nodes_ptr + request + 1) - first).to(tl.int32)
    row = tl.arange(0, BLOCK_N)
    token = tl.load(tokens_ptr + first + row, mask=row < count, other=-1)
    parent = tl.load(parents_ptr + first + row, mask=row < count, other=-2)
    return first, count, token, parent


@triton.jit
def first_row(condition, BLOCK_N: tl.constexpr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """The first row for which the condition [BLOCK_N] holds, -1 where none is."""
    row = tl.min(tl.where(condition, tl.arange(0, BLOCK_N), BLOCK_N))
    return tl.where(row < BLOCK_N, row, -1)


@triton.jit
def _summarise(logits_ptr, vocab_size, BLOCK_V: tl.constexpr) -> tuple:  # type: ignore[no-untyped-def]
    """(largest logit, its first index, sum of exp(logit - largest)) of one row."""
    largest, index, total = float("-inf"), 0, 0.0
    for start in range(0, vocab_size, BLOCK_V):
        at = start + tl.arange(0, BLOCK_V)
        logits = tl.load(logits_ptr + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        largest_here = tl.max(logits)
        index_here = start + tl.argmax(logits, 0)
        index = tl.where(largest_here > largest, index_here, index)
        new_largest = tl.maximum(largest, largest_here)
        # A block of -inf only has nothing to add, and -inf - -inf is no number.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(logits - shift))
        largest = new_largest
    return largest, index, total


@triton.jit
def find_beyond(weights, index, threshold, below, chosen, last) -> tuple:  # type: ignore[no-untyped-def]
    """Invert a cumulative sum a block at a time: (sum so far, index drawn or -1, last possible).

    ``below`` is the sum of earlier blocks. An index of weight zero is neither drawn nor last.
    """
    cumulative = below + tl.cumsum(weights, 0)
    beyond = (cumulative > threshold) & (weights > 0)
    hit = tl.min(tl.where(beyond, index, 2147483647))
    chosen = tl.where((chosen < 0) & (hit < 2147483647), hit, chosen)
    last = tl.maximum(last, tl.max(tl.where(weights > 0, index, -1)))
    return below + tl.sum(weights), chosen, last


@triton.jit
def _name_token(  # type: ignore[no-untyped-def]
    logits_ptr,  # of one row: [V]
    uniform,
    greedy,
    vocab_size,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    largest, index, total = _summarise(logits_ptr, vocab_size, BLOCK_V)
    if not greedy:
        threshold, below, chosen, last, start = uniform * total, 0.0, -1, -1, 0
        while (start < vocab_size) & (chosen < 0):
            at = start + tl.arange(0, BLOCK_V)
            live = at < vocab_size
            logits = tl.load(logits_ptr + at, mask=live, other=float("-inf")).to(tl.float32)
            weights = tl.exp(logits - largest)
            below, chosen, last = find_beyond(weights, at, threshold, below, chosen, last)
            start += BLOCK_V
        index = tl.where(chosen < 0, last, chosen)
    return index.to(tl.int64)


@triton.jit
def _accept_tree_kernel(  # type: ignore[no-untyped-def]
    path_ptr,  # [R, max_depth + 1] int32
    num_accepted_ptr,  # [R] int32
    bonus_ptr,  # [R] int64
    tokens_ptr,  # [N] int64
    parents_ptr,  # [N] int32
    cu_nodes_ptr,  # [R + 1] int32
    chosen_ptr,  # [N] int64, or None: found in the logits
    logits_ptr,  # [N, V], or None
    logits_row_stride,
    uniform_ptr,  # [N] float32, or None
    greedy_ptr,  # [R] bool, or None
    vocab_size,
    max_depth,
    BLOCK_N: tl.constexpr,  # the most nodes of a request, padded to a power of two
    BLOCK_P: tl.constexpr,  # max_depth + 1, likewise
    BLOCK_V: tl.constexpr,  # logits a step
) -> None:
    request = tl.program_id(0).to(tl.int64)
    first, count, token, parent = load_tree(tokens_ptr, parents_ptr, cu_nodes_ptr, request, BLOCK_N)
    row = tl.where(count > 0, 0, -1)
    step = tl.arange(0, BLOCK_P)
    path = tl.where(step == 0, row, -1)
    depth, bonus = 0, tl.full([], -1, tl.int64)
    while row >= 0:
        if chosen_ptr is None:
            at = logits_ptr + (first + row) * logits_row_stride
            greedy = tl.load(greedy_ptr + request)
            uniform = tl.load(uniform_ptr + first + row)
            bonus = _name_token(at, uniform, greedy, vocab_size, BLOCK_V)
        else:
            bonus = tl.load(chosen_ptr + first + row)
        row = first_row((parent == row) & (token == bonus) & (depth < max_depth), BLOCK_N)
        if row >= 0:
            depth += 1
            path = tl.where(step == depth, row, path)
    tl.store(path_ptr + request * (max_depth + 1) + step, path, mask=step <= max_depth)
    tl.store(num_accepted_ptr + request, depth)
    tl.store(bonus_ptr + request, bonus)


def accept_tree(
    tokens: torch.Tensor,  # [N]
    parents: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    chosen: torch.Tensor,  # [N]
    *,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    """Walk each request's tree along the target's tokens; see ``accept_tree_ref``.

    Args:
        tokens: int64 [N].
        parents: int32 [N], local rows, parents before children.
        cu_nodes: int32 [R + 1]; a request may own no row.
        chosen: int64 [N], the target's token at each node.
        max_nodes: the most rows of a request, known to the host; rows beyond are not accepted.
        max_depth: the most drafts accepted.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    check_tree(tokens, parents, cu_nodes, max_nodes, max_depth)
    check_per_row({"chosen": chosen}, tokens.shape[0], torch.int64, tokens.device)
    return _launch(tokens, parents, cu_nodes, chosen, None, None, None, max_nodes, max_depth)


def accept_tree_lazily(
    tokens: torch.Tensor,  # [N]
    parents: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    logits: torch.Tensor,  # [N, V]
    uniform: torch.Tensor,  # [N]
    greedy: torch.Tensor,  # [R]
    *,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    """The same, reading logits at the nodes it visits; see ``accept_tree_lazily_ref``.

    Args:
        tokens: int64 [N].
        parents: int32 [N], local rows, parents before children.
        cu_nodes: int32 [R + 1]; a request may own no row.
        logits: float32, float16 or bfloat16 [N, V], processed.
        uniform: float32 [N] in [0, 1).
        greedy: bool [R].
        max_nodes: the most rows of a request, known to the host; rows beyond are not accepted.
        max_depth: the most drafts accepted.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    check_tree(tokens, parents, cu_nodes, max_nodes, max_depth)
    num_nodes, num_reqs = tokens.shape[0], cu_nodes.shape[0] - 1
    check_per_row({"uniform": uniform}, num_nodes, torch.float32, tokens.device)
    check_per_row({"greedy": greedy}, num_reqs, torch.bool, tokens.device)
    check_vocab_rows({"logits": logits}, num_nodes, tokens.device)
    return _launch(tokens, parents, cu_nodes, None, logits, uniform, greedy, max_nodes, max_depth)


def _launch(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    cu_nodes: torch.Tensor,
    chosen: torch.Tensor | None,
    logits: torch.Tensor | None,
    uniform: torch.Tensor | None,
    greedy: torch.Tensor | None,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    out = new_acceptance(cu_nodes, max_depth)
    if out.bonus.shape[0] > 0:
        _accept_tree_kernel[(out.bonus.shape[0],)](
            *out,
            tokens,
            parents,
            cu_nodes,
            chosen,
            logits,
            0 if logits is None else logits.stride(0),
            uniform,
            greedy,
            0 if logits is None else logits.shape[1],
            max_depth,
            BLOCK_N=triton.next_power_of_2(max_nodes),
            BLOCK_P=triton.next_power_of_2(max_depth + 1),
            BLOCK_V=_BLOCK_V,
            num_warps=1 if logits is None else _DRAW_WARPS,
        )
    return out


def new_acceptance(cu_nodes: torch.Tensor, max_depth: int) -> TreeAcceptance:
    """Outputs for R requests, not filled."""
    num_reqs, device = cu_nodes.shape[0] - 1, cu_nodes.device
    return TreeAcceptance(
        torch.empty(num_reqs, max_depth + 1, dtype=torch.int32, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
        torch.empty(num_reqs, dtype=torch.int64, device=device),
    )
