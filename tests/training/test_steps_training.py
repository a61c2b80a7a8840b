"""Training text of the reasoning models: what is learned from, and what is only shown."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from speculators_ext.assets.steps_world import JUDGE_SUFFIX, check, draw_problem, is_sound

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"


@pytest.fixture(scope="module")
def data():
    sys.path.insert(0, str(SCRIPTS))
    import steps_data

    sys.path.pop(0)
    return steps_data


@pytest.fixture(scope="module")
def models(data):
    sys.path.insert(0, str(SCRIPTS))
    import steps_models

    sys.path.pop(0)
    return steps_models


def test_faults_are_shown_graded_and_never_learned(data):
    """Catches a target that learns to make the mistakes it is to recognise."""
    rng = random.Random(0)
    kinds = {True: 0, False: 0}
    for _ in range(200):
        problem = draw_problem(rng, 5, held_out=False)
        before = ""
        pieces = list(data.solution(rng, problem, data.TARGET, True))[1:]
        for piece, following in pairwise(pieces):
            if not piece.text.startswith(("then", "step", "now")):
                continue
            sound = is_sound(problem, before, piece.text)
            assert sound == (piece.weight == 1.0), (before, piece)
            assert sound or following.text == JUDGE_SUFFIX
            if following.text == JUDGE_SUFFIX:
                kinds[sound] += 1
            before += piece.text
    assert min(kinds.values()) > 50


def test_a_grade_is_learned_and_its_suffix_is_not(data):
    """Catches a model that grades itself unasked."""
    rng = random.Random(1)
    for _ in range(100):
        problem = draw_problem(rng, 6, held_out=False)
        pieces = list(data.solution(rng, problem, data.TARGET, True))
        for at, piece in enumerate(pieces):
            if piece.text == JUDGE_SUFFIX:
                assert piece.weight == 0.0
                assert pieces[at + 1].text in (" 0", " 9")
                assert pieces[at + 1].weight == 1.0
                assert (pieces[at + 1].text == " 9") == (pieces[at - 1].weight == 1.0)


def test_ungraded_text_is_a_right_solution(data):
    """The small model learns from these alone."""
    rng = random.Random(2)
    for _ in range(100):
        problem = draw_problem(rng, 7, held_out=False)
        text = "".join(p.text for p in data.solution(rng, problem, data.DRAFT, False))
        verdict = check(problem, text.removeprefix(problem.text))
        assert verdict.right
        assert verdict.steps == [True] * 7


def test_rows_are_the_texts_and_weights_lie_on_their_tokens(data):
    """Catches weights shifted by a token: the prompt would be learned and the answer not."""
    tokenizer = data.train_tokenizer()
    batch = data.Batches(tokenizer, data.DRAFT, False, 4, seed=3)
    tokens, weights = batch.draw()
    for ids, own in zip(tokens.tolist(), weights.tolist(), strict=True):
        learned = [i for i, w in zip(ids, own, strict=True) if w]
        assert learned[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learned).startswith(("then", "step", "now"))
        shown = [i for i, w in zip(ids, own, strict=True) if not w]
        assert "start" in tokenizer.decode(shown)


def test_growing_changes_nothing_at_first_and_files_come_back(data, models, tmp_path):
    """Catches new layers that disturb the old ones, and an export that loses a tensor."""
    config = {**models.CONFIGS["steps-draft-tiny"], "num_hidden_layers": 4}
    torch.manual_seed(0)
    model = models.TinyLlama(config, 2)
    model.initialize(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    tokens = torch.randint(0, config["vocab_size"], (2, 9))
    before = model(tokens)
    model.grow()
    assert len(model.layers) == 4
    assert torch.equal(model(tokens), before)
    models.export(model, config, data.train_tokenizer(), tmp_path)
    again = models.load(tmp_path)
    torch.testing.assert_close(again(tokens), before, atol=0.1, rtol=0.1)
