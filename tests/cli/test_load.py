"""The HTTP driver, against a small server that speaks the protocol but runs no model."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from speculators_ext.cli.common import CliError, ServerFailure
from speculators_ext.cli.load import Answer, Driver
from speculators_ext.cli.metrics import SpecCounters
from speculators_ext.cli.prompts import Prompt
from speculators_ext.proposers.reasoning_step import METRIC_PREFIX

PROMPTS = [Prompt(str(at), "c", f"text {at}") for at in range(8)]


class Echo(ThreadingHTTPServer):
    """Answers with the prompt it was sent and `max_tokens`; notes how many requests overlap."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.now, self.most, self.bodies = threading.Lock(), 0, 0, []
        self.refusal = None
        self.page = ""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def reply(self, path, body):
        self.bodies.append((path, body))
        if self.refusal and "chat" in path:
            status, message = self.refusal
            return status, {"error": {"message": message}}
        if "chat" in path:
            choice = {"message": {"content": body["messages"][0]["content"]}}
        else:
            choice = {"text": body["prompt"]}
        # The first prompt takes longest: answers arrive in another order than they were asked.
        time.sleep(0.2 if "text 0" in json.dumps(choice) else 0.02)
        return 200, {"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
        status, page = server.reply(self.path, body)
        with server.lock:
            server.now -= 1
        self.send(status, json.dumps(page).encode())

    def do_GET(self):
        self.send(200, self.server.page.encode())

    def send(self, status, text):
        with contextlib.suppress(ConnectionError):  # a driver that gives up does not read on
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def echo():
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_answers_keep_the_prompts_order_and_the_concurrency(echo, concurrency):
    """Catches answers in order of arrival, and more (or fewer) requests in flight than asked."""
    seen = []
    answers, seconds = Driver(echo.url, "m", 9).run(PROMPTS, concurrency, seen.append)
    assert [a.text for a in answers] == [p.text for p in PROMPTS]
    assert [a.tokens for a in answers] == [9] * 8
    assert echo.most == concurrency
    assert len(seen) == 8
    assert seconds > 0.2
    assert all(body["temperature"] == 0 for _, body in echo.bodies)


def test_model_without_chat_template_is_sent_plain_text(echo):
    """Catches base models that cannot be measured at all."""
    echo.refusal = (400, "As of transformers v4.44, a chat template must be provided")
    driver = Driver(echo.url, "m", 9).for_model(PROMPTS[0])
    assert not driver.chat
    [answer], _ = driver.run(PROMPTS[:1], 1)
    assert answer.text == "text 0"
    assert echo.bodies[-1][0] == "/v1/completions"


def test_refusal_names_the_prompt_and_the_reason(echo):
    """Catches a benchmark that goes on without some answers, or hides the server's words."""
    echo.refusal = (400, "max_tokens is too large")
    with pytest.raises(CliError, match=r"prompt \d: HTTP 400: max_tokens is too large"):
        Driver(echo.url, "m", 9).run(PROMPTS, 2)


def test_server_errors_are_told_apart(echo):
    """Catches a dead engine reported without a look at its log: ServerFailure asks for one."""
    echo.refusal = (500, "EngineCore encountered an issue")
    with pytest.raises(ServerFailure, match="HTTP 500"):
        Driver(echo.url, "m", 9).run(PROMPTS, 2)


def test_server_that_is_gone_is_a_server_failure():
    """Catches a connection error that reaches the user as a traceback."""
    with pytest.raises(ServerFailure, match="no answer"):
        Driver("http://127.0.0.1:9", "m", 9).run(PROMPTS, 1)


def test_sglang_tells_drafts_by_answer_and_steps_by_page(echo):
    """Catches steps that are counted since the server's start, and drafts that are lost to them."""
    driver = Driver(echo.url, "m", 9, engine="sglang")
    name = f"{METRIC_PREFIX}judged_total"
    echo.page = f"# TYPE {name} counter\n{name} 5.0\n"
    before = driver.counters()
    echo.page = echo.page.replace("5.0", "8.0")
    answers = [Answer("", 1, SpecCounters(drafts=2, accepted=3)), Answer("", 1)]
    found = driver.counters_since(before, answers)
    assert found == SpecCounters(drafts=2, accepted=3, steps={"judged": 3.0})
