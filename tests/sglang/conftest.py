"""The suite of the SGLang adapter: runs in an environment that has SGLang (`make venv-sglang`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

collect_ignore_glob = []
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob.append("test_*.py")  # vLLM and SGLang pin different versions
else:
    import speculators_ext

    shims = Path(speculators_ext.__file__).parent / "engines" / "sglang" / "cpu" / "shims"
    sys.path[:0] = [str(shims), str(Path(__file__).parent)]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang's own kernels, which ours are compared with, run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: the engines that every run starts")


# SGLang imports every model it knows at each start, which takes as long as all the rest of it.
MODELS = {
    *("llama", "llama_eagle", "llama_eagle3", "mistral", "qwen2", "qwen3"),
    *("mimo", "mimo_mtp"),
}


def other_models() -> str:
    """SGLang's model files the tests have no use for, as its environment variable names them."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    [folder] = spec.submodule_search_locations
    files = (Path(folder) / "srt" / "models").glob("*.py")
    return ",".join(sorted({file.stem for file in files} - MODELS - {"__init__", "registry"}))


RUNNER = "run_engine.py"
CONFIG = "SPECULATORS_EXT_METHOD_CONFIG"
MODEL_LEN = 256


class Engine:
    """One SGLang engine in a process of its own: a failing engine kills its parent.

    Args:
        log: where the engine's output goes.
        options: arguments of ``sglang.Engine`` beyond those every test shares.
        environment: further variables of the process.
        runner: what runs it, a file beside this one.
    """

    def __init__(
        self,
        log: Path,
        options: dict[str, Any],
        environment: dict[str, str],
        runner: str = RUNNER,
    ) -> None:
        shared = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "dtype": "float32",
            "context_length": MODEL_LEN,
            "max_total_tokens": 4096,
            "max_running_requests": 16,
            "log_level": "warning",
            "sleep_on_idle": True,
        }
        kept = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
        command = [
            sys.executable,
            str(Path(__file__).parent / runner),
            json.dumps(shared | options),
        ]
        self.log = log
        self._process = subprocess.Popen(
            command,
            env=kept
            | {
                "PYTHONPATH": str(shims),
                "OMP_NUM_THREADS": "1",
                "SGLANG_DISABLED_MODEL_ARCHS": other_models(),
            }
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            end = "\n".join(self.log.read_text().splitlines()[-40:])
            raise AssertionError(f"the engine is gone; the end of its output:\n{end}")
        return json.loads(line)

    def do(self, job: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job} | arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def generate(self, prompts: Sequence[Any], params: Any, **options: Any) -> list[dict[str, Any]]:
        return self.do("generate", prompts=list(prompts), params=params, **options)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Engines:
    """Engines by configuration: of plain ones and of ours the one used last, a gigabyte each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[bool, tuple[str, Engine]] = {}
        self._answers: dict[str, Any] = {}
        self._count = 0

    def get(
        self,
        model: str = "tiny-llama",
        method_config: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        runner: str = RUNNER,
        **options: Any,
    ) -> Engine:
        from speculators_ext.assets import build

        environment = dict(environment or {})
        if method_config is not None:
            environment[CONFIG] = json.dumps(method_config)
        options["model_path"] = str(build(model))
        key = json.dumps([options, environment, runner], sort_keys=True)
        plain = "speculative_algorithm" not in options
        running = self._running.get(plain)
        if running is None or running[0] != key or not running[1].alive:
            self._stop(plain)
            self._count += 1
            log = self._folder / f"engine{self._count}.log"
            self._running[plain] = key, Engine(log, options, environment, runner)
        return self._running[plain][1]

    def plain(self, prompts: Sequence[Any], params: Any, **options: Any) -> list[dict[str, Any]]:
        """What stock SGLang answers, asked once for the same question."""
        model = options.pop("model", "tiny-llama")
        key = json.dumps([model, list(prompts), params, options])
        if key not in self._answers:
            self._answers[key] = self.get(model).generate(prompts, params, **options)
        return self._answers[key]

    def eagle_head(self, name: str) -> Path:
        """An EAGLE head as SGLang loads it: by its architecture, and with a bias in ``fc``."""
        import torch
        from safetensors.torch import load_file, save_file

        from speculators_ext.assets import build

        folder = self._folder / name
        if not folder.exists():
            folder.mkdir()
            config = json.loads((build(name) / "config.json").read_text())
            config["architectures"] = ["LlamaForCausalLMEagle"]
            (folder / "config.json").write_text(json.dumps(config))
            tensors = load_file(build(name) / "model.safetensors")
            tensors["fc.bias"] = torch.zeros(config["hidden_size"])
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def _stop(self, plain: bool) -> None:
        if plain in self._running:
            self._running.pop(plain)[1].stop()

    def stop(self) -> None:
        self._stop(True)
        self._stop(False)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(tmp_path_factory.mktemp("engines"))
    yield found
    found.stop()
