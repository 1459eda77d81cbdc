"""``daskps settings``: print every setting of a job: type, default, meaning, whether it affects the result."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from daskps.cli.command import command
from daskps.config import Job, affects_result
from daskps.errors import ArgumentError
from daskps.view.words import plain

EPILOG = """\b
Examples:
  daskps settings train
  daskps settings 'tables.*.optimizer'
  daskps settings --schema > job.schema.json    # for editors: `#:schema job.schema.json` in the first line of a job

A * stands for the name of a table or the number of a slot.
"""
WIDTH = 110  # columns of the text


@click.command(epilog=EPILOG)
@click.argument("path", default="")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a job instead, whole.")
@command
def settings(path: str, schema: bool) -> tuple[Any, ...]:
    """Print the settings of a job, or only those at PATH, such as train or 'tables.*.optimizer'."""
    if schema:
        if path:
            raise ArgumentError("the schema is that of a whole job: leave PATH out")
        value: dict[str, Any] = Job.model_json_schema()
        return value, json.dumps(value, indent=2)
    found = list(_settings(Job, "", None))
    if path:
        found = _narrowed(found, path)
    return {"settings": found}, "\n\n".join(_text(item) for item in found)


def _settings(group: type[BaseModel], path: str, defaults: BaseModel | None) -> Iterator[dict[str, Any]]:
    """Yield the settings of `group` and of the groups in it; `defaults` is the group's own default, if it has one."""
    types = group.model_json_schema()
    for name, field in group.model_fields.items():
        default = getattr(defaults, name) if defaults is not None else _default(field)
        yield {
            "name": path + name,
            "type": _type_words(types["properties"][name], types.get("$defs", {})),
            "required": field.is_required(),
            "default": plain(default.model_dump(mode="json") if isinstance(default, BaseModel) else _plain(default)),
            "affects_result": affects_result(path + name),
            "meaning": field.description or "",
        }
        inner, many = _group_in(field.annotation)
        if inner is not None:
            own = default if isinstance(default, inner) else None
            yield from _settings(inner, f"{path}{name}.{'*.' if many else ''}", own)


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def _plain(default: Any) -> Any:
    """Return a default as JSON values."""
    if isinstance(default, dict):
        return {name: item.model_dump(mode="json") for name, item in default.items()}
    return list(default) if isinstance(default, tuple) else default


def _group_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the group of settings in a type, None if there is none, and whether the type has many such groups."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    parts = get_args(annotation)
    found = next((item for item in parts if isinstance(item, type) and issubclass(item, BaseModel)), None)
    return found, type(None) not in parts


def _type_words(schema: dict[str, Any], groups: dict[str, Any]) -> str:
    """Return a JSON schema's type in words."""
    if "$ref" in schema:
        return "group"
    if "anyOf" in schema:
        return " or ".join(_type_words(item, groups) for item in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type_words(schema['items'], groups)}s"
    if schema["type"] == "object":
        return "groups by name"
    words: str = {"null": "none", "string": "text"}.get(schema["type"], schema["type"])
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return " ".join([words, *(f"{sign} {schema[name]}" for name, sign in bounds.items() if name in schema)])


def _narrowed(found: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Return the settings at `path`; raise ArgumentError, with the nearest paths, if there are none."""
    wanted = path.split(".")
    kept = [item for item in found if _is_at(item["name"].split("."), wanted)]
    if not kept:
        names = {item["name"] for item in found}
        last = {name.rpartition(".")[2]: name for name in sorted(names, reverse=True)}
        near = difflib.get_close_matches(path, names, n=3)
        near += [last[name] for name in difflib.get_close_matches(wanted[-1], last, n=3) if last[name] not in near]
        hint = f"did you mean {', '.join(near[:3])}?" if near else f"known are {', '.join(Job.model_fields)}"
        raise ArgumentError(f"there is no setting {path!r}; {hint}")
    return kept


def _is_at(name: list[str], wanted: list[str]) -> bool:
    """Return True if the setting `name` is at the path `wanted` or below it; any word stands for a *."""
    return len(name) >= len(wanted) and all(part in ("*", word) for part, word in zip(name, wanted, strict=False))


def _text(item: dict[str, Any]) -> str:
    """Return one setting as text: a line with type and default, and its meaning below."""
    default = "required" if item["required"] else f"default {_default_text(item['default'])}"
    affects = {"yes": "affects the result", "no": "does not affect the result"}
    result = affects.get(item["affects_result"], f"affects the result {item['affects_result']}")
    head = f"{item['name']}: {item['type']}; {default if item['type'] != 'group' or item['required'] else ''}"
    lines = [f"{head.rstrip('; ')}; {result}"]
    return "\n".join(lines + textwrap.wrap(item["meaning"], WIDTH, initial_indent="    ", subsequent_indent="    "))


def _default_text(default: Any) -> str:
    if isinstance(default, dict):
        return ", ".join(default)
    return "none" if default is None else json.dumps(default)
