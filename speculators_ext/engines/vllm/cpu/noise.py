"""vLLM's random numbers on a CPU, bit for bit, and the Gumbel-max draw made of them.

Sources: `vllm/v1/worker/gpu/sample/gumbel.py` (MurmurHash3 over seed, position and token) and
`triton/language/random.py` (Philox-4x32-10). Integer hashing runs in Numba. Logarithms are left
to numpy, which is what Triton's interpreter calls: a compiled logf differs in the last bit,
and a last bit can change a token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import inline, jit

# `_DRAFT_NOISE_SALT` of gumbel.py: drafts and their verification draw from disjoint streams.
DRAFT_SALT = 1 << 30
# `_TL_RAND_MIN` of gumbel.py, the smallest positive value of `tl.rand`.
RAND_MIN = np.float32(4.6566127342e-10)
# A row with at most this share of finite logits is compacted before noise is drawn.
_SPARSE = 4


@inline
def _mix(h: Any, key: Any) -> Any:
    key = np.uint32(key * np.uint32(0xCC9E2D51))
    key = np.uint32(np.uint32(key << np.uint32(15)) | np.uint32(key >> np.uint32(17)))
    key = np.uint32(key * np.uint32(0x1B873593))
    h = np.uint32(h ^ key)
    h = np.uint32(np.uint32(h << np.uint32(13)) | np.uint32(h >> np.uint32(19)))
    return np.uint32(np.uint32(h * np.uint32(5)) + np.uint32(0xE6546B64))


@inline
def _finish(h: Any) -> Any:
    h = np.uint32(h ^ np.uint32(16))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@inline
def _prefix(seed: int, pos: int, domain: int) -> Any:
    """Hash the part of the key that all tokens of a row share."""
    h = np.uint32(domain)
    h = _mix(h, np.uint32(seed & 0xFFFFFFFF))
    h = _mix(h, np.uint32((seed >> 32) & 0xFFFFFFFF))
    return _mix(h, np.uint32(pos & 0xFFFFFFFF))


@inline
def _uniform32(head: Any, token: Any) -> Any:
    bits = _finish(_mix(head, np.uint32(token)))
    high = np.float32(np.int32(bits >> np.uint32(16))) * np.float32(1.52587890625e-05)
    low = np.float32(np.int32(bits & np.uint32(0xFFFF))) + np.float32(0.5)
    return high + low * np.float32(2.3283064365386963e-10)


@inline
def _direct_input(u: Any) -> Any:
    rest = np.float32(1.0) - u
    floor = np.float32(5.960464477539063e-08)
    return rest if rest > floor else floor


@jit
def _uniforms32(seed: int, pos: int, uniform: np.ndarray, direct: np.ndarray) -> None:
    """Fill u of every token id from 0, and what `_log1p_neg_stable(u)` takes the log of."""
    head = _prefix(seed, pos, 0)
    for token in range(uniform.shape[0]):
        u = _uniform32(head, token)
        uniform[token] = u
        direct[token] = _direct_input(u)


@jit
def _uniforms32_of(
    seed: int, pos: int, tokens: np.ndarray, uniform: np.ndarray, direct: np.ndarray
) -> None:
    """Do the same for chosen token ids."""
    head = _prefix(seed, pos, 0)
    for i in range(tokens.shape[0]):
        u = _uniform32(head, tokens[i])
        uniform[i] = u
        direct[i] = _direct_input(u)


@jit
def _neg_log1p(uniform: np.ndarray, logs: np.ndarray) -> None:
    """Turn log(1 - u) in `logs` into -log1p(-u), by the series where u is small."""
    for i in range(uniform.shape[0]):
        u = uniform[i]
        poly = np.float32(1.0 / 8.0)
        poly = np.float32(1.0 / 7.0) + u * poly
        poly = np.float32(1.0 / 6.0) + u * poly
        poly = np.float32(1.0 / 5.0) + u * poly
        poly = np.float32(1.0 / 4.0) + u * poly
        poly = np.float32(1.0 / 3.0) + u * poly
        poly = np.float32(1.0 / 2.0) + u * poly
        poly = np.float32(1.0) + u * poly
        logs[i] = u * poly if u < np.float32(0.25) else -logs[i]


@jit
def _uniforms64(seed: int, pos: int, tokens: np.ndarray, out: np.ndarray) -> None:
    low_head = _prefix(seed, pos, 0)
    high_head = _prefix(seed, pos, 0x9E3779B9)
    for i in range(tokens.shape[0]):
        token = np.uint32(tokens[i])
        low = np.uint64(_finish(_mix(low_head, token)))
        high = np.uint64(_finish(_mix(high_head, token)))
        bits = ((high << np.uint64(32)) | low) >> np.uint64(11)
        u = (np.float64(bits) + 0.5) * 1.1102230246251565e-16
        out[i] = u - 1.1102230246251565e-16 if u == 1.0 else u


@cache
def scratch(name: str, size: int) -> np.ndarray:
    """Return a float32 buffer kept for reuse: fresh memory of this size costs more than the maths.

    One worker thread samples, so a name stands for one use at a time.
    """
    return np.empty(size, np.float32)


def _negated_noise32(seed: int, pos: int, tokens: np.ndarray | None, size: int) -> np.ndarray:
    """Return log(-log(u)) by token: the Gumbel noise, negated, in a reused buffer."""
    uniform, logs = scratch("uniform", size), scratch("logs", size)
    if tokens is None:
        _uniforms32(seed, pos, uniform, logs)
    else:
        _uniforms32_of(seed, pos, tokens, uniform, logs)
    np.log(logs, out=logs)
    _neg_log1p(uniform, logs)
    return np.log(logs, out=logs)


def _negated_noise64(seed: int, pos: int, tokens: np.ndarray | None, size: int) -> np.ndarray:
    uniform = np.empty(size, np.float64)
    _uniforms64(seed, pos, np.arange(size) if tokens is None else tokens, uniform)
    return np.log(-np.log(uniform))


def best_token(row: np.ndarray) -> int:
    """Return the leftmost largest entry of a row, NaN counting as the smallest."""
    token = int(row.argmax())
    if np.isnan(row[token]):
        token = int(np.where(np.isnan(row), -np.inf, row).argmax())
    return token


def gumbel_argmax(
    row: np.ndarray, seed: int, pos: int, temperature: np.floating[Any], *, fp64: bool
) -> tuple[int, float]:
    """Draw a token from softmax(row), or take the best at temperature 0.

    Args:
        row: [V] float32 logits, temperature already applied.
        seed: the request's seed.
        pos: place of the draw in the request's stream.
        temperature: only compared with 0 here.
        fp64: add the noise in double precision.

    Returns:
        (token id, its perturbed logit).
    """
    if temperature == 0.0:
        token = best_token(row)
        return token, float(row[token])
    tokens, values = None, row
    # After top-k or top-p most of a row is -inf, which no noise can lift.
    if np.count_nonzero(row == -np.inf) > row.size - row.size // _SPARSE:
        tokens = np.flatnonzero(row > -np.inf)
        if tokens.size == 0:
            return 0, -np.inf
        values = row[tokens]
    draw = _negated_noise64 if fp64 else _negated_noise32
    noise = draw(seed, pos, tokens, values.size)
    noisy = np.subtract(values, noise, out=noise)
    best = best_token(noisy)
    return best if tokens is None else int(tokens[best]), float(noisy[best])


@inline
def _philox_uniform(seed: int, offset: int) -> Any:
    """Repeat `tl.rand(seed, offset)` for a 64-bit offset."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    k0 = np.uint64(seed) & mask
    k1 = np.uint64(seed) >> shift
    c0 = np.uint64(offset) & mask
    c1 = np.uint64(offset) >> shift
    c2 = np.uint64(0)
    c3 = np.uint64(0)
    for _ in range(10):
        product_b = c2 * np.uint64(0xCD9E8D57)
        product_a = c0 * np.uint64(0xD2511F53)
        c0 = (product_b >> shift) ^ c1 ^ k0
        c2 = (product_a >> shift) ^ c3 ^ k1
        c1 = product_b & mask
        c3 = product_a & mask
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    signed = np.int32(np.uint32(c0))
    if signed < 0:
        signed = np.int32(-signed - 1)
    return np.float32(signed) * np.float32(4.6566127342e-10)


@jit
def philox_uniforms(seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return `tl_rand32(seed, offset, includes_zero=False)` for paired int64 arrays, float32."""
    out = np.empty(offsets.shape[0], np.float32)
    for i in range(offsets.shape[0]):
        out[i] = max(_philox_uniform(seeds[i], offsets[i]), RAND_MIN)
    return out
