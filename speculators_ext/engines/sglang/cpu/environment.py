"""The environment that makes SGLang run on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_ext.engines.devices import find_gpu
from speculators_ext.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["assignments", "variables"]

SHIMS = Path(__file__).parent / "shims"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process with this environment must be given to run SGLang: name -> value.

    Raises:
        ConfigError: there is a GPU, or SGLang is not installed; one line.
    """
    _check()
    paths = [str(SHIMS), *([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        # Two busy OpenMP threads on two cores wait for each other more than they compute.
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or "1",
    }


def assignments() -> dict[str, str]:
    """Variables for a shell, in its own syntax of values: name -> value, quoted as needed.

    Raises:
        ConfigError: there is a GPU, or SGLang is not installed; one line.
    """
    _check()
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": f'"{SHIMS}${{PYTHONPATH:+:$PYTHONPATH}}"',
        "OMP_NUM_THREADS": '"${OMP_NUM_THREADS:-1}"',
    }


def _check() -> None:
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
