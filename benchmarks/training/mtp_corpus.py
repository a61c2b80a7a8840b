"""The text of the tiny MTP models: the running interpreter's standard library, its tokenizer, and
prompts cut from the modules that are kept out of training.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 1536
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
HELD_OUT = (
    *("bisect", "calendar", "cmd", "configparser", "csv", "difflib", "fileinput", "fractions"),
    *("graphlib", "heapq", "ipaddress", "pprint", "queue", "reprlib", "sched", "shlex"),
    *("statistics", "string", "textwrap", "timeit", "wave", "zipapp"),
)
# Tests, generated tables, data in the form of code, what is not the library, and what comes from
# the interpreter's own build.
_LEFT_OUT = {
    *("__pycache__", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "test", "tests", "turtledemo"),
}
PROMPTS = 320
_PROMPT_CHARS = (200, 900)
_SEED = 20


def training_texts() -> list[str]:
    """Every module of the library that is neither held out nor left out, in the order of paths."""
    root = _library()
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in paths if _LEFT_OUT.isdisjoint(path.parts) and _is_library(path)]
    return [(root / path).read_text(encoding="utf-8", errors="ignore") for path in kept]


def held_out_texts() -> dict[str, str]:
    """The held-out modules' sources by name."""
    return {name: (_library() / f"{name}.py").read_text(encoding="utf-8") for name in HELD_OUT}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` tokens; its chat template only joins the messages' texts, so
    that a chat request is continued like a plain prompt.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """int64 [N]: BOS, text, EOS, one file after the other."""
    ids: list[int] = []
    for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        ids += [tokenizer.bos_token_id, *tokens, tokenizer.eos_token_id]
    return torch.tensor(ids)


def held_out_prompts() -> list[dict[str, str]]:
    """`PROMPTS` records with id, category (the module) and prompt, mixed by a seeded generator.

    A prompt ends within a function's body, at the end of a line, and begins some lines earlier.
    """
    rng, texts = random.Random(_SEED), held_out_texts()
    cuts = [cut for name, text in texts.items() for cut in _cuts(name, text)]
    rng.shuffle(cuts)
    records = []
    for name, line in cuts[:PROMPTS]:
        lines = texts[name].splitlines(keepends=True)
        wanted = rng.randint(*_PROMPT_CHARS)
        start, size = line, 0
        while start > 0 and size + len(lines[start - 1]) <= wanted:
            start -= 1
            size += len(lines[start])
        text = "".join(lines[start:line]).rstrip()
        records.append({"id": f"{name}-{line}", "category": name, "prompt": text})
    return records


def _cuts(module: str, text: str) -> Iterator[tuple[str, int]]:
    """(module, line number after which a prompt ends), a third into each longer function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= 6:
                yield module, node.lineno + lines // 3


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _is_library(path: Path) -> bool:
    is_held_out = len(path.parts) == 1 and path.stem in HELD_OUT
    return not is_held_out and not path.name.startswith("_sysconfigdata")
