"""Merge of two attentions: against attention over all keys at once, and the cascade it joins."""

from __future__ import annotations

import math

import pytest
import torch

from speculators_ext.kernels.merge_attention import merge_attention, merge_parts
from speculators_ext.kernels.tree_attention_ref import merge_attention_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": merge_attention_ref, "triton": merge_attention}
both = pytest.mark.parametrize("merge", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def attend(query, keys, values):
    scores = query @ keys.T
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


def parts(num_rows, num_heads, head_size, split, total, sharpness=1.0):
    """(both parts' outputs and lses, those over all keys), computed in float64."""
    torch.manual_seed(0)
    query = torch.randn(num_rows * num_heads, head_size).double() * sharpness
    keys, values = torch.randn(2, total, head_size).double()
    found = []
    for span in (slice(0, split), slice(split, total), slice(0, total)):
        out, lse = attend(query, keys[span], values[span])
        shape = (num_rows, num_heads)
        found += [out.view(*shape, head_size).float(), lse.view(shape).float()]
    return [part.to(DEVICE) for part in found]


@both
@pytest.mark.parametrize("head_size", [32, 80, 512])
@pytest.mark.parametrize("sharpness", [1.0, 100.0], ids=["flat", "sharp"])
def test_merge_attention(merge, head_size, sharpness):
    """Catches weights that are swapped, not normalised, or overflow."""
    *given, out, lse = parts(5, 3, head_size, split=7, total=20, sharpness=sharpness)
    got, got_lse = merge(*given)
    # A float32 log-sum-exp of order 1000 is good to 1e-4, and so are weights made of it.
    tolerance = 1e-5 * sharpness
    torch.testing.assert_close(got, out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got_lse, lse, atol=tolerance, rtol=1e-5)


@both
def test_a_part_that_saw_nothing_counts_nothing(merge):
    """Catches NaN of an unwritten output (an empty prefix), and -inf less -inf where both are."""
    out_a, lse_a, out_b, lse_b, *_ = parts(3, 2, 32, split=7, total=20)
    out_a[0], lse_a[0] = math.nan, -math.inf
    out_b[1], lse_b[1] = math.nan, -math.inf
    lse_a[2], lse_b[2] = -math.inf, -math.inf
    got, lse = merge(out_a, lse_a, out_b, lse_b)
    assert torch.equal(got[0], out_b[0])
    assert torch.equal(got[1], out_a[1])
    assert torch.equal(got[2], torch.zeros_like(got[2]))
    assert bool((lse[2] == -math.inf).all())


@both
def test_half_precision_keeps_its_dtype(merge):
    """Catches an output in float32, which the next layer does not take."""
    out_a, lse_a, out_b, lse_b, out, _ = parts(3, 2, 32, split=7, total=20)
    got, _ = merge(out_a.half(), lse_a, out_b.half(), lse_b)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), out, atol=2e-3, rtol=2e-3)


def test_the_output_may_be_a_part():
    """Catches a part that is overwritten before it is read."""
    *given, out, _ = parts(3, 2, 80, split=7, total=20)
    got, _ = merge_attention(*given, out=given[0])
    assert got is given[0]
    torch.testing.assert_close(got, out, atol=1e-5, rtol=1e-5)


def test_no_rows_is_no_launch():
    """Catches a grid of size 0, which a GPU refuses."""
    out, lse = torch.zeros(0, 2, 32, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    assert merge_attention(out, lse, out, lse)[0].shape == (0, 2, 32)


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (1, lambda t: t.half(), "lse_a dtype"),
        (3, lambda t: t[:1], "lse_b shape"),
        (2, lambda t: t[:1], "out_b"),
    ],
)
def test_arguments_that_do_not_fit(index, spoil, message):
    """Catches a base-2 or half-precision lse taken for granted by shape alone, and short parts."""
    *given, _, _ = parts(3, 2, 32, split=7, total=20)
    given[index] = spoil(given[index])
    with pytest.raises(ValueError, match=message):
        merge_attention(*given)


def test_many_parts_are_as_two() -> None:
    """Catches a part that is skipped, read although it saw nothing, or weighed twice."""
    out_a, lse_a, out_b, lse_b, *_ = parts(3, 2, 80, split=7, total=20)
    nothing, never = torch.full_like(out_a, math.nan), torch.full_like(lse_a, -math.inf)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    given = torch.stack([nothing, out_a, out_b]), torch.stack([never, lse_a, lse_b])
    merge_parts(*given, out, lse)
    expected, expected_lse = merge_attention_ref(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-6)
    merge_parts(*(part[:1] for part in given), out)
    assert torch.equal(out, torch.zeros_like(out))
