"""Verification of drafts: our overrides against vLLM's kernels, interpreted, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

SEED = 42
STEPS = 3
TEMPS = [0.0, 1.0, 0.6, 1.4, 0.0, 0.9, 1.0, 0.0]


@pytest.fixture
def log1p(launchers, monkeypatch):
    """Give the interpreter the device function it lacks; our override never calls it."""
    import triton.language as tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    def interpreted_log1p(x: tl.tensor) -> tl.tensor:
        with np.errstate(all="ignore"):
            handle = type(x.handle)(np.log1p(x.handle.data), x.handle.dtype)
        return tl.tensor(handle, x.type)

    monkeypatch.setattr(rejection_sampler_utils.tldevice, "log1p", interpreted_log1p, raising=False)
    return launchers


def _inputs(seed: int, vocab: int, drafted: bool) -> dict[str, object]:
    """Six requests in eight rows with 0 to 3 drafts each, half of them likely, some -1."""
    gen = np.random.default_rng(seed)
    num_drafts = np.array([3, 0, 3, 1, 2, 3])
    cu_num_logits = np.concatenate([[0], np.cumsum(num_drafts + 1)])
    requests = gen.permutation(8)[:6]
    count = int(cu_num_logits[-1])
    target = gen.normal(0, 3, (count, vocab)).astype(np.float32)
    proposal = gen.normal(0, 3, (8, STEPS, vocab)).astype(np.float32)
    draft_sampled = gen.integers(0, vocab, count)
    local_pos = np.concatenate([np.arange(n + 1) for n in num_drafts])
    for i, (first, drafts) in enumerate(zip(cu_num_logits[:-1], num_drafts, strict=True)):
        for step in range(drafts):
            at = first + step
            if gen.random() < 0.7:
                proposal[requests[i], step] = target[at] + gen.normal(0, 0.3, vocab)
                draft_sampled[at + 1] = target[at].argmax()
                target[at, target[at].argmax()] += 4
    draft_sampled[cu_num_logits[2] + 2] = -1
    return {
        "target_logits": torch.from_numpy(target),
        "draft_logits": torch.from_numpy(proposal) if drafted else None,
        "draft_sampled": torch.from_numpy(draft_sampled.astype(np.int32)),
        "cu_num_logits": torch.from_numpy(cu_num_logits.astype(np.int32)),
        "pos": torch.from_numpy(gen.integers(0, 4000, count)),
        "idx_mapping": torch.from_numpy(requests.astype(np.int32)),
        "expanded_idx_mapping": torch.from_numpy(
            np.repeat(requests, num_drafts + 1).astype(np.int32)
        ),
        "expanded_local_pos": torch.from_numpy(local_pos.astype(np.int32)),
        "temperature": torch.tensor(TEMPS),
        "seed": torch.from_numpy(gen.integers(-(2**62), 2**62, 8)),
        "num_speculative_steps": STEPS,
    }


def _compare(launchers, inputs: dict[str, object], **modes: object) -> torch.Tensor:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    def run(_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return rejection_sample(**inputs, **modes)

    (ours, our_counts), (theirs, their_counts) = launchers.both(lambda: None, run)
    assert torch.equal(our_counts, their_counts)
    for row, count in enumerate(our_counts.tolist()):
        assert torch.equal(ours[row, :count], theirs[row, :count]), row
    return our_counts


@pytest.mark.parametrize("seed", [SEED, 7, 8])
@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
@pytest.mark.parametrize("drafted", [False, True], ids=["one-hot", "probabilistic"])
def test_verification_gives_the_same_tokens(log1p, seed, block, drafted):
    """Catches any difference in u, p/q, residual or resampling, for 0 to 3 drafts a request."""
    inputs = _inputs(seed, 300, drafted)
    counts = _compare(log1p, inputs, use_block_verification=block)
    assert len(set(counts.tolist())) > 1


@pytest.mark.parametrize("drafted", [False, True], ids=["one-hot", "probabilistic"])
def test_verification_across_vocabulary_blocks(log1p, drafted):
    """Catches block statistics merged wrongly: a vocabulary of two blocks and an odd tail."""
    _compare(log1p, _inputs(SEED, 8192 + 1200, drafted), use_block_verification=False)


def test_block_verification_across_vocabulary_blocks(log1p):
    """Catches residual mass summed over one block only."""
    _compare(log1p, _inputs(SEED, 8192 + 1200, True), use_block_verification=True)


def test_verification_with_synthetic_acceptance(launchers):
    """Catches rates ignored, or applied to the wrong draft position."""
    rates = torch.tensor([0.9, 0.5, 0.1])
    _compare(launchers, _inputs(SEED, 300, False), synthetic_conditional_rates=rates)


def test_verification_in_double_precision(launchers):
    """Catches noise drawn in fp32 although fp64 was asked for."""
    _compare(launchers, _inputs(SEED, 300, False), use_fp64=True)


def test_gather_and_flatten(launchers):
    """Catches drafts inside a prompt that are not turned into placeholders."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    gen = torch.Generator().manual_seed(SEED)
    inputs = _inputs(SEED, 30, False)
    count = inputs["pos"].shape[0]
    positions = torch.arange(40)
    where = torch.randperm(40, generator=gen)[:count]
    prefill = torch.tensor([0, 30, 5, 20, 0, 35, 10, 1], dtype=torch.int32)

    def run(_: object) -> tuple[torch.Tensor, ...]:
        gathered = rejection_sampler.gather_draft_sampled(
            torch.arange(100, 140, dtype=torch.int32),
            positions,
            where,
            inputs["expanded_idx_mapping"],
            inputs["expanded_local_pos"],
            prefill,
        )
        out = torch.zeros(count, dtype=torch.int64)
        sampled = torch.arange(24).view(6, 4)
        rejection_sampler._flatten_sampled_kernel[(6,)](
            out, sampled, 4, inputs["cu_num_logits"].diff(), inputs["cu_num_logits"]
        )
        return (*gathered, out)

    ours, theirs = launchers.both(lambda: None, run)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert (ours[0] == -1).any()
