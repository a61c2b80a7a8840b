"""The six hooks against the installed vLLM and against 0.33's sources; no engine starts here."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from speculators_ext.config import METHODS, ConfigError
from speculators_ext.engines.source_probe import Expectation, engine_root, find_problem
from speculators_ext.engines.vllm import expected, plugin
from speculators_ext.testing import SourcesUnavailable, wheel_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

ADAPTER = Path(plugin.__file__).parent
INSTALLED = engine_root("vllm")
EXPECTATIONS = [expectation for hook in expected.HOOKS for expectation in hook.expectations]
pytestmark = pytest.mark.skipif(INSTALLED is None, reason="vLLM is not installed")

# Methods of ours that vLLM calls: (our file, our method, vLLM's module, vLLM's method).
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
_HANDLER = "vllm.v1.worker.gpu.spec_decode.utils"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_STATE = "vllm.v1.worker.gpu.model_states.interface"
_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
_TREES = "trees/model_state.py"
_STEPS = "reasoning_step/writing.py"
OVERRIDES = [
    ("clasp/speculator.py", "ClaspSpeculator.propose", _SPECULATOR, "BaseSpeculator.propose"),
    (
        "skipping/speculator.py",
        "LayerSkippingSpeculator.set_attn",
        _SPECULATOR,
        "DraftModelSpeculator.set_attn",
    ),
    (
        "skipping/speculator.py",
        "LayerSkippingSpeculator.load_draft_model",
        _SPECULATOR,
        "DraftModelSpeculator.load_draft_model",
    ),
    (
        "skipping/speculator.py",
        "LayerSkippingSpeculator.init_cudagraph_manager",
        _SPECULATOR,
        "BaseSpeculator.init_cudagraph_manager",
    ),
    (
        "skipping/speculator.py",
        "LayerSkippingSpeculator.capture",
        _SPECULATOR,
        "BaseSpeculator.capture",
    ),
    (
        "drafts.py",
        "RaggedDraftTokensHandler.set_draft_tokens",
        _HANDLER,
        "DraftTokensHandler.set_draft_tokens",
    ),
    (
        "drafts.py",
        "RaggedDraftTokensHandler.get_draft_tokens",
        _HANDLER,
        "DraftTokensHandler.get_draft_tokens",
    ),
    (
        "request_options.py",
        "_RequestOptionsMixin.add_request",
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState.add_request",
    ),
    (
        "attention/packed_rows.py",
        "PackedRowsCPUImpl.forward",
        _CPU_ATTN,
        "CPUAttentionBackendImpl.forward",
    ),
    (
        "trees/attention_cpu.py",
        "TreeCPUImpl.forward",
        _CPU_ATTN,
        "CPUAttentionBackendImpl.forward",
    ),
    ("heads/speculator.py", "HeadSpeculator.propose", _SPECULATOR, "BaseSpeculator.propose"),
    (
        "heads/tree_speculator.py",
        "TreeSpeculator.set_attn",
        _SPECULATOR,
        "DraftModelSpeculator.set_attn",
    ),
    (
        "heads/backlog.py",
        "_BacklogMixin.add_request",
        _STATE,
        "ModelState.add_request",
    ),
    (
        "eagle2/speculator.py",
        "Eagle2Speculator.load_draft_model",
        _SPECULATOR,
        "DraftModelSpeculator.load_draft_model",
    ),
    (
        _STEPS,
        "StepSpeculator.propose",
        _SPECULATOR,
        "BaseSpeculator.propose",
    ),
    (
        _STEPS,
        "StepSpeculator.load_draft_model",
        _SPECULATOR,
        "DraftModelSpeculator.load_draft_model",
    ),
    (
        "reasoning_step/small_model.py",
        "SmallModelSteps.compute_draft_logits",
        _SPECULATOR,
        "DraftModelSpeculator.compute_draft_logits",
    ),
    *(
        ("reasoning_step/model_state.py", f"_StepsMixin.{name}", _STATE, f"ModelState.{name}")
        for name in ("add_request", "remove_request", "custom_sampler")
    ),
    (
        "reasoning_step/sampler.py",
        "StepRejectionSampler._verify",
        _REJECTION,
        "RejectionSampler._verify",
    ),
    *(
        (_TREES, f"_TreesMixin.{name}", _STATE, f"ModelState.{name}")
        for name in (
            "add_request",
            "custom_sampler",
            "prepare_attn",
            "prepare_inputs",
            "postprocess_state",
        )
    ),
    *(
        (
            "trees/sampler.py",
            f"TreeRejectionSampler.{name}",
            _REJECTION,
            f"RejectionSampler.{name}",
        )
        for name in ("_verify", "_get_logprobs_tensors")
    ),
]

# vLLM's functions that we call: (module, name, arguments by position, arguments by name).
CALLS = [
    (
        "vllm.v1.worker.gpu.block_table",
        "BlockTables.gather_block_tables",
        1,
        ("num_reqs_padded",),
    ),
    ("vllm.v1.worker.gpu.block_table", "BlockTables.compute_slot_mappings", 4, ()),
    ("vllm.v1.worker.gpu.attn_utils", "build_slot_mappings_by_layer", 2, ()),
    (
        _SPECULATOR,
        "DraftModelSpeculator._build_uniform_attn_metadata",
        0,
        ("batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound", "step"),
    ),
    (
        _SPECULATOR,
        "DraftModelSpeculator._build_attn_metadata",
        0,
        ("num_reqs", "batch_desc", "query_start_loc_np", "seq_lens_cpu_upper_bound", "step"),
    ),
    (
        "vllm.v1.worker.gpu.attn_utils",
        "build_attn_metadata",
        0,
        (
            "attn_groups",
            "num_reqs",
            "num_tokens",
            "query_start_loc_gpu",
            "query_start_loc_cpu",
            "max_query_len",
            "seq_lens",
            "max_seq_len",
            "block_tables",
            "slot_mappings",
            "kv_cache_config",
            "seq_lens_cpu_upper_bound",
            "positions",
            "is_prefilling",
        ),
    ),
    (_SPECULATOR, "DraftModelSpeculator.sample_draft", 8, ()),
    (_SAMPLER, "Sampler.sample", 8, ("return_logprobs",)),
    (_HANDLER, "DraftTokensHandler.__init__", 1, ()),
    ("vllm.forward_context", "set_forward_context", 2, ("num_tokens", "slot_mapping")),
]


@pytest.fixture(scope="session")
def next_vllm() -> Path:
    try:
        return wheel_sources("vllm", "0.33.0")
    except SourcesUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["installed", "0.33.0"])
def root(request: pytest.FixtureRequest) -> Path:
    if request.param == "installed":
        return INSTALLED
    return request.getfixturevalue("next_vllm")


def source_of(root: Path, module: str) -> Path:
    base = root.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def find_function(path: Path, name: str) -> ast.FunctionDef:
    node: ast.AST = ast.parse(path.read_text())
    for part in name.split("."):
        node = next(
            child
            for child in node.body
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == part
        )
    assert isinstance(node, ast.FunctionDef)
    return node


def doctored(root: Path, folder: Path, module: str, pattern: str, replacement: str) -> Path:
    """A copy of the modules that the hooks rely on, one of them changed."""
    for name in {e.module for e in EXPECTATIONS}:
        source = source_of(root, name)
        target = folder / source.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    target = folder / source_of(root, module).relative_to(root)
    text, count = re.subn(pattern, replacement, target.read_text())
    assert count, f"{pattern} is not in {module}: nothing was doctored"
    target.write_text(text)
    return folder


def describe(expectation: Expectation) -> str:
    return f"{expectation.module.rsplit('.', 1)[-1]}.{expectation.name}"


def test_every_hook_holds(root: Path) -> None:
    """Catches a release of vLLM that moved, renamed or re-shaped something a hook relies on."""
    assert [status for status in expected.probe(root) if not status.ok] == []


@pytest.mark.parametrize(("file", "ours", "module", "theirs"), OVERRIDES, ids=lambda v: v)
def test_our_methods_take_what_vllm_passes(
    root: Path, file: str, ours: str, module: str, theirs: str
) -> None:
    """Catches an argument that a vLLM passes and our override does not take, or takes elsewhere."""
    mine = find_function(ADAPTER / file, ours).args
    stock = find_function(source_of(root, module), theirs).args
    positional = [arg.arg for arg in (*mine.posonlyargs, *mine.args)]
    expected = [arg.arg for arg in (*stock.posonlyargs, *stock.args)]
    known = expected[: len(positional)]
    assert positional == known
    for extra in expected[len(positional) :]:
        assert mine.kwarg or extra in {arg.arg for arg in mine.kwonlyargs}, extra


@pytest.mark.parametrize(
    ("module", "name", "positional", "by_name"), CALLS, ids=lambda v: str(v).replace("vllm.", "")
)
def test_vllms_functions_take_what_we_pass(
    root: Path, module: str, name: str, positional: int, by_name: tuple[str, ...]
) -> None:
    """Catches a helper of vLLM that lost an argument we give, or wants one that we do not."""
    args = find_function(source_of(root, module), name).args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args) if arg.arg != "self"]
    required = names[: len(names) - len(args.defaults)]
    given = {*names[:positional], *by_name}
    assert positional <= len(names)
    assert given <= {*names, *(arg.arg for arg in args.kwonlyargs)}
    assert set(required) <= given


PARTS = (
    "speculator.build_speculator",
    "model_state.extend_model_state",
    "requested.check_request",
    "requested.find_target_obstacle",
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_has_all_its_parts(method: str, part: str) -> None:
    """Catches a part that is missing or misspelled: it is looked up only when it is needed."""
    module, _, function = part.partition(".")
    tree = ast.parse((ADAPTER / method / f"{module}.py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert f'"{module}:{function}"' in (ADAPTER / "methods.py").read_text()


@pytest.mark.parametrize("expectation", EXPECTATIONS, ids=describe)
def test_a_missing_name_is_reported(expectation: Expectation, tmp_path: Path) -> None:
    """Catches an expectation that would hold whatever vLLM looked like."""
    last = expectation.name.rsplit(".", 1)[-1]
    root = doctored(INSTALLED, tmp_path, expectation.module, rf"\b{last}\b", f"{last}_gone")
    assert find_problem(expectation, root) == f"{expectation.module}.{expectation.name} is missing"
    assert any(
        expectation.name in status.detail for status in expected.probe(root) if not status.ok
    )


@pytest.mark.parametrize(
    "expectation", [e for e in EXPECTATIONS if e.parameters is not None], ids=describe
)
def test_a_changed_parameter_is_reported(expectation: Expectation, tmp_path: Path) -> None:
    """Catches a probe that looks at names only: a re-shaped function would be called wrongly."""
    changed = expectation.parameters[-1]
    root = doctored(INSTALLED, tmp_path, expectation.module, rf"\b{changed}\b", "other")
    problem = find_problem(expectation, root)
    assert problem is not None
    assert expectation.name in problem
    assert f"expected ({', '.join(expectation.parameters)})" in problem


def test_a_missing_module_is_reported(tmp_path: Path) -> None:
    """Catches a probe that crashes, and takes `register()` along, when a file is gone."""
    problems = [find_problem(expectation, tmp_path) for expectation in EXPECTATIONS]
    assert problems == [f"module {e.module} is missing" for e in EXPECTATIONS]


@pytest.fixture
def unhooked_args(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """EngineArgs as vLLM ships it, our hook taken off until the test ends."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    stock = EngineArgs.create_speculative_config.__wrapped__
    monkeypatch.setattr(EngineArgs, "create_speculative_config", stock)
    return EngineArgs


def test_a_vllm_without_a_hook_refuses_only_ours(
    unhooked_args: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a half-hooked engine, and a package that breaks vLLM's own methods on such a vLLM."""
    root = doctored(INSTALLED, tmp_path, expected.RUNNER, r"\binit_speculator\b", "make_speculator")
    monkeypatch.setattr(expected, "engine_root", lambda _: root)
    plugin.register()
    with pytest.raises(ConfigError) as refusal:
        unhooked_args(speculative_config={"method": "clasp"}).create_speculative_config(None, None)
    message = str(refusal.value)
    assert "\n" not in message
    assert "'clasp' cannot run" in message
    assert "init_speculator is missing" in message
    assert all(version in message for version in expected.TESTED_VERSIONS)
    assert unhooked_args().create_speculative_config(None, None) is None
