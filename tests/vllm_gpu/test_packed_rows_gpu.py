"""The GPU backends' packed rows, in Triton's interpreter where there is no GPU.

The judge is vLLM's own Triton backend: it writes the cache, and one row at a time it decodes what
the packed call attends at once.
"""

from __future__ import annotations

import inspect
import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as writer

from speculators_ext.engines.vllm.attention import packed_rows_gpu
from speculators_ext.engines.vllm.attention.packed_rows import PackedRows, can_pack_rows
from speculators_ext.engines.vllm.attention.packed_rows_flash import PackedRowsFlashBackend
from speculators_ext.engines.vllm.attention.packed_rows_triton import PackedRowsTritonBackend
from speculators_ext.engines.vllm.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 6, 2, 64, 16
PREFIX_LENS, WIDTH = (37, 0, 16), 3
# Two float32 softmaxes that add in another order; on a GPU vLLM's products are TF32.
TOLERANCE = 1e-5 if DEVICE == "cpu" else 1e-2


@pytest.fixture(autouse=True)
def _capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's writer asks for it, to choose a tile, and whether the GPU has fp8: sm_90 it is."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(writer, "_is_supported_kv_cache_dtype", lambda dtype: True)


def make_layer(**scales: float) -> SimpleNamespace:
    names = ("_q_scale", "_k_scale", "_v_scale")
    return SimpleNamespace(
        **{name: torch.tensor(scales.get(name, 1.0), device=DEVICE) for name in names}
    )


def make_impl(
    cache_dtype: str = "auto", backend: Any = PackedRowsTritonBackend, **options: Any
) -> Any:
    impl_cls = backend.get_impl_cls()
    window, cap = options.pop("window", None), options.pop("soft_cap", None)
    return impl_cls(
        NUM_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, NUM_KV_HEADS, options.pop("alibi", None),
        window, cache_dtype, cap, **options,
    )  # fmt: skip


def make_cache(order: str, dtype: torch.dtype) -> torch.Tensor:
    """[blocks, heads, block_size, 2 * head_size] as vLLM shapes it, heads or slots outside."""
    shape = (4 * len(PREFIX_LENS) + 1, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    cache = torch.zeros(shape, dtype=dtype, device=DEVICE)
    return cache if order == "HND" else cache.transpose(1, 2).contiguous().transpose(1, 2)


class Batch:
    """Requests with prefixes in the cache and WIDTH rows each."""

    def __init__(self, impl: Any, layer: Any, cache: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.impl, self.layer, self.cache = impl, layer, cache
        most = cache.shape[0] // len(PREFIX_LENS)
        order = torch.randperm(most * len(PREFIX_LENS)) + 1
        self.table = order.view(len(PREFIX_LENS), most).to(torch.int32)
        for request, length in enumerate(PREFIX_LENS):
            if length:
                self.write(request, torch.arange(length), *self.random(length, 2))
        rows = len(PREFIX_LENS) * WIDTH
        self.query = torch.randn(rows, NUM_HEADS, HEAD_SIZE, device=DEVICE)
        self.key, self.value = self.random(rows, 2)

    def random(self, count: int, number: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(number, count, NUM_KV_HEADS, HEAD_SIZE, device=DEVICE).unbind()

    def write(
        self, request: int, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        blocks = self.table[request, positions // BLOCK_SIZE].long()
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(DEVICE)
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)

    def packed(self) -> torch.Tensor:
        positions = torch.tensor(PREFIX_LENS, device=DEVICE)
        rows = PackedRows(self.table.to(DEVICE), list(PREFIX_LENS), positions)
        return self.forward(self.query, self.key, self.value, rows)

    def one_by_one(self) -> torch.Tensor:
        """vLLM's own decode of each row, its key and value written to the cache for it."""
        out = torch.empty_like(self.query)
        for row in range(self.query.shape[0]):
            own = slice(row, row + 1)
            request = row // WIDTH
            position = PREFIX_LENS[request]
            key, value = self.key[own], self.value[own]
            self.write(request, torch.tensor([position]), key, value)
            metadata = decode_metadata(self.table[request : request + 1], position + 1)
            out[own] = self.forward(self.query[own], key, value, metadata)
        return out

    def forward(self, query: Any, key: Any, value: Any, metadata: Any) -> torch.Tensor:
        out = torch.full_like(query, math.nan)
        return self.impl.forward(self.layer, query, key, value, self.cache, metadata, out)


def decode_metadata(table: torch.Tensor, length: int) -> triton_attn.TritonAttentionMetadata:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    unused = torch.empty(0, device=DEVICE)
    return triton_attn.TritonAttentionMetadata(
        num_actual_tokens=1,
        max_query_len=1,
        query_start_loc=ints(0, 1),
        max_seq_len=length,
        seq_lens=ints(length),
        block_table=table.to(DEVICE),
        slot_mapping=unused,
        seq_threshold_3D=0,
        num_par_softmax_segments=16,
        softmax_segm_output=unused,
        softmax_segm_max=unused,
        softmax_segm_expsum=unused,
        causal=True,
    )


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 20}, {"soft_cap": 5.0}], ids=["plain", "window", "soft cap"]
)
def test_packed_rows_equal_vllm_decoding_each_alone(order: str, options: dict[str, Any]) -> None:
    """Catches keys taken for values, swapped strides, a window one off, a scale or cap dropped."""
    batch = Batch(make_impl(**options), make_layer(), make_cache(order, torch.float32))
    before = batch.cache.clone()
    packed = batch.packed()
    assert torch.equal(batch.cache, before)
    torch.testing.assert_close(packed, batch.one_by_one(), atol=TOLERANCE, rtol=TOLERANCE)


def test_packed_rows_on_an_fp8_cache() -> None:
    """Catches a cache read as bytes, and a scale dropped or applied to the rows' own keys."""
    dtype = current_platform.fp8_dtype()
    layer = make_layer(_k_scale=0.5, _v_scale=0.25)
    batch = Batch(make_impl("fp8"), layer, make_cache("HND", dtype))
    # vLLM decodes from the cache, so its own keys are rounded too: round ours alike beforehand.
    batch.key = (batch.key / 0.5).to(dtype).float() * 0.5
    batch.value = (batch.value / 0.25).to(dtype).float() * 0.25
    torch.testing.assert_close(batch.packed(), batch.one_by_one(), atol=TOLERANCE, rtol=TOLERANCE)


def test_flash_attention_views_its_cache_alike() -> None:
    """Catches a vLLM whose FlashAttention lays the cache out otherwise: its writer needs a GPU."""
    for method in (FlashAttentionImpl.forward, FlashAttentionImpl.do_kv_cache_update):
        source = inspect.getsource(method)
        assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in source
    cache = torch.arange(2 * 3 * 4 * 10).view(2, 3, 4, 10)
    key, value = packed_rows_gpu.key_value_views(cache, 5)
    assert key.shape == value.shape == (2, 4, 3, 5)
    assert torch.equal(key[1, 3, 2], cache[1, 2, 3, :5])
    assert torch.equal(value[1, 3, 2], cache[1, 2, 3, 5:])


@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=["plain", "window"])
def test_both_backends_pack_alike(options: dict[str, Any]) -> None:
    """Catches FlashAttention attributes (window, scale) that mean another thing than Triton's."""
    triton = make_impl(**options)
    batch = Batch(triton, make_layer(), make_cache("HND", torch.float32))
    expected = batch.packed()
    batch.impl = make_impl(backend=PackedRowsFlashBackend, **options)
    assert torch.equal(batch.packed(), expected)


def test_positions_are_needed() -> None:
    """Catches a search that leaves out the device's copy: a read-back would stall every layer."""
    batch = Batch(make_impl(), make_layer(), make_cache("HND", torch.float32))
    rows = PackedRows(batch.table, list(PREFIX_LENS))
    with pytest.raises(ValueError, match="positions"):
        batch.forward(batch.query, batch.key, batch.value, rows)


REFUSED = {
    "alibi": {"alibi": [0.5] * NUM_HEADS},
    "sinks": {"sinks": torch.zeros(NUM_HEADS)},
    "KV of another layer": {"kv_sharing_target_layer_name": "layers.0"},
    "encoder": {"attn_type": AttentionType.ENCODER_ONLY},
    "chunked": {"chunk_lookback": 1},
    "a scale for each token and head": {"cache_dtype": "int8_per_token_head"},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_a_layer_that_packed_rows_would_get_wrong(options: dict[str, Any]) -> None:
    """Catches a search misled by attention that lacks a term: the even set must serve instead."""
    layer = make_layer()
    layers = {"plain": layer, "special": make_layer()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    layers["plain"].impl, layers["special"].impl = make_impl(), make_impl(**options)
    assert can_pack_rows(config, {"plain"})
    assert not can_pack_rows(config, {"plain", "special"})


def test_a_scale_for_each_head_is_refused() -> None:
    """Catches an fp8 checkpoint with per-head scales: the kernel takes one for the tensor."""
    layer = make_layer()
    assert make_impl("fp8").packs_rows(layer)
    layer._k_scale = torch.ones(NUM_KV_HEADS)
    assert not make_impl("fp8").packs_rows(layer)


@pytest.fixture
def entries() -> Iterator[list[AttentionBackendEnum]]:
    """The two entries, vLLM's again afterwards."""
    both = [AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN]
    yield both
    for entry in both:
        entry.clear_override()


def test_vllm_builds_our_backends_by_its_own_names(entries: list[AttentionBackendEnum]) -> None:
    """Catches a path that does not resolve, or a name vLLM's own checks would not know."""
    stock = [entry.get_class() for entry in entries]
    packed_rows_gpu.use_packed_rows_backend_gpu()
    ours = [entry.get_class() for entry in entries]
    assert ours == [PackedRowsFlashBackend, PackedRowsTritonBackend]
    for entry, own, theirs in zip(entries, ours, stock, strict=True):
        assert own.get_name() == entry.name
        assert issubclass(own, theirs)
        assert issubclass(own.get_impl_cls(), theirs.get_impl_cls())


def test_a_backend_that_cannot_be_replaced_stays(
    entries: list[AttentionBackendEnum],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches an engine that dies for want of a search, and one backend's trouble spreading."""
    flash, triton = packed_rows_gpu._BACKENDS
    broken = flash._replace(impl="NoSuchImpl")
    monkeypatch.setattr(packed_rows_gpu, "_BACKENDS", (broken, triton))
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    packed_rows_gpu.use_packed_rows_backend_gpu()
    logger.removeHandler(caplog.handler)
    assert [entry.is_overridden() for entry in entries] == [False, True]
    assert len(caplog.records) == 1
    assert "NoSuchImpl.forward is missing" in caplog.text
