"""Run one SGLang engine as `run_engine.py` does, with the graphs that SGLang captures on GPUs.

A CUDA graph launches again the kernels that were launched when it was captured, on the same
buffers. Here the captured forward is called again, on the same buffers and with the attention's
metadata of its capture: what SGLang does around a graph (which batches are replayed, what is copied
into the buffers, how they are padded) is its own.

SGLang's processes import the module that was run, so what stands here is set in each of them.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import run_engine
from sglang.srt.layers.attention import verify_mask
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as stock
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from speculators_ext.engines.sglang import capture
from speculators_ext.engines.sglang.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CalledAgain(BaseCudaGraphBackend):
    """Keeps forwards where others keep graphs."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Callable[[], Any], Any, Any]] = {}
        self._replays = 0

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(self, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> None:
        attention = get_attn_backend()
        self._kept[shape_key] = forward_fn, attention, attention.forward_metadata
        forward_fn()

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._kept

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        if not static_forward_batch.forward_mode.is_target_verify():
            raise AssertionError(f"{static_forward_batch.forward_mode} is replayed as verification")
        self._replays += 1
        if self._replays == 1:
            logger.warning("a captured verification is replayed")
        forward, attention, attention.forward_metadata = self._kept[shape_key]
        return forward()

    def cleanup(self) -> None:
        self._kept.clear()


class Graphs(stock.DecodeCudaGraphRunner):
    """SGLang's runner, but for what asks a GPU."""

    def _capture(self) -> None:
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        self.buffers.reset_index_buffers()
        for size in reversed(self.capture_bs):
            self.capture_one_shape(size, self.model_runner.model.forward)

    def _record_in_graph_metadata_prep_done(self) -> None:
        """There is one stream only."""

    def _publish_read_done(self, in_graph: bool) -> None:
        """There is one stream only."""


def capture_graphs(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ``ModelRunner.init_cuda_graphs``, which captures nothing on CPUs."""
    if not runner.is_draft_worker:
        runner.decode_cuda_graph_runner = Graphs(runner)


# What SGLang takes on CPUs is its own CPU attention's.
verify_mask.default_tree_mask_mode = lambda: TreeMaskMode.FULL_MASK
stock.resolve_decode_backend = lambda runner: CalledAgain()
ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
HookRegistry.register(
    "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
    capture_graphs,
    HookType.AFTER,
)
# As on a GPU; on CPUs the package leaves it out.
stock.DecodeCudaGraphRunner.get_spec_info = (
    lambda self, num_tokens, original=stock.DecodeCudaGraphRunner.get_spec_info: (
        capture.get_spec_info(original, self, num_tokens)
    )
)

if __name__ == "__main__":
    run_engine.main()
