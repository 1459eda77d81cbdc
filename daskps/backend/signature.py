"""What a kernel takes, read from its source: the one place where argument types are written is the .cu text.

In: source text with ``KERNEL(name, type argument, ...)``, ``CPU_KERNEL(...)`` (the same, not on the GPU) or
``NATIVE(result, name, type argument, ...)`` lines.
Out: `Signature` values, from which both the ctypes call and the CuPy launch convert and check their arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.errors import ArgumentError

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
    # structures of 8-byte words, described where kernels/*.cuh declare them
    "Slot": np.dtype(np.uint64),
    "Shard": np.dtype(np.uint64),
    "Source": np.dtype(np.uint64),
}

_LIMITS = {
    name: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for name, dtype in DTYPES.items() if dtype.kind in "iu"
}
_DECLARATION = re.compile(r"^(KERNEL|CPU_KERNEL|NATIVE)\(\s*(.*?)\)\s*\{", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"^(const\s+)?(\w+)\s*(\*?)\s*(?:const\s+)?(?:__restrict__\s+)?(\w+)$")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel."""

    name: str
    type_name: str
    dtype: np.dtype[Any]
    pointer: bool
    constant: bool

    def scalar(self, owner: str, value: Any) -> int | float:
        """`value` as a plain number that fits the declared width; ctypes and CUDA would cut it off in silence."""
        if self.dtype.kind == "f":
            return float(value)
        number = int(value)
        limits = _LIMITS[self.type_name]
        if not limits[0] <= number <= limits[1]:
            raise ArgumentError(
                f"{owner}: {self.name} wants a {self.dtype} from {limits[0]} to {limits[1]}, got {number}"
            )
        return number


@dataclass(frozen=True, slots=True)
class Signature:
    """Name, result and arguments of one kernel; `kind` is the macro that declares it."""

    name: str
    kind: str
    result: str
    arguments: tuple[Argument, ...]

    @property
    def kernel(self) -> bool:
        """Whether it runs in shares, as KERNEL and CPU_KERNEL do."""
        return self.kind != "NATIVE"


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
        found.append(Signature(name, kind, result, arguments))
    return found
