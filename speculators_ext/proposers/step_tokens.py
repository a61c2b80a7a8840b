"""What reasoning steps need of a tokenizer: the text of every token, and the digits' ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from speculators_ext.errors import ConfigError
from speculators_ext.proposers.reasoning_step import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["JudgeSuffix", "Tokenizer", "find_span", "find_suffix", "same_tokens", "token_texts"]

WHERE = "speculative method_config"
_SAMPLE = "Step 1: 27 + 48 = 75, so x > 3.\n\nTherefore \u00e9 \u4e2d (a_1)^2 holds\tfor all n.\n"


class Tokenizer(Protocol):
    """The part of Hugging Face's tokenizers that is used here."""

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added ones too."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of some sequences of ids."""


class JudgeSuffix(NamedTuple):
    """The judging suffix: its ``ids``, and the ids of the ten digits as they follow it."""

    ids: tuple[int, ...]
    digits: tuple[int, ...]


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each id by itself; bytes that are no letter alone give a replacement letter."""
    size = max(tokenizer.get_vocab().values()) + 1
    return tokenizer.batch_decode([[index] for index in range(size)])


def find_suffix(tokenizer: Tokenizer, suffix: str) -> JudgeSuffix:
    """Encode the suffix and find how a digit continues it, with or without a space.

    Raises:
        ConfigError: where no single token a digit continues it.
    """
    ids = tokenizer.encode(suffix, add_special_tokens=False)
    for space in (" ", ""):
        texts = [f"{suffix}{space}{digit}" for digit in range(10)]
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if ids and all(e[:-1] == ids for e in encoded) and len({e[-1] for e in encoded}) == 10:
            return JudgeSuffix(tuple(ids), tuple(e[-1] for e in encoded))
    raise ConfigError(
        f"{WHERE}: judge_suffix={suffix!r} cannot be followed by a digit that is one token in this "
        "tokenizer; accepted: text that ends in a word or a colon, without a space behind it"
    )


def find_span(tokenizer: Tokenizer, start: str | None, end: str | None) -> Span:
    """The reasoning's opening and closing tokens as ids.

    Raises:
        ConfigError: where one of them is not a single token.
    """
    ids: list[int | None] = []
    for key, text in (("reasoning_start", start), ("reasoning_end", end)):
        found = None if text is None else tokenizer.encode(text, add_special_tokens=False)
        if found is not None and len(found) != 1:
            raise ConfigError(
                f"{WHERE}: {key}={text!r} is {len(found)} tokens; accepted: one token of the "
                "tokenizer; leave it out to judge the whole output"
            )
        ids.append(found[0] if found else None)
    return Span(*ids)


def same_tokens(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Why two tokenizers differ, as a clause, or None; padding beyond their tokens is no matter."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token, index in _only_in(ours, theirs) or _only_in(theirs, ours):
        return f"token {token!r} (id {index}) is in one of them only or has another id"
    if any(
        target.encode(text, add_special_tokens=False)
        != draft.encode(text, add_special_tokens=False)
        for text in (_SAMPLE, _SAMPLE.upper())
    ):
        return "they split a text differently"
    return None


def _only_in(first: Mapping[str, int], second: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(first.items() - second.items(), key=lambda item: item[1])[:1]
