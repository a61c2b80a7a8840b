"""Turn what the user asked of ``EAGLE2`` into settings, or refuse it in one line before loading."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.head_files import inspect_head
from speculators_ext.engines.sglang.requested import (
    check_engine,
    raw_settings,
    refuse_flags,
    same_as_flags,
    target_config,
    target_info,
    tree_nodes,
)

if TYPE_CHECKING:
    from speculators_ext.config import Eagle2Config

__all__ = ["eagle2_settings", "prepare_eagle2", "reads_several_layers"]


def eagle2_settings(server_args: Any) -> Eagle2Config:
    """The method's settings for this server's target: preset, SGLang's flags, the user's keys.

    Raises:
        ConfigError: one line.
    """
    raw = same_as_flags(raw_settings(), server_args)
    found = parse_method_config("eagle2", raw, target=target_info(server_args))
    return cast("Eagle2Config", found)


def reads_several_layers() -> bool:
    """Whether the head of the server that runs here is an EAGLE-3 head."""
    from sglang.srt.runtime_context import get_spec

    path = get_spec().speculative_draft_model_path
    return path is not None and _is_eagle3(path, get_spec().speculative_draft_model_revision)


@lru_cache
def _is_eagle3(path: str, revision: str | None) -> bool:
    from sglang.srt.utils.hf_transformers.config import get_config

    config = get_config(path, trust_remote_code=False, revision=revision)
    return any("eagle3" in name.lower() for name in config.architectures or ())


def _inspect_head(server_args: Any) -> None:
    """Refuse a head that does not fit the target, in one line."""
    from sglang.srt.utils.hf_transformers.config import get_config

    model, target = server_args.speculative_draft_model_path, target_config(server_args)
    where = "--speculative-draft-model-path"
    config = get_config(
        model,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
    )
    inspect_head(where, model, config.to_dict(), target.hidden_size, target.vocab_size)
    names = config.architectures or ()
    if not any("eagle" in name.lower() for name in names):
        raise ConfigError(
            f"{where}={model!r}: SGLang would load it as {', '.join(names)}, which is no head; "
            "accepted: an EAGLE architecture in its config.json; for a head of a Llama set "
            'architectures to ["LlamaForCausalLMEagle"]'
        )


def prepare_eagle2(server_args: Any) -> None:
    """Check a server's arguments and fill in what the user left open.

    Raises:
        ConfigError: one line naming the flag, what is accepted and the remedy.
    """
    check_engine("EAGLE2", server_args, on_gpus=True)
    refuse_flags(
        "EAGLE2",
        server_args,
        ("speculative_draft_window_size", "a level sees the whole prefix"),
        ("speculative_token_map", "a head's own draft vocabulary is used"),
    )
    if server_args.speculative_draft_model_path is None:
        raise ConfigError(
            "--speculative-algorithm EAGLE2: --speculative-draft-model-path is missing; accepted: "
            "an EAGLE, EAGLE-2 or EAGLE-3 head trained for the target"
        )
    _inspect_head(server_args)
    options = eagle2_settings(server_args)
    nodes = tree_nodes(options, server_args)
    server_args.speculative_num_steps = options.depth
    server_args.speculative_eagle_topk = options.topk
    server_args.speculative_num_draft_tokens = nodes + 1
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
