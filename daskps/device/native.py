"""Kernels compiled for the CPU: loads the shared library and calls its functions by name, with checked arguments.

Input: the name of a kernel and keyword arguments. Output: a call into the library, without the GIL. Names and types of
arguments, and the fields of structs that are passed by value, are read from the kernel's source, so they are declared
only once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.errors import ArgumentError, NativeLibraryError

DTYPES: dict[str, np.dtype[Any]] = {
    "void": np.dtype(np.uint8),  # an untyped pointer: arrays of any dtype are accepted
    "uint8_t": np.dtype(np.uint8),
    "char": np.dtype(np.uint8),
    "uint32_t": np.dtype(np.uint32),
    "int32_t": np.dtype(np.int32),
    "uint64_t": np.dtype(np.uint64),
    "int64_t": np.dtype(np.int64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    # structs of 8-byte words that arrays hold; the sources declare and document their fields
    "Cell": np.dtype(np.uint64),
    "Shard": np.dtype(np.uint64),
    "Source": np.dtype(np.uint64),
    "IndexGroups": np.dtype(np.uint64),
    "SegmentRead": np.dtype(np.uint64),
    # structs of 8-byte words that `struct_of_words` makes; mem/entry.cuh and mem/working_set.cpp declare them
    "CacheState": np.dtype(np.uint64),
    "KeyUnion": np.dtype(np.uint64),
    "NodeShare": np.dtype(np.uint64),
}

_LIMITS = {
    name: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for name, dtype in DTYPES.items() if dtype.kind in "iu"
}
_DECLARATION = re.compile(r"^(KERNEL|CPU_KERNEL|NATIVE)\(\s*(.*?)\)\s*\{", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"^(const\s+)?(\w+)\s*(\*?)\s*(?:const\s+)?(?:__restrict__\s+)?(\w+)$")


_STRUCT = re.compile(r"^struct (\w+) \{([^{}]*)\};", re.MULTILINE)
_MEMBERS = re.compile(r"^(\w+) (\w+(?:, \w+)*)$")


def structs(source: str) -> dict[str, np.dtype[Any]]:
    """Return the structs in the text `source` whose members are all numbers, as dtypes with the layout of C."""
    found = {}
    for name, body in _STRUCT.findall(re.sub(r"//[^\n]*", "", source)):
        lines = [_MEMBERS.match(line.strip()) for line in body.split(";") if line.strip()]
        if all(line is not None and line[1] in DTYPES for line in lines):
            members = [(member, DTYPES[line[1]]) for line in lines if line for member in line[2].split(", ")]
            found[name] = np.dtype(members, align=True)
    return found


@functools.cache
def struct_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a struct that kernels take by value; kernels/*.cuh declare it."""
    from daskps.device.compile import KERNELS

    known: dict[str, np.dtype[Any]] = {}
    for path in sorted(KERNELS.glob("*.cuh")):
        known |= structs(path.read_text())
    if name not in known:
        raise ValueError(f"no struct {name} of numbers in kernels/*.cuh; known are {', '.join(known)}")
    return known[name]


def make_struct(name: str, **values: float) -> np.void:
    """Return a struct to pass to a kernel by value; every member must be given."""
    dtype = struct_dtype(name)
    members = dtype.names or ()
    if values.keys() != set(members):
        missing, extra = set(members) - values.keys(), values.keys() - set(members)
        raise ArgumentError(f"struct {name}: missing {sorted(missing)}, unknown {sorted(extra)}")
    made: Any = np.array(tuple(values[member] for member in members), dtype)
    return made[()]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel."""

    name: str
    type_name: str
    dtype: np.dtype[Any]
    pointer: bool
    constant: bool

    def by_value(self, owner: str, value: Any) -> Any:
        """Return `value` as a Python number, or as the struct that it is. Raise ArgumentError if it does not fit the
        declared type: ctypes and CUDA would truncate it without an error."""
        if self.dtype.names:
            if getattr(value, "dtype", None) != self.dtype:
                raise ArgumentError(f"{owner}: {self.name} wants a struct {self.type_name}, made by make_struct")
            return value
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
    """Name, result type and arguments of one native function; `kind` is the macro that declares it."""

    name: str
    kind: str
    result: str
    arguments: tuple[Argument, ...]

    @property
    def kernel(self) -> bool:
        """Return True if the function runs in shares (KERNEL, CPU_KERNEL), False for a plain call (NATIVE)."""
        return self.kind != "NATIVE"


def struct_of_words(**fields: Any) -> tuple[Any, Any]:
    """Return a C struct of 8-byte words: an array of one record to read and set fields by name, and the same memory as
    uint64, to pass to native functions.

    A field is an integer or the address of an array, in the order of the struct's declaration. The caller keeps the
    arrays alive and in place as long as the struct is used.
    """
    record = np.zeros(1, [(name, np.int64) for name in fields])
    for name, value in fields.items():
        record[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return record, record.view(np.uint64)


def _argument(text: str, owner: str) -> Argument:
    match = _ARGUMENT.match(" ".join(text.split()))
    if match is None or (match[3] and match[2] not in DTYPES):
        raise ValueError(f"{owner}: cannot read the argument {text.strip()!r}; known types: {', '.join(DTYPES)}")
    dtype = DTYPES[match[2]] if match[2] in DTYPES else struct_dtype(match[2])
    return Argument(match[4], match[2], dtype, bool(match[3]), bool(match[1]))


def signatures(source: str) -> list[Signature]:
    """Return the signature of every KERNEL, CPU_KERNEL and NATIVE declared in the text `source`."""
    found = []
    for kind, inside in _DECLARATION.findall(re.sub(r"//[^\n]*", "", source)):
        parts = inside.split(",")
        result = parts.pop(0).strip() if kind == "NATIVE" else "void"
        name = parts.pop(0).strip()
        arguments = tuple(_argument(part, name) for part in parts if part.strip())
        found.append(Signature(name, kind, result, arguments))
    return found


_CTYPES = {
    "void": None,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@functools.cache
def _ctype(argument: Argument) -> Any:
    """Return the type by which ctypes passes an argument by value."""
    return np.ctypeslib.as_ctypes_type(argument.dtype) if argument.dtype.names else _CTYPES[argument.type_name]


_FIRST_BYTE: Any = ctypes.c_char.from_buffer
_PLACEHOLDER = np.empty(8, np.uint64)  # kernels get this address for an empty array: never read, but not null
_PLACEHOLDER_ADDRESS = _PLACEHOLDER.ctypes.data
# CPU flags that /proc/cpuinfo must list before a variant is loaded.
_NEEDS = {
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "fma", "f16c", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "bmi2"},
}


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def library_folder() -> Path:
    """Return the folder of the libraries; the environment variable DASKPS_LIBRARY_FOLDER overrides it, for example for
    a sanitizer build."""
    from daskps.device.compile import LIBRARY_FOLDER

    return Path(os.environ.get("DASKPS_LIBRARY_FOLDER", LIBRARY_FOLDER))


def runnable_variants() -> list[str]:
    """Return the names of the variants that this CPU can run, baseline first."""
    from daskps.device.compile import variants

    flags = _cpu_flags()
    return [name for name in variants() if _NEEDS.get(name, set()) <= flags]


def variant() -> str:
    """Return the variant to load: the environment variable DASKPS_VARIANT, else the best one that is built and that
    this CPU can run."""
    from daskps.device.compile import variants

    asked = os.environ.get("DASKPS_VARIANT")
    if asked:
        return asked
    built = [name for name in runnable_variants() if (library_folder() / f"daskps-{name}.so").exists()]
    return built[-1] if built else next(iter(variants()))


class Function:
    """One native function, called with keyword arguments. A pointer argument takes a C-contiguous array of exactly the
    declared dtype, or None."""

    def __init__(self, signature: Signature, symbol: Any) -> None:
        self.signature = signature
        self.arguments = signature.arguments
        self._names = frozenset(argument.name for argument in signature.arguments)
        self._plan = [(a, a.name, a.dtype if a.pointer else None) for a in signature.arguments]
        self._symbol = symbol
        types = [ctypes.c_void_p if a.pointer else _ctype(a) for a in signature.arguments]
        shares = [ctypes.c_int64, ctypes.c_int64] if signature.kernel else []
        symbol.argtypes = [*types, *shares]
        symbol.restype = _CTYPES[signature.result]

    def __call__(self, **values: Any) -> Any:
        """Run the function in the calling thread; a KERNEL runs as one single share."""
        converted = self.convert(values)
        return self._symbol(*converted, 0, 1) if self.signature.kernel else self._symbol(*converted)

    def share(self, converted: list[Any], share_index: int, share_count: int) -> None:
        """Run one share of a KERNEL; `converted` are the arguments that `convert` returned."""
        self._symbol(*converted, share_index, share_count)

    def convert(self, values: dict[str, Any]) -> list[Any]:
        """Check `values` against the signature and return them as ctypes arguments, in the declared order."""
        if values.keys() != self._names:
            missing, extra = self._names - values.keys(), values.keys() - self._names
            raise ArgumentError(
                f"{self.signature.name}: missing arguments {sorted(missing)}, unknown arguments {sorted(extra)}"
            )
        converted = []
        for argument, name, dtype in self._plan:
            value = values[name]
            # Fast path for a valid array: its address takes 0.3 us this way, and 1.6 us as `value.ctypes.data`.
            if type(value) is np.ndarray and value.dtype is dtype and value.flags.carray and value.size:
                converted.append(ctypes.addressof(_FIRST_BYTE(value)))
            else:
                converted.append(self._convert(argument, value))
        return converted

    def _convert(self, argument: Argument, value: Any) -> Any:
        if not argument.pointer:
            value = argument.by_value(self.signature.name, value)
            return _ctype(argument).from_buffer_copy(value) if argument.dtype.names else value
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            raise ArgumentError(
                f"{self.signature.name}: {argument.name} wants a NumPy array, got {type(value).__name__}; "
                "use numpy.asarray, or None where the argument is optional"
            )
        if argument.type_name != "void" and value.dtype != argument.dtype:
            raise ArgumentError(
                f"{self.signature.name}: {argument.name} wants dtype {argument.dtype}, got {value.dtype}; "
                f"convert it with .astype(numpy.{argument.dtype})"
            )
        if not value.flags.c_contiguous:
            raise ArgumentError(
                f"{self.signature.name}: {argument.name} wants a C-contiguous array, got strides {value.strides} "
                f"for shape {value.shape}; use numpy.ascontiguousarray"
            )
        if not argument.constant and not value.flags.writeable:
            raise ArgumentError(f"{self.signature.name}: {argument.name} is written to, but the array is read-only")
        return value.ctypes.data if value.size else _PLACEHOLDER_ADDRESS


class Library:
    """The loaded shared library; `library().name(...)` calls the native function `name`."""

    def __init__(self, path: Path) -> None:
        from daskps.device.compile import sources

        self.path = path
        if not path.exists():
            raise NativeLibraryError(
                f"the native library {path} is missing: reinstall daskps with `pip install .`, or in a checkout "
                "build it with `python -m daskps.device.compile`"
            )
        handle = ctypes.CDLL(str(path))
        self.functions = {}
        for source in sources():
            for signature in signatures(source.read_text()):
                self.functions[signature.name] = Function(signature, handle[signature.name])

    def __getattr__(self, name: str) -> Function:
        try:
            return self.__dict__["functions"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(
                f"no native function {name!r} in {self.path.name}; "
                f"if its source below daskps/ is new, run `python -m daskps.device.compile`"
            ) from None


@functools.cache
def library() -> Library:
    """Return the library of this process; the first call loads it."""
    return Library(library_folder() / f"daskps-{variant()}.so")


def mix_keys(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the 64-bit hash of each number: mix64 of kernels/dialect.cuh."""
    mixed = np.empty_like(keys)
    library().mix_keys(keys=keys, n=keys.size, seed=0, mixed=mixed)  # mix64(0) is 0
    return mixed


def mix64(x: int) -> int:
    """Return the 64-bit hash of one number, which is taken modulo 2^64."""
    return int(mix_keys(np.array([x % 2**64], np.uint64))[0])
