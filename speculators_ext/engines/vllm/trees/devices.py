"""What of draft trees differs between devices: attention backends, and what moves their KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.attention.packed_rows import replace_backends
from speculators_ext.engines.vllm.log import warn_untried_on_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from speculators_ext.engines.vllm.trees.metadata import Verification

__all__ = ["make_compactor", "refuse_other_layers", "use_tree_backends"]

_PACKAGE = __name__.rpartition(".")[0]
_CPU_BACKENDS = {
    "CPU_ATTN": f"{_PACKAGE}.attention_cpu.TreeCPUBackend",
    "CPU_MLA": f"{_PACKAGE}.attention_mla.TreeMLABackend",
}
_GPU_BACKENDS = {
    "FLASH_ATTN": f"{_PACKAGE}.attention_flash.TreeFlashBackend",
    "TRITON_ATTN": f"{_PACKAGE}.attention_triton.TreeTritonBackend",
}


def use_tree_backends(device: torch.device, method: str) -> None:
    """Make vLLM build our backends where it would build its own, from the next layer on."""
    if device.type == "cpu":
        replace_backends(_CPU_BACKENDS)
        return
    warn_untried_on_gpus(method)
    replace_backends(_GPU_BACKENDS)


def refuse_other_layers(method: str, layers: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a layer, given by name, that was built without our attention."""
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        find_obstacle = getattr(impl, "obstacle", None)
        obstacle = find_obstacle(layer) if find_obstacle else type(impl).__name__
        if obstacle is not None:
            raise ValueError(
                f"speculative method '{method}': layer {name} cannot attend a draft tree "
                f"({obstacle}); choose another method"
            )


def make_compactor(
    device: torch.device, layers: dict[str, Any], group_of: dict[str, int], dtype: torch.dtype
) -> Callable[[Verification, torch.Tensor], None]:
    """What moves the KV of accepted paths to the front, called with a step and its ``num_sampled``.

    Args:
        device: of the caches.
        layers: the target's attention layers by name.
        group_of: cache group of each layer's name.
        dtype: of the keys and values the layers write.
    """
    if device.type == "cpu":
        from speculators_ext.engines.vllm.trees.attention_mla import (
            LatentCompactorCPU,
            has_latents,
        )
        from speculators_ext.engines.vllm.trees.compaction_cpu import CompactorCPU

        if all(has_latents(layer) for layer in layers.values()):
            return LatentCompactorCPU(layers, group_of)
        return CompactorCPU(layers, group_of, dtype)
    from speculators_ext.engines.vllm.trees.compaction_gpu import CompactorGPU

    return CompactorGPU(layers, group_of)
