"""What doctor says of mtp_reuse: whether a target has a module, and what the module weighs."""

from __future__ import annotations

import json
import math

import pytest

from speculators_ext.assets import build
from speculators_ext.cli.checkup import examine
from speculators_ext.cli.cost import method_costs, read_target
from speculators_ext.cli.plan import method_variants
from speculators_ext.config import parse_method_config


def shapes_of_the_module(model):
    """Sizes of the matrices of a checkpoint's MTP module, without the shared embedding and head."""
    from safetensors import safe_open

    config = json.loads((build(model) / "config.json").read_text())
    mark = ("mtp_layers", f".layers.{config['num_hidden_layers']}.")
    found = []
    with safe_open(build(model) / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            shape = file.get_slice(name).get_shape()
            shared = "embed_tokens" in name or "shared_head.head" in name
            if any(part in name for part in mark) and not shared and len(shape) == 2:
                found.append(math.prod(shape))
    return found


@pytest.mark.parametrize("model", ["tiny-deepseek-v3", "tiny-mimo"])
def test_the_bill_is_the_checkpoints_module(model):
    """Catches experts, latents or the projection left out of the module's weights."""
    shape = read_target(str(build(model)))
    config = parse_method_config("mtp_reuse", None, target=None)
    [weights, cache, _slots] = method_costs("mtp_reuse", config, shape, 4)
    matrices = sum(shapes_of_the_module(model))
    # The router's matrix is not billed: a hundredth of the smallest of these models.
    assert weights.bytes == pytest.approx(matrices * shape.element_bytes, rel=0.01)
    assert cache.bytes == shape.kv_bytes_per_layer


def test_options_that_cost_are_billed():
    """Catches a draft head or the copies of prefixes that look free."""
    shape = read_target(str(build("tiny-mimo")))
    config = parse_method_config("mtp_reuse", {"topk": 2, "draft_vocab_size": 128}, target=None)
    bill = {cost.item: cost.bytes for cost in method_costs("mtp_reuse", config, shape, 4)}
    assert bill["the output head of the draft vocabulary"] == 128 * shape.hidden * 4
    assert any(item.startswith("plain copies") for item in bill)


@pytest.mark.parametrize(("model", "has"), [("tiny-llama", False), ("tiny-deepseek-v3", True)])
def test_doctor_knows_targets_with_a_module(model, has):
    """Catches a method promised to a target the engine then refuses, or the reverse."""
    [row] = [m for m in examine(str(build(model)), 4)["methods"] if m["name"] == "mtp_reuse"]
    assert any("no MTP module" in obstacle for obstacle in row["obstacles"]) is not has


def test_the_built_in_is_compared_by_name():
    """Catches the one built-in that needs nothing else asked for as a hand-written JSON."""
    [plain, built_in, ours] = method_variants(["plain", "mtp", "mtp_reuse"], 3)
    assert plain.speculative is None
    assert built_in.speculative == {"method": "mtp", "num_speculative_tokens": 3}
    assert ours.speculative == {"method": "mtp_reuse", "num_speculative_tokens": 3}
