"""Error messages for wrong settings: where the mistake is, the value, and for an unknown name the nearest known one.

Input: one error of a pydantic ValidationError. Output: one line of a `ConfigError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the closest known word, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


def _model_at(path: tuple[Any, ...], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model class in which the last part of `path` should have been a field; None if not found."""
    current: Any = root
    for part in path[:-1]:
        if isinstance(current, type) and issubclass(current, BaseModel):
            if part not in current.model_fields:
                return None
            current = current.model_fields[str(part)].annotation
        else:  # inside a container: `part` is an index or a name, the model is among the container's arguments
            current = next((item for item in get_args(current) if _is_model(item)), None)
        current = next(
            (item for item in get_args(current) if _is_model(item) and type(None) in get_args(current)), current
        )
    if not _is_model(current):
        current = next((item for item in get_args(current) if _is_model(item)), None)
    return current  # type: ignore[no-any-return]


def _is_model(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, BaseModel)


def explain(error: Any, root: type[BaseModel]) -> str:
    """Return one error of a `pydantic.ValidationError` of `root` as one line."""
    place = ".".join(str(part) for part in error["loc"]) or "job"
    if error["type"] == "extra_forbidden":
        model = _model_at(error["loc"], root)
        hint = nearest(str(error["loc"][-1]), model.model_fields) if model is not None else ""
        return f"{place}: unknown setting; {hint}"
    if error["type"] == "missing":
        return f"{place}: is required"
    message = error["msg"].removeprefix("Value error, ")
    came = "" if isinstance(error["input"], dict | BaseModel) else f" (got {error['input']!r})"
    return f"{place}: {message}{came}"


def is_url(path: str) -> bool:
    """Return True for a URL or a chain of URLs. One slash is enough: pathlib turns s3://bucket into s3:/bucket."""
    return "://" in path or re.match(r"[a-z][\w+.-]+:/", path, re.IGNORECASE) is not None
