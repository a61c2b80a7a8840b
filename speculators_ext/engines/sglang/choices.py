"""What drafts are accepted against, where a method has the last word on it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Choice = Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of logits [R * W, V], candidates and the target's choices, int [R, W] both."""

__all__ = ["choosing", "final_choice"]

# SGLang's scheduler is one thread.
_choices: list[Choice] = []


@contextlib.contextmanager
def choosing(choice: Choice) -> Iterator[None]:
    """Let ``choice`` say in verifications what drafts are accepted against."""
    _choices.append(choice)
    try:
        yield
    finally:
        _choices.pop()


def final_choice(logits: Tensor, candidates: Tensor, chosen: Tensor) -> Tensor:
    """``chosen``, or what the method says instead; see `Choice`."""
    return _choices[-1](logits, candidates, chosen) if _choices else chosen
