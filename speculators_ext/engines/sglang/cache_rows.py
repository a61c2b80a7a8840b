"""How wide a request's row is in SGLang's table of cache slots."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from speculators_ext.engines.sglang.algorithm import is_ours

__all__ = ["get_req_to_token_extra_context_len"]


def get_req_to_token_extra_context_len(extra: int) -> int | None:
    """After SGLang's function of that name: the columns of a row beyond the context.

    SGLang reserves slots behind a request's last token, up to the context's end too, and twice as
    many as it has columns there: long drafts would be written outside of the row. Its own methods
    keep requests away from the end of the context instead.

    Args:
        extra: SGLang's answer.
    """
    if not is_ours(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)):
        return None
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)
