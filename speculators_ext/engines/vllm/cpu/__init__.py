"""vLLM's Model Runner V2 on a CPU: Triton's interpreter switched on, hot kernels overridden.

`status()` says whether this process would run V2 interpreted and why; `install_overrides()`
registers the Numba versions of V2's kernels with vLLM. Importing this package imports
neither torch, Triton, Numba nor vLLM: Triton itself imports it while it looks for backends.
"""

from __future__ import annotations

from speculators_ext.engines.vllm.cpu.host import CpuV2Status, status
from speculators_ext.engines.vllm.cpu.overrides import install_overrides

__all__ = ["CpuV2Status", "install_overrides", "status"]
