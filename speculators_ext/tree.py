"""The draft tree: what a round of drafting hands to verification.

Row 0 is the root: the last token the target sampled, which has no KV yet. Every other row is a
draft, and its parent's row is smaller than its own, so any prefix of the rows is a tree too. A
chain is a tree whose every row follows the row before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["DraftTree"]


@dataclass(frozen=True)
class DraftTree:
    """The tree of one request, on the host.

    Attributes:
        tokens: int64 [n], the root's token first.
        parents: int32 [n], the parent's row; -1 for the root.
    """

    tokens: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, tokens: list[int], parents: list[int]) -> DraftTree:
        """Build a tree from lists.

        Raises:
            ValueError: the lists differ in length, or the rows are not parent-first.
        """
        rows = np.asarray(parents, dtype=np.int32)
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} tokens for {len(parents)} parents: expected as many")
        ordered = (rows >= 0) & (rows < np.arange(len(rows)))
        if len(rows) and (rows[0] != -1 or not ordered[1:].all()):
            raise ValueError(f"parents={parents}: expected -1, then rows before their children")
        return cls(np.asarray(tokens, dtype=np.int64), rows)

    def __len__(self) -> int:
        return len(self.parents)

    def cut(self, num_rows: int) -> DraftTree:
        """The tree of the first ``num_rows`` rows."""
        return DraftTree(self.tokens[:num_rows], self.parents[:num_rows])

    @property
    def is_chain(self) -> bool:
        """Whether every row is the child of the row before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def depths(self) -> np.ndarray:
        """int32 [n], how many rows lie above each."""
        return self.ancestors().sum(axis=1, dtype=np.int32) - 1

    def ancestors(self) -> np.ndarray:
        """bool [n, n]; entry (i, j): row j is row i or one of its ancestors."""
        sees = np.eye(len(self), dtype=bool)
        for row in range(1, len(self)):
            sees[row] |= sees[self.parents[row]]
        return sees
