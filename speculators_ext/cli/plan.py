"""What a benchmark compares: variants, each a name and the speculative config it is served with."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import CliError, resolve_model
from speculators_ext.cli.rows import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from speculators_ext.cli.prompts import Prompt
    from speculators_ext.config import Method

ENGINES = ("vllm", "sglang")
# Methods of the engine's own that need nothing beside the target, to compare with.
BUILT_IN = ("mtp",)
# The rest of vLLM's own, each with what its speculative config needs beside the method; those for
# one architecture's MTP module (`deepseek_mtp`) end alike and are not listed.
_HEAD = {"model": "HEAD"}
BY_VARIANT: dict[str, dict[str, Any]] = {
    "eagle": _HEAD,
    "eagle3": _HEAD,
    "draft_model": {"model": "SMALL"},
    "ngram": {"prompt_lookup_max": 4},
    "ngram_gpu": {"prompt_lookup_max": 4},
    "suffix": {},
    "medusa": _HEAD,
    "mlp_speculator": _HEAD,
    "dflash": _HEAD,
    "dspark": _HEAD,
    "extract_hidden_states": {},
    "custom_class": {"model": "MODULE.CLASS"},
}
STEP_TOKENS = 48  # room for a step of reasoning


@dataclass(frozen=True)
class Variant:
    """One server to measure: its name in the report, and its speculative config (None: plain)."""

    name: str
    speculative: dict[str, Any] | None


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, checked.

    Attributes:
        model: what the engine is given.
        model_label: what reports call it.
        variants: in the order they are served; plain first makes speed-ups appear early.
        concurrency: requests in flight, one pass over the prompts for each.
        max_tokens: most tokens of an answer.
        eager: no torch.compile and no graphs.
        extra: further arguments for the server's command line.
        logs: folder for the servers' logs.
    """

    model: str
    model_label: str
    variants: Sequence[Variant]
    concurrency: Sequence[int]
    prompts: Sequence[Prompt]
    max_tokens: int
    dtype: str
    eager: bool
    logs: Path
    extra: Sequence[str] = ()
    engine: str = "vllm"
    start_timeout_s: float = 600.0


def check_engine(name: str) -> None:
    """Refuse an engine that is not known."""
    if name not in ENGINES:
        raise CliError(f"--engine {name!r}: accepted is {', '.join(ENGINES)}")


def split_names(text: str, option: str) -> list[str]:
    """Split a comma-separated option, refusing an empty list and doubles."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise CliError(f"{option} {text!r}: give at least one, separated by commas")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise CliError(f"{option} {text!r}: {', '.join(doubles)} given twice")
    return names


def parse_concurrency(text: str) -> list[int]:
    """Read `1,4` as a list of positive numbers of requests."""
    parts = split_names(text, "--concurrency")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CliError(f"--concurrency {text!r}: positive whole numbers, such as 1,4")
    return [int(part) for part in parts]


def method_variants(
    names: Sequence[str], num_speculative_tokens: int, head: str | None = None
) -> list[Variant]:
    """`plain`, methods of ours with their presets or defaults, and the engine's own `mtp`, by name.

    `head` is the draft head of the methods that need one.
    """
    return [_method_variant(name, num_speculative_tokens, head) for name in names]


def with_folder(variant: Variant, log: Callable[[str], None]) -> Variant:
    """The variant with its draft checkpoint as an engine takes it: assets become folders."""
    config = variant.speculative or {}
    if not isinstance(config.get("model"), str):
        return variant
    return replace(variant, speculative=config | {"model": resolve_model(config["model"], log)})


def parse_variant(text: str, num_speculative_tokens: int) -> Variant:
    """Read `NAME=JSON`, the JSON being a speculative config of ours or of the engine's own.

    `num_speculative_tokens` is filled in where the JSON leaves it out. Methods of ours have their
    `method_config` checked here, before a server is started.
    """
    name, equals, body = text.partition("=")
    if not equals or not name.strip():
        raise CliError(f"--variant {text!r}: NAME=JSON expected")
    try:
        config = json.loads(body)
    except json.JSONDecodeError as error:
        raise CliError(f"--variant {name}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(config, dict) or not isinstance(config.get("method"), str):
        raise CliError(f'--variant {name}: a JSON object with "method" expected, given {body}')
    config = {"num_speculative_tokens": num_speculative_tokens} | config
    _check_method_config(f"--variant {name}", config)
    method = str(config["method"])
    if needs_head(method) and not _method(method).model_optional and not config.get("model"):
        raise CliError(
            f'--variant {name}: {method} drafts with {_method(method).needs}; give it as "model"'
        )
    return Variant(name.strip(), config)


def known_methods() -> list[str]:
    """The methods this package adds, in the registry's order."""
    from speculators_ext.config import METHODS

    return list(METHODS)


def _method_variant(name: str, num_speculative_tokens: int, head: str | None) -> Variant:
    if name == PLAIN:
        return Variant(PLAIN, None)
    known = [*known_methods(), *BUILT_IN]
    if name in BY_VARIANT or name.endswith("_mtp"):
        example = _example(name, num_speculative_tokens, **BY_VARIANT.get(name, {}))
        raise CliError(
            f"--methods {name}: this method of the engine's own goes through --variant: {example}"
        )
    if name not in known:
        from speculators_ext.config import suggest_method

        near = suggest_method(name)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise CliError(
            f"--methods {name!r}{hint}: known are {', '.join([PLAIN, *known])}; "
            "for another method of the engine's own use --variant NAME=JSON"
        )
    if name in known_methods() and not _method(name).lossless:
        example = _example(name, STEP_TOKENS, model="SMALL", method_config={"lossy": True})
        raise CliError(
            f"--methods {name}: it is lossy, which only a variant can allow: {example}; it "
            f"needs {_method(name).needs}"
        )
    config: dict[str, Any] = {"method": name, "num_speculative_tokens": num_speculative_tokens}
    if needs_head(name):
        if head is None:
            raise CliError(
                f"--methods {name}: it drafts with {_method(name).needs}; give it as --head"
            )
        config["model"] = head
    return Variant(name, config)


def needs_head(name: str) -> bool:
    """Whether a method of ours drafts with a checkpoint beside the target."""
    from speculators_ext.config import METHODS

    return name in METHODS and not METHODS[name].drafts_alone


def _example(method: str, num_speculative_tokens: int, **keys: Any) -> str:
    """The option that measures a method of this speculative config, as a shell takes it."""
    config = {"method": method, "num_speculative_tokens": num_speculative_tokens} | keys
    return f"--variant '{method}={json.dumps(config)}'"


def _method(name: str) -> Method:
    from speculators_ext.config import METHODS

    return METHODS[name]


def _check_method_config(where: str, config: dict[str, Any]) -> None:
    from speculators_ext.config import ConfigError, parse_method_config

    if config["method"] not in known_methods():
        return
    try:
        parse_method_config(
            config["method"],
            config.get("method_config"),
            target=None,
            draft_model=config.get("model"),
        )
    except ConfigError as error:
        raise CliError(f"{where}: {error}") from error
