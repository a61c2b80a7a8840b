"""Per-request switches in mixed batches, seen by what is drafted for each request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

K = 4
PROMPT = "List three colours: red, green"
pytestmark = pytest.mark.engine


def greedy(**extra: Any) -> SamplingParams:
    keys = {f"speculators_ext_{name}": value for name, value in extra.items()}
    return SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, extra_args=keys or None)


@pytest.fixture
def drafted(twins: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Request id -> how many drafts went to the scheduler, step by step."""
    counts: dict[str, list[int]] = {}
    handler = twins.clasp.runner.draft_tokens_handler
    original = handler.get_draft_tokens

    def get_draft_tokens() -> Any:
        drafts = original()
        for name, row in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            counts.setdefault(name, []).append(len(row))
        return drafts

    monkeypatch.setattr(handler, "get_draft_tokens", get_draft_tokens)
    return counts


def by_request(counts: dict[str, list[int]]) -> list[list[int]]:
    """In the order the requests were given."""
    return [counts[name] for name in sorted(counts, key=lambda name: int(name.split("-")[0]))]


def test_each_request_has_its_own_limit(twins: Any, drafted: dict[str, list[int]]) -> None:
    """Catches one request's switch applied to the whole batch, or to its slot's next owner."""
    kinds = [{}, {"enabled": 0}, {"max_drafts": 2}, {"max_drafts": 0}, {"max_drafts": 99}]
    limits = [K, 0, 2, 0, K]
    for _ in range(2):
        drafted.clear()
        twins.check([PROMPT] * len(kinds), [greedy(**kind) for kind in kinds])
        assert [max(row) for row in by_request(drafted)] == limits
        kinds, limits = kinds[::-1], limits[::-1]


def test_no_drafts_at_all(twins: Any, drafted: dict[str, list[int]]) -> None:
    """Catches a step that needs at least one draft somewhere."""
    before = twins.clasp.counters()["num_draft_tokens"]
    params = [greedy(enabled=0), greedy(max_drafts=0), greedy(enabled="false")]
    twins.check([PROMPT] * 3, params, drafts=False)
    assert {count for row in drafted.values() for count in row} == {0}
    assert twins.clasp.counters()["num_draft_tokens"] == before


def test_switched_off_beside_switched_on(twins: Any, drafted: dict[str, list[int]]) -> None:
    """Catches a switched-off row that drafts, or that stops its neighbour from drafting."""
    twins.check([PROMPT, PROMPT], [greedy(enabled=False), greedy(enabled=True)])
    off, on = by_request(drafted)
    assert set(off) == {0}
    assert max(on) == K


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What our logger says; vLLM keeps its loggers from propagating to pytest's."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("vllm.speculators_ext")
    handler = Keep(level=logging.WARNING)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"enabled": "maybe"}, "speculators_ext_enabled='maybe'"),
        ({"max_drafts": -1}, "speculators_ext_max_drafts=-1"),
        ({"max_drafts": [2]}, "speculators_ext_max_drafts=[2]"),
        ({"max_draft": 2}, "did you mean 'speculators_ext_max_drafts'?"),
    ],
    ids=["switch", "negative", "list", "near-miss"],
)
def test_bad_options_are_served_and_warned_about(
    twins: Any, warnings: list[str], extra: dict[str, Any], says: str
) -> None:
    """Catches a typo in one request that takes the engine down for all."""
    twins.check([PROMPT], greedy(**extra))
    (line,) = warnings
    assert says in line
    assert "served with default options" in line


def test_other_extra_args_are_left_alone(twins: Any, warnings: list[str]) -> None:
    """Catches our parser claiming keys that belong to somebody else."""
    params = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, extra_args={"their_key": [1, 2]}
    )
    twins.check([PROMPT], params)
    assert warnings == []
