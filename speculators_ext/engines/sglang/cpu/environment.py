"""The environment that makes SGLang run on a machine without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from speculators_ext.engines.devices import find_gpu
from speculators_ext.errors import ConfigError

__all__ = ["assignments"]

SHIMS = Path(__file__).parent / "shims"


def assignments() -> dict[str, str]:
    """Variables for a shell, in its own syntax of values: name -> value, quoted as needed.

    Raises:
        ConfigError: there is a GPU, or SGLang is not installed; one line.
    """
    gpu = find_gpu()
    if gpu is not None:
        raise ConfigError(
            f"sglang-cpu-env is for machines without a GPU, and {gpu} is here: "
            "start SGLang without it"
        )
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "sglang-cpu-env: SGLang is not installed in this environment; "
            "`make venv-sglang` of the repository makes one that has it"
        )
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": f'"{SHIMS}${{PYTHONPATH:+:$PYTHONPATH}}"',
        # Two busy OpenMP threads on two cores wait for each other more than they compute.
        "OMP_NUM_THREADS": '"${OMP_NUM_THREADS:-1}"',
    }
