"""Chains of one reused module: what is drafted, and when drafting ends."""

from __future__ import annotations

import random

import pytest
import torch

from speculators_ext.proposers.mtp_reuse import (
    AcceptanceTable,
    Choice,
    StopRule,
    Worth,
    draft_chains,
)

VOCAB = 97


class Successor:
    """Drafts 3 t + 1 behind a row's state t; its features are the token and how often it ran."""

    def __init__(self, probabilities=None):
        self.probabilities = probabilities or (lambda row, step: 0.9)
        self.ran: list[list[int]] = []

    def choose(self, hidden, rows, step):
        tokens = (3 * hidden[:, 0] + 1).long() % VOCAB
        given = [self.probabilities(row, step) for row in rows]
        return Choice(tokens, torch.tensor(given, dtype=torch.float64))

    def advance(self, rows, tokens, features, step):
        assert (features[:, 1] == step).all(), "features of another step or row"
        assert (features[:, 0].long() == torch.tensor(rows)).all(), "features of another row"
        self.ran.append(list(rows))
        hidden = torch.stack([tokens.float(), features[:, 1]], dim=1)
        return hidden, torch.stack([features[:, 0], features[:, 1] + 1], dim=1)


def draft(head, limits, rule=None, **options):
    count = len(limits)
    hidden = torch.stack([torch.arange(count).float() + 5, torch.zeros(count)], dim=1)
    features = torch.stack([torch.arange(count).float(), torch.zeros(count)], dim=1)
    return draft_chains(
        head, hidden, features, limits, rule or StopRule(), num_rows=count, **options
    )


def successors(start, count):
    tokens = []
    for _ in range(count):
        start = (3 * start + 1) % VOCAB
        tokens.append(start)
    return tokens


@pytest.mark.parametrize("stepwise", [True, False])
def test_every_row_is_drafted_to_its_own_limit(stepwise):
    """Catches states of a neighbour, and a row that goes on past its limit or stops before it."""
    head = Successor()
    chains, steps = draft(head, [3, 0, 1, 5, 2], stepwise=stepwise)
    expected = [successors(5 + row, limit) for row, limit in enumerate([3, 0, 1, 5, 2])]
    assert [chain.tokens for chain in chains] == expected
    assert steps == 5
    assert head.ran == [[0, 3, 4], [0, 3], [3], [3]]


def test_no_row_drafts_nothing():
    """Catches an empty batch run through the module."""
    head = Successor()
    chains, steps = draft(head, [0, 0])
    assert [chain.tokens for chain in chains] == [[], []]
    assert (steps, head.ran) == (0, [])


def test_a_row_stops_where_its_path_is_below_the_floor():
    """Catches a floor on one draft and not on its path, and a step run for what is below it."""
    head = Successor(lambda row, step: (0.81, 0.36)[row])
    chains, steps = draft(head, [8, 8], StopRule(0.5))
    # 0.9^5 = 0.59; the draft behind it is expected at 0.9 of 0.9 of that, which is below.
    assert [len(chain.tokens) for chain in chains] == [5, 1]
    assert steps == 5


def test_without_stepwise_the_same_drafts_are_cut_off():
    """Catches a device that cannot wait verifying what is below the floor."""
    given = {0: [0.9, 0.9, 0.04, 0.9], 1: [0.9, 0.09, 0.9, 0.9]}
    chains, steps = draft(
        Successor(lambda row, step: given[row][step]), [4, 4], StopRule(0.5), stepwise=False
    )
    assert steps == 4
    assert [chain.probabilities for chain in chains] == [[0.9, 0.9], [0.9]]


def test_a_draft_is_verified_if_it_gives_more_than_its_width_costs():
    """Catches a cost forgotten: at 1.5 tokens a plain step 0.2 of one costs 0.3 tokens."""
    rule = StopRule()
    rule.worth = Worth(draft_step=0.0, verify_token=0.2, gain=1.5)
    assert rule.verifies(0.31)
    assert not rule.verifies(0.29)


def test_a_step_is_shared_by_the_rows_that_go_on():
    """Catches a step charged to each row, and one not charged at all."""
    rule = StopRule()
    rule.worth = Worth(draft_step=0.3, verify_token=0.0, gain=1.0)
    # One of four rows would give 0.81 tokens for 1.2; two give 1.62.
    assert rule.going_on([0.9], [1.0], 0, num_rows=4) == []
    assert rule.going_on([0.9, 0.9], [1.0, 1.0], 0, num_rows=4) == [0, 1]
    assert rule.going_on([0.9], [1.0], 0, num_rows=1) == [0]


def test_a_row_not_worth_its_width_stays_behind():
    """Catches an unsure row carried along by sure ones."""
    rule = StopRule()
    rule.worth = Worth(draft_step=0.1, verify_token=0.3, gain=1.0)
    assert rule.going_on([0.9, 0.31, 0.9], [1.0, 1.0, 1.0], 0, num_rows=3) == [0, 2]


def test_an_overconfident_module_is_corrected():
    """Catches probabilities believed against what was accepted."""
    table = AcceptanceTable()
    assert table.chance(1, 0.81) == pytest.approx(0.9)
    for count in range(200):
        table.observe(1, 0.81, count % 5 == 0)
    assert table.chance(1, 0.81) == pytest.approx(0.21, abs=0.02)
    assert table.chance(0, 0.81) == pytest.approx(0.9), "another position"
    assert table.chance(1, 0.36) == pytest.approx(0.6), "another probability"


def test_a_modest_module_is_found_out():
    """Catches drafts never verified, and so never seen to be right, for what the module gave."""
    rule = StopRule()
    rule.worth = Worth(draft_step=0.2, verify_token=0.1, gain=1.3)
    for _ in range(100):
        [chain], _ = draft(Successor(lambda row, step: 0.05), [1], rule)
        rule.observe([(chain.probabilities, len(chain.tokens))])
    assert rule.path(1.0, 0, 0.05) > 0.9


def test_what_was_long_not_tried_is_tried_again():
    """Catches a position that a bad stretch rules out for ever."""
    table = AcceptanceTable()
    for _ in range(50):
        table.observe(2, 0.81, accepted=False)
    assert table.chance(2, 0.81) < 0.15
    for _ in range(3000):
        table.forget()
    assert table.chance(2, 0.81) > 0.85


def test_only_drafts_behind_accepted_ones_teach():
    """Catches drafts behind a rejected one counted as rejected themselves."""
    rule = StopRule()
    for _ in range(100):
        rule.observe([([0.81, 0.81, 0.81], 1)])
    assert rule.path(1.0, 0, 0.81) > 0.95
    assert rule.path(1.0, 1, 0.81) < 0.15
    assert rule.path(1.0, 2, 0.81) == pytest.approx(0.9)


@pytest.mark.parametrize("overconfident", [False, True])
def test_the_rule_beats_every_fixed_length(overconfident):
    """Catches a rule that stops too early or too late for what drafts cost: a simulated run."""
    costs = Worth(draft_step=0.12, verify_token=0.08)
    fixed = [_simulate(costs, length, None, overconfident) for length in (1, 2, 3)]
    free = _simulate(costs, 8, StopRule(), overconfident)
    assert free > max(fixed)
    assert free > 0.995 * _simulate(costs, 2, StopRule(), overconfident)


def _simulate(costs, length, rule, overconfident, rounds=1500):
    """Tokens in the time of a plain step, of one row whose drafts are hard or easy in turn."""
    chance = random.Random(1)
    time, tokens = 0.0, 0
    asked = rule or StopRule()
    for _ in range(rounds):
        truths = [chance.choice([0.95, 0.9, 0.4]) * 0.9**step for step in range(length)]
        said = [t**0.5 for t in truths] if overconfident else truths
        asked.worth = Worth(*costs[:2], gain=tokens / time if time else 1.0) if rule else Worth()
        [chain], steps = draft(Successor(lambda row, step, said=said: said[step]), [length], asked)
        drafted = len(chain.tokens)
        accepted = 0
        while accepted < drafted and chance.random() < truths[accepted]:
            accepted += 1
        asked.observe([(chain.probabilities, accepted)])
        time += 1 + costs.draft_step * steps + costs.verify_token * drafted
        tokens += 1 + accepted
    return tokens / time
