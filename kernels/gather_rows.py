r"""Kept rows of hidden states, tokens and positions in path order, in one launch for a batch.

The definition is ``gather_rows_ref``. A program owns an output row and a slice of its hidden state;
it finds its request by counting the requests that end before it. Hidden states are moved, not
computed with. Nothing is read back: rows behind the last keep what was there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from speculators_ext.kernels.checks import check_placement, require
from speculators_ext.kernels.gather_rows_ref import GatheredRows

__all__ = ["gather_rows"]

_MAX_BLOCK_H = 2048
_MAX_REQS = 4096  # a program holds all their offsets
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _load_step(path_ptr, j, stop) -> tl.tensor:  # type: ignore[no-untyped-def]
    step = tl.load(path_ptr + j, mask=j < stop, other=-1)
    return tl.where(step < 0, j, step)


@triton.jit
def _gather_rows_kernel(  # type: ignore[no-untyped-def]
    out_hidden_ptr,  # [N, H]
    out_row_stride,
    out_tokens_ptr,  # [N] int64
    out_positions_ptr,  # [N] int64
    out_rows_ptr,  # [N] int64
    hidden_ptr,  # [N, H]
    hidden_row_stride,
    tokens_ptr,  # [N] int64
    positions_ptr,  # [N] int32 or int64
    cu_nodes_ptr,  # [R + 1] int32
    cu_rows_ptr,  # [R + 1] int32
    path_ptr,  # [R, path_width] int32
    path_stride,
    bonus_ptr,  # [R] int64
    path_width,
    num_reqs,
    hidden_size,
    BLOCK_R: tl.constexpr,  # num_reqs, padded to a power of two
    BLOCK_H: tl.constexpr,
) -> None:
    out_row, tile = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK_R)
    ends = tl.load(cu_rows_ptr + 1 + lane, mask=lane < num_reqs, other=2147483647)
    request = tl.sum((ends <= out_row).to(tl.int32), axis=0)
    live = request < num_reqs
    request = tl.minimum(request, num_reqs - 1)
    first = tl.load(cu_rows_ptr + request)
    kept = tl.load(cu_rows_ptr + request + 1) - first
    start = tl.load(cu_nodes_ptr + request).to(tl.int64)
    path_ptr += request.to(tl.int64) * path_stride
    stop = tl.minimum(path_width, kept)
    j = out_row - first
    source = tl.where(live, start + _load_step(path_ptr, j, stop), 0)
    if tile == 0:
        following = start + _load_step(path_ptr, j + 1, stop)
        token = tl.load(tokens_ptr + following, mask=j + 1 < kept, other=0)
        token = tl.where(j + 1 < kept, token, tl.load(bonus_ptr + request))
        position = tl.load(positions_ptr + source).to(tl.int64)
        tl.store(out_tokens_ptr + out_row, token, mask=live)
        tl.store(out_positions_ptr + out_row, position, mask=live)
        tl.store(out_rows_ptr + out_row, source)

    dim = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = dim < tl.where(live, hidden_size, 0)
    state = tl.load(hidden_ptr + source * hidden_row_stride + dim, mask=mask)
    tl.store(out_hidden_ptr + out_row.to(tl.int64) * out_row_stride + dim, state, mask=mask)


def gather_rows(
    hidden: torch.Tensor,  # [N, H]
    tokens: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    path: torch.Tensor,  # [R, P]
    num_accepted: torch.Tensor,  # [R]
    bonus: torch.Tensor,  # [R]
) -> GatheredRows:
    """Rows, tokens and positions for a drafter's extend, request after request; see the reference.

    Args:
        hidden: [N, H] any dtype, of the verified rows.
        tokens: [N] int64, the verified rows' own tokens.
        positions: [N] int32 or int64.
        cu_nodes: [R + 1] int32, where each request's rows begin; R at most 4096.
        path: [R, P] int32, rows each request keeps, root first, within its own.
        num_accepted: [R] int32, rows kept less one; not read for a request without rows. May pass
            P: rows behind the path are kept in order.
        bonus: [R] int64, the token behind each request's last row.

    Returns:
        The rows; N is kept as the size of every array.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    _check(hidden, tokens, positions, cu_nodes, path, num_accepted, bonus)
    num_rows, hidden_size = hidden.shape
    kept = torch.where(cu_nodes[1:] > cu_nodes[:-1], num_accepted + 1, 0)
    cu_rows = functional.pad(kept.cumsum(0, dtype=torch.int32), (1, 0))
    gathered = GatheredRows(
        torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device),
        torch.empty_like(tokens),
        torch.empty(num_rows, dtype=torch.int64, device=hidden.device),
        torch.empty(num_rows, dtype=torch.int64, device=hidden.device),
        cu_rows,
    )
    if num_rows > 0:
        unit = _INTEGERS[hidden.element_size()]
        block_h = min(triton.next_power_of_2(hidden_size), _MAX_BLOCK_H)
        _gather_rows_kernel[(num_rows, triton.cdiv(hidden_size, block_h))](
            gathered.hidden.view(unit), hidden_size, *gathered[1:4], hidden.view(unit),
            hidden.stride(0), tokens, positions, cu_nodes, cu_rows, path, path.stride(0), bonus,
            path.shape[1], len(bonus), hidden_size,
            BLOCK_R=triton.next_power_of_2(len(bonus)), BLOCK_H=block_h, num_warps=4,
        )  # fmt: skip
    return gathered


def _check(
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cu_nodes: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    require(hidden.dim() == path.dim() == 2, "dims of hidden, path", 2, (hidden.dim(), path.dim()))
    num_rows, num_reqs = hidden.shape[0], path.shape[0]
    require(num_rows == 0 or num_reqs > 0, "requests", "at least 1", num_reqs)
    require(num_reqs <= _MAX_REQS, "requests", f"at most {_MAX_REQS}", num_reqs)
    integers, i32, i64 = (torch.int32, torch.int64), (torch.int32,), (torch.int64,)
    given = {
        "tokens": (tokens, num_rows, i64),
        "positions": (positions, num_rows, integers),
        "cu_nodes": (cu_nodes, num_reqs + 1, i32),
        "num_accepted": (num_accepted, num_reqs, i32),
        "bonus": (bonus, num_reqs, i64),
    }
    for name, (tensor, elements, dtypes) in given.items():
        require(tensor.shape == (elements,), f"{name} shape", (elements,), tuple(tensor.shape))
        require(tensor.dtype in dtypes, f"{name} dtype", dtypes, tensor.dtype)
    require(path.dtype == torch.int32, "path dtype", torch.int32, path.dtype)
    placed = {name: tensor for name, (tensor, _, _) in given.items()}
    check_placement({"hidden": hidden, "path": path, **placed}, hidden.device)
