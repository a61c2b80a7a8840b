"""The head's training form against plain drafting, and its loss against autograd's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"
STEPS, FIRST = 3, 4
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
}


@pytest.fixture(scope="module")
def scripts():
    """The training scripts import each other by name, as scripts in one folder do."""
    sys.path.insert(0, str(SCRIPTS))
    yield __import__("eagle3_head")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def head(scripts):
    torch.manual_seed(0)
    config = SimpleNamespace(**CONFIG)
    embedding = torch.randn(64, 32, dtype=torch.bfloat16)
    return scripts.Eagle3Head(config, embedding, torch.arange(0, 64, 2), torch.ones(96))


def draft(head, tokens, features, position):
    """What drafting computes: the layer over rows 0..position, then over its own outputs.

    `features` [position + 1, H] are made of the target's states.
    """
    found = []
    for step in range(STEPS):
        embedded = head.input_layernorm(head.embedding[tokens[1 : position + step + 2]].float())
        x = torch.cat([embedded, head.hidden_norm(features)], dim=-1)
        parts = ((head.q_proj, 4), (head.k_proj, 2), (head.v_proj, 2))
        q, k, v = (layer(x).float().unflatten(-1, (n, 8)).transpose(0, 1) for layer, n in parts)
        q, k = (rotate(part, head.rope_theta) for part in (q, k))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        attended = F.scaled_dot_product_attention(q[:, -1:], k, v).transpose(0, 1).flatten(1)
        new = features[-1:] + head.o_proj(attended)
        inner = head.post_attention_layernorm(new)
        new = new + head.down_proj(F.silu(head.gate_proj(inner)) * head.up_proj(inner))
        features = torch.cat([features, new])
        found.append(new[0])
    return found


def rotate(x, theta):
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(4) / 4)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def test_unrolled_training_computes_what_drafting_computes(head):
    """Catches a token, position or key off by one: such a head trains well and drafts badly."""
    torch.manual_seed(1)
    length, padding = 10, 2
    tokens = torch.randint(0, 64, (1, padding + length + 1))
    states = torch.randn(1, padding + length, 96).bfloat16()
    first = padding + FIRST
    with torch.autocast("cpu", torch.bfloat16):
        unrolled = list(head.unroll(tokens, states, torch.tensor([padding]), first, STEPS))
    own = tokens[0, padding:]
    features = head.fc(states[0, padding:].float())
    for position in range(FIRST, length - STEPS + 1):
        expected = draft(head, own, features[: position + 1], position)
        for step, want in enumerate(expected):
            got = unrolled[step][0, position - FIRST].float()
            assert F.cosine_similarity(got, want, dim=0) > 0.999
            torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


def test_the_loss_has_the_gradient_of_a_soft_cross_entropy(scripts):
    """Catches a wrong sign, weight or transposition in the gradient made by hand."""
    torch.manual_seed(2)
    x = torch.randn(6, 16).bfloat16().requires_grad_()
    weight = torch.randn(20, 16).bfloat16().float().requires_grad_()
    q, share = torch.randn(6, 20).softmax(-1).bfloat16(), torch.rand(6)
    top = torch.randint(0, 20, (6,))
    got = scripts.SoftCrossEntropy.apply(x, weight, q, top, share)
    grads = torch.autograd.grad(got, (x, weight))
    plain = -(q.float() * (x.float() @ weight.T).log_softmax(-1)).sum(-1) @ share
    wanted = torch.autograd.grad(plain, (x, weight))
    torch.testing.assert_close(got, plain, atol=0.05, rtol=0.02)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.03, rtol=0.05)


def test_a_run_that_builds_on_another_keeps_the_rows_of_common_tokens(scripts, tmp_path):
    """Catches rows of `lm_head` that go to other tokens when the vocabulary changes."""
    torch.manual_seed(3)
    config = SimpleNamespace(**CONFIG)
    embedding = torch.randn(64, 32, dtype=torch.bfloat16)
    old_ids, new_ids = torch.arange(0, 32, 2), torch.arange(0, 48, 3)
    old = scripts.Eagle3Head(config, embedding, old_ids, torch.rand(96))
    new = scripts.Eagle3Head(config, embedding, new_ids, torch.ones(96))
    with torch.no_grad():
        old.lm_head.weight.copy_(embedding[old_ids].float() + 0.5)
        old.lm_head.weight[0] += 1.0  # token 0's own
    path = tmp_path / "checkpoint.safetensors"
    save_file({f"head.{key}": value for key, value in old.state_dict().items()}, path)
    __import__("train_eagle3").build_on(new, path)
    rows = dict(zip(new_ids.tolist(), new.lm_head.weight.detach(), strict=True))
    torch.testing.assert_close(rows[0], embedding[0].float() + 1.5)
    torch.testing.assert_close(rows[6], embedding[6].float() + 0.5)
    torch.testing.assert_close(rows[9], embedding[9].float() + 0.5 + 1.0 / len(old_ids))
    assert torch.equal(new.draft_ids, new_ids)
    assert torch.equal(new.scale, old.scale)
    assert torch.equal(new.fc.weight, old.fc.weight)


def test_what_is_kept_back_does_not_depend_on_the_shards_trained_on(scripts, tmp_path):
    """Catches a later run that trains on what an earlier one was validated with."""
    for shard in range(3):
        lengths = torch.full((60,), 4)
        tokens = {"tokens": torch.arange(240, dtype=torch.int32), "answers": lengths // 2}
        tokens["starts"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        save_file(tokens, tmp_path / f"{shard:03d}.safetensors")
    conversations = __import__("conversations").Conversations
    first, second = conversations(tmp_path, end=2), conversations(tmp_path, first=2)
    assert set(first.kept_back) < set(second.kept_back)
    assert not set(first.training) & set(second.training)
    assert {shard for shard, _ in second.training} == {2}
    assert second.token_counts(256).sum() == 2 * (180 - len(second.kept_back))
