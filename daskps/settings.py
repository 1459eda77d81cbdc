"""Base of all settings, their common types, and the words for wrong settings.

The settings of a part stand beside the part; `daskps.config` composes them to a `Job`. Example of a group of settings:

>>> class Example(Settings):
...     depth: int = Field(default=3, ge=1, description="Batches in flight.")
>>> Example(depth=4)
Example(depth=4)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

# Factors of byte units, decimal (KB) and binary (KiB).
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", start=1)}


def is_url(path: str) -> bool:
    """Return True for a URL or a chain of URLs. One slash is enough: pathlib turns s3://bucket into s3:/bucket."""
    return "://" in path or re.match(r"[a-z][\w+.-]+:/", path, re.IGNORECASE) is not None


def parse_bytes(value: object) -> object:
    """Return a text such as ``"1.5 GiB"`` as a number of bytes (1610612736); return other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", value.upper())
    if match is None:
        raise ValueError(
            f"cannot read {value!r} as a number of bytes; write for example 500_000_000, '500MB' or '2GiB'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def local_path(value: object) -> object:
    """Return a path unchanged, and a ``file://`` URL as its path; raise ValueError for every other URL.

    The log, the dense network and the rows of a model must be on one file system, with hard links and flock. With
    another URL the rows would be at the URL, and everything else in a local folder with that name.
    """
    if not isinstance(value, str) or not is_url(value):
        return value
    named = re.fullmatch(r"file:(?://(?:localhost)?)?(/(?!/).*)", value, re.IGNORECASE)
    if named is None:
        raise ValueError(
            "a model directory is a path of a file system, not a URL (file:///a/whole/path is taken as a path); "
            "give a local path, or one of a file system that all machines share"
        )
    return named[1]


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(gt=0)]
LocalPath = Annotated[str, BeforeValidator(local_path, json_schema_input_type=str)]
Rate = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
# Validation context for settings from a snapshot. Validators that are newer than some snapshots accept them unchecked:
# a trained model must stay readable.
RECORDED = "recorded"


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def as_float32(value: float) -> float:
    """Return the value rounded to float32, as kernels get it."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _finite_in_float32(value: float, info: pydantic.ValidationInfo) -> float:
    if info.context != RECORDED and not np.isfinite(as_float32(value)):
        raise ValueError("must be a finite number, in float32 too")
    return value


def _above_0_in_float32(value: float, info: pydantic.ValidationInfo) -> float:
    if info.context != RECORDED and not as_float32(value) > 0:
        raise ValueError("must be above 0, in float32 too")
    return value


def _below_1_in_float32(value: float, info: pydantic.ValidationInfo) -> float:
    if info.context != RECORDED and not 0 <= as_float32(value) < 1:
        raise ValueError("must be at least 0 and below 1, in float32 too, which 0.99999998 and more are not")
    return value


Finite = Annotated[float, AfterValidator(_finite_in_float32)]
FiniteNonNegative = Annotated[Finite, Field(ge=0)]
LearningRate = Annotated[Finite, AfterValidator(_above_0_in_float32)]
Decay = Annotated[float, AfterValidator(_below_1_in_float32)]


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
