"""Which skip set serves which request, and when a new one is searched."""

from __future__ import annotations

import pytest

from speculators_ext.config import ClaspConfig
from speculators_ext.proposers.skip_search import SkipSets
from speculators_ext.proposers.skip_sets import plan_skips


def sets_for(**keys) -> SkipSets:
    config = ClaspConfig(**({"num_skip_layers": 2, "refresh_interval": 3} | keys))
    return SkipSets(config, plan_skips(config, 6), can_search=True)


def always(skip_set):
    return lambda tokens, candidates: skip_set


def test_a_set_is_searched_when_none_is_known_and_when_it_is_old():
    """Catches a search in every round, and a set that is never renewed."""
    sets = sets_for()
    assert sets.due(["a"])
    sets.search(["a"], ["a"], always((0, 1)))
    due = []
    for _ in range(4):
        due.append(sets.due(["a"]))
        sets.count_round()
    assert due == [False, False, False, True]


def test_a_batch_shares_one_set_and_newcomers_take_it():
    """Catches a search for each newcomer, which at many requests costs more than drafting."""
    sets = sets_for()
    sets.search(["a", "b"], ["a"], always((1, 2)))
    assert not sets.due(["a", "b", "c"])
    assert sets.groups(["a", "b", "c"]) == [((0, 3, 4, 5), [0, 1, 2])]


def test_requests_of_their_own_sets_draft_apart():
    """Catches one request's set used for another."""
    sets = sets_for(grouping="per_request")
    found = {(0, 1): (0, 1), (2,): (4, 5)}
    sets.search(["a", "b"], ["a", "a", "b"], lambda tokens, _: found[tuple(tokens)])
    assert sets.groups(["b", "a"]) == [((0, 1, 2, 3), [0]), ((2, 3, 4, 5), [1])]
    assert sets.due(["a", "c"])


def test_a_search_never_loses_the_set_before_or_the_even_one():
    """Catches candidates left out: the new set could be worse than what is in use."""
    sets = sets_for()
    seen = []

    def watch(tokens, candidates):
        seen.append(candidates)
        return (2, 3)

    sets.search(["a"], ["a"], watch)
    sets.search(["a"], ["a"], watch)
    assert seen == [((1, 4),), ((1, 4), (2, 3))]


def test_sets_go_with_their_requests():
    """Catches a set of an ended request that serves whoever comes next."""
    sets = sets_for()
    sets.search(["a"], ["a"], always((0, 1)))
    sets.forget_absent({"b"}.__contains__)
    assert sets.due(["b"])
    assert sets.groups(["b"]) == [((0, 2, 3, 5), [0])]


@pytest.mark.parametrize(
    ("window", "rows", "expected"),
    [(1, 2, ([0, 1], 1)), (4, 2, ([0, 1], 2)), (64, 1, ([0], 4)), (4, 9, ([0, 3, 6], 1))],
)
def test_a_search_for_a_batch_looks_at_few_tokens(window, rows, expected):
    """Catches a search as wide as the batch, which takes tens of plain steps."""
    assert sets_for(search_window=window).looked_at(list(range(rows))) == expected


def test_a_search_for_one_request_looks_at_its_whole_window():
    """Catches the batch's limit applied where each request is searched by itself."""
    sets = sets_for(search_window=8, grouping="per_request")
    assert sets.looked_at([0, 1, 2, 3, 4]) == ([0, 1, 2, 3, 4], 8)


def test_without_packed_rows_nothing_is_searched():
    """Catches a search on an attention backend that cannot run it."""
    config = ClaspConfig(num_skip_layers=2)
    assert not SkipSets(config, plan_skips(config, 6), can_search=False).due(["a"])
