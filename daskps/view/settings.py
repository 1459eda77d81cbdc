"""A job's settings as TOML text, for the report and for running the job again.

In: settings as JSON values, from a snapshot. Out: text that `daskps train` accepts.
"""

from __future__ import annotations

import json
import re
from typing import Any

BARE = re.compile(r"[A-Za-z0-9_-]+")  # TOML names that need no quotes


def settings_text(settings: dict[str, Any]) -> str:
    """Return a job's settings as TOML; settings that are None are left out."""
    plain = {name: value for name, value in settings.items() if not isinstance(value, dict) and not _tables(value)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items() if value is not None]
    for name, value in settings.items():
        if isinstance(value, dict):
            lines += _group(name, value)
        elif _tables(value):
            for item in value:
                lines += ["", f"[[{name}]]"]
                lines += [f"{key} = {json.dumps(entry)}" for key, entry in item.items() if entry is not None]
    return "\n".join(lines).strip()


def _tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def _group(path: str, group: dict[str, Any]) -> list[str]:
    single = {name: value for name, value in group.items() if value is not None and not isinstance(value, dict)}
    own = [f"{name} = {json.dumps(value)}" for name, value in single.items()]
    lines = ["", f"[{path}]", *own] if own else []
    for name, value in group.items():
        if isinstance(value, dict):
            lines += _group(f"{path}.{name if BARE.fullmatch(name) else json.dumps(name)}", value)
    return lines
