"""Acceptance of draft chains: the plain reference the engines' own rules are compared with.

Layout. R requests with n_r >= 0 drafts each, N in all. `cu_drafts` int64 [R+1] is their cumulative
sum, starting at 0. Draft arrays have N rows. Target arrays have N + R rows: request r owns the
rows cu_drafts[r] + r .. cu_drafts[r+1] + r; row k of a request is the target after its first k
drafts, and its last row is the bonus position.

Nothing here waits for the device. Random numbers are arguments, so that the output law can be
enumerated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

# What fills the rows behind a request's last token.
PADDING = -1


class ChainResult(NamedTuple):
    """What a verification emits.

    Attributes:
        num_accepted: int64 [R], accepted drafts of each request.
        tokens: int64 [N + R]; request r emits num_accepted[r] + 1 tokens from its first row on,
            the last being the target's own; the rest of its rows hold `PADDING`.
    """

    num_accepted: Tensor
    tokens: Tensor


def accept_greedy(draft_ids: Tensor, cu_drafts: Tensor, target_ids: Tensor) -> ChainResult:
    """Accept the longest prefix of drafts that the target would have chosen, and one token more.

    Args:
        draft_ids: int64 [N].
        cu_drafts: int64 [R+1].
        target_ids: int64 [N + R], the target's choice in each row.
    """
    rows = _rows_of_drafts(cu_drafts, draft_ids.shape[0])
    num_accepted = _prefix(draft_ids == target_ids[rows.target], rows.request, cu_drafts)
    return _emit(target_ids, num_accepted, cu_drafts)


def accept_sampled(
    draft_ids: Tensor,
    cu_drafts: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    accept_uniform: Tensor,
    token_uniform: Tensor,
) -> ChainResult:
    """Accept drafts so that what is emitted follows the target's distribution exactly.

    A draft x is accepted with probability min(1, p(x) / q(x)); the first one rejected is replaced
    by a draw from max(p - q, 0), normalised; where all are accepted the bonus is drawn from p.
    Source: speculative sampling, Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen et al.,
    arXiv 2302.01318, Algorithm 2.

    Args:
        draft_ids: int64 [N], each drawn from its row of `draft_probs`.
        cu_drafts: int64 [R+1].
        target_probs: float [N + R, V], p; rows sum to 1.
        draft_probs: float [N, V], q; None where drafts were chosen, not drawn (q is one-hot).
        accept_uniform: float [N] in [0, 1).
        token_uniform: float [R] in [0, 1), for the one token drawn per request.
    """
    rows = _rows_of_drafts(cu_drafts, draft_ids.shape[0])
    chosen = draft_ids.unsqueeze(-1)
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[rows.target]).scatter_(-1, chosen, 1.0)
    p = target_probs[rows.target].gather(-1, chosen).squeeze(-1)
    q = draft_probs.gather(-1, chosen).squeeze(-1)
    num_accepted = _prefix(accept_uniform * q < p, rows.request, cu_drafts)

    counts = cu_drafts.diff()
    requests = torch.arange(counts.shape[0], device=counts.device)
    drawn_row = cu_drafts[:-1] + requests + num_accepted
    law = target_probs[drawn_row]  # [R, V]
    if draft_ids.shape[0]:
        at = (cu_drafts[:-1] + num_accepted).clamp(max=draft_ids.shape[0] - 1)
        rejected = (num_accepted < counts).unsqueeze(-1)
        law = torch.where(rejected, residual(law, draft_probs[at]), law)
    out = torch.zeros_like(target_probs[:, 0], dtype=torch.long)
    out[rows.target] = draft_ids
    out[drawn_row] = _draw(law, token_uniform)
    return _emit(out, num_accepted, cu_drafts)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p - q, 0), normalised over the last dimension.

    Where nothing is left (p <= q everywhere, which is p = q but for rounding) it returns p.
    """
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / torch.where(total > 0, total, 1), p)


class _Rows(NamedTuple):
    request: Tensor  # int64 [N]
    target: Tensor  # int64 [N], the target row that judges each draft


def _rows_of_drafts(cu_drafts: Tensor, num_drafts: int) -> _Rows:
    drafts = torch.arange(num_drafts, device=cu_drafts.device)
    request = torch.searchsorted(cu_drafts[1:], drafts, right=True)
    return _Rows(request, drafts + request)


def _prefix(accepted: Tensor, request: Tensor, cu_drafts: Tensor) -> Tensor:
    """Count each request's drafts before its first rejected one; bool [N] -> int64 [R]."""
    misses = torch.nn.functional.pad((~accepted).long().cumsum(0), (1, 0))  # [N+1]
    alive = misses[1:] == misses[cu_drafts[request]]
    count = torch.zeros_like(cu_drafts[1:])
    return count.scatter_add(0, request, alive.long())


def _draw(law: Tensor, uniform: Tensor) -> Tensor:
    """Draw one id a row by inverting the cumulative sum; a zero-probability id is never drawn."""
    cumulative = law.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may not lift the threshold to the total, behind which only impossible ids lie.
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform.unsqueeze(-1) * total, below)
    return (cumulative <= threshold).sum(-1)


def _emit(tokens: Tensor, num_accepted: Tensor, cu_drafts: Tensor) -> ChainResult:
    """Blank the rows behind each request's last token."""
    requests = torch.arange(num_accepted.shape[0], device=cu_drafts.device)
    starts = cu_drafts[:-1] + requests  # first target row of each request
    rows = torch.arange(tokens.shape[0], device=cu_drafts.device)
    owner = torch.searchsorted(cu_drafts[1:] + requests, rows)
    emitted = rows - starts[owner] <= num_accepted[owner]
    return ChainResult(num_accepted, torch.where(emitted, tokens, PADDING))
