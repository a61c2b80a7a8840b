"""mtp_reuse on a target with two MTP modules, each with a cache of its own."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.assets import build

CODE = [
    "def read(path):\n    with open(path) as file:\n        return file.",
    "class Stack:\n    def __init__(self):\n        self.",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "def f(x):\n    return x",
]
K = 2
pytestmark = pytest.mark.engine
Drafts = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The trained target; its second module is the first, disturbed, so that they draft apart."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "two-modules"
    shutil.copytree(build("deepseek-v3-tiny-mtp"), folder)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"]
    weights, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.startswith(f"model.layers.{last}.")]:
        own = weights[name].float()
        noise = torch.randn(own.shape, generator=chance) * (0.2 if own.dim() > 1 else 0.0)
        behind = name.replace(f"layers.{last}.", f"layers.{last + 1}.")
        weights[behind] = (own * (1 + noise)).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "model": str(folder), "attention_config": {"backend": "CPU_MLA"}, "block_size": 16,
        "enable_prefix_caching": False,
    }  # fmt: skip


def greedy(max_tokens: int = 40, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )


def drafts_of(engine: Any, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """What an engine drafts, by request and tokens it has."""
    found: Drafts = {}
    handler = engine.runner.draft_tokens_handler
    take = handler.set_draft_tokens

    def taking(batch: Any, drafts: Any) -> None:
        take(batch, drafts)
        states = engine.runner.req_states
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            request = int(batch.req_ids[row].split("-")[0])
            made = [token for token in drafts[row].tolist() if token >= 0]
            found[request, int(states.total_len.gpu[slot])] = made

    monkeypatch.setattr(handler, "set_draft_tokens", taking)
    engine.generate(prompts, greedy())
    monkeypatch.undo()
    first = min(request for request, _ in found)
    return {(request - first, length): drafts for (request, length), drafts in found.items()}


@pytest.mark.parametrize("count", [1, 4])
def test_two_modules_draft_what_vllms_own_do(
    make_mtp_reuse_twins: Any,
    engines: Any,
    target: dict[str, Any],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a module run over another's cache, states, tokens or rows, or left behind."""
    stock = engines.get({"method": "mtp", "num_speculative_tokens": K}, **target)
    ours = make_mtp_reuse_twins({"num_speculative_tokens": K}, alike=target).clasp
    expected = drafts_of(stock, CODE[:count], monkeypatch)
    found = drafts_of(ours, CODE[:count], monkeypatch)
    # At its end a request needs fewer drafts, which vLLM's own does not know.
    ends = dict(sorted(found.keys()))
    sure = [{k: d for k, d in one.items() if k[1] < ends[k[0]] - 3} for one in (found, expected)]
    assert sure[0] == sure[1]
    assert len(sure[0]) > 10 * count


@pytest.mark.parametrize("count", [1, 4])
def test_the_last_module_is_reused_beyond(
    make_mtp_reuse_twins: Any, target: dict[str, Any], count: int
) -> None:
    """Catches text that the second module changes, and drafts behind it that are noise."""
    twins = make_mtp_reuse_twins({"num_speculative_tokens": 4}, alike=target)
    before = twins.clasp.counters()
    twins.check(CODE[:count], greedy(60))
    after = twins.clasp.counters()
    found = {name: after[name] - before[name] for name in after}
    assert found["num_accepted_tokens"] > found["num_drafts"]


def test_requests_that_come_and_go(make_mtp_reuse_twins: Any, target: dict[str, Any]) -> None:
    """Catches a row that waits for the last owner of a slot, and prompts beside verifications."""
    twins = make_mtp_reuse_twins({"num_speculative_tokens": 4}, alike=target, max_num_seqs=3)
    prompts = [CODE[i % 3] + "a = b\n" * (9 * (i % 5)) for i in range(12)]
    for start in (0, 5):
        params = [greedy(8 + 5 * (i % 4)) for i in range(len(prompts) - start)]
        twins.check(prompts[start:], params)
