"""The tiny MTP models' training form: what it may see, and that leaving it loses nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"
LENGTH = 12


@pytest.fixture(scope="module")
def scripts():
    """The training scripts import each other by name, as scripts in one folder do."""
    sys.path.insert(0, str(SCRIPTS))
    yield __import__("mtp_export"), __import__("mtp_models"), __import__("mtp_layers")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module", params=["deepseek-v3-tiny-mtp", "mimo-tiny-mtp"])
def config(request, scripts):
    return scripts[1].CONFIGS[request.param] | {"num_hidden_layers": 2}


@pytest.fixture
def model(scripts, config):
    """Two layers, every weight random in a bf16 value, as far from its start as training takes."""
    model = scripts[1].TinyMtp(config)
    generator = torch.Generator().manual_seed(0)
    model.initialize(generator)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.1
            weight.copy_(
                (weight + noise).abs().bfloat16() if weight.ndim == 1 else noise.bfloat16()
            )
    return model.eval()


@pytest.fixture
def tokens(config):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config["vocab_size"], (2, LENGTH), generator=generator)


def test_no_prediction_sees_what_it_predicts(model, tokens):
    """Catches a module fed by a state one position too far, which trains to near zero loss."""
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 1000
    with torch.inference_mode():
        (first, second), (first_new, second_new) = model.logits(tokens), model.logits(changed)
    assert first[:, :7].equal(first_new[:, :7])  # position 6 predicts token 7
    assert second[:, :6].equal(second_new[:, :6])  # so does the module at position 5
    assert not second[:, 6].equal(second_new[:, 6])


def test_an_exported_model_comes_back(scripts, config, model, tokens, tmp_path):
    """Catches a tensor that is written under another's name, split wrongly, or not at all."""

    class Tokenizer:
        def save_pretrained(self, folder):
            """Not what is tested."""

    scripts[0].export(model, config, Tokenizer(), tmp_path)
    with torch.inference_mode():
        back, expected = scripts[0].load(tmp_path).logits(tokens), model.logits(tokens)
    assert all(map(torch.equal, back, expected))


def test_restored_scales_do_not_change_the_target(model, tokens):
    """Catches output rows that take the difference the wrong way round."""
    with torch.inference_mode():
        expected, drafts = model.logits(tokens)
    assert not torch.allclose(model.norm.weight, model.first_scales, rtol=0.05)
    model.restore_scales()
    with torch.inference_mode():
        got, got_drafts = model.logits(tokens)
    assert model.norm.weight.equal(model.first_scales)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    agree = (got_drafts.argmax(-1) == drafts.argmax(-1)).float().mean()
    assert agree == 1 if not model.is_deepseek else agree > 0.7


def test_experts_are_what_a_loop_over_them_gives(scripts):
    """Catches weights that are not normalised, a shared expert that is weighed, mixed-up rows."""
    config = scripts[1].CONFIGS["deepseek-v3-tiny-mtp"]
    torch.manual_seed(0)
    experts = scripts[2].Experts(config).eval()
    experts.bias.copy_(torch.tensor([0.3, -0.3, 0.1, 0.0]))
    x = torch.randn(1, 5, config["hidden_size"])
    inner, stack = experts.inner, experts.stack

    def run(index, row):
        rows = slice(index * inner, (index + 1) * inner)
        up = F.silu(stack.gate_proj.weight[rows] @ row) * (stack.up_proj.weight[rows] @ row)
        return stack.down_proj.weight[:, rows] @ up

    with torch.inference_mode():
        for row, got in zip(x[0], experts(x)[0], strict=True):
            scores = torch.sigmoid(experts.gate.weight @ row)
            chosen = (scores + experts.bias).topk(2).indices
            shares = scores[chosen] / scores[chosen].sum()
            parts = [share * run(i, row) for i, share in zip(chosen, shares, strict=True)]
            torch.testing.assert_close(got, sum(parts) + run(4, row))
