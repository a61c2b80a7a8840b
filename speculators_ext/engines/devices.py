"""Says whether a GPU is here, from the files of its kernel driver: nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_gpu"]

# They exist only where a driver is loaded. torch or a vendor library would have to be imported to
# be asked, and this is asked from inside other packages' imports.
_NVIDIA_GLOBS = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))
_NVIDIA_WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
_AMD_COMPUTE_NODE = Path("/dev/kfd")


def find_gpu() -> str | None:
    """Name the GPU of this machine in a few words ("an NVIDIA GPU"), None where there is none."""
    if any(any(Path(folder).glob(pattern)) for folder, pattern in _NVIDIA_GLOBS):
        return "an NVIDIA GPU"
    if _NVIDIA_WSL_DRIVER.exists():
        return "an NVIDIA GPU driver (WSL)"
    if _AMD_COMPUTE_NODE.exists():
        return "an AMD GPU"
    return None
