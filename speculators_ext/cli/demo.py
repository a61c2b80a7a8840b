"""`speculators-ext demo`: every method of this package on small real models, in a few minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators_ext.cli.common import log_console, need, one_line_errors

if TYPE_CHECKING:
    from speculators_ext.cli.plan import Plan, Variant
    from speculators_ext.cli.prompts import Prompt

MODEL = "smollm2-135m-instruct"
HEAD = f"{MODEL}-eagle3"
MTP_MODELS = {"vllm": "deepseek-v3-tiny-mtp", "sglang": "mimo-tiny-mtp"}
SPEC_TOKENS = 6
TREE_NODES = 8
CHAIN_LENGTH = 2  # as deep as the trees
MTP_LENGTH = 2  # of the engine's own chain; ours stops where it is unsure, so it gets more room
MTP_ROOM = 8
STEPS_MODEL, STEPS_DRAFT = "steps-target-tiny", "steps-draft-tiny"
STEP_ROOM = 24  # tokens of the longest step
STEP_CHAIN = 5
STEP_TOKENS = 160  # every solution ends
STEP_PROMPTS = 4  # three servers and their answers in a minute and a half
# Sized for two CPU cores: under a minute and a half a variant, half of it the server's start.
NUM_PROMPTS, MAX_TOKENS, CONCURRENCY = 8, 64, (1, 4)
QUICK_NUM_PROMPTS, QUICK_MAX_TOKENS, QUICK_CONCURRENCY = 4, 32, (1,)
MODEL_LEN = {"vllm": ("--max-model-len", "2048"), "sglang": ("--context-length", "2048")}
# The MLA backend for CPUs with AMX is for bf16 only.
MLA_IN_FLOAT32 = ("--attention-config.backend", "CPU_MLA", "--block-size", "16")


@one_line_errors
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the charts, the JSON and the logs.")
    ] = Path("out/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter answers, one request at a time.")
    ] = False,
    engine: Annotated[str, typer.Option(help="The engine to start: vllm or sglang.")] = "vllm",
) -> None:
    """Build small models, serve them plainly and with every method, and compare.

    SmolLM2-135M-Instruct for `clasp` and `eagle2`, a tiny DeepSeek-V3 (on SGLang a tiny MiMo) that
    writes Python for `mtp_reuse`. In float32, where a lossless method must give plain's very texts
    (bf16 rounds differently in wider batches). Every method is shown twice: as it comes, when it
    drafts only where that pays on this machine, and with `adaptive` off, when its acceptance can
    be seen. Two tiny models that solve sums step by step show `reasoning_step`, which is lossy: its
    texts may differ from plain's, by whole steps that its judge let pass.
    """
    from speculators_ext.cli import report
    from speculators_ext.cli.plan import check_engine
    from speculators_ext.cli.runner import run_plan

    for module in ("httpx", "matplotlib", "prometheus_client"):
        need(module, "demo")
    console = log_console()
    check_engine(engine)
    plans = [
        demo_plan(out, quick=quick, engine=engine),
        mtp_plan(out / "mtp", quick=quick, engine=engine),
        steps_plan(out / "steps", quick=quick, engine=engine),
    ]
    for plan in plans:
        measurements = run_plan(plan, console)
        folder = plan.logs.parent
        report.publish(
            plan,
            measurements,
            console,
            json_out=str(folder / "result.json"),
            chart=folder / "chart.png",
        )
        report.print_samples(plan, measurements, count=1)


def demo_plan(out: Path, *, quick: bool, engine: str = "vllm") -> Plan:
    """The race on SmolLM2; builds its assets where they are missing and creates `out`."""
    from speculators_ext.cli.assets import build_assets
    from speculators_ext.cli.prompts import default_prompts

    folders = build_assets([MODEL, HEAD])
    variants = demo_variants(str(folders[HEAD]))
    return _plan(MODEL, folders[MODEL], variants, default_prompts(), out, quick, engine)


def mtp_plan(out: Path, *, quick: bool, engine: str = "vllm") -> Plan:
    """The race on a target with an MTP module, which continues source text; as `demo_plan`."""
    from speculators_ext.cli.assets import build_assets
    from speculators_ext.cli.prompts import load_prompts

    model = MTP_MODELS[engine]
    folder = build_assets([model])[model]
    prompts = load_prompts(folder / "prompts.jsonl")
    plan = _plan(model, folder, mtp_variants(), prompts, out, quick, engine)
    return replace(plan, extra=(*plan.extra, *MLA_IN_FLOAT32)) if engine == "vllm" else plan


def steps_plan(out: Path, *, quick: bool, engine: str = "vllm") -> Plan:
    """The race on sums solved step by step; as `demo_plan`."""
    from speculators_ext.cli.assets import build_assets
    from speculators_ext.cli.prompts import load_prompts

    folders = build_assets([STEPS_MODEL, STEPS_DRAFT])
    folder = folders[STEPS_MODEL]
    prompts = load_prompts(folder / "problems.jsonl")
    variants = steps_variants(str(folders[STEPS_DRAFT]), engine)
    plan = _plan(STEPS_MODEL, folder, variants, prompts, out, quick, engine)
    return replace(
        plan,
        prompts=plan.prompts[:STEP_PROMPTS],
        max_tokens=STEP_TOKENS,
        extra=(MODEL_LEN[engine][0], "512"),
    )


def demo_variants(head: str) -> list[Variant]:
    """Plain, the engine's own chain with our head, and our methods, adaptive on and off."""
    from speculators_ext.cli.plan import Variant, method_variants, needs_head

    chain = {"method": "eagle3", "model": head, "num_speculative_tokens": CHAIN_LENGTH}
    variants = [Variant("plain", None), Variant("eagle3, built in", chain)]
    for name in ("clasp", "eagle2"):
        [shipped] = method_variants([name], TREE_NODES if needs_head(name) else SPEC_TOKENS, head)
        config = {**(shipped.speculative or {}), "method_config": {"adaptive": False}}
        variants += [shipped, Variant(f"{name}, adaptive off", config)]
    return variants


def mtp_variants() -> list[Variant]:
    """Plain, the engine's own reuse of the target's MTP module, and ours."""
    from speculators_ext.cli.plan import Variant, method_variants

    [built_in] = method_variants(["mtp"], MTP_LENGTH)
    [ours] = method_variants(["mtp_reuse"], MTP_ROOM)
    [fixed] = method_variants(["mtp_reuse"], MTP_LENGTH)
    config = {**(fixed.speculative or {}), "method_config": {"adaptive": False}}
    return [
        Variant("plain", None),
        Variant("mtp, built in", built_in.speculative),
        ours,
        Variant("mtp_reuse, adaptive off", config),
    ]


def steps_variants(draft: str, engine: str = "vllm") -> list[Variant]:
    """Plain, vLLM's own token-level speculation with the same small model, whole steps."""
    from speculators_ext.cli.plan import Variant

    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": STEP_CHAIN}
    steps = {
        "method": "reasoning_step",
        "model": draft,
        "num_speculative_tokens": STEP_ROOM,
        "method_config": {"lossy": True, "judge": "logprob", "delimiter": "\n"},
    }
    variants = [
        Variant("plain", None),
        Variant("draft_model, built in", chain),
        Variant("reasoning_step, LOSSY", steps),
    ]
    return variants if engine == "vllm" else [variants[0], variants[-1]]


def _plan(
    name: str,
    model: Path,
    variants: list[Variant],
    prompts: list[Prompt],
    out: Path,
    quick: bool,
    engine: str,
) -> Plan:
    from speculators_ext.cli import plan as plans
    from speculators_ext.cli.runner import eager_by_default

    out.mkdir(parents=True, exist_ok=True)
    return plans.Plan(
        model=str(model),
        model_label=name,
        variants=variants,
        concurrency=QUICK_CONCURRENCY if quick else CONCURRENCY,
        prompts=prompts[: QUICK_NUM_PROMPTS if quick else NUM_PROMPTS],
        max_tokens=QUICK_MAX_TOKENS if quick else MAX_TOKENS,
        dtype="float32",
        eager=eager_by_default(),
        logs=out / "logs",
        extra=MODEL_LEN[engine],
        engine=engine,
    )
