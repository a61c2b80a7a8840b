"""SGLang's CPU operations on draft trees, in torch: no CPU build of ``sgl_kernel`` is on PyPI.

Names, argument orders and spelling (``retrive_*``) are ``sgl_kernel``'s; SGLang's own Triton
kernels of the same purpose are what each is tested against. A tree has n rows, its root first;
``next_token`` holds a row's first child and ``next_sibling`` the next child of the same parent,
-1 where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "build_tree_kernel_efficient_cpu",
    "reconstruct_indices_from_tree_mask",
    "verify_tree_greedy_cpu",
]

_FULL_MASK, _QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the candidates an EAGLE drafter selected into trees.

    Args:
        parent_list: int [bs, ...]; entry k is the candidate whose children fill block k.
        selected_index: int [bs, n - 1], candidates kept, ascending; candidate c lies in block
            c // topk, and block 0 holds the root's children.
        verified_seq_len: int [bs], tokens with KV.
        tree_mask: bool, flat, filled in: [bs, n, n], or with the full mask, for each request,
            [n, verified_seq_len + n], whose columns of the prefix are left alone.
        positions: int [bs * n], filled in.
        retrieve_index: int [bs, n], filled in with the rows' numbers in the batch.
        retrieve_next_token: int [bs, n], -1 throughout, filled in.
        retrieve_next_sibling: the same.
        topk: candidates in a block.
        depth: longest path.
        draft_token_num: n.
        tree_mask_mode: 0 for the full mask, 1 for the rows only.

    Raises:
        NotImplementedError: another mask mode.
    """
    if int(tree_mask_mode) not in (_FULL_MASK, _QLEN_ONLY):
        raise NotImplementedError(f"tree_mask_mode={tree_mask_mode}: expected 0 or 1")
    n, start = draft_token_num, 0
    for request, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(parent_list[request].tolist(), selected_index[request].tolist(), topk)
        sees, depths = _ancestry(parents, depth)
        prefix = length if int(tree_mask_mode) == _FULL_MASK else 0
        block = tree_mask[start : start + n * (prefix + n)].view(n, prefix + n)
        block[:, prefix:] = sees.to(tree_mask.dtype)
        start += block.numel()
        rows = slice(request * n, request * n + n)
        positions[rows] = depths.to(positions.dtype) + length
        retrieve_index[request] = torch.arange(rows.start, rows.stop)
        _link(parents, retrieve_next_token[request], retrieve_next_sibling[request])


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """The parent's row of each row; -1 for the root, -2 where the parent was not selected."""
    row_of = {candidate: row for row, candidate in reversed(list(enumerate(selected, start=1)))}
    blocks = [candidate // topk for candidate in selected]
    return [-1, *(row_of.get(parent_list[b], -2) if b else 0 for b in blocks)]


def _ancestry(parents: list[int], depth: int) -> tuple[Tensor, Tensor]:
    """bool [n, n]: who sees whom; int64 [n]: how deep each row lies."""
    n = len(parents)
    sees, depths = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    sees[:, 0] = True
    for row in range(1, n):
        here = row
        for _ in range(depth):
            sees[row, here] = True
            depths[row] += 1
            here = parents[here]
            if here <= 0:
                break
    return sees, depths


def _link(parents: list[int], next_token: Tensor, next_sibling: Tensor) -> None:
    first_child: dict[int, int] = {}
    for row in range(len(parents) - 1, 0, -1):
        parent = parents[row]
        if parent < 0:
            continue
        if parent in first_child:
            next_sibling[row] = first_child[parent]
        first_child[parent] = row
    for parent, child in first_child.items():
        next_token[parent] = child


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's choices from the root down each tree.

    Args:
        predicts: int [bs * n], filled in: the target's token at each row of the accepted path.
        accept_index: int [bs, longest path], filled in: numbers of the accepted rows, root first.
        accept_token_num: int [bs], filled in: accepted drafts.
        candidates: int [bs, n], the rows' tokens.
        retrive_index: int [bs, n], the rows' numbers in the batch.
        retrive_next_token: int [bs, n].
        retrive_next_sibling: int [bs, n].
        target_predict: int [bs, n], the target's choice behind each row.
    """
    for request in range(candidates.shape[0]):
        tokens, numbers = candidates[request].tolist(), retrive_index[request].tolist()
        child, sibling = (
            retrive_next_token[request].tolist(),
            retrive_next_sibling[request].tolist(),
        )
        wanted = target_predict[request].tolist()
        row, path = 0, [0]
        while len(path) < accept_index.shape[1]:
            below = child[row]
            while below != -1 and tokens[below] != wanted[row]:
                below = sibling[below]
            if below == -1:
                break
            row = below
            path.append(row)
        accept_index[request, : len(path)] = torch.tensor([numbers[r] for r in path])
        accept_token_num[request] = len(path) - 1
        for r in path:
            predicts[numbers[r]] = wanted[r]


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Read links and positions off masks.

    Args:
        tree_mask: bool [bs * n * n]; entry (i, j) of a request: row i sees row j.
        verified_seq_len: int [bs].
        positions: int [bs * n], filled in.
        retrieve_index: int [bs, n], filled in.
        retrieve_next_token: int [bs, n], filled in.
        retrieve_next_sibling: int [bs, n], filled in.
        batch_size: bs.
        draft_token_num: n.
    """
    n = draft_token_num
    rows = torch.arange(n)
    above = tree_mask.view(batch_size, n, n).bool() & (rows < rows.unsqueeze(1))
    depths = above.sum(-1) + verified_seq_len.view(-1, 1)
    positions.view(batch_size, n).copy_(depths)
    retrieve_index.view(-1).copy_(torch.arange(batch_size * n))
    parents = torch.where(above, rows, -1).amax(-1)  # [bs, n]
    first = torch.where(above, rows.unsqueeze(1), n).amin(1)
    retrieve_next_token.view(batch_size, n).copy_(torch.where(first < n, first, -1))
    same = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (rows > rows.unsqueeze(1))
    later = torch.where(same & (parents >= 0).unsqueeze(2), rows, n).amin(-1)
    retrieve_next_sibling.view(batch_size, n).copy_(torch.where(later < n, later, -1))
