"""`speculators-ext demo`: every method of this package on a small real model, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators_ext.cli.common import log_console, need, one_line_errors

if TYPE_CHECKING:
    from speculators_ext.cli.plan import Plan, Variant

MODEL = "smollm2-135m-instruct"
HEAD = f"{MODEL}-eagle3"
SPEC_TOKENS = 6
TREE_NODES = 8
CHAIN_LENGTH = 2  # as deep as the trees
# Sized for two CPU cores: under a minute and a half a variant, half of it the server's start.
NUM_PROMPTS, MAX_TOKENS, CONCURRENCY = 8, 64, (1, 4)
QUICK_NUM_PROMPTS, QUICK_MAX_TOKENS, QUICK_CONCURRENCY = 4, 32, (1,)


@one_line_errors
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the chart, the JSON and the logs.")
    ] = Path("out/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter answers, one request at a time.")
    ] = False,
) -> None:
    """Build SmolLM2-135M-Instruct, serve it plainly and with every method, and compare.

    Runs in float32, where a lossless method must give plain's very texts (bf16 rounds differently
    in wider batches). A method that adapts is shown twice: as it comes, when it drafts only where
    that pays on this machine, and with `adaptive` off, when its acceptance can be seen.
    """
    from speculators_ext.cli import report
    from speculators_ext.cli.runner import run_plan

    for module in ("httpx", "matplotlib", "prometheus_client"):
        need(module, "demo")
    console = log_console()
    plan = demo_plan(out, quick=quick)
    measurements = run_plan(plan, console)
    report.publish(
        plan,
        measurements,
        console,
        json_out=str(out / "result.json"),
        chart=out / "chart.png",
    )
    report.print_samples(plan, measurements)


def demo_plan(out: Path, *, quick: bool) -> Plan:
    """The demo's plan; builds the model's asset where it is missing and creates `out`."""
    from speculators_ext.cli import plan as plans
    from speculators_ext.cli.assets import build_assets
    from speculators_ext.cli.prompts import default_prompts
    from speculators_ext.cli.runner import eager_by_default

    folders = build_assets([MODEL, HEAD])
    out.mkdir(parents=True, exist_ok=True)
    return plans.Plan(
        model=str(folders[MODEL]),
        model_label=MODEL,
        variants=demo_variants(str(folders[HEAD])),
        concurrency=QUICK_CONCURRENCY if quick else CONCURRENCY,
        prompts=default_prompts()[: QUICK_NUM_PROMPTS if quick else NUM_PROMPTS],
        max_tokens=QUICK_MAX_TOKENS if quick else MAX_TOKENS,
        dtype="float32",
        eager=eager_by_default(),
        logs=out / "logs",
        extra=("--max-model-len", "2048"),
    )


def demo_variants(head: str) -> list[Variant]:
    """Plain, the engine's own chain with our head, and each of our methods, adaptive on and off."""
    from speculators_ext.cli.plan import Variant, method_variants, needs_head

    chain = {"method": "eagle3", "model": head, "num_speculative_tokens": CHAIN_LENGTH}
    variants = [Variant("plain", None), Variant("eagle3, built in", chain)]
    for name in ("clasp", "eagle2"):  # this target has no MTP module
        [shipped] = method_variants([name], TREE_NODES if needs_head(name) else SPEC_TOKENS, head)
        config = {**(shipped.speculative or {}), "method_config": {"adaptive": False}}
        variants += [shipped, Variant(f"{name}, adaptive off", config)]
    return variants
