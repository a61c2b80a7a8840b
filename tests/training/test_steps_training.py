"""Training text of the reasoning models: what is learned from, what is only shown, what is graded;
and how the judges' thresholds are chosen.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from speculators_ext.assets.steps_world import check, draw_problem, is_sound

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def data():
    sys.path.insert(0, str(BENCHMARKS / "training"))
    import steps_data

    sys.path.pop(0)
    return steps_data


@pytest.fixture(scope="module")
def models(data):
    sys.path.insert(0, str(BENCHMARKS / "training"))
    import steps_models

    sys.path.pop(0)
    return steps_models


@pytest.fixture(scope="module")
def calibration():
    sys.path.insert(0, str(BENCHMARKS))
    from steps_curve import calibration as found

    sys.path.pop(0)
    return found


@pytest.fixture(scope="module")
def tokenizer(data):
    return data.train_tokenizer()


def faulty_rows(data, count, faults=0.4):
    rng = random.Random(0)
    for _ in range(count):
        problem = draw_problem(rng, 5, held_out=False)
        lines = list(data.solution(rng, problem, data.TARGET, faults, faults / 2))
        yield problem, data.Row(problem.text, lines)


def test_a_line_is_called_what_it_is(data):
    """Catches grades that teach the wrong thing, and a remedy that is wrong itself."""
    kinds = {True: 0, False: 0}
    for problem, row in faulty_rows(data, 100):
        before = ""
        for line in row.lines:
            assert line.sound == is_sound(problem, before, line.text), (before, line)
            assert (line.right is None) == line.sound
            if line.right is not None:
                assert is_sound(problem, before, line.right), (before, line)
            kinds[line.sound] += 1
            before += line.text
    assert min(kinds.values()) > 100


def test_text_without_faults_is_a_right_solution(data):
    """The small model and the solver learn from these alone."""
    rng = random.Random(2)
    for _ in range(100):
        problem = draw_problem(rng, 7, held_out=False)
        verdict = check(problem, "".join(x.text for x in data.solution(rng, problem, data.DRAFT)))
        assert verdict.right
        assert verdict.steps == [True] * 7


def test_rows_are_the_texts_and_weights_lie_on_their_tokens(data, tokenizer):
    """Catches weights shifted by a token: the prompt would be learned and the answer not."""
    batch = data.Batches(tokenizer, data.DRAFT, 4, seed=3).draw()
    for ids, own in zip(batch.tokens.tolist(), batch.weights.tolist(), strict=True):
        learned = [i for i, w in zip(ids, own, strict=True) if w]
        assert learned[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learned).startswith(("then", "step", "now"))
        shown = [i for i, w in zip(ids, own, strict=True) if not w]
        assert "start" in tokenizer.decode(shown)


def test_faults_are_shown_and_never_learned(data, tokenizer):
    """Catches a target that learns to make the mistakes it is to recognise, and marks that lie
    beside the first wrong digit.
    """
    batches = data.Batches(tokenizer, data.TARGET, 1, seed=4)
    marked = 0
    for _, row in faulty_rows(data, 40):
        batch = batches.encode([row])
        ids = batch.tokens[0].tolist()
        starts = [len(tokenizer.encode(row.prompt)), *(batch.ends[0] + 1).tolist()]
        for line, (start, end) in zip(row.lines, pairwise(starts), strict=True):
            assert tokenizer.decode(ids[start:end]) == line.text
            assert set(batch.weights[0, start:end].tolist()) == {float(line.sound)}
            faults = (batch.wrong[0, start:end] == 1).nonzero().flatten().tolist()
            assert len(faults) <= 1 - line.sound
            for at in faults:
                right = tokenizer.encode(line.right, add_special_tokens=False)
                assert ids[start : start + at] == right[:at]
                assert ids[start + at] != right[at]
                marked += 1
    assert marked > 30


def test_what_the_small_model_wrote_is_graded_and_not_learned(data, tokenizer):
    """Catches a target that takes on the small model's wording or its faults."""
    problem = draw_problem(random.Random(5), 4, held_out=False)
    lines = [line.text for line in data.solution(random.Random(6), problem, data.DRAFT)]
    lines[1] = lines[1].replace("\n", " , so 00\n") if " , so" not in lines[1] else "gives\n"
    found = data.read_lines(problem, "".join(lines))
    assert [line.sound for line in found][:3] == [True, False, False]
    assert data.read_lines(problem, "".join(lines[1:])) is None
    row = data.Row(problem.text, found, False)
    batch = data.Batches(tokenizer, data.TARGET, 1, seed=4).encode([row])
    assert not batch.weights.any()
    assert (batch.wrong == -1).all()
    assert batch.sound.tolist() == [[line.sound for line in found]]


def drawn(models, layers):
    model = models.TinyLlama({**models.CONFIGS["steps-draft-tiny"], "num_hidden_layers": layers})
    generator = torch.Generator().manual_seed(0)
    model.initialize(generator)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


def test_a_grade_sees_its_own_line_and_no_later_one(models):
    """Behind each line's end the suffix must find what it finds when a model is served: the text
    up to there. Catches grades that see the answer, each other, or a position too many.
    """
    model = drawn(models, 2)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 300, (2, 12), generator=generator)
    ends, suffix = torch.tensor([[3, 8], [5, 11]]), 7
    both = torch.cat([tokens, torch.full_like(ends, suffix)], dim=1)
    logits = model.logits(model.states(both, models.branched(12, ends))[-1])
    torch.testing.assert_close(logits[:, :12], model(tokens))
    for row, own in enumerate(ends.tolist()):
        for at, end in enumerate(own):
            served = torch.cat([tokens[row, : end + 1], torch.tensor([suffix])])
            torch.testing.assert_close(logits[row, 12 + at], model(served[None])[0, -1])


def test_growing_changes_nothing_at_first_and_files_come_back(models, tokenizer, tmp_path):
    """Catches new layers that disturb the old ones, and an export that loses a tensor."""
    config = {**models.CONFIGS["steps-draft-tiny"], "num_hidden_layers": 4}
    model = drawn(models, 2)
    tokens = torch.randint(0, config["vocab_size"], (2, 9))
    before = model(tokens)
    model.grow(config, torch.Generator().manual_seed(0))
    assert len(model.layers) == 4
    assert torch.equal(model(tokens), before)
    models.export(model, config, tokenizer, tmp_path)
    again = models.load(tmp_path)
    torch.testing.assert_close(again(tokens), before, atol=0.1, rtol=0.1)


def test_calibration_has_problems_of_its_own(calibration):
    """Catches thresholds chosen on the problems that the curve is drawn on."""
    shown = calibration.calibration_problems(50, ())
    others = calibration.calibration_problems(50, shown)
    assert len(set(shown) | set(others)) == 100
    assert all(problem.held_out for problem in others)


@pytest.mark.parametrize(
    ("accuracy", "chosen"),
    [
        ({-1.0: 0.99, -2.0: 0.985, -3.0: 0.98}, -2.0),
        ({-1.0: 0.99, -2.0: 0.98, -3.0: 0.99}, -1.0),
        ({-1.0: 0.98, -2.0: 0.99}, None),
    ],
    ids=["last good one", "not by luck behind a bad one", "none"],
)
def test_the_most_lenient_threshold(calibration, accuracy, chosen):
    """Half a point may be lost against 99 %, and not more."""
    assert calibration.most_lenient(accuracy, 0.99) == chosen
