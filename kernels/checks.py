"""What launchers ask of their tensors before a kernel, which never validates, touches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["check_placement", "require"]


def require(holds: bool, what: str, expected: object, got: object) -> None:
    """Raise a one-line ``ValueError`` that names both sides unless the condition holds."""
    if not holds:
        raise ValueError(f"{what}: expected {expected}, got {got}")


def check_placement(tensors: Mapping[str, torch.Tensor | None], device: torch.device) -> None:
    """Every tensor that is given lies on the device and is contiguous in its last dimension.

    Raises:
        ValueError: one does not; names it.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            require(tensor.device == device, f"{name} device", device, tensor.device)
            last_stride = tensor.stride(-1)
            require(
                tensor.shape[-1] == 1 or last_stride == 1, f"{name} last stride", 1, last_stride
            )
