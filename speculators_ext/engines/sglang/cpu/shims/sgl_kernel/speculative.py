"""The part of the stand-in that SGLang imports as ``sgl_kernel.speculative``."""

from speculators_ext.engines.sglang.cpu.tree_ops import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
