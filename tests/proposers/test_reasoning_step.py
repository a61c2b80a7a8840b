"""Where steps end and which of them may be judged, and what acceptance does to whole texts."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from speculators_ext.errors import ConfigError
from speculators_ext.proposers.reasoning_step import (
    DelimiterWatch,
    DraftedStep,
    Span,
    StepCounters,
    StepRules,
    StepSplitter,
    StepTracker,
)
from speculators_ext.proposers.step_judges import JUDGES, OpenSteps
from speculators_ext.proposers.step_tokens import (
    find_span,
    find_suffix,
    same_tokens,
    token_texts,
)
from speculators_ext.verification.steps import count_exact, settle

TEXTS = ["a", "\n", "b\n", "\n\n", ".\n\nc", "\nx\n", "", "\n\n\n"]


@pytest.mark.parametrize("delimiter", ["\n", "\n\n", "a\na", "\n\n\n"])
def test_splitter_finds_what_a_search_in_the_text_finds(delimiter: str) -> None:
    """A delimiter across tokens, or inside one, is missed or seen twice: all texts of 4 tokens."""
    splitter = StepSplitter(delimiter, TEXTS)
    for tokens in itertools.product(range(len(TEXTS)), repeat=4):
        state, pending = 0, ""
        for token in tokens:
            state, ended = splitter.advance(state, token)
            pending += TEXTS[token]
            assert ended == (delimiter in pending), (tokens, token)
            if ended:
                pending = pending.split(delimiter)[-1]


def test_empty_delimiter_is_refused() -> None:
    """It would end every step before it begins."""
    with pytest.raises(ValueError, match="delimiter"):
        StepSplitter("", TEXTS)


END, START, STOP, LINE, WORD = 4, 3, 2, 1, 0


def rules(**options: object) -> StepRules:
    splitter = StepSplitter("\n", ["w", "\n", "</s>", "<t>", "</t>"])
    return StepRules(splitter, stops=frozenset({STOP}), **options)  # type: ignore[arg-type]


def drafted(tracker: StepTracker, tokens: list[int]) -> tuple[int, bool]:
    """How many tokens a draft takes of these, and whether the result may be judged."""
    step = DraftedStep(tracker)
    for count, token in enumerate(tokens, 1):
        if not step.push(token):
            return count, step.judgeable
    return len(tokens), step.judgeable


def said(watch: DelimiterWatch, tracker: StepTracker, tokens: list[int], times: int) -> list[str]:
    """What the watch says while the same draft comes so often."""
    lines = []
    for _ in range(times):
        step = DraftedStep(tracker)
        count = next((n for n, t in enumerate(tokens, 1) if not step.push(t)), len(tokens))
        lines.append(watch.note(step, count))
    return [line for line in lines if line is not None]


@pytest.mark.parametrize("tokens", [[WORD] * 4, [WORD, STOP], [WORD, END]], ids=str)
def test_a_delimiter_that_is_never_reached_is_said_once(tokens: list[int]) -> None:
    """Catches a method that judges nothing and never says why, and one that says it all day."""
    tracker = StepTracker(rules(span=Span(None, END)))
    watch = DelimiterWatch(tracker.rules, most=4)
    assert said(watch, tracker, tokens, DelimiterWatch.PATIENCE - 1) == []
    [line] = said(watch, tracker, tokens, 99)
    assert "20 steps were drafted" in line
    assert "none reached the delimiter '\\n', so" in line
    assert "\n" not in line


def test_one_step_that_reaches_the_delimiter_is_enough() -> None:
    """Catches a warning about a delimiter that is right, with long steps between short ones."""
    tracker = StepTracker(rules())
    watch = DelimiterWatch(tracker.rules, most=4)
    assert said(watch, tracker, [WORD] * 4, 19) == said(watch, tracker, [WORD, LINE], 1) == []
    assert said(watch, tracker, [WORD] * 4, 99) == []


def test_what_says_nothing_of_the_delimiter_is_not_counted() -> None:
    """Catches a warning of requests that ask for short drafts, or of text behind the reasoning."""
    tracker = StepTracker(rules())
    watch = DelimiterWatch(tracker.rules, most=4)
    assert said(watch, tracker, [WORD] * 3, 99) == []
    outside = StepTracker(rules(span=Span(START, END)))
    assert said(watch, outside, [WORD] * 4, 99) == []
    least = rules(min_tokens=3)
    [line] = said(DelimiterWatch(least, 2), StepTracker(least), [WORD, LINE], 99)
    assert "'\\n' after 3 tokens or more" in line


def test_a_draft_stops_at_the_end_of_its_step() -> None:
    """Drafting past the delimiter would hand two steps to one judgement."""
    tracker = StepTracker(rules())
    assert drafted(tracker, [WORD, WORD, LINE, WORD]) == (3, True)
    assert drafted(tracker, [WORD, WORD]) == (2, False)
    assert (tracker.state, tracker.length, tracker.steps) == (0, 0, 0)


@pytest.mark.parametrize("last", [STOP, END, START])
def test_the_end_of_text_or_reasoning_is_never_judged(last: int) -> None:
    """Whether to stop thinking, or writing, is the target's decision alone."""
    tracker = StepTracker(rules(span=Span(START, END)), [START])
    assert drafted(tracker, [WORD, last, LINE]) == (2, False)


def test_only_the_reasoning_is_judged() -> None:
    """The answer behind the reasoning must be the target's, and what precedes it too."""
    tracker = StepTracker(rules(span=Span(START, END)), [WORD])
    assert not tracker.may_judge
    tracker.feed([START, WORD])
    assert tracker.may_judge
    tracker.feed([LINE, END])
    assert not tracker.may_judge
    assert drafted(tracker, [WORD, LINE]) == (2, False)


def test_a_prompt_can_open_the_reasoning_and_an_earlier_turn_closes_it() -> None:
    """Chat templates put the opening token into the prompt."""
    span = Span(START, END)
    assert StepTracker(rules(span=span), [START, WORD, END, WORD, START]).may_judge
    assert not StepTracker(rules(span=span), [START, WORD, END]).may_judge


def test_first_steps_are_exact_and_a_resumed_request_remembers() -> None:
    """A preempted request would be exact again, or judged too early."""
    given = rules(first_exact=2)
    fresh = StepTracker(given, [LINE, LINE, LINE])
    assert not fresh.may_judge
    fresh.feed([WORD, LINE])
    assert not fresh.may_judge
    fresh.feed([WORD, LINE])
    assert fresh.may_judge
    resumed = StepTracker(given, [LINE, LINE, LINE], [WORD, LINE, WORD, LINE])
    assert resumed.may_judge


def test_short_lines_end_no_step() -> None:
    """A list of short lines would be judged word by word."""
    tracker = StepTracker(rules(min_tokens=3))
    assert drafted(tracker, [WORD, LINE, WORD, LINE]) == (4, True)


def test_judges_give_the_numbers_they_promise() -> None:
    """`logprob` the least and its mean as a gate, `score` the mean digit, `exact` nothing."""
    logprobs, owners = torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([0, 0, 1])
    digits = torch.full((2, 10), -50.0)
    digits[0, 9] = 0.0
    digits[1, 2] = digits[1, 4] = 0.0
    steps = OpenSteps(2, lambda: (logprobs, owners), lambda: digits)
    assert JUDGES["logprob"]().numbers(steps).tolist() == [-3.0, -2.0]
    assert JUDGES["logprob"](-1.9).numbers(steps).tolist() == [float("-inf")] * 2
    assert JUDGES["logprob"](-2.0).numbers(steps).tolist() == [-3.0, -2.0]
    torch.testing.assert_close(JUDGES["score"]().numbers(steps), torch.tensor([9.0, 3.0]))
    assert JUDGES["exact"]().numbers(steps).tolist() == [float("-inf")] * 2


def test_counters_say_what_was_refused() -> None:
    """The line of the log and the benchmark's table read the same numbers."""
    counters = StepCounters(drafted=5, agreed=2, judged=3, accepted=1)
    assert counters.as_dict()["refused"] == 2
    assert "3 judged: 1 accepted" in counters.line()


def table_model(seed: int) -> object:
    """A model over tokens 0, 1 (a line's end) and 2 (a word): its choice by the whole prefix."""

    def choose(prefix: tuple[int, ...]) -> int:
        return random.Random(f"{seed}{prefix}").randrange(3)

    return choose


def run(target, draft, passes, *, length: int, width: int):
    """Speculate `length` tokens; returns them and the (start, end) of steps a judge let pass."""
    splitter = StepSplitter("\n", ["a", "\n", "b"])
    tracker = StepTracker(StepRules(splitter))
    text: list[int] = []
    passed = []
    while len(text) < length:
        step = DraftedStep(tracker)
        drafts: list[int] = []
        while len(drafts) < width:
            drafts.append(draft((*text, *drafts)))
            if not step.push(drafts[-1]):
                break
        rows = torch.tensor([text[-1] if text else 0, *drafts])
        chosen = torch.tensor([target((*text, *drafts[:n])) for n in range(len(drafts) + 1)])
        starts = torch.tensor([0, len(rows)])
        exact = count_exact(rows, chosen, starts)
        sound = step.judgeable and int(exact) < len(drafts) and passes(tuple(text), tuple(drafts))
        tokens, counts = settle(rows, chosen, starts, exact, torch.tensor([sound]), width + 1)
        if sound:
            passed.append((len(text), len(text) + len(drafts)))
        gained = tokens[0, : int(counts)].tolist()
        tracker.feed(gained)
        text += gained
    return text, passed


@pytest.mark.parametrize("seed", range(40))
def test_exact_is_lossless_and_a_judge_changes_only_the_steps_it_passes(seed: int) -> None:
    """With `exact` the text is the target's; else every token outside of passed steps still is."""
    target, draft = table_model(seed), table_model(seed + 1000 if seed % 2 else seed % 3)
    plain: list[int] = []
    for _ in range(30):
        plain.append(target(tuple(plain)))
    text, passed = run(target, draft, lambda *_: False, length=30, width=4)
    assert text[:30] == plain
    assert not passed
    for share in (2, 3):
        text, passed = run(
            target, draft, lambda before, _, of=share: len(before) % of == 0, length=30, width=4
        )
        inside = {i for start, end in passed for i in range(start, end)}
        for index, token in enumerate(text):
            if index not in inside:
                assert token == target(tuple(text[:index]))
        for start, end in passed:
            own = [draft(tuple(text[:index])) for index in range(start, end)]
            assert text[start:end] == own
            assert text[end - 1] == 1
            assert own != [target(tuple(text[:index])) for index in range(start, end)]
        assert all(end <= len(text) - 1 for _, end in passed)  # the target's token follows


class Words:
    """A tokenizer of words, with the blank in front; digits come apart only where told so."""

    def __init__(self, extra: tuple[str, ...] = (), *, pairs: bool = False) -> None:
        digits = [f"{blank}{digit}" for blank in ("", " ") for digit in range(10)]
        self._vocab = {w: i for i, w in enumerate(["grade", " it", " 4", "<t>", *digits, *extra])}
        self._pairs = pairs

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        pattern = r"<t>| ?[a-z]+| ?[0-9]{2}| ?[0-9]|." if self._pairs else r"<t>| ?[a-z]+| ?[0-9]|."
        return [self._vocab.get(word, 999) for word in re.findall(pattern, text, re.DOTALL)]

    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        names = {index: word for word, index in self._vocab.items()}
        return ["".join(names.get(i, "") for i in ids) for ids in sequences]


def test_the_suffix_knows_how_a_digit_follows_it() -> None:
    """The digit with its blank is another token than without; reading the wrong one reads noise."""
    words = Words()
    ids = words.get_vocab()
    found = find_suffix(words, "grade it")
    assert found.ids == (ids["grade"], ids[" it"])
    assert found.digits == tuple(ids[f" {digit}"] for digit in range(10))


def test_digits_that_are_no_tokens_are_refused() -> None:
    """Ten digits that share one id would all get the same number."""
    words = Words()
    for digit in range(10):
        for blank in ("", " "):
            words._vocab.pop(f"{blank}{digit}")
    with pytest.raises(ConfigError, match=r"judge_suffix='grade' cannot be followed by a digit"):
        find_suffix(words, "grade")


def test_the_reasonings_ends_are_single_tokens() -> None:
    """An end of several tokens would be missed, and the answer judged."""
    words = Words()
    assert find_span(words, "<t>", None) == Span(words.get_vocab()["<t>"], None)
    with pytest.raises(ConfigError, match=r"reasoning_end='grade it' is 2 tokens"):
        find_span(words, "<t>", "grade it")


def test_texts_of_tokens_follow_their_ids() -> None:
    """Shifted by one, every delimiter would be found a token off."""
    words = Words()
    texts = token_texts(words)
    assert all(texts[index] == word for word, index in words.get_vocab().items())


def test_other_tokens_or_another_split_are_another_tokenizer() -> None:
    """Ids would mean other words to the draft model: nothing is accepted, or nonsense is."""
    assert same_tokens(Words(), Words()) is None
    assert "token 'more' (id" in str(same_tokens(Words(), Words(("more",))))
    assert "token 'more' (id" in str(same_tokens(Words(("more",)), Words()))
    assert same_tokens(Words(), Words(pairs=True)) == "they split a text differently"
