"""The tokenizer of the tiny models: 512 tokens, byte level, made by rule and not by training.

Ids 0 to 2 are ``<pad>``, ``<s>`` and ``</s>``; then come the 256 bytes (any text can be encoded)
and 253 merges of two letters (so that text is shorter than its bytes, and words split unevenly).
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIALS = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = 512
MAX_LENGTH = 2048

_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_CLUSTERS = ("th st nd ng ll ss tt rt nt", "ck sh ch wh pr tr br gr")
_SPACE = "\u0120"  # byte-level BPE writes the byte 0x20 as this letter
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def write(folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` with a plain chat template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        pad_token=SPECIALS[PAD_ID],
        bos_token=SPECIALS[BOS_ID],
        eos_token=SPECIALS[EOS_ID],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def vocabulary() -> dict[str, int]:
    """Token, in byte-level BPE's alphabet, -> id; `VOCAB_SIZE` entries."""
    from tokenizers.pre_tokenizers import ByteLevel

    merged = ["".join(pair) for pair in _merges()]
    tokens = [*SPECIALS, *sorted(ByteLevel.alphabet()), *merged]
    return {token: index for index, token in enumerate(tokens)}


def readable_ids() -> list[int]:
    """Ids that decode to printable ASCII by themselves: what tiny models should mostly write."""
    return [
        index
        for token, index in vocabulary().items()
        if token not in SPECIALS and token.replace(_SPACE, " ").isascii()
    ]


def _merges() -> list[tuple[str, str]]:
    letters = [*product(_CONSONANTS, _VOWELS), *product(_VOWELS, _CONSONANTS)]
    clusters = [(pair[0], pair[1]) for line in _CLUSTERS for pair in line.split()]
    starts = list(product(_SPACE, _VOWELS + _CONSONANTS))
    return [*letters, *starts, *clusters]


def _tokenizer() -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=_merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
