"""What the overrides rely on, looked up in the installed vLLM and in 0.33's sources."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from speculators_ext.engines.vllm.cpu import overrides
from speculators_ext.testing import SourcesUnavailable, wheel_sources


@pytest.fixture(scope="module", params=["installed", "0.33.0"])
def root(request: pytest.FixtureRequest) -> Path:
    if request.param == "installed":
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            pytest.skip("vLLM is not installed")
        return Path(spec.origin).parent.parent
    try:
        return wheel_sources("vllm", request.param)
    except SourcesUnavailable as error:
        pytest.skip(str(error))


def _function(root: Path, module: str, name: str) -> ast.FunctionDef:
    tree = ast.parse(root.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{module} has no {name}")


def test_every_kernel_has_an_override_that_fits(root):
    """Catches a kernel renamed, or given other arguments, which would run interpreted again."""
    pytest.importorskip("numba")
    for name in overrides._MODULES:
        importlib.import_module(f"speculators_ext.engines.vllm.cpu.{name}")
    from speculators_ext.engines.vllm.cpu.arrays import OVERRIDES

    kernels = {item.kernel for item in OVERRIDES}
    assert len(kernels) >= 37
    for kernel in kernels:
        module, _, name = kernel.rpartition(".")
        arguments = tuple(a.arg for a in _function(root, module, name).args.args)
        known = [item.signature for item in OVERRIDES if item.kernel == kernel]
        assert arguments in known, kernel


def test_the_worker_calls_the_platform_after_the_plugins(root):
    """Catches a hook that is called before our plugin can set it, or no more at all."""
    body = ast.unparse(_function(root, "vllm.v1.worker.worker_base", "init_worker"))
    assert 0 < body.index("load_general_plugins()") < body.index(f"{overrides._HOOK}()")
    hook = _function(root, "vllm.platforms.cpu", overrides._HOOK)
    assert [ast.unparse(d) for d in hook.decorator_list] == ["classmethod"]
    assert [a.arg for a in hook.args.args] == ["cls"]


def test_the_wrapper_takes_what_ours_gives_it(root):
    """Catches a changed constructor of vLLM's kernel wrapper, which ours extends."""
    tree = ast.parse((root / "vllm/triton_utils/dispatcher.py").read_text())
    wrapper = next(n for n in tree.body if isinstance(n, ast.ClassDef))
    assert wrapper.name == "KernelOverride"
    init = next(n for n in wrapper.body if isinstance(n, ast.FunctionDef))
    assert [a.arg for a in init.args.args] == ["self", "kernel", "impl"]
    assert "self.arg_names" in ast.unparse(init)
    assert "self._impl" in ast.unparse(init)
