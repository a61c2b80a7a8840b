"""How often stock vLLM's own `mtp` accepts a model's drafts, on code it was not trained on.

Greedy; the answers are compared with those of plain vLLM.

    python benchmarks/training/mtp_acceptance.py deepseek-v3-tiny-mtp --json acceptance.json
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speculators_ext.assets import build
from speculators_ext.cli.prompts import load_prompts

console = Console()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
REQUESTS = 8


def answer(folder: Path, depth: int, dtype: str, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Answers of one engine, drafting `depth` tokens a round (0: none), and its counters."""
    import torch
    from vllm import LLM, SamplingParams

    speculative = {"method": "mtp", "num_speculative_tokens": depth} if depth else None
    latent = "kv_lora_rank" in (folder / "config.json").read_text()
    latent = latent and not torch.cuda.is_available()
    # What vLLM chooses for latent attention on a CPU with AMX takes no fp32.
    attention = {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16} if latent else {}
    llm = LLM(
        str(folder),
        **attention,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    before = counters(llm)
    started = time.perf_counter()
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=tokens), use_tqdm=False
    )
    seconds = time.perf_counter() - started
    new = {name: value - before.get(name, 0) for name, value in counters(llm).items()}
    texts = [output.outputs[0].text for output in outputs]
    del llm
    gc.collect()
    return {"texts": texts, "seconds": seconds, "counters": new}


def counters(llm: Any) -> dict[str, float]:
    """Rounds of drafting ("rounds"), and accepted drafts by position ("1", "2", ...)."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["rounds"] = found.get("rounds", 0) + metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for place, value in enumerate(metric.values, 1):
                found[str(place)] = found.get(str(place), 0) + value
    return found


def main(
    model: Annotated[str, typer.Argument(help="name of the asset, or a folder with prompts.jsonl")],
    depths: Annotated[str, typer.Option(help="drafts a round, several with commas")] = "1,2,3,4",
    num_prompts: Annotated[int, typer.Option(help="held-out prompts")] = 48,
    max_tokens: Annotated[int, typer.Option(help="tokens a prompt")] = 96,
    dtype: Annotated[str, typer.Option(help="of weights and products")] = "float32",
    json_path: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure acceptance by position for each depth."""
    folder = Path(model) if Path(model).is_dir() else build(model)
    prompts = [prompt.text for prompt in load_prompts(folder / "prompts.jsonl")[:num_prompts]]
    plain = answer(folder, 0, dtype, prompts, max_tokens)
    console.print(prompts[0] + "|" + plain["texts"][0], markup=False, highlight=False)
    table = Table(title=f"{model}: drafts accepted by position, greedy, {dtype}")
    for heading in ("a round", "accepted", "mean length", "identical"):
        table.add_column(heading)
    rows = []
    for depth in map(int, depths.split(",")):
        got = answer(folder, depth, dtype, prompts, max_tokens)
        rounds = got["counters"]["rounds"]
        shares = [got["counters"].get(str(i + 1), 0.0) / rounds for i in range(depth)]
        same = sum(a == b for a, b in zip(got["texts"], plain["texts"], strict=True))
        rows.append({"depth": depth, "rounds": rounds, "accepted": shares, "identical": same})
        shown = " ".join(f"{share:.3f}" for share in shares)
        table.add_row(str(depth), shown, f"{1 + sum(shares):.3f}", f"{same} of {len(prompts)}")
    console.print(table)
    if json_path:
        described = {"model": Path(model).name, "dtype": dtype, "prompts": len(prompts)}
        described |= {"max_tokens": max_tokens, "rows": rows}
        json_path.write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
