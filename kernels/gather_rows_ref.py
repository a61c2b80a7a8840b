r"""The rows a drafter extends over, in path order: the definition and the CPU path.

After a verify, request r keeps ``num_accepted[r] + 1`` of its rows, or none if it had none. Row j
of them and the token that *follows* it (a drafter pairs a hidden state with the next token, EAGLE,
arXiv 2401.15077, section 3.1) are

    row(r, j)  = path[r, j]; j itself where the path says -1 or ends (a prompt's rows, in order)
    token_j    = tokens[row(r, j + 1)], and bonus[r] behind the last

The tokens of a request are thus exactly those it emitted. Rows stand one request after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["GatheredRows", "gather_rows_ref"]


class GatheredRows(NamedTuple):
    """Kept rows, ``cu_rows[R]`` of them at the front of N; behind, only ``rows`` are set (to 0)."""

    hidden: torch.Tensor  # [N, H]
    tokens: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [N]
    rows: torch.Tensor  # int64 [N], the flat row each came from
    cu_rows: torch.Tensor  # int32 [R + 1], where each request's begin


def gather_rows_ref(
    hidden: torch.Tensor,  # [N, H]
    tokens: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    path: torch.Tensor,  # [R, P]
    num_accepted: torch.Tensor,  # [R]
    bonus: torch.Tensor,  # [R]
) -> GatheredRows:
    """Gather them; arguments and result are those of ``gather_rows.gather_rows``.

    Offsets, path and counts are read back.
    """
    offsets, cu_rows = cu_nodes.tolist(), [0]
    rows, last_rows, last_requests = [], [], []
    for request, (steps, accepted) in enumerate(
        zip(path.tolist(), num_accepted.tolist(), strict=True)
    ):
        start = offsets[request]
        if offsets[request + 1] > start:
            steps = [row if step < 0 else step for row, step in enumerate(steps[: accepted + 1])]
            steps += range(len(steps), accepted + 1)
            rows += [start + step for step in steps]
            last_rows.append(len(rows) - 1)
            last_requests.append(request)
        cu_rows.append(len(rows))
    num_rows, device = hidden.shape[0], hidden.device
    source = torch.zeros(num_rows, dtype=torch.int64, device=device)
    source[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
    kept = source[: len(rows)]
    following = tokens.new_empty(num_rows)
    following[: len(rows)] = tokens[kept].roll(-1)
    following[last_rows] = bonus[last_requests]
    gathered = torch.empty_like(hidden)
    gathered[: len(rows)] = hidden[kept]
    places = torch.empty(num_rows, dtype=torch.int64, device=device)
    places[: len(rows)] = positions[kept]
    offsets_out = torch.tensor(cu_rows, dtype=torch.int32, device=device)
    return GatheredRows(gathered, following, places, source, offsets_out)
