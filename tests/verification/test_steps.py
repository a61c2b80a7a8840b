"""The acceptance of drafted steps against a plain reference, over every small case."""

from __future__ import annotations

import itertools

import torch

from speculators_ext.verification.steps import count_exact, settle


def plain(drafts: list[int], chosen: list[int], passed: bool) -> tuple[int, list[int]]:
    """Exact drafts and gained tokens of one request; `chosen` has one more than `drafts`."""
    exact = 0
    while exact < len(drafts) and drafts[exact] == chosen[exact]:
        exact += 1
    taken = len(drafts) if passed else exact
    return exact, [*drafts[:taken], chosen[taken]]


def requests() -> list[tuple[list[int], list[int], bool]]:
    """Every request of 0 to 3 drafts over two tokens (one of them may be marked invalid, -1)."""
    return [
        (list(drafts), list(chosen), passed)
        for count in range(4)
        for drafts in itertools.product((-1, 0, 1), repeat=count)
        for chosen in itertools.product((0, 1), repeat=count + 1)
        for passed in (False, True)
        if not (passed and -1 in drafts)
    ]


def check(batch: list[tuple[list[int], list[int], bool]]) -> None:
    rows, chosen, starts = [], [], [0]
    for drafts, own, _ in batch:
        rows += [7, *drafts]
        chosen += own
        starts.append(len(rows))
    given = torch.tensor(rows), torch.tensor(chosen), torch.tensor(starts, dtype=torch.int32)
    exact = count_exact(*given)
    tokens, counts = settle(*given, exact, torch.tensor([p for *_, p in batch]), 5)
    for index, (drafts, own, passed) in enumerate(batch):
        want_exact, want = plain(drafts, own, passed)
        assert int(exact[index]) == want_exact
        assert tokens[index, : int(counts[index])].tolist() == want
        assert bool((tokens[index, int(counts[index]) :] == want[-1]).all())


def test_every_request_alone() -> None:
    """A first draft after the last row, a request without drafts, an invalid draft."""
    for request in requests():
        check([request])


def test_requests_beside_each_other() -> None:
    """A request whose rows leak into its neighbour's: all of them in ragged batches."""
    every = requests()
    for shift in (1, 5, 17):
        turned = every[shift:] + every[:shift]
        check([r for pair in zip(every, turned, strict=True) for r in pair])
