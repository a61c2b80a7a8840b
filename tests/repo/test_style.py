"""Sizes and bans that ruff has no rule for (see CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ("speculators_ext", "kernels", "model_configs")
CODE = (*PACKAGE, "tests", "benchmarks")
FILE_LINES = 400
FUNCTION_LINES = 80
# A checkpoint in Python's pickle format runs code when it is opened; weights are safetensors here.
PICKLED = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
HOME = re.compile(r"(?<![\w.~$}])/(?:home|mnt|opt|root|Users|work|tmp)/\w")
# Others' source text, as it is: prompts to continue.
QUOTED = {"speculators_ext/assets/tiny_mtp/prompts.jsonl"}
LEFT_FOR_LATER = re.compile(r"\b(?:TO" + "DO|FIX" + r"ME|X{3})\b")


def files(*folders: str, suffix: str = ".py") -> list[Path]:
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob(f"*{suffix}"))
        if "__pycache__" not in path.parts
    ]
    assert found, f"no {suffix or 'file'} in {folders}: the rule would check nothing"
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def written_files() -> list[Path]:
    """Every text a person wrote: code, data and the files at the root."""
    at_root = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    return [*files(*CODE, suffix=""), *at_root, ROOT / ".ci" / "run"]


def texts() -> list[tuple[str, str]]:
    return [
        (name_of(path), path.read_text())
        for path in written_files()
        if path.is_file()
        and path.suffix in {"", ".json", ".jsonl", ".md", ".py", ".toml"}
        and name_of(path) not in QUOTED
    ]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, all of them; of a Triton kernel those below its signature.

    A kernel takes a pointer and its strides apart, an argument a line with its shape: attention's
    signature alone is 56 lines, and there is nothing to bundle arguments in.
    """
    assert function.end_lineno is not None
    is_kernel = any(ast.unparse(mark) == "triton.jit" for mark in function.decorator_list)
    start = function.body[0].lineno if is_kernel else function.lineno
    return function.end_lineno - start + 1


@pytest.mark.parametrize("path", files(*CODE), ids=name_of)
def test_file_and_functions_are_short(path: Path) -> None:
    """Catches a file or function that has outgrown what one reads at a sitting."""
    text = path.read_text()
    lengths = {
        f"{node.name} (line {node.lineno})": lines_of(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(text.splitlines()) <= FILE_LINES
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", files(*PACKAGE), ids=name_of)
def test_the_package_never_prints(path: Path) -> None:
    """Catches a left-over print: inside an engine it lands among another program's output."""
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert lines == []


@pytest.mark.parametrize("pattern", [HOME, LEFT_FOR_LATER], ids=["machine path", "left for later"])
def test_no_text_holds(pattern: re.Pattern[str]) -> None:
    """Catches a path that exists on one machine only, and work put off in a comment."""
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_pickled_weights() -> None:
    """Catches a checkpoint whose loading runs code, and any weights but those we ship."""
    banned = PICKLED | {".gguf", ".safetensors"}
    found = [name_of(path) for path in written_files() if path.suffix in banned]
    tiny = ("mtp/deepseek-v3-tiny-mtp", "mtp/mimo-tiny-mtp")
    tiny += ("steps/steps-target-tiny", "steps/steps-draft-tiny")
    parts = ("smollm2_eagle3", *(f"tiny_{name}" for name in tiny))
    shipped = {f"speculators_ext/assets/{part}/model.safetensors" for part in parts}
    assert set(found) <= shipped


def test_no_test_package() -> None:
    """Catches tests/__init__.py or a root conftest: pytest would put the root on sys.path."""
    assert [name_of(path) for path in files("tests") if path.name == "__init__.py"] == []
    assert not (ROOT / "conftest.py").exists()
