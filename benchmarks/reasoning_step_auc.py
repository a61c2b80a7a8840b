"""Can a model tell its own steps from spoiled ones? The area under the curve, for each judge.

SmolLM2 answers questions that ask for steps (sampled, so that it does not only write its likeliest
words). Each step of an answer is shown to the judges as it is, and spoiled in one of three ways: a
number changed, two content words swapped for words of other answers, or the step of another answer
in its place. An area of 0.5 is chance, 1 is no mistake.

    python benchmarks/reasoning_step_auc.py --json auc.json

Beside the areas it says how many steps pass at each judge's default threshold and around it.
"""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from speculators_ext.assets import build
from speculators_ext.method_configs import JUDGE_SUFFIX
from speculators_ext.proposers.step_judges import JUDGES, OpenSteps
from speculators_ext.proposers.step_tokens import JudgeSuffix, find_suffix

console = Console()
MODEL = "smollm2-135m-instruct"
TOPICS = (
    "how a letter travels from one town to another",
    "how to boil an egg",
    "why the sky is blue",
    "how to find the area of a rectangle of 6 by 7 metres",
    "how rain forms",
    "how to plan a birthday party for 12 children",
    "how bread is baked",
    "how a bill becomes a law",
    "how to add 245 and 378 by hand",
    "how plants make sugar from light",
    "how to repair a flat bicycle tyre",
    "how vaccines protect people",
    "how to save 600 dollars in 12 months",
    "how a computer starts",
    "how the heart moves blood",
    "how to write a short story",
    "how glass is recycled",
    "how to convert 5 kilometres to metres",
    "how a volcano erupts",
    "how to prepare for an exam in 10 days",
)
KINDS = ("number", "words", "other step")
THRESHOLDS = {"logprob": (-1.0, -2.0, -2.5, -3.0, -4.0, -6.0, -9.0), "score": (8.0, 7.0, 6.0, 5.0)}


def questions(count: int) -> list[str]:
    """Questions that ask for numbered steps."""
    return [f"Explain step by step {topic}. Number the steps." for topic in TOPICS[:count]]


def answers(model: Any, tokenizer: Any, asked: list[str], max_new: int) -> list[tuple[str, str]]:
    """(prompt with its template, answer), sampled at temperature 0.7."""
    made = []
    for question in asked:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(
            ids, max_new_tokens=max_new, do_sample=True, temperature=0.7, top_p=0.95,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        made.append((text, tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return made


def steps_of(answer: str) -> list[str]:
    """Complete lines of some length, each with its end; an unfinished last one is left out."""
    lines = re.findall(r"[^\n]+\n+", answer)
    return [line for line in lines if len(line.split()) >= 6]


def spoil(rng: random.Random, kind: str, step: str, others: list[str]) -> str | None:
    """A wrong version of a step, or None where this kind does not apply."""
    if kind == "other step":
        return rng.choice(others)
    if kind == "number":
        body = re.match(r"(\W*\d+\W)?(.*)", step, re.DOTALL)
        assert body is not None
        found = list(re.finditer(r"\d+", body[2]))
        if not found:
            return None
        hit = rng.choice(found)
        wrong = str(int(hit[0]) + rng.choice((1, 2, 3, 10, 25)))
        return (body[1] or "") + body[2][: hit.start()] + wrong + body[2][hit.end() :]
    words = list(re.finditer(r"[a-z]{4,}", step))
    pool = re.findall(r"[a-z]{4,}", " ".join(others))
    if len(words) < 2:
        return None
    text = step
    for hit in sorted(rng.sample(words, 2), key=lambda m: -m.start()):
        text = text[: hit.start()] + rng.choice(pool) + text[hit.end() :]
    return text


class Reader:
    """Asks the judges about a step behind a text."""

    def __init__(self, model: Any, tokenizer: Any, suffix: JudgeSuffix) -> None:
        self._model, self._tokenizer, self._suffix = model, tokenizer, suffix

    @torch.inference_mode()
    def numbers(self, before: str, step: str) -> dict[str, float]:
        """What `logprob`, its mean and `score` give the step."""
        head = self._tokenizer(before, add_special_tokens=False)["input_ids"]
        own = self._tokenizer(step, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*head, *own, *self._suffix.ids]])
        logits = self._model(ids).logits[0].float()
        law = torch.log_softmax(logits[len(head) - 1 : len(head) + len(own) - 1], dim=-1)
        each = law.gather(1, torch.tensor(own)[:, None])[:, 0]
        owners = torch.zeros(len(own), dtype=torch.int64)
        steps = OpenSteps(1, lambda: (each, owners), lambda: logits[-1:, list(self._suffix.digits)])
        found = {name: float(JUDGES[name]().numbers(steps)) for name in ("logprob", "score")}
        return found | {"mean logprob": float(each.mean())}


def area(sound: list[float], spoiled: list[float]) -> float:
    """The chance that a sound step gets more than a spoiled one, ties counting half."""
    s, w = torch.tensor(sound)[:, None], torch.tensor(spoiled)[None, :]
    return float(((s > w).float() + 0.5 * (s == w).float()).mean())


def passing(values: list[float], thresholds: tuple[float, ...]) -> dict[str, float]:
    """The share of steps that passes, by threshold."""
    return {f"{t:g}": sum(v >= t for v in values) / len(values) for t in thresholds}


def main(
    num_questions: Annotated[int, typer.Option()] = len(TOPICS),
    max_new: Annotated[int, typer.Option(help="Tokens of an answer.")] = 160,
    suffix: Annotated[str, typer.Option(help="The judging suffix.")] = JUDGE_SUFFIX,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print a table."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    rng, folder = random.Random(0), build(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    reader = Reader(model, tokenizer, find_suffix(tokenizer, suffix))
    started = time.process_time()
    made = answers(model, tokenizer, questions(num_questions), max_new)
    sound: dict[str, list[float]] = {}
    spoiled: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for index, (prompt, answer) in enumerate(made):
        others = [s for at, (_, a) in enumerate(made) if at != index for s in steps_of(a)]
        for step in steps_of(answer):
            before = prompt + answer.partition(step)[0]
            for name, value in reader.numbers(before, step).items():
                sound.setdefault(name, []).append(value)
            for kind in KINDS:
                wrong = spoil(rng, kind, step, others)
                if wrong is not None and wrong != step:
                    for name, value in reader.numbers(before, wrong).items():
                        spoiled[kind].setdefault(name, []).append(value)
    areas = {
        name: {k: area(values, spoiled[k][name]) for k in KINDS if name in spoiled[k]}
        | {"all": area(values, [v for k in KINDS for v in spoiled[k].get(name, ())])}
        for name, values in sound.items()
    }
    passes = {
        judge: {"sound": passing(sound[judge], thresholds)}
        | {kind: passing(spoiled[kind][judge], thresholds) for kind in KINDS}
        for judge, thresholds in THRESHOLDS.items()
    }
    counts = {"sound": len(sound["score"])} | {k: len(spoiled[k].get("score", ())) for k in KINDS}
    table = Table(title=f"{MODEL}: area under the curve; steps {counts}")
    for column in ("judge", *KINDS, "all"):
        table.add_column(column)
    for name, found in areas.items():
        table.add_row(name, *(f"{found[c]:.3f}" if c in found else "" for c in (*KINDS, "all")))
    console.print(table, passes)
    if json_path is not None:
        settings = {
            "model": MODEL, "questions": len(made), "max_new": max_new, "suffix": suffix,
            "torch": torch.__version__, "processor_seconds": time.process_time() - started,
        }  # fmt: skip
        result = {"settings": settings, "steps": counts, "areas": areas, "passes": passes}
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
