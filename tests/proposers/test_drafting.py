"""Tensor pieces of the drafting loop at their edges."""

from __future__ import annotations

import math

import pytest
import torch

from speculators_ext.proposers.drafting import clamp_ids, exit_mask


def _logits(*probabilities):
    """Rows whose likeliest token, number 2 of 4, has the given probability."""
    return torch.tensor(
        [
            [math.log((1 - p) / 3), math.log((1 - p) / 3), math.log(p), math.log((1 - p) / 3)]
            for p in probabilities
        ]
    )


def test_a_row_stops_once_it_is_unsure():
    """The threshold is on the probability, not on the logit, and the token stays a draft."""
    mask = exit_mask(_logits(0.65, 0.75, 0.4) + 50.0, 0.7)
    assert mask.tokens.tolist() == [2, 2, 2]
    assert mask.keep.tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_logits_do_not_overflow(dtype):
    """exp() of a float16 logit of 20 is infinite: probabilities are taken in float32."""
    mask = exit_mask((_logits(0.9) + 20.0).to(dtype), 0.7)
    assert mask.keep.tolist() == [True]


def test_threshold_zero_stops_no_finite_row_and_one_stops_nearly_all():
    """The two ends that tests of acceptance rely on."""
    logits = torch.cat([_logits(0.3, 0.9), torch.full((1, 4), math.nan)])
    mask = exit_mask(logits, 0.0)
    assert mask.keep.tolist() == [True, True, False]
    assert ((mask.tokens >= 0) & (mask.tokens < 4)).all()
    assert exit_mask(logits, 1.0).keep.tolist() == [False, False, False]


def test_ids_that_cannot_be_embedded_become_valid():
    """-1 (an unused slot) and ids of a padded vocabulary reach the embedding unchecked."""
    ids = torch.tensor([[-1, 0, 9], [10, 5, 2**40]])
    assert clamp_ids(ids, 10).tolist() == [[0, 0, 9], [0, 5, 0]]
    assert clamp_ids(ids.int(), 10).dtype == torch.int32
