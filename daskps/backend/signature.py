"""What a kernel takes, read from its source: the one place where argument types are written is the .cu text.

In: source text with ``KERNEL(name, type argument, ...)`` or ``NATIVE(result, name, type argument, ...)`` lines.
Out: `Signature` values, from which both the ctypes call and the CuPy launch convert and check their arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "void": np.dtype(np.uint8),  # an untyped pointer: any dtype passes
    "uint8_t": np.dtype(np.uint8),
    "char": np.dtype(np.uint8),
    "uint32_t": np.dtype(np.uint32),
    "int32_t": np.dtype(np.int32),
    "uint64_t": np.dtype(np.uint64),
    "int64_t": np.dtype(np.int64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}

_DECLARATION = re.compile(r"^(KERNEL|NATIVE)\(\s*(.*?)\)\s*\{", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"^(const\s+)?(\w+)\s*(\*?)\s*(?:const\s+)?(?:__restrict__\s+)?(\w+)$")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel."""

    name: str
    type_name: str
    dtype: np.dtype[Any]
    pointer: bool
    constant: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """Name, result and arguments of one kernel; `kernel` tells KERNEL from NATIVE."""

    name: str
    kernel: bool
    result: str
    arguments: tuple[Argument, ...]


def _argument(text: str, owner: str) -> Argument:
    match = _ARGUMENT.match(" ".join(text.split()))
    if match is None or match[2] not in DTYPES:
        raise ValueError(f"{owner}: cannot read the argument {text.strip()!r}; known types: {', '.join(DTYPES)}")
    return Argument(match[4], match[2], DTYPES[match[2]], bool(match[3]), bool(match[1]))


def signatures(source: str) -> list[Signature]:
    """Every KERNEL and NATIVE declared in `source`."""
    found = []
    for kind, inside in _DECLARATION.findall(re.sub(r"//[^\n]*", "", source)):
        parts = inside.split(",")
        result = parts.pop(0).strip() if kind == "NATIVE" else "void"
        name = parts.pop(0).strip()
        arguments = tuple(_argument(part, name) for part in parts if part.strip())
        found.append(Signature(name, kind == "KERNEL", result, arguments))
    return found
