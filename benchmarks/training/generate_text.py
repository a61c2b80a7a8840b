"""Writes the training text: SmolLM2's own answers (and many of its own questions), in shards.

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
import varied_prompts
from rich.console import Console
from text_prompts import OPENINGS, PACKAGES, HeldOut, code_prompts, template_prompt

from speculators_ext.assets import build

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = "smollm2-135m-instruct"
USER = "<|im_start|>user\n"
# Shares of a shard: its own questions from nothing, from an opening, code; the rest are templates.
FREE, OPENED, CODE = 0.3, 0.3, 0.25
# Shares of a varied shard: openings and code as above, given texts; the rest is everyday.
VARIED_OPENED, VARIED_CODE, VARIED_TEXTS = 0.2, 0.12, 0.25
GREEDY = 0.75  # share of greedy answers; the others are sampled at T = 0.7
MAX_QUESTION, MAX_PROMPT = 160, 384  # tokens
MAX_VARIED_ANSWER = 192  # of the tokens: a long answer's end repeats what it said
console = Console()


class Writer:
    """One in-process vLLM that samples questions and answers them."""

    def __init__(self, requests: int, max_answer: int) -> None:
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
        self.held_out, self.max_answer = HeldOut(), max_answer

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

    def answers(self, questions: list[str], longest: int | None = None) -> Iterator[dict[str, Any]]:
        """The conversations, as records of token ids; prompts that are too long are left out."""
        from vllm import SamplingParams

        texts = [self._chat(text) for text in questions if not self.held_out.overlaps(text)]
        prompts = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        prompts = [ids for ids in prompts if len(ids) <= MAX_PROMPT]
        max_tokens = min(self.max_answer, longest or self.max_answer)
        greedy = int(GREEDY * len(prompts))
        # Apart: one sampled row makes vLLM draw noise for every row of its batch.
        for part, temperature in ((prompts[:greedy], 0.0), (prompts[greedy:], 0.7)):
            params = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, detokenize=False
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


def plain_shard(writer: Writer, shard: int, size: int) -> list[dict[str, Any]]:
    """About `size` conversations: long answers, few kinds of questions."""
    rng = random.Random(shard)
    openings = [""] * int(FREE * size) + rng.choices(OPENINGS, k=int(OPENED * size))
    questions = writer.questions(openings)
    each = int(CODE * size)
    questions += islice(code_prompts(random.Random(0)), shard * each, (shard + 1) * each)
    questions += [template_prompt(rng) for _ in range(int((1 - FREE - OPENED - CODE) * size))]
    rng.shuffle(questions)
    return list(writer.answers(list(dict.fromkeys(questions))))


def varied_shard(writer: Writer, shard: int, size: int, number: int) -> list[dict[str, Any]]:
    """About `size` conversations of many kinds, some about texts of this shard's own answers.

    The shard is the varied one with this `number`, from 0.
    """
    rng = random.Random(shard)
    openings = rng.choices([*varied_prompts.OPENINGS, *OPENINGS], k=int(VARIED_OPENED * size))
    questions = writer.questions(openings)
    each = int(VARIED_CODE * size)
    code = code_prompts(random.Random(1), PACKAGES)
    questions += islice(code, number * each, (number + 1) * each)
    everyday = int((1 - VARIED_OPENED - VARIED_CODE - VARIED_TEXTS) * size)
    questions += [varied_prompts.everyday_prompt(rng) for _ in range(everyday)]
    rng.shuffle(questions)
    records = list(writer.answers(list(dict.fromkeys(questions)), MAX_VARIED_ANSWER))
    texts = [
        writer.tokenizer.decode(record["answer"], skip_special_tokens=True) for record in records
    ]
    about = varied_prompts.about_texts(rng, texts, int(VARIED_TEXTS * size))
    rng.shuffle(about)
    return records + list(writer.answers(about, MAX_VARIED_ANSWER))


def main(
    folder: Annotated[Path, typer.Argument(help="where the shards go")],
    shards: Annotated[int, typer.Option(help="how many shards there shall be")] = 8,
    first: Annotated[int, typer.Option(help="the first shard's number")] = 0,
    varied: Annotated[int, typer.Option(help="the first shard of varied questions")] = 5,
    size: Annotated[int, typer.Option(help="conversations a shard; short ones: twice")] = 500,
    max_answer: Annotated[int, typer.Option(help="tokens an answer, at most")] = 320,
    requests: Annotated[int, typer.Option(help="conversations at a time")] = 128,
) -> None:
    """Write the shards that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [n for n in range(first, shards) if not (folder / f"{n:03d}.jsonl").exists()]
    if not missing:
        return
    writer = Writer(requests, max_answer)
    for shard in missing:
        # vLLM's sampler draws from torch's own generator: the engine lives in this process.
        torch.manual_seed(shard)
        if shard < varied:
            records = plain_shard(writer, shard, size)
        else:
            records = varied_shard(writer, shard, 2 * size, shard - varied)
        path = folder / f"{shard:03d}.jsonl"
        fresh = path.with_suffix(".part")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
        fresh.rename(path)
        tokens = sum(len(record["answer"]) for record in records)
        console.print(f"shard {shard}: {len(records)} conversations, {tokens} answer tokens")


if __name__ == "__main__":
    typer.run(main)
