"""Short queries given as decode rows: which rows, of whom, and how long what they see is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.attention.backend import CommonAttentionMetadata

from speculators_ext.engines.vllm.attention.decode_rows_mla import split_short_queries


def batch(queries: list[int], lengths: list[int], **changes: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tables = torch.arange(len(queries)).unsqueeze(1) * 100 + torch.arange(4)
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(lengths).int(),
        "num_reqs": len(queries),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(queries),
        "max_seq_len": max(lengths),
        "block_table_tensor": tables.int(),
        "slot_mapping": torch.arange(int(starts[-1])),
        "seq_lens_cpu_upper_bound": torch.tensor(lengths).int(),
        "is_prefilling": torch.tensor(queries) == torch.tensor(lengths),
    }
    return CommonAttentionMetadata(**fields | changes)


def test_a_token_is_a_row_that_sees_what_is_before_it() -> None:
    """Catches a row that sees a later one, another request's blocks, or one position too few."""
    split = split_short_queries(batch([3, 1, 2], [10, 7, 20]))
    assert split.num_reqs == 6
    assert split.seq_lens.tolist() == [8, 9, 10, 7, 19, 20]
    assert split.seq_lens_cpu_upper_bound.tolist() == [8, 9, 10, 7, 19, 20]
    assert split.block_table_tensor[:, 0].tolist() == [0, 0, 0, 100, 200, 200]
    assert split.query_start_loc.tolist() == [*range(7)]
    assert (split.max_query_len, split.num_actual_tokens) == (1, 6)


def test_prompts_stay_whole_behind_the_rows() -> None:
    """Catches a prompt cut up, or its length lost: its context is worked out from both."""
    given = batch([2, 1, 40, 17], [9, 5, 40, 30])
    split = split_short_queries(given)
    assert split.num_reqs == 5
    assert split.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 43, 60]
    assert split.seq_lens.tolist() == [8, 9, 5, 40, 30]
    assert split.is_prefilling.tolist() == [False, False, False, True, False]
    assert split.max_query_len == 40
    assert given.seq_lens.tolist() == [9, 5, 40, 30], "the batch itself was changed"


@pytest.mark.parametrize("queries", [[1, 1, 1], [40, 2], [17]])
def test_nothing_to_split_is_the_same_batch(queries: list[int]) -> None:
    """Catches short queries behind a prompt moved before it: rows would no longer be the tokens."""
    given = batch(queries, [50] * len(queries))
    assert split_short_queries(given) is given
