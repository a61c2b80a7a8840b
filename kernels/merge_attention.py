"""Merge of two attentions over disjoint keys, from their outputs and log-sum-exps.

    lse = log(exp lse_a + exp lse_b),  out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

Exact but for rounding (Milakov and Gimelshein, arXiv 1805.02867). A part that saw nothing has lse
-inf and counts nothing, whatever its output holds. It joins the cascade form of tree attention: a
prefix part by any kernel that returns its lse, and the tree's own part. ``merge_parts`` does the
same for any number of parts that lie in one tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.checks import check_placement, require

__all__ = ["merge_attention", "merge_parts"]


@triton.jit
def _merge_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [N, num_heads, head_size]
    out_row_stride,
    out_head_stride,
    lse_ptr,  # [N, num_heads] float32
    lse_row_stride,
    out_a_ptr,  # [N, num_heads, head_size]
    out_a_row_stride,
    out_a_head_stride,
    lse_a_ptr,  # [N, num_heads] float32
    lse_a_row_stride,
    out_b_ptr,  # [N, num_heads, head_size]
    out_b_row_stride,
    out_b_head_stride,
    lse_b_ptr,  # [N, num_heads] float32
    lse_b_row_stride,
    head_size,
    BLOCK_D: tl.constexpr,  # head_size, padded to a power of two
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lse_a = tl.load(lse_a_ptr + row * lse_a_row_stride + head)
    lse_b = tl.load(lse_b_ptr + row * lse_b_row_stride + head)
    largest = tl.maximum(lse_a, lse_b)
    # Where neither saw anything both are -inf, and -inf - -inf is no number.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = weight_a + weight_b
    some = tl.where(total > 0, total, 1.0)
    dim = tl.arange(0, BLOCK_D)
    # A weight of 0 keeps its output unread: it may never have been written.
    read_a = (dim < head_size) & (dim < tl.where(weight_a > 0, BLOCK_D, 0))
    read_b = (dim < head_size) & (dim < tl.where(weight_b > 0, BLOCK_D, 0))
    at_a = row * out_a_row_stride + head * out_a_head_stride + dim
    at_b = row * out_b_row_stride + head * out_b_head_stride + dim
    out_a = tl.load(out_a_ptr + at_a, mask=read_a, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + at_b, mask=read_b, other=0.0).to(tl.float32)
    merged = (out_a * weight_a + out_b * weight_b) / some
    at = row * out_row_stride + head * out_head_stride + dim
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=dim < head_size)
    lse = tl.where(total > 0, shift + tl.log(some), float("-inf"))
    tl.store(lse_ptr + row * lse_row_stride + head, lse)


def merge_attention(
    out_a: torch.Tensor,  # [N, num_heads, head_size]
    lse_a: torch.Tensor,  # [N, num_heads]
    out_b: torch.Tensor,  # [N, num_heads, head_size]
    lse_b: torch.Tensor,  # [N, num_heads]
    out: torch.Tensor | None = None,  # [N, num_heads, head_size]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts; see the module.

    Args:
        out_a: [N, num_heads, head_size] floats.
        lse_a: [N, num_heads] float32, natural logarithms.
        out_b: [N, num_heads, head_size] floats.
        lse_b: [N, num_heads] float32.
        out: [N, num_heads, head_size] to write to, possibly ``out_a`` or ``out_b`` itself; by
            default a new tensor of out_a's dtype.

    Returns:
        (out, lse [N, num_heads] float32).

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    if out is None:
        out = torch.empty_like(out_a)
    require(out_a.dim() == 3, "dims of out_a", 3, out_a.dim())
    num_rows, num_heads, head_size = shape = tuple(out_a.shape)
    for name, part in (("out_b", out_b), ("out", out)):
        require(part.shape == shape, f"{name} shape", shape, tuple(part.shape))
    for name, part in (("lse_a", lse_a), ("lse_b", lse_b)):
        require(part.shape == shape[:2], f"{name} shape", shape[:2], tuple(part.shape))
        require(part.dtype == torch.float32, f"{name} dtype", torch.float32, part.dtype)
    parts = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out}
    check_placement(parts, out_a.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=out_a.device)
    if lse.numel() > 0:
        _merge_attention_kernel[(num_rows, num_heads)](
            out,
            *out.stride()[:2],
            lse,
            lse.stride(0),
            out_a,
            *out_a.stride()[:2],
            lse_a,
            lse_a.stride(0),
            out_b,
            *out_b.stride()[:2],
            lse_b,
            lse_b.stride(0),
            head_size,
            BLOCK_D=triton.next_power_of_2(head_size),
            num_warps=1,
        )
    return out, lse


@triton.jit
def _merge_parts_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [N, num_heads, head_size]
    out_row_stride,
    out_head_stride,
    lse_ptr,  # [N, num_heads] float32, or None
    lse_row_stride,
    parts_ptr,  # [S, N, num_heads, head_size]
    part_stride,
    part_row_stride,
    part_head_stride,
    lses_ptr,  # [S, N, num_heads] float32
    lses_part_stride,
    lses_row_stride,
    num_parts,
    head_size,
    BLOCK_S: tl.constexpr,  # parts, padded to a power of two
    BLOCK_D: tl.constexpr,  # head_size, likewise
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    part = tl.arange(0, BLOCK_S).to(tl.int64)
    at = part * lses_part_stride + row * lses_row_stride + head
    lses = tl.load(lses_ptr + at, mask=part < num_parts, other=float("-inf"))
    largest = tl.max(lses)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(lses - shift))
    some = tl.where(total > 0, total, 1.0)
    dim = tl.arange(0, BLOCK_D)
    merged = tl.zeros([BLOCK_D], tl.float32)
    parts_ptr += row * part_row_stride + head * part_head_stride
    for index in range(num_parts):
        weight = tl.sum(tl.where(part == index, tl.exp(lses - shift), 0.0))
        # A weight of 0 keeps its part unread: it may never have been written.
        read = dim < tl.where(weight > 0, head_size, 0)
        merged += weight * tl.load(parts_ptr + dim, mask=read, other=0.0).to(tl.float32)
        parts_ptr += part_stride
    out_at = row * out_row_stride + head * out_head_stride + dim
    tl.store(out_ptr + out_at, (merged / some).to(out_ptr.dtype.element_ty), mask=dim < head_size)
    if lse_ptr is not None:
        lse = tl.where(total > 0, shift + tl.log(some), float("-inf"))
        tl.store(lse_ptr + row * lse_row_stride + head, lse)


def merge_parts(
    parts: torch.Tensor,  # [S, N, num_heads, head_size]
    lses: torch.Tensor,  # [S, N, num_heads]
    out: torch.Tensor,  # [N, num_heads, head_size]
    lse: torch.Tensor | None = None,  # [N, num_heads]
) -> None:
    """Merge S attentions over disjoint keys into ``out`` and ``lse``; see the module.

    Args:
        parts: [S, N, num_heads, head_size] floats.
        lses: [S, N, num_heads] float32, natural logarithms.
        out: [N, num_heads, head_size] to write to.
        lse: [N, num_heads] float32 to write to, if it is wanted.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    num_parts, *shape = parts.shape
    require(list(out.shape) == shape, "out shape", shape, list(out.shape))
    require(lses.shape == parts.shape[:3], "lses shape", parts.shape[:3], lses.shape)
    require(lses.dtype == torch.float32, "lses dtype", torch.float32, lses.dtype)
    check_placement({"parts": parts, "lses": lses, "out": out, "lse": lse}, parts.device)
    num_rows, num_heads, head_size = shape
    if num_rows > 0:
        _merge_parts_kernel[(num_rows, num_heads)](
            out,
            *out.stride()[:2],
            lse,
            0 if lse is None else lse.stride(0),
            parts,
            *parts.stride()[:3],
            lses,
            *lses.stride()[:2],
            num_parts,
            head_size,
            BLOCK_S=triton.next_power_of_2(num_parts),
            BLOCK_D=triton.next_power_of_2(head_size),
            num_warps=1,
        )
