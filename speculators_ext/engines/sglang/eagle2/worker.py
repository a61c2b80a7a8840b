"""The speculative worker of ``EAGLE2``."""

from __future__ import annotations

from typing import Any

from speculators_ext.engines.sglang.eagle2.requested import eagle2_settings
from speculators_ext.engines.sglang.heads.tree_worker import TreeWorker
from speculators_ext.engines.sglang.log import log_method

__all__ = ["Eagle2Worker"]


class Eagle2Worker(TreeWorker):
    """Draft trees of an EAGLE or EAGLE-3 head.

    Args:
        server_args: SGLang's.
        gpu_id: SGLang's.
        nccl_port: SGLang's.
        target_worker: runs the target.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        options = eagle2_settings(server_args)
        super().__init__(options, server_args, gpu_id, nccl_port, target_worker)
        log_method("EAGLE2", self._most, options)
