"""What `register()` does to a vLLM, in a fresh process and to its command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from speculators_ext.config import METHODS
from speculators_ext.engines.source_probe import engine_root
from speculators_ext.engines.vllm import expected, plugin

pytestmark = pytest.mark.skipif(engine_root("vllm") is None, reason="vLLM is not installed")

FRESH = """
import sys
from speculators_ext.engines.vllm import plugin
for _ in range(3):
    plugin.register()
late = {"vllm.engine.arg_utils", "vllm.v1.worker.gpu.model_runner", "vllm.v1.attention.selector"}
print("imported", sorted(late & set(sys.modules)))
from vllm.engine import arg_utils
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.gpu import model_runner, model_states
plugin.register()
def depth(function):
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0
for holder, name in [
    (arg_utils.EngineArgs, "create_speculative_config"),
    (arg_utils.EngineArgs, "add_cli_args"),
    (model_runner, "init_speculator"),
    (model_states, "resolve_model_state_cls"),
]:
    print(name, depth(getattr(holder, name)))
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print("backend", AttentionBackendEnum.CPU_ATTN.get_path())
"""


@pytest.fixture(scope="module")
def fresh_process() -> dict[str, str]:
    """What a new process says after `register()` ran four times and as vLLM's own plugin."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_register_sets_each_hook_once(fresh_process: dict[str, str]) -> None:
    """Catches hooks stacked on hooks: vLLM runs a plugin more than once in some processes."""
    names = ("create_speculative_config", "add_cli_args", "init_speculator")
    assert {name: fresh_process[name] for name in names} == dict.fromkeys(names, "1")
    assert fresh_process["resolve_model_state_cls"] == "1"


def test_register_leaves_the_import_order_to_vllm(fresh_process: dict[str, str]) -> None:
    """Catches a plugin that loads worker modules early: on a CPU vLLM patches torch before them."""
    assert fresh_process["imported"] == "[]"


def test_without_our_method_vllm_is_stock(fresh_process: dict[str, str]) -> None:
    """Catches a plugin that changes the engine of people who do not use it."""
    assert "speculators_ext" not in fresh_process["backend"]


def test_register_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an exception out of a plugin, which would kill vLLM for everybody."""

    def broken() -> list[expected.HookStatus]:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(expected, "probe", broken)
    plugin.register()


def test_the_command_line_accepts_our_names() -> None:
    """Catches `--spec-method clasp` refused by the parser, or vLLM's own choices lost."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for _ in range(2):
        words = ["--model", "m", "--spec-method", "clasp", "--spec-tokens", "6"]
        args = parser.parse_args(words)
        assert (args.spec_method, args.spec_tokens) == ("clasp", 6)
    (choices,) = [a.choices for a in parser._actions if "--spec-method" in a.option_strings]
    assert {"ngram", "eagle", "mtp", "draft_model", *METHODS} <= set(choices)
    assert len(choices) == len(set(choices))
