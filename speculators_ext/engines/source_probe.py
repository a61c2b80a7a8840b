"""Check, by reading source, that an engine still has what our hooks rely on.

Reading instead of importing keeps `register()` and `doctor` cheap, keeps an engine's import order
its own, and lets a test check a version that is not installed from its wheel's sources alone.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Expectation", "engine_root", "find_problem"]


class Expectation(NamedTuple):
    """One name in the engine's source and what it must look like.

    ``name`` is dotted inside the module (``EngineArgs.add_cli_args``). With ``parameters`` it must
    be a function that takes them in this order (more may follow or stand between); without, any
    definition or import of that name will do.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None


def engine_root(package: str) -> Path | None:
    """The folder that holds ``package``'s folder, or None when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def find_problem(expectation: Expectation, root: Path) -> str | None:
    """What is wrong with ``expectation`` in the sources below ``root``; None when it holds."""
    tree = _parse_module(root, expectation.module)
    if tree is None:
        return f"module {expectation.module} is missing"
    node = _lookup(tree, expectation.name.split("."))
    if node is None:
        return f"{expectation.module}.{expectation.name} is missing"
    if expectation.parameters is None:
        return None
    if not isinstance(node, ast.FunctionDef):
        return f"{expectation.module}.{expectation.name} is not a function"
    have = _parameter_names(node)
    remaining = iter(have)
    if all(name in remaining for name in expectation.parameters):
        return None
    want = ", ".join(expectation.parameters)
    return f"{expectation.module}.{expectation.name} takes ({', '.join(have)}), expected ({want})"


@lru_cache(maxsize=32)
def _parse_module(root: Path, module: str) -> ast.Module | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _parameter_names(node: ast.FunctionDef) -> list[str]:
    args = node.args
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def _lookup(tree: ast.Module, path: list[str]) -> ast.AST | None:
    node: ast.AST | None = tree
    for part in path:
        node = next((child for child in _children(node) if _defines(child, part)), None)
        if node is None:
            return None
    return node


def _children(node: ast.AST | None) -> list[ast.AST]:
    return [] if node is None else [n for n in getattr(node, "body", []) if isinstance(n, ast.AST)]


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return False
