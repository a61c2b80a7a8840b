"""Child processes: started, waited for, explained when they fail, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators_ext.cli.common import CliError, ServerFailure
from speculators_ext.cli.server import free_port, root_cause, running_server, vllm_command

ANSWERS = """
import http.server, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("helper", helper.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def serving(port, log, **options):
    command = [sys.executable, "-c", ANSWERS, str(port)]
    return running_server(command, port, log, name="server", **options)


def alive(pid):
    """Whether a process runs; one that ended and was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid, within_s=10.0):
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def helper_pid(log):
    return int(log.read_text().split()[1])


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_server_and_its_children_end_with_the_block(tmp_path, error):
    """Catches a server, or a worker of it, that outlives an exception or Ctrl-C."""
    log = tmp_path / "log"
    try:
        with serving(free_port(), log) as server:
            pids = [server.pid, helper_pid(log)]
            assert all(map(alive, pids))
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        assert error
    assert all(map(ends, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_command_ends_its_server(tmp_path, number):
    """Catches `timeout` or Ctrl-C ending the command and leaving the server on the machine."""
    log, port = tmp_path / "log", free_port()
    script = (
        "import signal, sys, time; from pathlib import Path\n"
        # A job in the background of a script inherits SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from speculators_ext.cli.server import running_server\n"
        f"command = [sys.executable, '-c', {ANSWERS!r}, '{port}']\n"
        f"with running_server(command, {port}, Path({str(log)!r}), name='s') as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    ours = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    server = int(ours.stdout.readline())
    helper = helper_pid(log)
    os.kill(ours.pid, number)
    assert ours.wait(30) != 0
    assert ends(server)
    assert ends(helper)


def test_failed_start_says_why_in_one_line(tmp_path):
    """Catches a bare exit code: the reason is in the log, its end is shown, its place is named."""
    log = tmp_path / "log"
    script = "print('loading'); print('ValueError: no such model'); raise SystemExit(3)"
    command = [sys.executable, "-c", script]
    with (
        pytest.raises(CliError, match=r"ended with code 3 .*: ValueError: no such model") as caught,
        running_server(command, free_port(), log, name="vllm serve"),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert str(log) in str(caught.value)
    assert "loading" in caught.value.details
    assert caught.value.code == 1


def test_silent_server_is_given_up_and_ended(tmp_path):
    """Catches a wait without end, and the process it waited for left running."""
    log = tmp_path / "log"
    script = "import os, time; print('helper', os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script]
    with (
        pytest.raises(CliError, match="did not answer within 1 s"),
        running_server(command, free_port(), log, name="server", timeout_s=1.0),
    ):
        pass
    assert ends(helper_pid(log))


def test_failure_while_running_carries_the_log(tmp_path):
    """Catches 'HTTP 500' alone, when the log holds what the engine died of."""
    log = tmp_path / "log"
    with pytest.raises(CliError, match="HTTP 500") as caught, serving(free_port(), log):
        raise ServerFailure("HTTP 500")
    assert "helper" in caught.value.details


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "(EngineCore pid=7) ERROR 11-30 00:54:17 [core.py:1512] ValueError: too big\n"
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See above.\n",
            "ValueError: too big",
        ),
        (
            "(APIServer pid=6) pydantic_core._pydantic_core.ValidationError: 1 validation error "
            "for SpeculativeConfig\n(APIServer pid=6)   Value error, unknown method\n",
            "Value error, unknown method",
        ),
        ("api_server.py: error: unrecognized arguments: --nope\n",
         "api_server.py: error: unrecognized arguments: --nope"),
        ("INFO all is well\n", ""),
        ("RuntimeError: Engine core initialization failed. See above.\n",
         "RuntimeError: Engine core initialization failed. See above."),
    ],
)  # fmt: skip
def test_root_cause_is_the_line_that_says_most(log, cause):
    """Catches the last exception of a chain, which often only points to an earlier one."""
    assert root_cause(log) == cause


def test_extra_arguments_win_over_ours():
    """Catches user options placed before ours, where the command line would ignore them."""
    command = vllm_command(
        "m", 80, dtype="float32", eager=True, speculative=None, extra=["--dtype", "auto"]
    )
    assert command[-2:] == ["--dtype", "auto"]
    assert "127.0.0.1" in command
    assert "--speculative-config" not in command
