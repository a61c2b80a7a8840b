"""Tokens, log-probabilities and masks: our overrides against vLLM's kernels, interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

SEED = 42
# Not a multiple of any block size; and one with several vocabulary blocks and an odd tail.
VOCABS = (37, 1500)


def _requests(n: int, temps: list[float]) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(SEED)
    return {
        "mapping": torch.randperm(n, generator=gen).to(torch.int32),
        "temp": torch.tensor(temps[:n], dtype=torch.float32),
        "seed": torch.randint(-(2**62), 2**62, (n,), generator=gen),
        "pos": torch.randint(0, 5000, (n,), generator=gen),
    }


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fp64", "drafting"), [(False, False), (False, True), (True, False)], ids=str
)
def test_gumbel_sample_gives_the_same_tokens(launchers, vocab, dtype, fp64, drafting):
    """Catches any difference in hash, noise, temperature, salt or tie-breaking."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    gen = torch.Generator().manual_seed(SEED)
    logits = (torch.randn(6, vocab, generator=gen) * 3).to(dtype)
    logits[4, vocab // 8 :] = -torch.inf
    logits[5] = -torch.inf
    args = _requests(6, [0.0, 1.0, 0.6, 1.7, 1.0, 0.9])

    def run(_: object) -> torch.Tensor:
        return torch.stack(
            [
                gumbel_sample(
                    logits.clone(),
                    args["mapping"],
                    args["temp"],
                    args["seed"],
                    args["pos"] + step,
                    apply_temperature=drafting,
                    is_drafting=drafting,
                    use_fp64=fp64,
                )
                for step in range(2)
            ]
        )

    ours, theirs = launchers.both(lambda: None, run)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("per_token", [False, True])
def test_gumbel_sample_caches_draft_logits(launchers, per_token):
    """Catches a cache filled after temperature, in the wrong column, or past the vocabulary.

    The interpreter cannot run this mode (it rejects the kernel's mask), so the tokens are
    compared with those of the mode without a cache, which 0.32 defines as equal.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    if hasattr(gumbel, "spec_step_seed"):
        pytest.skip("this vLLM gives a cached step a seed of its own")
    args = _requests(3, [0.7, 0.0, 1.0])
    logits = torch.randn(3, 37, generator=torch.Generator().manual_seed(SEED))
    col = torch.tensor([1, 0, 1]) if per_token else torch.tensor(1)
    cache = torch.zeros(4, 2, 40)
    fixed = (args["mapping"], args["temp"], args["seed"], args["pos"], True, True)
    tokens = gumbel.gumbel_sample(logits, *fixed, cache, col)
    with launchers.interpreted():
        assert torch.equal(tokens, gumbel.gumbel_sample(logits, *fixed))
    expected = torch.zeros(4, 2, 40)
    expected[args["mapping"].long(), col, :37] = logits
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("vocab", VOCABS)
def test_temperature_and_min_p(launchers, vocab):
    """Catches a row scaled twice, a threshold rounded otherwise, a request mixed up."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    args = _requests(5, [0.0, 1.0, 0.3, 2.0, 0.7])
    min_p = torch.tensor([0.0, 0.1, 0.02, 0.5, 0.9])

    def make() -> torch.Tensor:
        return torch.randn(5, vocab, generator=torch.Generator().manual_seed(SEED)) * 2

    def run(logits: torch.Tensor) -> torch.Tensor:
        apply_temperature(logits, args["mapping"], args["temp"])
        apply_min_p(logits, args["mapping"], min_p)
        return logits

    ours, theirs = launchers.both(make, run)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_and_ranks(launchers, vocab):
    """Catches a sum in another order, a rank that excludes ties, a wrong gather."""
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    gen = torch.Generator().manual_seed(SEED)
    # Values of bf16 precision: ties are the interesting case for ranks.
    logits = (torch.randn(4, vocab, generator=gen) * 4).to(torch.bfloat16).float()
    sampled = torch.randint(0, vocab, (4,), generator=gen)
    ours, theirs = launchers.both(logits.clone, lambda rows: compute_topk_scores(rows, 5, sampled))
    assert torch.equal(ours.logprobs, theirs.logprobs)
    assert torch.equal(ours.logprob_token_ids, theirs.logprob_token_ids)
    assert torch.equal(ours.selected_token_ranks, theirs.selected_token_ranks)
    # The interpreter compares bf16 bit patterns as integers, so bf16 is checked against fp32.
    bf16 = compute_topk_scores(logits.to(torch.bfloat16), 5, sampled)
    assert torch.equal(bf16.selected_token_ranks, theirs.selected_token_ranks)
    assert torch.equal(bf16.logprobs[:, 0], theirs.logprobs[:, 0])


# vLLM's top-k/top-p kernel does not run in the interpreter at all (`tl.range` yields a plain
# int there), so it is checked against vLLM's torch version, which V1 uses on a CPU.
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    ("k", "p"),
    [
        ([1, 5, 20, 37], None),
        ([3, 10, 30, 37], [0.3, 0.9, 0.99, 1.0]),
        (None, [0.1, 0.5, 0.8, 1.0]),
    ],
    ids=["k", "k-and-p", "p"],
)
def test_truncation_keeps_the_same_tokens(launchers, vocab, k, p):
    """Catches an off-by-one at the cut, probabilities not renormalised after top-k."""
    from vllm.v1.sample.ops.topk_topp_sampler import (
        apply_top_k_top_p_pytorch,
        apply_top_k_top_p_triton,
    )

    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(SEED)) * 4
    ks = None if k is None else torch.tensor(k, dtype=torch.int32)
    ps = None if p is None else torch.tensor(p)
    ours = apply_top_k_top_p_triton(logits.clone(), ks, ps)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), ks, ps, allow_cpu_sync=True)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("k", "p", "kept"),
    [
        (2, None, [0, 2]),
        (4, None, [0, 2, 3, 5]),
        (None, 0.4, [0, 2]),
        (None, 0.8, [0, 2, 3, 5]),
        (4, 0.8, [0, 2, 5]),
        (None, 1.0, list(range(10))),
        (10, None, list(range(10))),
    ],
)
def test_truncation_breaks_ties_by_token_id(k, p, kept):
    """Catches keeping every tied token, or the wrong ones: bf16 logits tie all the time."""
    from speculators_ext.engines.vllm.cpu.truncation import truncate

    # Probabilities: 0.249 three times, 0.0916 twice, 0.0337 twice, then 0.0017 and less.
    row = np.array([3, 1, 3, 2, -2, 3, 2, 1, -3, -4], np.float32)
    truncate(row, k, p, -np.inf)
    assert np.flatnonzero(row > -np.inf).tolist() == kept


def test_truncation_leaves_rows_it_cannot_rank():
    """Catches a crash, or a row emptied, where a grammar or a NaN left nothing to choose from."""
    from speculators_ext.engines.vllm.cpu.truncation import truncate

    for row in ([-np.inf] * 4, [np.nan, 1.0, 2.0, 0.0], [-np.inf, 5.0, -np.inf, -np.inf]):
        before = np.array(row, np.float32)
        after = before.copy()
        truncate(after, 2, 0.5, -np.inf)
        assert (after > -np.inf).sum() >= min(1, (before > -np.inf).sum())


def test_truncation_of_a_flat_row_is_exact():
    """Catches an inexact cut where vLLM's bounded search is one: mass reached, none spare."""
    from speculators_ext.engines.vllm.cpu.truncation import truncate

    row = np.random.default_rng(SEED).normal(0, 0.5, 49152).astype(np.float32)
    probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum(dtype=np.float64)
    cut = row.copy()
    truncate(cut, None, 0.9, -np.inf)
    kept = np.sort(probs[cut > -np.inf])
    assert kept.sum() >= 0.9 - 1e-9
    assert kept.sum() - kept[0] < 0.9


def test_grammar_bitmask(launchers):
    """Catches reversed bits, a mask on the wrong row, one that reaches past a request's rows.

    The interpreter rejects this kernel's mask, so the expected rows are written out.
    """
    from vllm.v1.worker.gpu import structured_outputs

    vocab, stride = 70, 3
    # Request 0 has one row; request 1 has two, so its third mask must be dropped.
    where = torch.tensor([0, 3, 5], dtype=torch.int32)
    cu_num_logits = torch.tensor([0, 1, 3], dtype=torch.int32)
    bitmask = torch.zeros(3, 3, dtype=torch.int32)
    bitmask[0, 0] = 1 << 5
    bitmask[1, 1] = -(2**31)
    bitmask[1, 2] = 1 << 5
    logits = torch.ones(3, vocab, dtype=torch.bfloat16)
    structured_outputs._apply_grammar_bitmask_kernel[(3, 1)](
        logits,
        logits.stride(0),
        where,
        cu_num_logits,
        bitmask,
        bitmask.stride(0),
        vocab,
        MASK_STRIDE=stride,
        BLOCK_SIZE=128,
    )
    kept = [row.nonzero().flatten().tolist() for row in logits == 1.0]
    assert kept == [[5], [63, 69], list(range(vocab))]
