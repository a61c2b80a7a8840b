"""At temperature 1 the distribution of the text is the target's, drafts sampled or not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

PROMPT = "List three colours: red, green"
ROWS = 64
LENGTH = 4
RARE = 8.0
pytestmark = [pytest.mark.engine, pytest.mark.statistical]


def sample(engine: Any, batches: int, seed: int) -> Counter[tuple[int, ...]]:
    """Histogram of the first `LENGTH` tokens over ROWS * batches independent answers."""
    histogram: Counter[tuple[int, ...]] = Counter()
    for batch in range(batches):
        params = SamplingParams(
            n=ROWS,
            temperature=1.0,
            top_k=20,
            max_tokens=LENGTH,
            ignore_eos=True,
            seed=seed + ROWS * batch,
        )
        (output,) = engine.generate([PROMPT], params)
        histogram.update(tuple(completion.token_ids) for completion in output.outputs)
    return histogram


def p_value(one: Counter[Any], two: Counter[Any]) -> float:
    """Chi-square test of homogeneity; cells seen less than RARE times are put together."""
    from scipy.stats import chi2_contingency

    cells: Counter[Any] = Counter()
    pairs: dict[Any, list[int]] = {}
    for key, total in (one + two).items():
        cell = key if total >= RARE else "rare"
        cells[cell] += total
        pair = pairs.setdefault(cell, [0, 0])
        pair[0] += one[key]
        pair[1] += two[key]
    assert len(pairs) >= 5, "too few cells: the test could not fail"
    return float(chi2_contingency(list(zip(*pairs.values(), strict=True))).pvalue)


def projected(histogram: Counter[tuple[int, ...]], *places: int) -> Counter[tuple[int, ...]]:
    out: Counter[tuple[int, ...]] = Counter()
    for tokens, count in histogram.items():
        out[tuple(tokens[place] for place in places)] += count
    return out


@pytest.fixture(scope="module", params=[24, pytest.param(320, marks=pytest.mark.full)])
def batches(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def expected(engines: Any, batches: int) -> Counter[tuple[int, ...]]:
    return sample(engines.get(max_num_seqs=ROWS), batches, seed=1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_sampling_is_the_targets(make_twins: Any, expected: Any, batches: int, drafts: str) -> None:
    """Catches drafts accepted too often, or a residual that is not the target's."""
    twins = make_twins({"draft_sample_method": drafts}, max_num_seqs=ROWS)
    got = sample(twins.clasp, batches, seed=10**6)
    count = twins.clasp.counters()
    assert 0 < count["num_accepted_tokens"] < count["num_draft_tokens"]
    for places in ((1,), (2,), (3,), (0, 1), (1, 2)):
        assert p_value(projected(expected, *places), projected(got, *places)) > 1e-3, places
