"""An engine's HTTP server as a child process: started, waited for, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import FAILED, CliError, ServerFailure, need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

HOST = "127.0.0.1"
TERMINATE_GRACE_S = 20.0
TAIL_LINES = 15
_PREFIX = re.compile(r"^\([^)]*\)\s*|^\w+ [\d-]+ [\d:]+ \[[^\]]*\]\s*")
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|SystemExit): \S|^\S+: error: ")
_POINTS_ELSEWHERE = ("Engine core initialization failed", "EngineCore encountered an issue")
_PYDANTIC_HEADING = "validation error for"


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: where it listens, without a slash at the end.
        pid: of the process started; also the id of its process group.
        log: what it wrote.
        start_s: seconds from launch to the first healthy answer.
    """

    url: str
    pid: int
    log: Path
    start_s: float


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def vllm_command(
    model: str,
    port: int,
    *,
    dtype: str,
    eager: bool,
    speculative: dict[str, Any] | None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The server's command line; `extra` comes last, so it wins over ours.

    Prefix caching is off: the same prompts are sent once for every concurrency, and a second
    pass served from the cache would not measure what the first did.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", HOST, "--port", str(port), "--dtype", dtype]
    command += ["--no-enable-prefix-caching"]
    if eager:
        command.append("--enforce-eager")
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    return [*command, *extra]


def server_environment() -> dict[str, str]:
    """This process's environment, with vLLM's CPU cache bounded unless the user chose a size."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    return defaults | dict(os.environ)


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    port: int,
    log: Path,
    *,
    name: str,
    timeout_s: float = 600.0,
    waiting: Callable[[float], None] | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start `command` in its own process group, yield once /health answers, end the group.

    Args:
        command: what to run; its output goes to `log`.
        port: where the server will listen on 127.0.0.1.
        log: file to write; its end is shown when the start fails.
        name: what to call the server in an error.
        timeout_s: seconds to wait for the first healthy answer.
        waiting: called several times a second with the seconds waited so far.
        environment: of the process; None takes ours.

    Raises:
        CliError: the process ended or the time was up before the server answered; or a
            `ServerFailure` left the block, now with what the log says.
    """
    started = time.monotonic()
    with log.open("wb") as sink, _sigterm_unwinds():
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=server_environment() if environment is None else environment,
            start_new_session=True,
        )
        try:
            _wait_until_healthy(process, port, log, name, timeout_s, waiting)
            took = time.monotonic() - started
            yield Server(f"http://{HOST}:{port}", process.pid, log, took)
        except ServerFailure as failure:
            raise _with_log(f"{name}: {failure}", log) from failure
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes], grace_s: float = TERMINATE_GRACE_S) -> None:
    """End a process that leads its own group, and whatever is left of the group.

    The leader gets SIGTERM and `grace_s` seconds; then the group gets SIGKILL, also when a second
    interrupt cuts the waiting short.
    """
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def root_cause(log_text: str) -> str:
    """The log line that says best why a server did not start; empty where none stands out."""
    lines = [_strip_prefixes(line) for line in log_text.splitlines()]
    found = ""
    for at, line in enumerate(lines):
        if not _ERROR_LINE.match(line):
            continue
        if _PYDANTIC_HEADING in line and at + 1 < len(lines):
            line = lines[at + 1].strip()
        if not found or not any(phrase in line for phrase in _POINTS_ELSEWHERE):
            found = line
    return found


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, unreadable bytes replaced."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


def _strip_prefixes(line: str) -> str:
    previous = None
    while previous != line:
        previous, line = line, _PREFIX.sub("", line, count=1)
    return line


def _wait_until_healthy(
    process: subprocess.Popen[bytes],
    port: int,
    log: Path,
    name: str,
    timeout_s: float,
    waiting: Callable[[float], None] | None,
) -> None:
    httpx = need("httpx", "bench")
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        if process.poll() is not None:
            ended = f"{name} ended with code {process.returncode} before it answered"
            raise _with_log(ended, log)
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://{HOST}:{port}/health", timeout=5.0, trust_env=False).is_success:
                return
        if waited > timeout_s:
            raise _with_log(f"{name} did not answer within {timeout_s:.0f} s", log)
        if waiting is not None:
            waiting(waited)
        time.sleep(0.25)


def _with_log(what: str, log: Path) -> CliError:
    cause = root_cause(log.read_text(encoding="utf-8", errors="replace"))
    reason = f": {cause}" if cause else ""
    return CliError(f"{what}{reason} (log: {log})", code=FAILED, details=tail(log))


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM raise, as Ctrl-C does, so that a server is ended when this process is.

    Python allows handlers in the main thread only; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
