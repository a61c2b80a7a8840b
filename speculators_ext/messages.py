"""What a user reads of a setting that is not valid: one line, from the model of the settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

from speculators_ext.registry import near_miss
from speculators_ext.settings import WHERE, MethodConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError

__all__ = ["describe_schema", "did_you_mean", "one_line"]


def one_line(model: type[MethodConfig], error: ValidationError, values: Mapping[str, Any]) -> str:
    """Turn pydantic's first complaint into our one line.

    Args:
        model: of the settings.
        error: what it raised.
        values: what it was given.
    """
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return f"{WHERE}: {first['ctx']['error']}"
    key = str(first["loc"][0]) if first["loc"] else ""
    names = tuple(model.model_fields)
    if first["type"] == "extra_forbidden" or key not in names:
        remedy = _inner_place(model, key, values) or did_you_mean(
            near_miss(key, names), "remove it"
        )
        return f"{WHERE}: unknown key {key!r}; accepted: {', '.join(names)}; {remedy}"
    schema = model.model_json_schema()["properties"][key]
    accepted = describe_schema(schema)
    given, place = first["input"], "".join(f"[{index}]" for index in first["loc"][1:])
    return (
        f"{WHERE}: {key}{place}={given!r} is not valid; accepted: {accepted}; "
        f"correct it or leave the key out for the default ({json.dumps(schema.get('default'))})"
    )


def _inner_place(model: type[MethodConfig], key: str, values: Mapping[str, Any]) -> str | None:
    """What to do with a key of an object inside the settings; None where no object has it."""
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation):
            if not (isinstance(kind, type) and issubclass(kind, MethodConfig)):
                continue
            if key not in kind.model_fields:
                continue
            if values.get(name) is None:
                return f"it is a key of {name!r}, which does not go with a model; remove it"
            inside = json.dumps({name: {key: values[key]}}, default=repr)[1:-1]
            return f"it is a key of {name!r}: write {inside}"
    return None


_NAMES = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "each true or false"),
    "object": ("an object", "objects"),
    "string": ("a string", "strings"),
    "null": ("null", "nulls"),
}


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Say in a few words which values a field's JSON schema accepts."""
    if "anyOf" in schema:
        kinds = [part for part in schema["anyOf"] if part.get("type") != "null"]
        texts = [describe_schema(part) for part in kinds]
        return ("null, or " if len(kinds) < len(schema["anyOf"]) else "") + " or ".join(texts)
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    if schema.get("type") == "array":
        items = schema["items"]
        return f"a list of {_NAMES[items['type']][1]}{_bounds(items)}"
    return f"{_NAMES[schema.get('type', 'object')][0]}{_bounds(schema)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    if "minLength" in schema or "maxLength" in schema:
        most = f"to {schema['maxLength']}" if "maxLength" in schema else "or more"
        return f" of {schema.get('minLength', 0)} {most} characters"
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    if "minimum" in schema:
        return f" >= {schema['minimum']:g}"
    return f" <= {schema['maximum']:g}" if "maximum" in schema else ""


def did_you_mean(name: str | None, otherwise: str) -> str:
    """The remedy for a name that is probably ``name``, or is none."""
    return f"did you mean {name!r}?" if name else otherwise
