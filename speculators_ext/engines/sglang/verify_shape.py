"""How the attention backend that runs wants the rows of a verification laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.eagle_utils import TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["AS_NEEDED", "VerifyShape", "lay_mask", "runs_kernels", "verify_shape"]


class VerifyShape(NamedTuple):
    """What a verification's tensors must be like.

    Attributes:
        width: rows every request has; None: as many as the batch's longest drafts need.
        sees_prefix: masks have columns for a request's prefix too, before those of its rows.
        device: where they are.
    """

    width: int | None = None
    sees_prefix: bool = False
    device: torch.device | str = "cpu"


AS_NEEDED = VerifyShape()
"""Our own attention for CPUs: any width, masks of the rows among themselves."""


def runs_kernels(runner: Any) -> bool:
    """Whether ``runner`` attends by kernels for GPUs, which Triton's interpreter may run."""
    return not isinstance(runner.attn_backend, TorchNativeAttnBackend)


def verify_shape(runner: Any, most: int) -> VerifyShape:
    """What ``runner``'s attention wants of at most ``most`` drafts a request.

    SGLang's backends for GPUs have one width: FlashAttention assumes it, and it is the width that
    CUDA graphs were captured with. A verification of that width is replayed, any other would be
    launched kernel by kernel.

    Raises:
        NotImplementedError: a layout of masks that is not known here; one line.
    """
    backend = runner.attn_backend
    if not runs_kernels(runner):
        return AS_NEEDED._replace(device=runner.device)
    mode = TreeMaskMode.FULL_MASK if backend.verify_mask is None else backend.verify_mask.mode
    if mode not in (TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY):
        raise NotImplementedError(
            f"{type(backend).__name__} wants masks as {mode.name}; supported: FULL_MASK, QLEN_ONLY"
        )
    return VerifyShape(most + 1, mode == TreeMaskMode.FULL_MASK, runner.device)


def lay_mask(sees: Tensor, lengths: Sequence[int], shape: VerifyShape) -> Tensor:
    """Masks of a batch, one request after another, as the attention reads them.

    Args:
        sees: bool [R, n, n], which of its request's rows each row sees.
        lengths: tokens with KV, of each request.
        shape: of the verification.

    Returns:
        bool, flat: of each request [n, n], or [n, length + n] with the prefix in it, all seen.
    """
    if not shape.sees_prefix:
        return sees.flatten()
    n, device = sees.shape[1], sees.device
    prefix = torch.tensor(lengths, device=device)
    row_sizes = (prefix + n).unsqueeze(1)
    starts = (row_sizes * n).cumsum(0) - row_sizes * n
    rows = starts + torch.arange(n, device=device) * row_sizes + prefix.unsqueeze(1)  # [R, n]
    mask = torch.ones(sum(n * (length + n) for length in lengths), dtype=torch.bool, device=device)
    mask[(rows.unsqueeze(2) + torch.arange(n, device=device)).flatten()] = sees.flatten()
    return mask
