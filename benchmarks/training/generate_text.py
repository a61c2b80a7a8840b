"""Writes the training text: SmolLM2's own answers (and most of its own questions), in shards.

Every shard is one JSON-lines file of a few hundred conversations, drawn from a seed of its own and
renamed into place when it is whole: a second run goes on where the first one stopped. A line holds
the token ids of the prompt (chat template included) and of the answer.

    python benchmarks/training/generate_text.py head_data/text --shards 8
"""

from __future__ import annotations

import json
import os
import random
from itertools import islice
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from text_prompts import OPENINGS, HeldOut, code_prompts, template_prompt

from speculators_ext.assets import build

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = "smollm2-135m-instruct"
USER, END = "<|im_start|>user\n", "<|im_end|>"
# Shares of a shard: its own questions from nothing, from an opening, code; the rest are templates.
FREE, OPENED, CODE = 0.3, 0.3, 0.25
GREEDY = 0.75  # share of greedy answers; the others are sampled at T = 0.7
MAX_QUESTION, MAX_PROMPT, MAX_ANSWER = 160, 384, 320  # tokens
console = Console()


class Writer:
    """One in-process vLLM that samples questions and answers them."""

    def __init__(self, requests: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self.llm = LLM(
            str(build(TARGET)),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=requests,
            seed=0,
        )
        self.tokenizer: Any = self.llm.get_tokenizer()
        self.held_out = HeldOut()

    def questions(self, openings: list[str]) -> list[str]:
        """A user turn for each opening; only turns that end by themselves and look sane."""
        from vllm import SamplingParams

        system = self._chat("").partition(USER)[0]
        prompts = [system + USER + opening for opening in openings]
        # No top-p: sorting the vocabulary costs a CPU more than the model does.
        params = SamplingParams(temperature=0.9, max_tokens=MAX_QUESTION)
        outputs = self.llm.generate(prompts, params)
        found = [
            opening + output.outputs[0].text
            for opening, output in zip(openings, outputs, strict=True)
            if output.outputs[0].finish_reason == "stop"
        ]
        return [text.strip() for text in found if _is_sane(text)]

    def answers(self, questions: list[str]) -> Iterator[dict[str, Any]]:
        """The conversations, as records of token ids; prompts that are too long are left out."""
        from vllm import SamplingParams

        texts = [self._chat(text) for text in questions if not self.held_out.overlaps(text)]
        prompts = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        prompts = [ids for ids in prompts if len(ids) <= MAX_PROMPT]
        greedy = int(GREEDY * len(prompts))
        # Apart: one sampled row makes vLLM draw noise for every row of its batch.
        for part, temperature in ((prompts[:greedy], 0.0), (prompts[greedy:], 0.7)):
            params = SamplingParams(
                temperature=temperature, max_tokens=MAX_ANSWER, detokenize=False
            )
            inputs = [{"prompt_token_ids": ids} for ids in part]
            for output in self.llm.generate(inputs, params):
                answer = list(output.outputs[0].token_ids)
                yield {"prompt": output.prompt_token_ids, "answer": answer}

    def _chat(self, text: str) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )


def _is_sane(question: str) -> bool:
    """Long enough, in Latin script mostly, no template tokens inside, no line ten times over."""
    plain = sum(char.isascii() for char in question)
    lines = question.splitlines()
    return (
        len(question.split()) >= 3
        and plain > 0.9 * len(question)
        and "<|" not in question
        and len(lines) - len(set(lines)) < 10
    )


def shard_questions(writer: Writer, shard: int, size: int) -> list[str]:
    """About `size` questions of the shard's own seed."""
    rng = random.Random(shard)
    openings = [""] * int(FREE * size) + rng.choices(OPENINGS, k=int(OPENED * size))
    questions = writer.questions(openings)
    each = int(CODE * size)
    questions += islice(code_prompts(random.Random(0)), shard * each, (shard + 1) * each)
    questions += [template_prompt(rng) for _ in range(int((1 - FREE - OPENED - CODE) * size))]
    rng.shuffle(questions)
    return list(dict.fromkeys(questions))


def main(
    folder: Annotated[Path, typer.Argument(help="where the shards go")],
    shards: Annotated[int, typer.Option(help="how many shards there shall be")] = 8,
    first: Annotated[int, typer.Option(help="the first shard's number")] = 0,
    size: Annotated[int, typer.Option(help="conversations a shard, about")] = 500,
    requests: Annotated[int, typer.Option(help="conversations at a time")] = 128,
) -> None:
    """Write the shards that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [n for n in range(first, shards) if not (folder / f"{n:03d}.jsonl").exists()]
    if not missing:
        return
    writer = Writer(requests)
    for shard in missing:
        # vLLM's sampler draws from torch's own generator: the engine lives in this process.
        torch.manual_seed(shard)
        records = list(writer.answers(shard_questions(writer, shard, size)))
        path = folder / f"{shard:03d}.jsonl"
        fresh = path.with_suffix(".part")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
        fresh.rename(path)
        tokens = sum(len(record["answer"]) for record in records)
        console.print(f"shard {shard}: {len(records)} conversations, {tokens} answer tokens")


if __name__ == "__main__":
    typer.run(main)
