"""What a user may ask of EAGLE2 and MTP_REUSE, and the one line he gets where it cannot be."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins

from speculators_ext.assets import build
from speculators_ext.config import ConfigError
from speculators_ext.engines.sglang import requested
from speculators_ext.engines.sglang.eagle2.requested import eagle2_settings
from speculators_ext.engines.sglang.mtp_reuse.requested import (
    DEFAULT_NUM_STEPS,
    mtp_reuse_settings,
)

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402 - as SGLang does: plugins come first


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """The flag writes to the environment: no test may leave settings to the next."""
    monkeypatch.setenv(requested.ENVIRONMENT, "")


def resolve(*words: str, model: str):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    shared = ["--model-path", str(build(model)), "--device", "cpu"]
    shared += ["--attention-backend", "torch_native"]
    args = ServerArgs.from_cli_args(parser.parse_args([*shared, *words]))
    args.resolve_once()
    return resolving_view(args)


def eagle2(*words: str, head: str = "tiny-llama-eagle3", model: str = "tiny-llama"):
    asked = ["--speculative-algorithm", "EAGLE2", "--speculative-draft-model-path"]
    return resolve(*asked, str(build(head)), *words, model=model)


def mtp_reuse(*words: str, model: str = "mimo-tiny-mtp"):
    return resolve("--speculative-algorithm", "MTP_REUSE", *words, model=model)


def test_a_tree_is_filled_in():
    """Catches a verify width that no tree of the defaults has, or overlap switched off."""
    found = eagle2()
    options = eagle2_settings(found)
    assert (options.depth, options.topk) == (5, 4)
    assert (found.speculative_num_steps, found.speculative_eagle_topk) == (5, 4)
    assert found.speculative_num_draft_tokens == requested.DEFAULT_NUM_NODES + 1
    assert not found.disable_overlap_schedule


def test_sglangs_flags_are_settings_of_a_tree():
    """Catches SGLang's own flags ignored where they mean the same."""
    words = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    found = eagle2(*words, requested.FLAG, '{"adaptive": false}')
    options = eagle2_settings(found)
    assert (options.depth, options.topk, options.adaptive) == (2, 1, False)
    assert found.speculative_num_draft_tokens == 3  # two levels of one node hold no more


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--speculative-num-draft-tokens", "99"), "--speculative-num-draft-tokens=99 is more"),
        (
            ("--speculative-num-steps", "2", requested.FLAG, '{"depth": 3}'),
            "--speculative-num-steps=2 and depth=3",
        ),
        ((requested.FLAG, '{"depht": 3}'), "did you mean 'depth'"),
        (("--speculative-draft-window-size", "64"), "--speculative-draft-window-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_no_tree_can_be_is_one_line(words, says):
    """Catches a server that dies of it after loading, or silently does something else."""
    with pytest.raises(ValueError, match=r"accepted|remove|give one|lower it") as raised:
        eagle2(*words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_head_that_does_not_fit_is_refused():
    """Catches a head of another target, which would draft noise or fail in the first round."""
    with pytest.raises(ValueError, match="takes hidden states of size 128, the target gives 576"):
        eagle2(model="smollm2-135m-instruct")
    with pytest.raises(ValueError, match="would load it as LlamaForCausalLM, which is no head"):
        eagle2(head="tiny-llama-eagle")
    with pytest.raises(ValueError, match="--speculative-draft-model-path is missing"):
        resolve("--speculative-algorithm", "EAGLE2", model="tiny-llama")


def test_a_chain_of_the_module_is_filled_in():
    """Catches the module looked for in another checkpoint, or a wrong verify width."""
    found = mtp_reuse()
    assert found.speculative_draft_model_path == found.model_path
    assert found.speculative_num_steps == DEFAULT_NUM_STEPS
    assert found.speculative_num_draft_tokens == DEFAULT_NUM_STEPS + 1
    assert mtp_reuse_settings(found).topk == 1
    assert mtp_reuse("--speculative-num-draft-tokens", "4").speculative_num_steps == 3


def test_a_module_drafts_trees_where_that_is_asked():
    """Catches the length of a chain taken for a tree's depth, or the other way round."""
    words = ("--speculative-eagle-topk", "2", "--speculative-num-steps", "3")
    found = mtp_reuse(*words, "--speculative-num-draft-tokens", "7")
    options = mtp_reuse_settings(found)
    assert (options.topk, options.depth) == (2, 3)
    assert found.speculative_num_draft_tokens == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((requested.FLAG, '{"calibrate": true}'), "calibrate=True is not supported on SGLang"),
        ((requested.FLAG, '{"draft_vocab_size": 9999}'), "an integer from 2 to 1535"),
        (
            ("--speculative-num-steps", "4", "--speculative-num-draft-tokens", "9"),
            "accepted: 5",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_no_module_can_be_is_one_line(words, says):
    """Catches a server that dies of it after loading, or silently does something else."""
    with pytest.raises(ValueError, match=r"accepted|remove") as raised:
        mtp_reuse(*words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_another_checkpoints_module_is_refused():
    """Catches a draft model that is loaded and never asked."""
    with pytest.raises(ValueError, match="the target's own module drafts; remove it"):
        mtp_reuse("--speculative-draft-model-path", str(build("tiny-llama")))


def test_latent_attention_is_refused():
    """Catches a target that torch_native cannot run, which would kill the server at a prompt."""
    with pytest.raises(ValueError, match="does not run latent attention"):
        mtp_reuse(model="deepseek-v3-tiny-mtp")


def test_a_target_without_modules_is_refused(tmp_path):
    """Catches a module of random weights, or an error out of the depths of a loader."""
    with pytest.raises(ValueError, match="the target has no MTP module"):
        mtp_reuse(model="tiny-llama")
    shell = tmp_path / "model"
    shell.mkdir()
    for file in build("tiny-llama").iterdir():
        (shell / file.name).symlink_to(file)
    config = json.loads((shell / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (shell / "config.json").unlink()
    (shell / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the checkpoint has no tensor of any"):
        resolve_folder(shell)


def resolve_folder(folder):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = ["--model-path", str(folder), "--device", "cpu", "--attention-backend", "torch_native"]
    words += ["--speculative-algorithm", "MTP_REUSE"]
    ServerArgs.from_cli_args(parser.parse_args(words)).resolve_once()


def test_two_depths_are_one_line_with_what_is_accepted():
    """Catches a refusal that leaves open which of the two to write, and how."""
    flags = SimpleNamespace(speculative_num_steps=5, speculative_eagle_topk=None)
    with pytest.raises(ConfigError, match=r"steps=5 and depth=4 .*accepted: one .*remove depth"):
        requested.same_as_flags({"depth": 4}, flags)
    assert requested.same_as_flags({"depth": 5}, flags) == {"depth": 5}
