"""What only GPUs take of our code, as far as it can be tried without one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from speculators_ext.cli import checkup
from speculators_ext.engines import devices, round_times
from speculators_ext.engines.sglang import capture, gpus, round_clock, sampling
from speculators_ext.engines.sglang.attention import PackedRowsBackend
from speculators_ext.engines.sglang.attention_gpu import KernelPackedRowsBackend, reads_pool
from speculators_ext.engines.sglang.heads.attention import LevelBackend
from speculators_ext.engines.sglang.heads.attention_gpu import KernelLevelBackend
from speculators_ext.engines.sglang.heads.draft_model import DraftModel
from speculators_ext.engines.sglang.round_clock import RoundClock
from speculators_ext.engines.sglang.skipping import drafting
from speculators_ext.engines.sglang.trees import tree_verify_input
from speculators_ext.engines.sglang.verify_shape import VerifyShape, verify_shape
from speculators_ext.proposers.eagle2 import Level
from speculators_ext.tree import DraftTree

load_plugins()  # our algorithms by name

LAYER = SimpleNamespace(
    layer_id=0, scaling=0.3, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=32,
    v_head_dim=32, sliding_window_size=-1,
)  # fmt: skip


class Pool:
    """SGLang's KV pool, one layer."""

    start_layer = 0

    def __init__(self, head_size: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, 40, 2, head_size, generator=generator)

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


def slots_of(*lengths: int) -> list[torch.Tensor]:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    return list(order[: sum(lengths)].split(lengths))


def test_packed_rows_by_our_kernel_are_the_torch_ones():
    """Catches a block table that is not a request's slots, or a prefix cut short."""
    q, k, v = (torch.randn(6, heads * 32) for heads in (4, 2, 2))
    given = Pool(), slots_of(17, 0, 5)
    found = KernelPackedRowsBackend(*given).forward(q, k, v, LAYER, None)
    wanted = PackedRowsBackend(*given).forward(q, k, v, LAYER, None)
    torch.testing.assert_close(found, wanted)


def test_levels_by_our_kernel_are_the_torch_ones():
    """Catches nodes that see another request's, or a level that forgets the one before it."""
    given = Pool(), slots_of(9, 18, 3), 6
    backends = KernelLevelBackend(*given), LevelBackend(*given)
    before = given[0].keys.clone()
    first = (
        torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 0, 1]),
        torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.bool),
    )  # fmt: skip
    second = (
        torch.tensor([0, 1, 2, 2]), torch.tensor([3, 2, 2, 3]),
        torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]], dtype=torch.bool),
    )  # fmt: skip
    for depth, (requests, places, sees) in enumerate((first, second), start=1):
        q, k, v = (torch.randn(4, heads * 32) for heads in (4, 2, 2))
        outs = []
        for backend in backends:
            backend.level = Level(depth, requests, places, torch.zeros(4), q, sees)
            outs.append(backend.forward(q, k, v, LAYER, None))
        torch.testing.assert_close(*outs)
    assert torch.equal(given[0].keys, before)


@pytest.mark.parametrize(("size", "fits"), [(32, True), (16, False), (512, False)])
def test_a_cache_our_kernels_do_not_read_is_torchs(size, fits):
    """Catches a kernel launched over rows of a size it was not written for."""
    assert reads_pool(Pool(size)) is fits


class Attention(AttentionBackend):
    """A backend of SGLang's that is not for CPUs."""

    def __init__(self, mode: TreeMaskMode | None) -> None:
        self._mode = mode

    @property
    def verify_mask(self):
        return None if self._mode is None else VerifyMask(torch.empty(0), self._mode, 1)


@pytest.mark.parametrize(
    ("mode", "sees_prefix"),
    [(None, True), (TreeMaskMode.FULL_MASK, True), (TreeMaskMode.QLEN_ONLY, False)],
)
def test_masks_are_what_the_running_attention_reads(mode, sees_prefix):
    """Catches a mask read with an offset it does not have."""
    runner = SimpleNamespace(attn_backend=Attention(mode), device="cuda")
    assert verify_shape(runner, 4) == VerifyShape(5, sees_prefix, "cuda")


def test_a_layout_of_masks_that_is_not_known_is_refused():
    """Catches packed bits read from bools."""
    runner = SimpleNamespace(attn_backend=Attention(TreeMaskMode.QLEN_ONLY_BITPACKING), device="x")
    with pytest.raises(NotImplementedError, match="supported: FULL_MASK, QLEN_ONLY"):
        verify_shape(runner, 4)


def test_no_graph_of_all_layers_is_replayed_for_a_draft():
    """Catches a target that drafts with all its layers, or one that never replays again."""
    runner, seen = SimpleNamespace(decode_cuda_graph_runner="captured"), []

    def forward(step):
        seen.append(runner.decode_cuda_graph_runner)
        if step is None:
            raise RuntimeError("no memory")
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=step))

    class Layers:
        def only(self, kept):
            return drafting.contextmanager(lambda: (yield))()

    runner.forward = forward
    assert drafting.draft_logits(Layers(), runner, (0,), 5) == 5
    with pytest.raises(RuntimeError, match="no memory"):
        drafting.draft_logits(Layers(), runner, (0,), None)
    assert seen == [None, None]
    assert runner.decode_cuda_graph_runner == "captured"


def test_a_head_captures_no_graph_of_sglangs_drafting():
    """Catches graphs of a drafting that is not ours, which needs an attention we do not make."""
    asked = []
    model = object.__new__(DraftModel)
    model.draft_worker = SimpleNamespace(init_cuda_graphs=lambda **kwargs: asked.append(kwargs))
    model.init_cuda_graphs()
    assert asked == [{"capture_decode_cuda_graph": False}]


@pytest.mark.parametrize("name", ["CLASP", "NGRAM"])
def test_graphs_of_a_chains_verification_read_a_mask(monkeypatch, name):
    """Catches a verification captured as if it had no drafts, and one of SGLang's own changed."""
    spec = SimpleNamespace(
        speculative_num_steps=4, speculative_eagle_topk=1, speculative_num_draft_tokens=5
    )
    monkeypatch.setattr(capture, "get_spec", lambda: spec)
    algorithm = SpeculativeAlgorithm.from_string(name)
    graphs = SimpleNamespace(
        model_runner=SimpleNamespace(spec_algorithm=algorithm),
        buffers=SimpleNamespace(custom_mask="the buffer"),
    )
    found = (
        capture.get_spec_info(lambda graphs, num_tokens: None, graphs, 10),
        capture.create_dummy_verify_input(lambda *args: None, algorithm, "the buffer", 5, False),
    )
    if name == "NGRAM":
        assert found == (None, None)
        return
    for given in found:
        assert (given.draft_token_num, given.num_tokens_per_req, given.topk) == (5, 5, 1)
        assert given.custom_mask == "the buffer"
        assert given.capture_hidden_mode == CaptureHiddenMode.FULL
    stock = object()
    assert capture.get_spec_info(lambda graphs, num_tokens: stock, graphs, 10) is stock


def test_drafts_of_ours_are_compared_and_not_sampled(monkeypatch):
    """Catches drafts accepted by a law that is not plain decoding's, and SGLang's own changed."""
    asked = {"is_all_greedy": False, "is_cpu": False}
    assert not sampling.verify_uses_greedy(lambda **given: given["is_all_greedy"], **asked)
    monkeypatch.setattr(sampling, "_under_way", [object()])
    assert sampling.verify_uses_greedy(lambda **given: given["is_all_greedy"], **asked)


# Laws of the token behind each row of a tree, over three tokens; the root's children are 0 and 2,
# and 1 follows 2.
TREE = DraftTree.of([9, 0, 2, 1], [-1, 0, 0, 2])
LAWS = [[1, 2, 3], [4, 1, 1], [2, 2, 2], [1, 1, 4]]  # of 6


@pytest.mark.parametrize("width", [4, 6])
def test_drawing_then_comparing_gives_the_targets_law(width):
    """Catches an acceptance that favours drafts: all draws of a tree, weighed, to the last digit.

    The kernel is SGLang's Triton one, whose CUDA twin runs on GPUs.
    """
    info = tree_verify_input([TREE], [7], 100, VerifyShape(width))
    law: defaultdict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for drawn in itertools.product(range(3), repeat=4):
        weight = Fraction(1)
        for row, token in enumerate(drawn):
            weight *= Fraction(LAWS[row][token], 6)
        target = torch.tensor([[*drawn, *[0] * (width - 4)]])
        predicts = torch.zeros(width, dtype=torch.int32)
        index = torch.full((1, info.max_tree_depth), -1, dtype=torch.int32)
        count = torch.zeros(1, dtype=torch.int32)
        verify_tree_greedy_triton(
            predicts, index, count, info.draft_token.view(1, width), info.retrieve_index,
            info.retrieve_next_token, info.retrieve_next_sibling, target,
        )  # fmt: skip
        path = index[0, : int(count) + 1].tolist()
        law[tuple(predicts[path].tolist())] += weight
    wanted: defaultdict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for first in range(3):
        here = Fraction(LAWS[0][first], 6)
        if first == 1:
            wanted[1,] += here
        for second in range(3) if first != 1 else ():
            row = 1 if first == 0 else 2
            both = here * Fraction(LAWS[row][second], 6)
            if (first, second) != (2, 1):
                wanted[first, second] += both
            for third in range(3) if (first, second) == (2, 1) else ():
                wanted[first, second, third] += both * Fraction(LAWS[3][third], 6)
    assert law == wanted


def test_on_a_gpu_a_part_lasts_until_its_kernels_are_done(monkeypatch):
    """Catches launching booked as drafting, and drafting as the target's step."""
    now, queued = [0.0], [0.0]
    monkeypatch.setattr(round_times.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(round_times.time, "thread_time", lambda: 0.0)

    class Stream:
        def synchronize(self):
            now[0] += queued[0]
            queued[0] = 0.0

    device = SimpleNamespace(current_stream=Stream)
    monkeypatch.setattr(round_clock.torch, "get_device_module", lambda name: device)
    clock, seen = RoundClock(4, 16, adaptive=True), []
    monkeypatch.setattr(clock._controller, "observe", lambda rows, **kw: seen.append(kw))
    clock.time_on("cuda")
    for _ in range(2):
        clock.begin(["a"])
        with clock.drafting(0):
            now[0] += 1.0
            queued[0] = 4.0
        queued[0] = 2.0  # what is launched between drafting and verification
        clock.end_drafting()
        queued[0] = 16.0
        clock.verified([1], [1], [1])
    clock.begin(["a"])
    clock.end_drafting()
    assert [kw["draft_seconds"] for kw in seen] == [5.0, 0.0]
    assert [kw["verify_seconds"] for kw in seen] == [16.0, 16.0]


def test_a_clock_without_a_controller_waits_for_nothing(monkeypatch):
    """Catches a device held up for times that nobody reads."""
    stream = SimpleNamespace(synchronize=lambda: pytest.fail("waited"))
    device = SimpleNamespace(current_stream=lambda: stream)
    monkeypatch.setattr(round_clock.torch, "get_device_module", lambda name: device)
    clock = RoundClock(4, 16, adaptive=False)
    clock.time_on("cuda")
    clock.begin(["a"])
    with clock.drafting(0):
        pass
    clock.end_drafting()


@pytest.mark.parametrize(
    ("gpu", "said", "ok", "says"),
    [
        ("an NVIDIA GPU", "", False, f"{gpus.OPT_IN}=1 lets you try it"),
        ("an NVIDIA GPU", "1", True, "CLASP, EAGLE2, MTP_REUSE, which has never run on a GPU"),
        ("an AMD GPU", "1", False, "accepted: an NVIDIA GPU"),
        (None, "", True, "REASONING_STEP, on CPUs"),
    ],
    ids=["not-said", "said", "amd", "none"],
)
def test_doctor_says_what_a_gpu_host_may_try(monkeypatch, gpu, said, ok, says):
    """Catches a doctor that promises what the server refuses, or hides that it is untried."""
    monkeypatch.setattr(devices, "find_gpu", lambda: gpu)
    monkeypatch.setenv(gpus.OPT_IN, said)
    found = checkup._sglang("0.5.23")
    assert found["ok"] is ok
    assert says in found["detail"]
    [row] = [m for m in checkup.examine(None, 4)["methods"] if m["name"] == "reasoning_step"]
    assert ("sglang" in row["engines"]) is (gpu is None)
