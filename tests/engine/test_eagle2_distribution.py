"""What `eagle2` samples follows the target's own law, worked out beside the engine.

The law of every token given those before it comes from the target's logits (transformers, fp32),
cut by temperature, top-k and top-p here. Two statistics judge the samples:

- *cells*: chi-square of the first two tokens against their enumerated joint law;
- *places*: a token x with mass b before it, in the order of falling probability, is put at
  b + v p(x), v uniform. If x follows the law these places are uniform and independent from token to
  token, whatever the context. A draft accepted too often crowds the low end.

Trees come from the tiny head, which guesses right now and then, and from a growth that puts the
target's likeliest tokens on branches, of which about half a path is accepted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.assets import build
from speculators_ext.kernels.accept_tree_ref import collect
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "List three colours: red, green"
ROWS = 64
LENGTH = 5
CHILDREN = (3, 2, 1, 1)  # of a node, by its depth
BATCHES = 7
BATCHES_FULL = 40
LEAST = 1e-4  # p-values are of fixed seeds: they do not vary from run to run
pytestmark = [pytest.mark.engine, pytest.mark.statistical]


class Law(NamedTuple):
    """Sampling options."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def of(self, logits: torch.Tensor) -> np.ndarray:
        """[n, V] logits -> [n, V] float64 probabilities."""
        scaled = logits.double() / self.temperature
        if self.top_k:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        law, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        law = law.masked_fill(law.cumsum(-1) - law >= self.top_p, 0.0)
        law = torch.zeros_like(law).scatter(1, order, law)
        return (law / law.sum(-1, keepdim=True)).numpy()


LAWS = [Law(t, k, p) for t in (0.7, 1.0) for k in (0, 20) for p in (1.0, 0.9)]


@dataclass
class Target:
    """The target in transformers."""

    model: Any
    prompt: list[int]

    def logits(self, continuations: np.ndarray) -> torch.Tensor:
        """[n, L] tokens behind the prompt -> [n, L + 1, V], row 0 being the prompt's last."""
        rows = torch.from_numpy(np.asarray(continuations, dtype=np.int64))
        ids = torch.cat([torch.tensor(self.prompt).expand(len(rows), -1), rows], dim=1)
        with torch.inference_mode():
            return torch.cat(
                [self.model(part).logits[:, len(self.prompt) - 1 :] for part in ids.split(512)]
            )


@pytest.fixture(scope="module")
def engine(make_eagle2_twins: Any) -> Any:
    return make_eagle2_twins(max_num_seqs=ROWS).clasp


@pytest.fixture(scope="module")
def target(engine: Any) -> Target:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build("tiny-llama"), dtype=torch.float32).eval()
    return Target(model, engine.llm.get_tokenizer().encode(PROMPT))


def sample(engine: Any, law: Law, batches: int) -> np.ndarray:
    """[ROWS * batches, LENGTH] tokens of independent answers."""
    answers = []
    for batch in range(batches):
        params = SamplingParams(
            n=ROWS, max_tokens=LENGTH, ignore_eos=True, seed=1 + ROWS * batch, **law._asdict()
        )
        (output,) = engine.generate([PROMPT], params)
        answers += [list(completion.token_ids) for completion in output.outputs]
    return np.asarray(answers)


def p_of_cells(target: Target, law: Law, answers: np.ndarray) -> float:
    """Of the first two tokens; what is rarer than the last cell expected 8 times joins that one."""
    from scipy.stats import chisquare

    vocabulary = np.arange(target.model.config.vocab_size)
    first = law.of(target.logits(np.empty((1, 0)))[:, 0])[0]
    joint = first[:, None] * law.of(target.logits(vocabulary[:, None])[:, 1])
    expected = joint.ravel() * len(answers)
    seen = np.bincount(answers[:, 0] * len(first) + answers[:, 1], minlength=joint.size)
    assert not seen[expected == 0].any(), "a token was sampled that the options exclude"
    starts = np.arange((expected >= 8).sum())
    assert len(starts) >= 6, "too few cells: the test could not fail"
    order = np.argsort(-expected)
    sums = [np.add.reduceat(side[order], starts) for side in (seen, expected)]
    return float(chisquare(*sums).pvalue)


def places(target: Target, law: Law, answers: np.ndarray) -> np.ndarray:
    """[n, LENGTH] in [0, 1): where each token lies in the law it should follow."""
    contexts, which = np.unique(answers[:, :-1], axis=0, return_inverse=True)
    logits = target.logits(contexts)
    within = np.random.default_rng(0).random(answers.shape)
    out = np.empty(answers.shape)
    for position in range(LENGTH):
        laws = law.of(logits[:, position])
        order = np.argsort(-laws, axis=1, kind="stable")
        ranks = np.argsort(order, axis=1)
        ordered = np.take_along_axis(laws, order, axis=1)
        before = np.cumsum(ordered, axis=1) - ordered
        tokens = answers[:, position]
        own = laws[which, tokens]
        assert (own > 0).all(), "a token was sampled that the options exclude"
        out[:, position] = before[which, ranks[which, tokens]] + within[:, position] * own
    return out.clip(0, 1 - 1e-12)


def p_values(target: Target, law: Law, answers: np.ndarray) -> dict[str, float]:
    from scipy.stats import chisquare

    found = {"cells": p_of_cells(target, law, answers)}
    at = places(target, law, answers)
    for position in range(1, LENGTH):
        bins = np.bincount((at[:, position] * 20).astype(int), minlength=20)
        found[f"token {position}"] = float(chisquare(bins).pvalue)
        pair = (at[:, position - 1 : position + 1] * 5).astype(int) @ (5, 1)
        found[f"tokens {position - 1}, {position}"] = float(
            chisquare(np.bincount(pair, minlength=25)).pvalue
        )
    return found


@pytest.fixture
def likely_trees(engine: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tree is of the target's likeliest tokens, by levels."""
    known: dict[tuple[int, ...], list[int]] = {}

    def likeliest(contexts: list[tuple[int, ...]]) -> None:
        new = sorted({c for c in contexts if c not in known}, key=lambda c: (len(c), c))
        for _, alike in groupby(new, key=len):
            rows = list(alike)
            best = target.logits(np.asarray(rows))[:, -1].topk(max(CHILDREN)).indices
            known.update(zip(rows, best.tolist(), strict=True))

    def grow(self: Any, batch: Any, roots: Any, plan: Any) -> list[DraftTree]:
        states, prompt = self._req_states, len(target.prompt)
        trees = []  # of nodes: (tokens behind the prompt, parent)
        for row, length, root in zip(roots.rows, roots.lengths, roots.tokens.tolist(), strict=True):
            slot = int(batch.idx_mapping_np[row])
            said = states.all_token_ids.gpu[slot, prompt:length].tolist()
            trees.append([((*said, root), -1)])
        levels = [(0, 1)] * len(trees)
        for depth in range(max(roots.max_levels)):
            likeliest(
                [
                    n[0]
                    for tree, level in zip(trees, levels, strict=True)
                    for n in tree[slice(*level)]
                ]
            )
            for index, (tree, (start, stop)) in enumerate(zip(trees, levels, strict=True)):
                for parent in range(start, stop if depth < roots.max_levels[index] else start):
                    context = tree[parent][0]
                    tree += [((*context, t), parent) for t in known[context][: CHILDREN[depth]]]
                levels[index] = (stop, len(tree))
        return [
            DraftTree.of([n[0][-1] for n in tree], [n[1] for n in tree]).cut(limit + 1)
            for tree, limit in zip(trees, roots.max_drafts, strict=True)
        ]

    monkeypatch.setattr(type(engine.speculator), "grow", grow)


def check(
    engine: Any, target: Target, law: Law, batches: int, record: Callable[..., None]
) -> float:
    """The law holds; returns accepted drafts a tree."""
    before = engine.counters()
    found = p_values(target, law, sample(engine, law, batches))
    grown = {key: count - before[key] for key, count in engine.counters().items()}
    accepted = grown["num_accepted_tokens"] / grown["num_drafts"]
    record("p_values", found)
    record("accepted_a_tree", round(accepted, 3))
    assert min(found.values()) > LEAST, found
    return accepted


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_likely_trees(
    engine: Any, target: Target, likely_trees: None, law: Law, record_property: Any
) -> None:
    """Catches drafts accepted too often, options left off nodes, noise shared along a path."""
    assert check(engine, target, law, BATCHES, record_property) > 0.3


@pytest.mark.full
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_likely_trees_in_full(
    engine: Any, target: Target, likely_trees: None, law: Law, record_property: Any
) -> None:
    """The same with six times the samples: a bias of a few per cent shows."""
    assert check(engine, target, law, BATCHES_FULL, record_property) > 0.3


@pytest.mark.full
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_trees_of_the_head(engine: Any, target: Target, law: Law, record_property: Any) -> None:
    """Catches a tree of a real head, ragged and ranked by its own guesses, that bends the law."""
    assert check(engine, target, law, BATCHES_FULL, record_property) > 0


def test_the_test_can_fail(
    engine: Any, target: Target, likely_trees: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that accepts a likely draft unseen now and then is found out, at the short size."""

    def careless(
        tokens: Any, parents: Any, cu_nodes: Any, chosen: Any, *, max_nodes: int, max_depth: int
    ) -> Any:
        paths, bonus = [], []
        cu = cu_nodes.tolist()
        for first, stop in pairwise(cu):
            path = [0]
            for row in range(first + 1, stop):
                right = tokens[row] == chosen[first + path[-1]]
                unseen = len(path) == 1 and row == first + 1 and first % 2 == 0
                if parents[row] == path[-1] and (right or unseen):
                    if unseen:
                        chosen[first] = tokens[row]
                    path.append(row - first)
            paths.append(path)
            bonus.append(int(chosen[first + path[-1]]))
        return collect(paths, bonus, max_depth, tokens.device)

    sampler = sys.modules[type(engine.runner.rejection_sampler).__module__]
    monkeypatch.setattr(sampler, "accept_tree_ref", careless)
    law = Law(1.0)
    found = p_values(target, law, sample(engine, law, BATCHES))
    assert found["cells"] < LEAST
    assert found["token 1"] < LEAST
