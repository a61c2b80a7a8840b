"""Drives an OpenAI-compatible server over HTTP: greedy, a fixed number of requests at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import FAILED, CliError, ServerFailure, need
from speculators_ext.cli.metrics import SpecCounters, parse_metrics, sglang_counters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculators_ext.cli.prompts import Prompt

REQUEST_TIMEOUT_S = 1800.0
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt: the text, its length in tokens, and what was drafted for it.

    vLLM tells the last of all requests together, see `Driver.counters`.
    """

    text: str
    tokens: int
    counters: SpecCounters | None = None


def served_model(url: str) -> str:
    """The name a server serves its model under (--served-model-name may have changed it)."""
    page = need("httpx", "bench").get(f"{url}/v1/models", timeout=30.0, trust_env=False)
    page.raise_for_status()
    return str(page.json()["data"][0]["id"])


@dataclass(frozen=True)
class Driver:
    """How requests are sent to one server.

    Attributes:
        url: the server, without a slash at the end.
        model: the name the server serves the model under.
        max_tokens: most tokens an answer may have.
        chat: apply the model's chat template, or send the text as it is.
        engine: whose server it is.
    """

    url: str
    model: str
    max_tokens: int
    chat: bool = True
    engine: str = "vllm"

    def run(
        self,
        prompts: Sequence[Prompt],
        concurrency: int,
        done: Callable[[Answer], None] | None = None,
    ) -> tuple[list[Answer], float]:
        """Send every prompt, `concurrency` at a time; answers in the prompts' order, and seconds.

        Raises:
            CliError: the server refused a request or went away.
        """
        return asyncio.run(self._run(prompts, concurrency, done))

    def counters_since(self, before: SpecCounters, answers: Sequence[Answer]) -> SpecCounters:
        """What was drafted for `answers`, which are all that was asked since `before`."""
        counted = self.counters() - before
        return sum((answer.counters or SpecCounters() for answer in answers), counted)

    def counters(self) -> SpecCounters:
        """Read the counters that the server shows now: vLLM's of drafts, and ours on any engine."""
        httpx = need("httpx", "bench")
        page = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False)
        page.raise_for_status()
        return parse_metrics(page.text)

    def for_model(self, probe: Prompt) -> Driver:
        """This driver, or one without chat where the model has no chat template."""
        try:
            replace(self, max_tokens=1).run([probe], 1)
        except CliError as error:
            if self.chat and "chat template" in str(error):
                return replace(self, chat=False)
            raise
        return self

    async def _run(
        self, prompts: Sequence[Prompt], concurrency: int, done: Callable[[Answer], None] | None
    ) -> tuple[list[Answer], float]:
        httpx = need("httpx", "bench")
        answers: list[Answer | None] = [None] * len(prompts)
        waiting = iter(enumerate(prompts))
        limits = httpx.Limits(max_connections=concurrency)

        async def work(client: Any) -> None:
            for at, prompt in waiting:
                answers[at] = answer = await self._ask(client, prompt)
                if done is not None:
                    done(answer)

        async with httpx.AsyncClient(
            base_url=self.url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False
        ) as client:
            started = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work(client))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            seconds = time.perf_counter() - started
        return [answer for answer in answers if answer is not None], seconds

    async def _ask(self, client: Any, prompt: Prompt) -> Answer:
        httpx = need("httpx", "bench")
        body: dict[str, Any] = {"model": self.model, "temperature": 0}
        body["max_tokens"] = self.max_tokens
        if self.engine == "sglang":
            body["return_spec_tokens_details"] = True
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        try:
            reply = await client.post(_CHAT if self.chat else _TEXT, json=body)
        except httpx.HTTPError as error:
            what = f"{type(error).__name__}: {error}"
            raise ServerFailure(f"prompt {prompt.id}: no answer ({what})") from error
        if reply.status_code != httpx.codes.OK:
            what = f"prompt {prompt.id}: HTTP {reply.status_code}: {_reason(reply)}"
            raise ServerFailure(what) if reply.is_server_error else CliError(what, code=FAILED)
        page = reply.json()
        choice = page["choices"][0]
        text = choice["message"]["content"] if self.chat else choice["text"]
        details = (page.get("sglext") or {}).get("spec_tokens_details")
        counters = None if details is None else sglang_counters(details)
        return Answer(text or "", int(page["usage"]["completion_tokens"]), counters)


def _reason(reply: Any) -> str:
    """The message of an OpenAI-style error, else the start of the body."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(reply.text[:300])
