"""What vLLM's adapter knows of each request, without an engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.config import parse_method_config
from speculators_ext.engines.vllm.reasoning_step.book import StepBook
from speculators_ext.engines.vllm.reasoning_step.model_state import extend_model_state
from speculators_ext.proposers.reasoning_step import StepRules, StepSplitter

TEXTS = ["a", "b", "\n", "\n\n"]
A, END = 0, 3
K = 4


class Slots:
    """Stands below our model state, where vLLM's own would note the request."""

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Nothing to note."""


def state_of(**given: Any) -> Any:
    """A model state with a book, as `extend_model_state` makes it of any other."""
    options: Any = parse_method_config("reasoning_step", {"lossy": True} | given, target=None)
    state: Any = object.__new__(extend_model_state(Slots, options))  # type: ignore[arg-type]
    state.request_options = {}
    rules = StepRules(StepSplitter(options.delimiter, TEXTS))
    state.book = StepBook(rules, options, always_exact=False, most=K)
    state.book.max_model_len = 100
    return state


def add(state: Any, **extra_args: Any) -> None:
    params = SamplingParams(extra_args=extra_args)
    new = SimpleNamespace(
        req_id="r", prompt_token_ids=[A], prefill_token_ids=[A], sampling_params=params
    )
    state.add_request(0, new)


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Our lines; vLLM's logger keeps them to itself otherwise."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm.speculators_ext")
    return caplog


@pytest.mark.parametrize(
    ("asked", "judged"),
    [
        ({}, True),
        ({"speculators_ext_threshold": 5}, True),
        ({"speculators_ext_threshhold": 5}, False),
        ({"speculators_ext_threshold": "low"}, False),
        ({"speculators_ext_threshold": -2.5}, False),
    ],
    ids=str,
)
def test_what_a_request_asks_for_in_vain_makes_it_exact(
    asked: dict[str, Any], judged: bool, log: pytest.LogCaptureFixture
) -> None:
    """Catches a mistyped request that is served lossily, by the server's threshold or by none."""
    state = state_of()
    add(state, **asked)
    step = state.book.begin_step(0)
    assert [step.push(token) for token in (A, END)] == [True, False]
    state.book.note_drafts(0, 2, step)
    assert state.book.may_judge(0, 2, 5) is judged
    assert ("served exactly" in log.text) is not judged


def test_a_delimiter_that_is_never_reached_is_said_once(log: pytest.LogCaptureFixture) -> None:
    """Catches a server that judges nothing and never says why."""
    state = state_of()
    add(state)
    for _ in range(50):
        step = state.book.begin_step(0)
        assert all(step.push(A) for _ in range(K))
        state.book.note_drafts(0, K, step)
    assert log.text.count("none reached the delimiter") == 1
