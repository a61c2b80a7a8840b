r"""Growing and pruning a draft tree, in torch: the definition of both steps and their CPU path.

EAGLE-2 (arXiv 2406.16858, section 4) values a node by the probability that its whole path is
accepted, taken to be the product of the draft probabilities on it; here in logarithms, "score":

    score(root) = 0        score(child) = score(parent) + log softmax(logits of parent)[child]

*Expand*: each of the ``topk`` best nodes of a level (the frontier) brings its ``topk`` likeliest
children; the ``topk`` best of those are the next frontier. All children stay candidates. *Rerank*:
the best of all candidates, whatever their level, are the tree to verify. A score never grows along
a path and an earlier candidate wins a tie, so a parent comes before its children in that order:
the choice is connected, and **any prefix of the rows is the best tree of its size**.

Candidates of a request are columns of a pool: ``topk`` of level 0, then ``topk ** 2`` a level, in
the order of the frontier and then of probability. A score of -inf means: no such node.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

__all__ = [
    "Candidates",
    "Frontier",
    "PaddedTree",
    "expand_frontier_ref",
    "level_columns",
    "make_candidates",
    "rerank_candidates_ref",
]


class Candidates(NamedTuple):
    """All nodes grown in a round, [R, C] with ``C = topk + (depth - 1) * topk ** 2``."""

    tokens: torch.Tensor  # int64, of the target's vocabulary
    scores: torch.Tensor  # float32
    parents: torch.Tensor  # int32, column of the parent; -1: the root


class Frontier(NamedTuple):
    """The best nodes of a level, [R, topk], best first; a missing one has score -inf.

    What else is said of a missing node is safe to look up, and means nothing.
    """

    tokens: torch.Tensor  # int64
    scores: torch.Tensor  # float32
    columns: torch.Tensor  # int32, of the candidates
    origin: torch.Tensor  # int64, row of the frontier before whose child it is


class PaddedTree(NamedTuple):
    """The tree to verify, [R, M]; row 0 is the root. Behind ``counts`` rows: -1, depth 0, -inf."""

    tokens: torch.Tensor  # int64
    parents: torch.Tensor  # int32, row of the parent; root -1
    depths: torch.Tensor  # int32
    scores: torch.Tensor  # float32
    counts: torch.Tensor  # int32 [R], rows there are, root included


def level_columns(level: int, topk: int) -> tuple[int, int]:
    """(first candidate of a level, one past its last); level 0 holds the root's children."""
    start = 0 if level == 0 else topk + (level - 1) * topk**2
    return start, topk + level * topk**2


def make_candidates(num_reqs: int, depth: int, topk: int, device: torch.device) -> Candidates:
    """An empty pool for ``depth`` levels: every score is -inf."""
    shape = (num_reqs, level_columns(depth - 1, topk)[1])
    return Candidates(
        torch.zeros(shape, dtype=torch.int64, device=device),
        torch.full(shape, -math.inf, device=device),
        torch.full(shape, -1, dtype=torch.int32, device=device),
    )


def expand_frontier_ref(
    logits: torch.Tensor,  # [R * F, V]
    candidates: Candidates,
    frontier: Frontier | None,
    *,
    topk: int,
    level: int,
    draft_to_target: torch.Tensor | None = None,  # [V]
) -> Frontier:
    """Grow one level; arguments and result are those of ``tree_build.expand_frontier``."""
    num_reqs = candidates.scores.shape[0]
    logprobs, children = _likeliest(logits, topk)
    if frontier is None:
        scores, parents = logprobs, candidates.parents.new_full((num_reqs, 1), -1)
    else:
        scores, parents = frontier.scores.reshape(-1, 1) + logprobs, frontier.columns
    start, stop = level_columns(level, topk)
    scores, children = (part.view(num_reqs, stop - start) for part in (scores, children))
    if draft_to_target is not None:
        children = children + draft_to_target[children]
    candidates.tokens[:, start:stop] = children
    candidates.scores[:, start:stop] = scores
    candidates.parents[:, start:stop] = parents.repeat_interleave(topk, dim=1)
    best, picked = _best_columns(scores, topk)
    picked = picked.masked_fill(best == -math.inf, 0)
    columns = (picked + start).to(torch.int32)
    return Frontier(children.gather(1, picked), best, columns, picked // topk)


def rerank_candidates_ref(
    candidates: Candidates,
    root_tokens: torch.Tensor,  # [R]
    max_rows: torch.Tensor,  # [R]
    *,
    topk: int,
    num_rows: int,
    floor: float = -math.inf,
) -> PaddedTree:
    """Choose the tree to verify; arguments and result are those of ``tree_rerank``."""
    scores = candidates.scores
    if floor > -math.inf:
        scores = scores.masked_fill(scores < floor, -math.inf)
    best, picked = _best_columns(scores, num_rows - 1)
    exists = best > -math.inf
    counts = (exists.sum(dim=1) + 1).minimum(max_rows).to(torch.int32)
    row = torch.arange(num_rows, device=scores.device)
    rows_of = row.new_zeros(len(scores), max(scores.shape[1], num_rows) + 1)
    rows_of.scatter_(1, picked + 1, row[1:].expand_as(picked))
    rows_of[:, 0] = 0  # a parent of -1 is the root
    picked = picked.masked_fill(~exists, 0)
    parents = rows_of.gather(1, candidates.parents.gather(1, picked).long() + 1)
    depths = ((picked - topk).div(topk**2, rounding_mode="floor") + 2).clamp_(min=1)
    missing = row >= counts[:, None]

    def pad(drafts: torch.Tensor, root: torch.Tensor | float, fill: float) -> torch.Tensor:
        rows = functional.pad(drafts, (1, 0))
        rows[:, 0] = root
        return rows.masked_fill_(missing, fill)

    return PaddedTree(
        pad(candidates.tokens.gather(1, picked), root_tokens, -1),
        pad(parents.to(torch.int32), -1, -1),
        pad(depths.to(torch.int32), 0, 0),
        pad(best, 0.0, -math.inf),
        counts,
    )


def _likeliest(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, columns) of each row's ``topk`` largest, [rows, topk]."""
    logprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32)
    if logprobs[:, :1].isnan().any():  # a NaN, or nothing but -inf, spoils its row
        logits = logits.masked_fill(logits.isnan(), -math.inf)
        logprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32)
        logprobs.masked_fill_(logprobs.isnan(), -math.inf)
    largest, columns = _best_columns(logits, topk)
    none = largest == -math.inf
    columns = columns.masked_fill(none, 0)
    return logprobs.gather(1, columns).masked_fill_(none, -math.inf), columns


def _best_columns(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, columns) [rows, count] of the largest, ties to the smaller column.

    Where there are fewer than ``count``, values are -inf and their columns distinct, but these may
    lie past the end. torch.topk orders ties as it likes: they are ordered again, and chosen again
    where one lies across its end.
    """
    if scores.shape[1] <= count:
        scores = functional.pad(scores, (0, count + 1 - scores.shape[1]), value=-math.inf)
    values, columns = scores.topk(count + 1, dim=1)
    tied = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)
    values, columns = values[:, :count], columns[:, :count]
    if tied.any():
        across = tied[:, -1]
        if across.any():
            columns[across] = _stable_columns(scores[across], count)
        columns = columns.sort(dim=1).values
        values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
        columns = columns.gather(1, order)
    return values, columns


def _stable_columns(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the largest, ties to the smaller column, by integers that sort so."""
    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = scores.shape[1] - 1
    keys = (ordered.long() << 32) | torch.arange(last, -1, -1, device=scores.device)
    return last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
