"""What launchers of tree attention ask of their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from speculators_ext.kernels.checks import check_placement, require

if TYPE_CHECKING:
    from speculators_ext.kernels.packed_attention_ref import DequantScales
    from speculators_ext.kernels.tree_attention_mla_ref import LocalLatents
    from speculators_ext.kernels.tree_attention_ref import LocalRows, TreeBatch

__all__ = [
    "check_cache",
    "check_latents",
    "check_local",
    "check_outputs",
    "check_rows",
    "check_trees",
]

_ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
_MIN_HEAD_SIZE, _MAX_HEAD_SIZE = 32, 256
_MIN_LATENT = 16


def check_rows(
    query: torch.Tensor, key_cache: torch.Tensor, local: LocalRows | None
) -> torch.dtype:
    """Shapes of the query and the local rows; the rows' dtype, the first given that is not fp8."""
    require(query.dim() == 3, "dims of query", 3, query.dim())
    require(key_cache.dim() == 4, "dims of key_cache", 4, key_cache.dim())
    num_heads, head_size = query.shape[1:]
    low, high = _MIN_HEAD_SIZE, _MAX_HEAD_SIZE
    require(low <= head_size <= high, "head_size", f"{low} to {high}", head_size)
    num_kv_heads = key_cache.shape[2]
    grouped = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    require(grouped, "query heads", f"a multiple of {num_kv_heads} KV heads", num_heads)
    given = [query.dtype, key_cache.dtype]
    if local is not None:
        expected = (local.key.shape[0], num_kv_heads, head_size)
        for name, part in (("local key", local.key), ("local value", local.value)):
            require(part.shape == expected, f"{name} shape", expected, tuple(part.shape))
            require(part.dtype in _ROW_DTYPES, f"{name} dtype", _ROW_DTYPES, part.dtype)
        require(local.key.dtype == local.value.dtype, "local dtypes", "one", "two")
        check_placement({"local key": local.key, "local value": local.value}, query.device)
        given.insert(0, local.key.dtype)
    return _check_dtypes(given, query, "key_cache", key_cache)


def _check_dtypes(
    given: list[torch.dtype], query: torch.Tensor, name: str, cache: torch.Tensor
) -> torch.dtype:
    """The rows' dtype, which query and cache have where they are not fp8."""
    rows = next((dtype for dtype in given if dtype not in _FP8_DTYPES), torch.bfloat16)
    require(rows in _ROW_DTYPES, "rows' dtype", _ROW_DTYPES, rows)
    if query.device.type == "cpu":
        # Triton's interpreter gets bfloat16 wrong.
        require(rows != torch.bfloat16, "rows' dtype on a CPU", _ROW_DTYPES[:2], rows)
    readable = (rows, *_FP8_DTYPES)
    require(query.dtype in readable, "query dtype", readable, query.dtype)
    require(cache.dtype in readable, f"{name} dtype", readable, cache.dtype)
    return rows


def check_latents(
    query: torch.Tensor,
    cache: torch.Tensor,
    latent: int,
    trees: TreeBatch,
    local: LocalLatents | None,
) -> torch.dtype:
    """Shapes of latents, in the cache and outside, and of their query; the rows' dtype."""
    require(query.dim() == cache.dim() == 3, "dims of query, cache", 3, (query.dim(), cache.dim()))
    width = query.shape[2]
    require(cache.shape[2] == width, "width of cache", width, cache.shape[2])
    for name, part in (("latent", latent), ("rotated key", width - latent)):
        fits = part >= _MIN_LATENT and part & (part - 1) == 0
        require(fits, f"numbers of the {name}", f"a power of two from {_MIN_LATENT} on", part)
    check_placement({"cache": cache}, query.device)
    given = [query.dtype, cache.dtype]
    if local is None:
        check_words(trees)
    else:
        rows = local.rows
        require(rows.dim() == 2, "dims of local rows", 2, rows.dim())
        require(rows.shape[1] == width, "width of local rows", width, rows.shape[1])
        require(rows.dtype in _ROW_DTYPES, "local rows dtype", _ROW_DTYPES, rows.dtype)
        check_offsets(trees, local.cu_rows)
        check_placement({"local rows": rows}, query.device)
        given.insert(0, rows.dtype)
    return _check_dtypes(given, query, "cache", cache)


def check_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Shapes and dtypes of the caches and the outputs."""
    head_size, got = query.shape[2], key_cache.shape[3]
    require(got == head_size, "head_size of key_cache", head_size, got)
    shape, got_shape = tuple(key_cache.shape), tuple(value_cache.shape)
    require(got_shape == shape, "value_cache shape", shape, got_shape)
    dtype = key_cache.dtype
    require(value_cache.dtype == dtype, "value_cache dtype", dtype, value_cache.dtype)
    check_outputs(query, out, lse, head_size)
    check_placement({"key_cache": key_cache, "value_cache": value_cache}, query.device)


def check_outputs(
    query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, head_size: int
) -> None:
    """Shapes and dtypes of the outputs, and where they and the query are."""
    expected = (*query.shape[:2], head_size)
    require(out.shape == expected, "out shape", expected, tuple(out.shape))
    require(out.dtype in _ROW_DTYPES, "out dtype", _ROW_DTYPES, out.dtype)
    if lse is not None:
        require(lse.shape == expected[:2], "lse shape", expected[:2], tuple(lse.shape))
        require(lse.dtype == torch.float32, "lse dtype", torch.float32, lse.dtype)
    check_placement({"query": query, "out": out, "lse": lse}, query.device)


def check_trees(query: torch.Tensor, trees: TreeBatch, dequant: DequantScales) -> None:
    """Shapes, dtypes and places of what is given per request and per row."""
    prefix_lens, block_table, words = trees.prefix_lens, trees.block_table, trees.mask_words
    require(prefix_lens.dim() == 1, "dims of prefix_lens", 1, prefix_lens.dim())
    integers = (torch.int32, torch.int64)
    require(prefix_lens.dtype in integers, "prefix_lens dtype", integers, prefix_lens.dtype)
    num_reqs, num_rows = prefix_lens.shape[0], query.shape[0]
    require(block_table.dim() == 2, "dims of block_table", 2, block_table.dim())
    require(block_table.shape[0] == num_reqs, "block_table rows", num_reqs, block_table.shape[0])
    offsets = tuple(trees.cu_nodes.shape)
    require(offsets == (num_reqs + 1,), "cu_nodes", num_reqs + 1, offsets)
    require(words.dim() == 2, "dims of mask_words", 2, words.dim())
    require(words.shape[0] == num_rows, "mask_words rows", num_rows, words.shape[0])
    require(trees.max_nodes > 0, "max_nodes", "at least 1", trees.max_nodes)
    given = {"block_table": block_table, "cu_nodes": trees.cu_nodes, "mask_words": words}
    for name, tensor in given.items():
        _check_int32(name, tensor)
    factors = {f"{name} scale": factor for name, factor in dequant._asdict().items()}
    for name, factor in factors.items():
        if factor is not None:
            expected, got = (1, torch.float32), (factor.numel(), factor.dtype)
            require(got == expected, f"{name} elements and dtype", expected, got)
    check_placement({**given, "prefix_lens": prefix_lens, **factors}, query.device)


def check_words(trees: TreeBatch) -> None:
    """Words enough for trees whose rows are the queries'."""
    words, got = -(-trees.max_nodes // 32), trees.mask_words.shape[1]
    require(got >= words, f"mask words for {trees.max_nodes} rows", f"at least {words}", got)


def check_offsets(trees: TreeBatch, cu_rows: torch.Tensor) -> None:
    """Offsets of tree rows outside the cache."""
    shape = tuple(trees.cu_nodes.shape)
    require(cu_rows.shape == shape, "local cu_rows", shape, tuple(cu_rows.shape))
    _check_int32("local cu_rows", cu_rows)
    check_placement({"local cu_rows": cu_rows}, trees.cu_nodes.device)


def check_local(
    query: torch.Tensor, trees: TreeBatch, sliding_window: int, local: LocalRows | None
) -> None:
    """Words enough for the rows of a tree, offsets of local rows, and depths where they count."""
    if local is None:
        check_words(trees)
    else:
        check_offsets(trees, local.cu_rows)
    if sliding_window > 0:
        _check_depths("depths", trees.depths, query.shape[0], query.device)
        if local is not None:
            _check_depths("local depths", local.depths, local.key.shape[0], query.device)


def _check_depths(
    name: str, depths: torch.Tensor | None, length: int, device: torch.device
) -> None:
    if depths is None:
        raise ValueError(f"{name}: a sliding window needs them, int32 [{length}]; got none")
    require(depths.shape == (length,), f"{name} shape", (length,), tuple(depths.shape))
    _check_int32(name, depths)
    check_placement({name: depths}, device)


def _check_int32(name: str, tensor: torch.Tensor) -> None:
    require(tensor.dtype == torch.int32, f"{name} dtype", torch.int32, tensor.dtype)
