"""Imports go down only: cli -> engines -> proposers, verification -> kernels -> torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from speculators_ext.config import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} holds no Python file: the rule below would check nothing"
    return files


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("kernels", "model_configs"):
        parts = ("speculators_ext", *parts)
    return ".".join(parts)


def imported(text: str, module: str, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """Absolute names of what a module's text imports at run time, each with its line."""
    here = module.split(".")
    for node in run_time_nodes(ast.parse(text), top_level_only=top_level_only):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def run_time_nodes(tree: ast.AST, *, top_level_only: bool) -> Iterator[ast.AST]:
    """Every node below `tree`, without `if TYPE_CHECKING:` bodies (and function bodies)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from run_time_nodes(other, top_level_only=top_level_only)
            continue
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from run_time_nodes(node, top_level_only=top_level_only)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offences(paths: list[Path], *banned: str, top_level_only: bool = False) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for name, line in imported(
            path.read_text(), module_name(path), top_level_only=top_level_only
        )
        if any(inside(name, package) for package in banned)
    ]


PROPOSERS = ("speculators_ext.proposers", "speculators_ext.verification")


@pytest.mark.parametrize(
    ("folder", "banned"),
    [
        ("kernels", (*ENGINES, *PROPOSERS, "speculators_ext.engines", "speculators_ext.cli")),
        ("model_configs", (*ENGINES, "torch", "speculators_ext.engines", "speculators_ext.cli")),
        ("speculators_ext/proposers", (*ENGINES, "speculators_ext.engines", "speculators_ext.cli")),
        (
            "speculators_ext/verification",
            (*ENGINES, "speculators_ext.engines", "speculators_ext.cli"),
        ),
        ("speculators_ext/assets", (*ENGINES, "speculators_ext.engines", "speculators_ext.cli")),
        ("speculators_ext/engines", ("speculators_ext.cli",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lower_layer_imports_no_upper_one(folder: str, banned: tuple[str, ...]) -> None:
    """Catches a kernel or proposer that reaches up, which would tie it to one engine."""
    assert offences(sources(folder), *banned) == []


VLLM = "speculators_ext.engines.vllm"
# Lowest first; the methods stand side by side on top.
SHARED = ("attention", "skipping", "trees", "heads")


@pytest.mark.parametrize("folder", [*SHARED, *METHODS])
def test_a_methods_folder_is_its_own(folder: str) -> None:
    """Catches one method built on another, and shared code that knows the method above it."""
    above = SHARED[SHARED.index(folder) + 1 :] if folder in SHARED else ()
    others = [name for name in (*above, *METHODS) if name != folder]
    paths = sources(f"speculators_ext/engines/vllm/{folder}")
    assert offences(paths, *(f"{VLLM}.{name}" for name in others)) == []


def test_the_hooks_know_no_method() -> None:
    """Catches a method named in what all of them share: `methods.py` finds each by its name."""
    paths = sorted((ROOT / "speculators_ext" / "engines" / "vllm").glob("*.py"))
    assert paths
    assert offences(paths, *(f"{VLLM}.{name}" for name in (*SHARED, *METHODS))) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_only_its_own_adapter_imports_an_engine(engine: str) -> None:
    """Catches `import vllm` outside engines/vllm: the other engine's users would not have it."""
    adapter = ROOT / "speculators_ext" / "engines" / engine
    outside = [
        path
        for folder in ("speculators_ext", "kernels", "model_configs")
        for path in sources(folder)
        if not path.is_relative_to(adapter)
    ]
    assert offences(outside, engine) == []


def test_no_two_files_need_each_other() -> None:
    """Catches a circle of imports, also one that only types close: none of it reads alone."""
    names = {
        module_name(path): path for folder in ("speculators_ext", "kernels", "model_configs")
        for path in sources(folder) if path.stem != "__init__"
    }  # fmt: skip
    needs = {
        name: {
            taken
            for found in named_anywhere(path.read_text())
            for taken in (found, found.rpartition(".")[0])
            if taken in names and taken != name
        }
        for name, path in names.items()
    }
    assert sum(map(len, needs.values())) > len(names), "too few imports were read"
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError, which names the files


def named_anywhere(text: str) -> Iterator[str]:
    """Absolute names of all imports of a text, those for types too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_command_line_loads_its_engine_late() -> None:
    """Catches an adapter imported at the top of a command: `--help` would load torch and vLLM."""
    heavy = ("torch", *ENGINES, "speculators_ext.engines")
    assert offences(sources("speculators_ext/cli"), *heavy, top_level_only=True) == []


@pytest.mark.parametrize(
    "module", ["speculators_ext", "speculators_ext.config", "speculators_ext.cli"]
)
def test_a_light_module_stays_light(module: str) -> None:
    """Catches an indirect heavy import that reading the file alone cannot see."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'vllm', 'sglang'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_reader_of_imports_sees_what_it_must() -> None:
    """Catches a blind checker: every form of import is found, TYPE_CHECKING ones are not."""
    text = (
        "import vllm.config\n"
        "from ..engines import vllm as adapter\n"
        "if TYPE_CHECKING:\n    import sglang\n"
        "def late():\n    from torch import nn\n"
    )
    module = "speculators_ext.proposers.imaginary"
    early = ["vllm.config", "speculators_ext.engines.vllm"]
    assert [name for name, _ in imported(text, module)] == [*early, "torch.nn"]
    assert [name for name, _ in imported(text, module, top_level_only=True)] == early
