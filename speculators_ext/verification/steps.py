"""Acceptance of drafted steps: the exact prefix and a correction, or the whole step.

Rows lie as in the engine's verification: request i has rows ``starts[i] .. starts[i + 1] - 1``, the
first for the token before its drafts and one for each draft. ``drafted[row]`` is the token that was
fed in that row (the first row's is no draft), ``chosen[row]`` the target's own token after it.
"""

from __future__ import annotations

import torch

__all__ = ["count_exact", "settle"]


def count_exact(drafted: torch.Tensor, chosen: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """How many first drafts of each request are the target's own choices.

    Args:
        drafted: int64 [rows]; a negative draft is never right.
        chosen: int64 [rows].
        starts: int [requests + 1], cumulative.

    Returns:
        int64 [requests].
    """
    counts = (starts[1:] - starts[:-1]).long()
    owners = torch.repeat_interleave(
        torch.arange(len(counts), device=starts.device), counts, output_size=len(drafted)
    )
    local = torch.arange(len(drafted), device=starts.device) - starts[:-1].long()[owners]
    wrong = torch.ones_like(drafted, dtype=torch.bool)
    wrong[1:] = drafted[1:] != chosen[:-1]
    wrong &= local > 0
    first_wrong = counts.scatter_reduce(
        0, owners, torch.where(wrong, local, counts[owners]), "amin"
    )
    return first_wrong - 1


def settle(
    drafted: torch.Tensor,
    chosen: torch.Tensor,
    starts: torch.Tensor,
    exact: torch.Tensor,
    passed: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens each request gains.

    Args:
        drafted: int64 [rows].
        chosen: int64 [rows].
        starts: int [requests + 1], cumulative.
        exact: int64 [requests], of `count_exact`.
        passed: bool [requests], True where all drafts are taken, right or not.
        width: columns of the result, at least the most drafts of a request plus one.

    Returns:
        int64 [requests, width], the drafts taken and then the target's own next token (repeated
        to the end), and int64 [requests], how many count.
    """
    first = starts[:-1].long()
    drafts = (starts[1:].long() - first) - 1
    taken = torch.where(passed, drafts, exact)
    column = torch.arange(width, device=drafted.device)
    rows = (first[:, None] + column + 1).clamp(max=len(drafted) - 1)
    following = chosen[first + taken]
    tokens = torch.where(column < taken[:, None], drafted[rows], following[:, None])
    return tokens, taken + 1
