"""`speculators-ext config`: every setting of each method, with its default and what it accepts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators_ext.cli.common import CliError, one_line_errors, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@one_line_errors
def config(
    method: Annotated[
        str | None, typer.Argument(help="Of which method; all of them when left out.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, method to settings.")
    ] = False,
) -> None:
    """List what `method_config` may hold: each key, its default, what it accepts, what it does.

    A preset for your model, where the package has one, comes before the defaults.
    """
    from speculators_ext.config import METHODS, suggest_method

    if method is not None and method not in METHODS:
        near = suggest_method(method)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise CliError(f"config {method!r}{hint}: accepted are {', '.join(METHODS)}")
    names = list(METHODS) if method is None else [method]
    found = {name: describe_settings(name) for name in names}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    for name, settings in found.items():
        rows = [
            (row["key"], json.dumps(row["default"]), row["accepted"], row["description"])
            for row in settings
        ]
        headings = ("key", "default", "accepted", "what it does")
        print_table(Console(), f"{name}: {METHODS[name].summary}", headings, rows)


def describe_settings(method: str) -> list[dict[str, Any]]:
    """The settings of a method in their order: `key`, `default`, `accepted`, `description`.

    A setting that is an object is followed by its own keys, as `object.key`.
    """
    from speculators_ext.config import METHODS

    schema = METHODS[method].config_model.model_json_schema()
    return list(_rows(schema["properties"], schema.get("$defs", {}), ""))


def _rows(
    properties: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> Iterator[dict[str, Any]]:
    from speculators_ext.config import describe_schema

    for key, field in properties.items():
        yield {
            "key": prefix + key,
            "default": field.get("default"),
            "accepted": describe_schema(field),
            "description": field["description"],
        }
        for part in field.get("anyOf", [field]):
            if "$ref" in part:
                inner = definitions[part["$ref"].rpartition("/")[2]]
                yield from _rows(inner["properties"], definitions, f"{prefix}{key}.")
