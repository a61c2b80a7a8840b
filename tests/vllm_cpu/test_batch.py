"""Batch layout and write-back: our overrides against vLLM's kernels, interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

SEED = 42
NUM_REQS, MAX_REQS, MAX_LEN, STEPS = 5, 8, 64, 3


def _ints(gen: np.random.Generator, low: int, high: int, size: object) -> torch.Tensor:
    return torch.from_numpy(gen.integers(low, high, size).astype(np.int32))


def _batch(seed: int) -> dict[str, torch.Tensor]:
    """Five requests in eight rows: decoding, drafting, prefilling in chunks, just done."""
    gen = np.random.default_rng(seed)
    num_logits = gen.integers(1, STEPS + 2, NUM_REQS)
    query_lens = num_logits + gen.integers(0, 4, NUM_REQS)
    prefill = gen.integers(1, 30, MAX_REQS)
    return {
        "idx_mapping": torch.from_numpy(gen.permutation(MAX_REQS)[:NUM_REQS].astype(np.int32)),
        "query_start_loc": torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        "cu_num_logits": torch.tensor([0, *np.cumsum(num_logits)], dtype=torch.int32),
        "prefill_len": torch.from_numpy(prefill.astype(np.int32)),
        "num_computed": torch.from_numpy((prefill + gen.integers(-9, 9, MAX_REQS)).clip(0)).to(
            torch.int32
        ),
        "all_token_ids": _ints(gen, 0, 1000, (MAX_REQS, MAX_LEN)),
        "input_ids": torch.zeros(128, dtype=torch.int32),
        "positions": torch.zeros(128, dtype=torch.int64),
        "seq_lens": _ints(gen, 1, 40, MAX_REQS),
        "last_sampled": torch.from_numpy(gen.integers(0, 1000, (MAX_REQS, 1))),
        "drafts": torch.from_numpy(gen.integers(0, 1000, (MAX_REQS, STEPS))),
        "total_len": _ints(gen, 20, 40, MAX_REQS),
        "num_sampled": _ints(gen, 0, STEPS + 2, NUM_REQS),
        "sampled": torch.from_numpy(gen.integers(0, 50, (NUM_REQS, STEPS + 1))),
        "counts": torch.zeros(MAX_REQS, 50, dtype=torch.int32),
    }


def _same(launchers, seed: int, run) -> None:
    def after(batch: dict[str, torch.Tensor]) -> tuple:
        return run(batch), batch

    (our_result, ours), (their_result, theirs) = launchers.both(lambda: _batch(seed), after)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    for mine, other in zip(our_result or (), their_result or (), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("seed", [SEED, 7, 8])
def test_prefill_inputs(launchers, seed):
    """Catches tokens copied past a chunk, and look-ahead tokens past the prompt."""
    from vllm.v1.worker.gpu.input_batch import prepare_prefill_inputs

    def run(b: dict) -> tuple:
        lookahead = torch.full((2, MAX_REQS), -5, dtype=torch.int32)
        prepare_prefill_inputs(
            b["input_ids"],
            lookahead,
            b["idx_mapping"],
            b["query_start_loc"],
            b["all_token_ids"],
            b["prefill_len"],
            b["num_computed"],
        )
        return (lookahead,)

    _same(launchers, seed, run)


@pytest.mark.parametrize("seed", [SEED, 7])
def test_positions_and_lengths(launchers, seed):
    """Catches stale lengths left in the padding rows."""
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

    def run(b: dict) -> None:
        prepare_pos_seq_lens(
            b["idx_mapping"],
            b["query_start_loc"],
            b["num_computed"],
            b["positions"],
            b["seq_lens"],
        )

    _same(launchers, seed, run)


@pytest.mark.parametrize("seed", [SEED, 7, 8])
@pytest.mark.parametrize("num_new", [0, 1])
def test_combine_sampled_and_draft_tokens(launchers, seed, num_new):
    """Catches drafts written over prompt tokens, or logits indexed one off."""
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens

    def run(b: dict) -> tuple:
        indices = combine_sampled_and_draft_tokens(
            b["input_ids"],
            b["idx_mapping"],
            b["last_sampled"],
            b["query_start_loc"],
            b["seq_lens"],
            b["prefill_len"],
            b["drafts"],
            b["cu_num_logits"],
            int(b["cu_num_logits"][-1]),
            num_new,
        )
        return (indices,)

    _same(launchers, seed, run)


@pytest.mark.parametrize("seed", [SEED, 7])
def test_counts_of_sampled_and_rejected(launchers, seed):
    """Catches a chunked prefill that counts as sampled."""
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping, get_num_sampled_and_rejected

    def run(b: dict) -> tuple:
        counts = get_num_sampled_and_rejected(
            b["num_sampled"],
            b["seq_lens"],
            b["cu_num_logits"],
            b["idx_mapping"],
            b["prefill_len"],
        )
        expanded = expand_idx_mapping(
            b["idx_mapping"], int(b["cu_num_logits"][-1]), b["cu_num_logits"], STEPS + 1
        )
        return (*counts, *expanded)

    _same(launchers, seed, run)


@pytest.mark.parametrize("seed", [SEED, 7])
@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("with_query", [False, True])
def test_post_update(launchers, seed, with_counts, with_query):
    """Catches tokens appended at the wrong place, a skipped row (-1) updated, lost counts."""
    from vllm.v1.worker.gpu.input_batch import post_update, post_update_num_computed_tokens

    def run(b: dict) -> None:
        b["idx_mapping"][2] = -1
        rejected = (b["num_sampled"] + 1).to(torch.int32)
        post_update(
            b["idx_mapping"],
            b["num_computed"],
            b["last_sampled"],
            b["counts"] if with_counts else None,
            b["sampled"],
            b["num_sampled"],
            rejected,
            b["query_start_loc"] if with_query else None,
            b["all_token_ids"],
            b["total_len"],
        )
        b["idx_mapping"][2] = 0
        post_update_num_computed_tokens(b["idx_mapping"], b["num_computed"], b["query_start_loc"])

    _same(launchers, seed, run)


def _block_tables(num_groups: int):
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = BlockTables(
        block_sizes=[4, 8][:num_groups],
        max_num_reqs=MAX_REQS,
        max_num_batched_tokens=32,
        max_num_blocks_per_group=[16, 8][:num_groups],
        device=torch.device("cpu"),
    )
    tables.init_block_table_layout_tensors()
    return tables


@pytest.mark.parametrize("num_groups", [1, 2])
def test_block_tables_and_slots(launchers, num_groups):
    """Catches raw addresses misread, a group mixed up, padding rows or slots left stale."""
    mapping = torch.tensor([5, 2, -1], dtype=torch.int32)
    query_start = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    positions = torch.tensor([9, 10, 11, 3, 0, 1])

    def run(_: object) -> list[torch.Tensor]:
        tables = _block_tables(num_groups)
        for table in tables.input_block_tables:
            table.fill_(77)
        for row, count in ((5, 6), (2, 3)):
            ids = tuple(list(range(10 * row + g, 10 * row + g + count)) for g in range(num_groups))
            tables.append_block_ids(row, ids, overwrite=True)
        tables.apply_staged_writes()
        gathered = tables.gather_block_tables(mapping[:2], 4)
        slots = tables.compute_slot_mappings(mapping, query_start, positions, 8)
        return [*gathered, slots, *(t.gpu for t in tables.block_tables)]

    ours, theirs = launchers.both(lambda: None, run)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert (ours[0][2:4] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_staged_writes(launchers, dtype):
    """Catches a write at the wrong row or offset, or the contents of its neighbour."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    def run(_: object) -> tuple[torch.Tensor, torch.Tensor]:
        wide = StagedWriteTensor((6, 10), dtype, torch.device("cpu"))
        wide.stage_write(4, 2, [1, 2, 3])
        wide.stage_write(0, 0, [9])
        wide.stage_write(5, 9, [7])
        wide.apply_write()
        narrow = StagedWriteTensor(6, dtype, torch.device("cpu"))
        narrow.stage_write_elem(3, 8)
        narrow.apply_write()
        return wide.gpu, narrow.gpu

    ours, theirs = launchers.both(lambda: None, run)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("seed", [SEED, 7])
def test_draft_model_inputs(launchers, seed):
    """Catches a correction token misplaced after rejected drafts, or padding left stale."""
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

    def run(b: dict) -> tuple:
        ids = torch.full((96,), -7, dtype=torch.int32)
        positions = torch.full((96,), -7)
        last = torch.full((MAX_REQS,), -7)
        starts = torch.full((MAX_REQS + 1,), -7, dtype=torch.int32)
        lens = torch.full((MAX_REQS,), -7, dtype=torch.int32)
        rejected = (b["cu_num_logits"].diff() - 1).to(torch.int32)
        speculator._prepare_prefill_inputs_kernel[(NUM_REQS,)](
            torch.arange(128, dtype=torch.int32),
            torch.arange(128) + 30,
            b["last_sampled"].int(),
            b["idx_mapping"],
            ids,
            positions,
            last,
            starts,
            lens,
            b["query_start_loc"],
            b["seq_lens"],
            rejected,
            MAX_REQS,
            40,
            BLOCK_SIZE=16,
        )
        return ids, positions, last, starts, lens

    _same(launchers, seed, run)


@pytest.mark.parametrize("seed", [SEED, 7])
@pytest.mark.parametrize("advance", [False, True])
def test_head_inputs(launchers, seed, advance):
    """Catches an EAGLE or MTP step fed the wrong token, position, length or hidden state."""
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    def run(b: dict) -> tuple:
        last = torch.full((MAX_REQS,), -7)
        step = torch.tensor([4])
        ids = torch.full((64,), -7, dtype=torch.int32)
        positions = torch.full((64,), 38)
        starts = torch.full((MAX_REQS + 1,), -7, dtype=torch.int32)
        lens = torch.full((MAX_REQS,), -7, dtype=torch.int32)
        rejected = (b["cu_num_logits"].diff() - 1).to(torch.int32)
        speculator._prepare_prefill_inputs_kernel[(NUM_REQS,)](
            last,
            step,
            ids,
            positions,
            starts,
            lens,
            torch.arange(64, dtype=torch.int32) + 500,
            torch.arange(64) + 10,
            b["idx_mapping"],
            b["last_sampled"],
            torch.arange(MAX_REQS, dtype=torch.int32) + 900,
            b["num_sampled"],
            rejected,
            b["query_start_loc"],
            b["seq_lens"],
            MAX_REQS,
            BLOCK_SIZE=8,
        )
        first = [t.clone() for t in (last, step, ids, positions, starts, lens)]
        key = torch.arange(MAX_REQS)
        buffers = type("Buffers", (), {})()
        buffers.input_ids, buffers.positions = ids, positions
        buffers.query_start_loc, buffers.seq_lens = starts, lens
        speculator.prepare_decode_inputs(
            b["drafts"][:NUM_REQS], b["seq_lens"], rejected, buffers, key, 40, MAX_REQS, advance
        )
        second = [t.clone() for t in (ids, positions, starts, lens, key)]
        hidden = torch.randn(NUM_REQS, 6, generator=torch.Generator().manual_seed(seed))
        out, next_hidden = torch.zeros(MAX_REQS, 3).long(), torch.zeros(MAX_REQS, 6)
        for at in (0, 1, 2):
            speculator.update_draft_inputs(
                b["drafts"][:NUM_REQS, at].contiguous(),
                torch.tensor([at]),
                hidden + at,
                out,
                next_hidden,
                buffers,
                key,
                NUM_REQS,
                40,
                3,
                advance,
            )
        return (*first, *second, ids, positions, lens, key, out, next_hidden)

    _same(launchers, seed, run)


@pytest.mark.parametrize("seed", [SEED, 7])
def test_ngram_lookup(launchers, seed):
    """Catches a shorter or an earlier match preferred, and drafts read past the text."""
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator

    gen = np.random.default_rng(seed)
    tokens = _ints(gen, 0, 3, (MAX_REQS, MAX_LEN))
    lengths = torch.tensor([64, 1, 40, 12, 5, 33, 2, 20], dtype=torch.int32)
    mapping = torch.from_numpy(gen.permutation(MAX_REQS).astype(np.int32))
    sampled = torch.tensor([1, 1, 0, 2, 1, 1, 1, 1], dtype=torch.int32)
    last = torch.arange(MAX_REQS) + 70

    def run(_: object) -> tuple[torch.Tensor, torch.Tensor]:
        scratch, drafts = torch.zeros(MAX_REQS, 4).long(), torch.zeros(MAX_REQS, 3).long()
        speculator._ngram_scan_kernel[(MAX_REQS, 4)](
            tokens, MAX_LEN, mapping, lengths, sampled, scratch, 4, MAX_LEN, 2, 4, 4, 16
        )
        speculator._ngram_finalize_kernel[(MAX_REQS,)](
            tokens,
            MAX_LEN,
            mapping,
            lengths,
            sampled,
            last,
            scratch,
            4,
            drafts,
            MAX_LEN,
            4,
            3,
            4,
            4,
        )
        return scratch, drafts

    ours, theirs = launchers.both(lambda: None, run)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
