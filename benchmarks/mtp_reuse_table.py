"""`mtp_reuse` against plain decoding and vLLM's own `mtp`, by the number of drafts, in one run.

Every variant is an engine in this process; they take turns over the same held-out prompts of the
model, so that a machine that drifts weighs on all alike. Each prompt is answered in several turns,
of which every variant's fastest counts: what else runs on the machine can only slow one down.
Before them is one that is not counted, in which adaptive variants find out what drafts cost.
Seconds are processor time of the engines' thread.

    python benchmarks/mtp_reuse_table.py --model deepseek-v3-tiny-mtp --json t.json --png t.png
    python benchmarks/mtp_reuse_table.py --model mimo-tiny-mtp --compare vocabularies
    python benchmarks/mtp_reuse_table.py --model mimo-tiny-mtp --compare states

`vocabularies` are all, 1/2, 1/4 and 1/8 of the target's; `states` are the hidden states fed to the
module before or after their final norms, and `own KV`: what the module wrote of its own states is
left in its cache where drafts were accepted, instead of being made anew from the target's.
"""

from __future__ import annotations

import json
import os
import time
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from speculators_ext.assets import build
from speculators_ext.cli.chart import draw
from speculators_ext.cli.load import Answer
from speculators_ext.cli.metrics import SpecCounters
from speculators_ext.cli.prompts import load_prompts
from speculators_ext.cli.report import table
from speculators_ext.cli.rows import PLAIN, Measurement, compute_rows

console = Console()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's thread is ours to time
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
FRACTIONS = (1, 2, 4, 8)
SIDES = ("pre", "post")
OWN_KV = "own KV"


def caps(latent: bool) -> dict[str, dict[str, Any] | None]:
    """Plain, the built-in by K, ours by K, and where the target takes trees a tree."""
    variants: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for count in (1, 2, 3, 4):
        variants[f"mtp {count}"] = {"method": "mtp", "num_speculative_tokens": count}
    for count in (1, 2, 3, 4, 8):
        variants[f"reuse {count}"] = {"method": "mtp_reuse", "num_speculative_tokens": count}
    if not latent:
        shape = {"topk": 2, "depth": 3}
        variants["reuse tree"] = {
            "method": "mtp_reuse", "num_speculative_tokens": 6, "method_config": shape,
        }  # fmt: skip
    return variants


def vocabularies(full: int, drafts: int) -> dict[str, dict[str, Any] | None]:
    """Plain, and ours with fewer and fewer tokens to draft; every chain runs to its end."""
    variants: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for part in FRACTIONS:
        options: dict[str, Any] = {"adaptive": False}
        if part > 1:
            options["draft_vocab_size"] = full // part
        variants[f"1/{part} of {full}"] = {
            "method": "mtp_reuse", "num_speculative_tokens": drafts, "method_config": options,
        }  # fmt: skip
    return variants


def states(drafts: int) -> dict[str, dict[str, Any] | None]:
    """Plain, and ours with every choice of states; every chain runs to its end."""
    variants: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for name, options in [
        *((f"{f} {r}", {"first_hidden": f, "recycled_hidden": r}) for f in SIDES for r in SIDES),
        (OWN_KV, {}),
    ]:
        variants[name] = {
            "method": "mtp_reuse", "num_speculative_tokens": drafts,
            "method_config": {"adaptive": False} | options,
        }  # fmt: skip
    return variants


def keep_own_kv(llm: Any) -> None:
    """Let the module run over the last row of a verification only, and what it has not written."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    most = runner.speculator.num_speculative_steps
    backlog = runner.model_state.backlog
    take = backlog.take

    def shortened(slot: int) -> Any:
        rows = take(slot)
        count = len(rows.tokens)
        if not 1 < count <= most + 1:
            return rows
        left = 2 if count == most + 1 else 1
        start = rows.start + count - left
        return type(rows)(start, rows.tokens[-left:], rows.hidden[-left:])

    backlog.take = shortened


class Variant:
    """An engine, and what its scheduler has counted."""

    def __init__(self, folder: Path, config: dict[str, Any] | None, dtype: str) -> None:
        from vllm import LLM

        latent = is_latent(folder)
        own = {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16} if latent else {}
        self.llm = LLM(
            str(folder), dtype=dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=8,
            enable_prefix_caching=False, speculative_config=config,
            num_gpu_blocks_override=8192 // (16 if latent else 128), **own,
        )  # fmt: skip
        self.counted = SpecCounters()
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        make = scheduler.make_spec_decoding_stats

        def counting(*args: Any, **kwargs: Any) -> Any:
            given = signature(make).bind(*args, **kwargs).arguments
            drafted, accepted = given["num_draft_tokens"], given["num_accepted_tokens"]
            if drafted:
                self._count(drafted, accepted)
            return make(*args, **kwargs)

        scheduler.make_spec_decoding_stats = counting

    def _count(self, drafted: int, accepted: int) -> None:
        old = self.counted
        width = max(len(old.accepted_at), drafted)
        at = [*old.accepted_at, *[0] * (width - len(old.accepted_at))]
        for position in range(accepted):
            at[position] += 1
        self.counted = SpecCounters(
            old.drafts + 1, old.drafted + drafted, old.accepted + accepted, tuple(at)
        )

    def answer(self, prompts: list[str], max_tokens: int) -> tuple[list[Answer], float]:
        """The answers, and the seconds they took."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.thread_time()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.thread_time() - started
        made = [output.outputs[0] for output in outputs]
        return [Answer(one.text, len(one.token_ids)) for one in made], seconds


def is_latent(folder: Path) -> bool:
    return "kv_lora_rank" in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def measure(
    variants: dict[str, Variant], prompts: list[str], requests: int, max_tokens: int, turns: int
) -> list[Measurement]:
    """Every variant over all prompts, ``requests`` at a time, in turns."""
    groups = [prompts[at : at + requests] for at in range(0, len(prompts), requests)]
    for variant in variants.values():
        for group in groups[: max(2, 4 // requests)]:
            variant.answer(group, max_tokens)
    before = {name: variant.counted for name, variant in variants.items()}
    answers: dict[str, list[Answer]] = {name: [] for name in variants}
    seconds = dict.fromkeys(variants, 0.0)
    for group in groups:
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(turns):
            for name, variant in variants.items():
                made, spent = variant.answer(group, max_tokens)
                taken[name].append(spent)
                if turn == 0:
                    answers[name] += made
        for name, spent in taken.items():
            seconds[name] += min(spent)
    return [
        Measurement(
            "vllm", name, requests, answers[name], seconds[name], variant.counted - before[name]
        )
        for name, variant in variants.items()
    ]


def main(
    model: Annotated[
        str, typer.Option(help="An asset with an MTP module, or a folder.")
    ] = "deepseek-v3-tiny-mtp",
    compare: Annotated[str, typer.Option(help="caps, vocabularies or states.")] = "caps",
    drafts: Annotated[int, typer.Option(help="Drafts of a chain; caps have their own.")] = 3,
    requests: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4",
    num_prompts: Annotated[int, typer.Option()] = 12,
    max_tokens: Annotated[int, typer.Option()] = 64,
    turns: Annotated[int, typer.Option(help="Turns of each prompt; the fastest counts.")] = 3,
    dtype: Annotated[str, typer.Option()] = "float32",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    png_path: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Measure the variants and print a table."""
    import torch

    torch.set_num_threads(1)
    folder = Path(model) if Path(model).is_dir() else build(model)
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    kinds = {
        "caps": caps(is_latent(folder)),
        "vocabularies": vocabularies(size, drafts),
        "states": states(drafts),
    }
    wanted = kinds[compare]
    variants = {name: Variant(folder, config, dtype) for name, config in wanted.items()}
    if OWN_KV in variants:
        keep_own_kv(variants[OWN_KV].llm)
    prompts = [prompt.text for prompt in load_prompts(folder / "prompts.jsonl")][:num_prompts]
    measured = [
        one
        for count in requests.split(",")
        for one in measure(variants, prompts, int(count), max_tokens, turns)
    ]
    rows = compute_rows(measured)
    title = f"{folder.name}, {dtype}, {len(prompts)} prompts, {max_tokens} tokens each"
    console.print(table(rows, title))
    if json_path is not None:
        settings = {"model": folder.name, "dtype": dtype, "prompts": len(prompts),
                    "max_tokens": max_tokens, "turns": turns,
                    "seconds": "processor time"}  # fmt: skip
        found = {"settings": settings, "rows": [row.as_json() for row in rows]}
        json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if png_path is not None:
        draw(rows, png_path, title)


if __name__ == "__main__":
    typer.run(main)
