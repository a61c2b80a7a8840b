"""The draft tree: what a round of drafting hands to verification.

Row 0 is the root: the last token the target sampled, which has no KV yet. Every other row is a
draft, and its parent's row is smaller than its own, so any prefix of the rows is a tree too. A
chain is a tree whose every row follows the row before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["DraftTree"]


@dataclass(frozen=True)
class DraftTree:
    """The tree of one request, on the host.

    Attributes:
        tokens: int64 [n], the root's token first.
        parents: int32 [n], the parent's row; -1 for the root.
        scores: float32 [n], the drafter's log-probability of each row's path, 0 for the root; None
            where it gives none.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray | None = None

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
        if num_rows >= len(self):
            return self
        scores = None if self.scores is None else self.scores[:num_rows]
        return DraftTree(self.tokens[:num_rows], self.parents[:num_rows], scores)

    @property
    def is_chain(self) -> bool:
        """Whether every row is the child of the row before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def depths(self) -> np.ndarray:
        """int32 [n], how many rows lie above each."""
        return self._depths

    @cached_property
    def _depths(self) -> np.ndarray:
        return self.ancestors().sum(axis=1, dtype=np.int32) - 1

    def ancestors(self) -> np.ndarray:
        """bool [n, n]; entry (i, j): row j is row i or one of its ancestors."""
        return self._ancestors

    @cached_property
    def _ancestors(self) -> np.ndarray:
        sees = np.eye(len(self), dtype=bool)
        rows, above = np.arange(len(self)), self.parents
        while len(rows):  # once a level
            deep = above >= 0
            rows, above = rows[deep], above[deep]
            sees[rows, above] = True
            above = self.parents[above]
        return sees
