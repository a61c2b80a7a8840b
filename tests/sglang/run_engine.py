"""Run one SGLang engine for a test: JSON jobs on stdin, a JSON answer a line on stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

PATIENCE = 30.0  # seconds


def generate(engine: Any, prompts: list[Any], params: Any, **options: Any) -> list[dict[str, Any]]:
    given = {"prompt": prompts} if isinstance(prompts[0], str) else {"input_ids": prompts}
    return engine.generate(sampling_params=params, **given, **options)


def stream(engine: Any, prompt: list[int], params: dict[str, Any]) -> list[list[int]]:
    """What each chunk holds of the answer so far."""
    chunks = engine.generate(input_ids=prompt, sampling_params=params, stream=True)
    return [chunk["output_ids"] for chunk in chunks]


def abort(engine: Any, prompts: list[list[int]], params: dict[str, Any], after: float) -> int:
    """Abort requests while they run; how many were cut short."""

    async def one(prompt: list[int], rid: str) -> dict[str, Any]:
        return await engine.async_generate(input_ids=prompt, sampling_params=params, rid=rid)

    async def run() -> list[Any]:
        rids = [f"to-abort-{row}" for row in range(len(prompts))]
        tasks = [
            asyncio.ensure_future(one(prompt, rid))
            for prompt, rid in zip(prompts, rids, strict=True)
        ]
        await asyncio.sleep(after)
        for rid in rids:
            engine.tokenizer_manager.abort_request(rid=rid)
        return await asyncio.gather(*tasks, return_exceptions=True)

    done = engine.loop.run_until_complete(run())
    return sum(
        isinstance(answer, Exception) or answer["meta_info"]["finish_reason"]["type"] == "abort"
        for answer in done
    )


def used_tokens(engine: Any) -> int:
    """KV slots that are neither free nor hold the prefix cache, once nothing runs any more.

    An aborted request is answered before its last round has ended; a lost slot never comes back.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        loads = engine.loop.run_until_complete(engine.tokenizer_manager.get_loads())
        used = sum(load.num_used_tokens for load in loads)
        if not used or time.monotonic() > deadline:
            return used
        time.sleep(0.1)


def counters(engine: Any) -> dict[str, float]:
    """What the metrics page would show of `reasoning_step`; of engines with ``enable_metrics``."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    from speculators_ext.cli.metrics import parse_metrics

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return dict(parse_metrics(generate_latest(registry).decode()).steps)


JOBS = {
    "generate": generate,
    "stream": stream,
    "abort": abort,
    "used_tokens": used_tokens,
    "counters": counters,
}


def main() -> None:
    # SGLang prints on stdout too: answers go where its output cannot.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(JOBS[job.pop("job")](engine, **job)), file=answers, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
