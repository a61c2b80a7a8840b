"""The layout of GPUs, run by Triton's interpreter: SGLang's Triton attention, masks that hold the
prefix, verification at one width, its CUDA-graph runner.

SGLang's own rounding differs from the CPU attention's, whose plain text is what is compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from speculators_ext.assets import build

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 55))]
CLASP: dict[str, Any] = {
    "speculative_algorithm": "CLASP",
    "speculative_num_steps": 4,
    "method_config": {
        "num_skip_layers": 2, "adaptive": False, "refresh_interval": 4, "exit_threshold": 0.1,
    },
}  # fmt: skip
EAGLE2: dict[str, Any] = {
    "speculative_algorithm": "EAGLE2",
    "speculative_draft_model_path": "tiny-llama-eagle3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
    "method_config": {"adaptive": False},
}
MTP_REUSE: dict[str, Any] = {
    "model": "mimo-tiny-mtp",
    "speculative_algorithm": "MTP_REUSE",
    "speculative_num_steps": 4,
    "method_config": {"adaptive": False},
}
# Three requests are padded to four.
GRAPHS = {"runner": "run_graphs.py", "cuda_graph_bs_decode": [1, 4]}
# What every run starts; the others are for the long proofs.
LAYOUTS = {
    "clasp-graphs": CLASP | GRAPHS,
    "eagle2-graphs": EAGLE2 | GRAPHS,
    "clasp": CLASP,
    "eagle2": EAGLE2,
    "eagle2-pages": EAGLE2 | GRAPHS | {"page_size": 16},
    "mtp_reuse-graphs": MTP_REUSE | GRAPHS,
}
FIRST = ("clasp-graphs", "eagle2-graphs")


def texts(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.full) for n in LAYOUTS]
)
def test_text_is_plain_decodings(engines, name):
    """Catches a mask, a width or a graph that GPUs would take and that changes the text."""
    options = {"model": "tiny-llama"} | LAYOUTS[name]
    head = options.get("speculative_draft_model_path")
    if head is not None:
        options["speculative_draft_model_path"] = str(build(head))
    plain = texts(engines.plain(PROMPTS, GREEDY, model=options["model"]))
    engine = engines.get(
        **options, attention_backend="triton", environment={"TRITON_INTERPRET": "1"}
    )
    answers = engine.generate(PROMPTS, GREEDY)
    assert texts(answers) == plain
    assert texts(engine.generate(PROMPTS[:1], GREEDY)) == plain[:1]
    rounds = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert min(rounds) < GREEDY["max_new_tokens"] - 1  # something was accepted
    replayed = "a captured verification is replayed" in engine.log.read_text()
    assert replayed == name.endswith(("graphs", "pages"))
