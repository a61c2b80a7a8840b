"""What launchers of tree kernels ask of trees, noise and rows of the vocabulary."""

from __future__ import annotations

import torch

from speculators_ext.kernels.checks import check_placement, require

__all__ = ["check_chain", "check_per_row", "check_tree", "check_vocab_rows", "checked_laws"]

_MAX_NODES = 4096  # of a request: a program holds them all in registers


def check_chain(tokens: torch.Tensor, cu_nodes: torch.Tensor, max_depth: int) -> None:
    """Shapes, dtypes and places of a batch of chains."""
    for name, tensor, dtype in (
        ("tokens", tokens, torch.int64),
        ("cu_nodes", cu_nodes, torch.int32),
    ):
        require(tensor.dim() == 1, f"dims of {name}", 1, tensor.dim())
        require(tensor.dtype == dtype, f"{name} dtype", dtype, tensor.dtype)
    require(cu_nodes.shape[0] > 0, "cu_nodes", "at least 1", cu_nodes.shape[0])
    require(max_depth >= 0, "max_depth", "at least 0", max_depth)
    check_placement({"tokens": tokens, "cu_nodes": cu_nodes}, tokens.device)


def check_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    cu_nodes: torch.Tensor,
    max_nodes: int,
    max_depth: int,
) -> None:
    """Shapes, dtypes and places of a batch of trees."""
    check_chain(tokens, cu_nodes, max_depth)
    check_per_row({"parents": parents}, tokens.shape[0], torch.int32, tokens.device)
    require(0 < max_nodes <= _MAX_NODES, "max_nodes", f"1 to {_MAX_NODES}", max_nodes)


def check_per_row(
    given: dict[str, torch.Tensor], length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Each tensor is [length] of the dtype, on the device."""
    for name, tensor in given.items():
        require(tensor.shape == (length,), f"{name} shape", (length,), tuple(tensor.shape))
        require(tensor.dtype == dtype, f"{name} dtype", dtype, tensor.dtype)
    check_placement(given, device)


def check_vocab_rows(given: dict[str, torch.Tensor], num_rows: int, device: torch.device) -> None:
    """Each tensor is [num_rows, V] floats of one V, on the device."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    vocab_sizes = {tensor.shape[-1] for tensor in given.values()}
    require(len(vocab_sizes) == 1, f"vocabulary of {' and '.join(given)}", "one", vocab_sizes)
    for name, tensor in given.items():
        expected, got = (num_rows, *vocab_sizes), tuple(tensor.shape)
        require(got == expected, f"{name} shape", expected, got)
        require(tensor.dtype in floats, f"{name} dtype", floats, tensor.dtype)
    check_placement(given, device)


def checked_laws(
    tokens: torch.Tensor,
    cu_nodes: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniform: torch.Tensor,
    token_uniform: torch.Tensor,
) -> tuple[torch.Tensor | int, ...]:
    """What kernels that judge drafts by their law take of the laws and the noise, checked."""
    num_nodes, num_reqs, device = tokens.shape[0], cu_nodes.shape[0] - 1, tokens.device
    probs = {"target_probs": target_probs, "draft_probs": draft_probs}
    check_vocab_rows(probs, num_nodes, device)
    check_per_row({"accept_uniform": accept_uniform}, num_nodes, torch.float32, device)
    check_per_row({"token_uniform": token_uniform}, num_reqs, torch.float32, device)
    return (
        target_probs, target_probs.stride(0), draft_probs, draft_probs.stride(0),
        accept_uniform, token_uniform, target_probs.shape[1],
    )  # fmt: skip
