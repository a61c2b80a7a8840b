"""What we rely on in SGLang is probed, and we stand aside where it is not there."""

from __future__ import annotations

from collections import defaultdict

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from speculators_ext.engines.sglang import algorithm, gpus, hooks, plugin
from speculators_ext.engines.source_probe import Expectation


def test_everything_expected_is_there():
    """Catches an expectation that does not hold in the version the package is made for."""
    assert hooks.find_problem() is None


@pytest.mark.parametrize(
    "missing",
    [
        Expectation("sglang.srt.speculative.eagle_utils", "eagle_sample", ("no_such_argument",)),
        Expectation("sglang.srt.speculative.no_such_module", "anything"),
    ],
    ids=["signature", "module"],
)
def test_a_mismatch_is_one_line_and_no_algorithm(monkeypatch, caplog, missing):
    """Catches an adapter set on an SGLang it does not fit, and an exception in a plugin."""
    monkeypatch.setattr(hooks, "_EXPECTED", (*hooks._EXPECTED, missing))
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("installed all the same"))
    with caplog.at_level("ERROR", logger="sglang.speculators_ext"):
        plugin.register()
    [record] = caplog.records
    assert missing.module in record.getMessage()
    assert "tested with SGLang 0.5.23" in record.getMessage()


def test_registering_never_raises(monkeypatch, caplog):
    """Catches a plugin whose failure fills the log of those who never use it with a crash."""

    def broken():
        raise OSError("disk full")

    monkeypatch.setattr(hooks, "install", broken)
    plugin.register()
    assert "unavailable" in caplog.text


def test_a_gpu_host_has_our_flag_and_no_hook_more(monkeypatch):
    """Catches hooks that act on plain decoding: a GPU host must not even have them."""
    install_on_gpu(monkeypatch)
    assert list(HookRegistry._hooks) == ["sglang.srt.server_args.ServerArgs.add_cli_args"]


def install_on_gpu(monkeypatch):
    monkeypatch.setattr(hooks, "find_gpu", lambda: "an NVIDIA GPU")
    monkeypatch.setattr(algorithm, "register_algorithms", lambda: None)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    hooks.install()


def test_a_gpu_host_that_was_opted_in_samples_and_captures_as_we_do(monkeypatch):
    """Catches drafts accepted by SGLang's own sampling, or the CPU's stand-ins on a GPU."""
    monkeypatch.setenv(gpus.OPT_IN, "1")
    install_on_gpu(monkeypatch)
    names = [target.rpartition(".")[2] for target in HookRegistry._hooks]
    assert names == [
        "add_cli_args", "get_req_to_token_extra_context_len", "eagle_sample",
        "verify_tree_greedy_func", "_verify_uses_greedy", "get_spec_info",
        "create_dummy_verify_input",
    ]  # fmt: skip
