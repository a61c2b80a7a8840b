"""What a target's name that is no folder and no asset is told; the hub is one on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from speculators_ext import assets

pytest.importorskip("huggingface_hub", reason="comes with an engine")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for one model, for one without config.json, and for none."""

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        body = json.dumps(CONFIG).encode()
        error = {"org/empty": "EntryNotFound", "org/model": None}
        code = error.get("/".join(self.path.split("/")[1:3]), "RepoNotFound")
        self.send_response(200 if code is None else 404)
        if code is not None:
            body = b""
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"0123456789"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format, *args):
        """Say nothing: the test reads what the command says."""


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def doctor(target, endpoint, home):
    command = [sys.executable, "-c", "from speculators_ext.cli import app; app()", "doctor"]
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [*command, "--json", "--target", target],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nonsense", "which has none of this name, or asks for a token"),
        ("org/empty", "where this one has no config.json"),
        ("a/b/c", "which this cannot be"),
        ("tiny-lama", "did you mean 'tiny-llama'"),
    ],
)
def test_what_is_no_model_is_one_line(tmp_path, hub, target, says):
    """Catches the client's own lines beside ours, and assets that the user cannot guess."""
    result = doctor(target, hub, tmp_path)
    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert f"--target {target!r}" in line
    assert says in line
    assert line.endswith(f"one of the assets: {', '.join(assets.names())}")


def test_a_hub_out_of_reach_is_asked_once(tmp_path):
    """Catches six tries, half a minute and a traceback or twelve lines for one mistyped name."""
    result = doctor("nonsense", "http://127.0.0.1:9", tmp_path)
    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert "which cannot be reached" in line


def test_a_model_of_the_hub_is_read(tmp_path, hub):
    """Catches a name that is asked for so carefully that its model is never found."""
    result = doctor("org/model", hub, tmp_path)
    assert json.loads(result.stdout)["target"]["layers"] == 3, result.stderr
    again = doctor("org/model", "http://127.0.0.1:9", tmp_path)
    assert json.loads(again.stdout)["target"]["layers"] == 3, again.stderr
