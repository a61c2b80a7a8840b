"""What a worker knows of its requests beyond SGLang's batch: options, newest tokens, room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.sglang.log import logger
from speculators_ext.request_options import RequestOptions, read_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["KnownRequests"]


class KnownRequests:
    """Per request: its options, and its newest tokens.

    Under overlap scheduling a request's ``output_ids`` lag a round, so the worker keeps its own.

    Args:
        tail: how many of the newest tokens to keep, the bonus token included.
        least_threshold: of a lossy method, the least that a request may set; None of a lossless.
    """

    def __init__(self, tail: int, least_threshold: float | None = None) -> None:
        self._tail, self._least_threshold = tail, least_threshold
        self._tokens: dict[str, list[int]] = {}
        self._options: dict[str, RequestOptions] = {}

    def start(self, req: Any, token: int) -> None:
        """A prompt (or a part of it) has been run, and ``token`` was sampled behind it."""
        known = [*req.origin_input_ids, *req.output_ids][-self._tail :]
        self._tokens[req.rid] = [*known, token][-self._tail :]

    def extend(self, rid: str, tokens: Sequence[int]) -> None:
        """A verification has accepted ``tokens``."""
        self._tokens[rid] = [*self._tokens.get(rid, ()), *tokens][-self._tail :]

    def newest(self, rid: str, count: int) -> list[int]:
        """The newest ``count`` tokens or fewer, oldest first, the bonus token last."""
        return self._tokens.get(rid, [])[-count:]

    def forget_absent(self, is_present: Callable[[str], bool]) -> None:
        """Drop what is known of requests that ended, were aborted or were retracted."""
        for rid in [rid for rid in self._tokens if not is_present(rid)]:
            self._tokens.pop(rid)
            self._options.pop(rid, None)

    def limit(self, req: Any, length: int, most: int, last: int) -> int:
        """The most drafts this request can use now.

        Args:
            req: SGLang's request.
            length: its tokens with KV; the bonus token follows them.
            most: drafts a round may hold.
            last: greatest position the model has.
        """
        params = req.sampling_params
        if _needs_each_token_counted(params):
            return 0
        produced = length + 1 - len(req.origin_input_ids)
        # Each round gives one token for free, so drafts past the last one would be thrown away.
        room = min(params.max_new_tokens - produced - 1, last - length)
        return max(0, min(self.wanted(req, most), room))

    def wanted(self, req: Any, most: int) -> int:
        """How many of ``most`` drafts a round the request itself asks for."""
        return self.options_of(req).limit(most)

    def options_of(self, req: Any) -> RequestOptions:
        """What the request itself asks for."""
        if req.rid not in self._options:
            given = req.sampling_params.custom_params
            options, warning = read_options(given, "custom_params", self._least_threshold)
            if warning is not None:
                logger.warning(warning)
            self._options[req.rid] = options
        return self._options[req.rid]


def _needs_each_token_counted(params: Any) -> bool:
    """Whether a token's law depends on the tokens just before it, which SGLang counts by round."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )
