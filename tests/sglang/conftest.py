"""The suite of the SGLang adapter: runs in an environment that has SGLang (`make venv-sglang`)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

collect_ignore_glob = []
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob.append("test_*.py")  # vLLM and SGLang pin different versions
else:
    import speculators_ext

    shims = Path(speculators_ext.__file__).parent / "engines" / "sglang" / "cpu" / "shims"
    sys.path.insert(0, str(shims))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang's own kernels, which ours are compared with, run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
