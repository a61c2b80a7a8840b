"""The reduced draft vocabulary and the norms of what a module is fed."""

from __future__ import annotations

import pytest
import torch

from speculators_ext.proposers.mtp_norms import (
    CHOICES,
    KNOWN_NORMS,
    HiddenNorms,
    find_norms,
    undo_norm,
)
from speculators_ext.proposers.mtp_vocab import DraftVocabulary


def test_before_any_traffic_the_tokenizer_order_and_what_must_be_in_it():
    """Catches a vocabulary without an end of sequence, which sits among the last ids."""
    vocabulary = DraftVocabulary(1000, 16, [999, 1000, -1], "cpu")
    assert vocabulary.ids.tolist() == [*range(15), 999]
    assert (torch.arange(16) + vocabulary.offsets).tolist() == vocabulary.ids.tolist()


def test_what_the_traffic_holds_comes_in_and_keeps_its_slot():
    """Catches rows of the head copied to slots of other tokens."""
    vocabulary = DraftVocabulary(1000, 16, [999], "cpu")
    before = vocabulary.ids.clone()
    vocabulary.count(torch.tensor([500, 501] * 300))
    assert vocabulary.due
    slots = vocabulary.choose()
    assert not vocabulary.due
    assert {500, 501, 999} <= set(vocabulary.ids.tolist())
    assert len(set(vocabulary.ids.tolist())) == 16
    changed = (vocabulary.ids != before).nonzero().view(-1)
    assert changed.tolist() == slots.tolist()
    assert len(slots) == 2


def test_old_traffic_fades():
    """Catches a vocabulary stuck on what was asked first."""
    vocabulary = DraftVocabulary(1000, 8, [], "cpu")
    for first in (500, 700):
        for _ in range(6):
            vocabulary.count(torch.arange(first, first + 8).repeat(100))
            vocabulary.choose()
    assert set(vocabulary.ids.tolist()) == set(range(700, 708))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_undone_but_for_the_size(dtype):
    """Catches a state of another direction: the module's own norm must give the same."""
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(-0.1, 2.0, 64).to(dtype)

    def norm(x, scale=1.0):
        return (x.float() * x.float().pow(2).mean(-1, keepdim=True).rsqrt() * scale).to(dtype)

    again = norm(undo_norm(norm(states, weight), weight))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # two roundings to 8 bits
    torch.testing.assert_close(again, norm(states), atol=tolerance, rtol=tolerance)


def test_a_lost_dimension_is_zero():
    """Catches a division by zero that makes every draft NaN."""
    assert undo_norm(torch.tensor([[0.0, 2.0]]), torch.tensor([0.0, 0.5])).tolist() == [[0.0, 4.0]]


def test_norms_of_known_and_of_other_targets():
    """Catches an unknown architecture given somebody else's norms."""
    assert find_norms(["DeepseekV3ForCausalLM"]) == HiddenNorms("post", "post")
    assert find_norms(["SomethingElse"]) == HiddenNorms(None, None)
    assert set(KNOWN_NORMS.values()) <= set(CHOICES)
    assert len(set(CHOICES)) == 4
