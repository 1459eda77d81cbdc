"""The CPU's half of the kernels: the shared library, its functions by name, every argument checked.

In: NumPy arrays and plain numbers by keyword. Out: what the native function returns; arrays are changed in place.
Calls release the GIL. The library is chosen once, by what the CPU knows; DASKPS_VARIANT names another one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from daskps.backend.compile import LIBRARY_FOLDER, PACKAGE, sources, variants
from daskps.backend.signature import Argument, Signature, signatures
from daskps.errors import ArgumentError, NativeLibraryError

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
_FIRST_BYTE: Any = ctypes.c_char.from_buffer
_NOWHERE = np.empty(8, np.uint64)  # where empty arrays are: nobody reads it, and it is not null
_NOWHERE_ADDRESS = _NOWHERE.ctypes.data
# What /proc/cpuinfo must list before a variant is loaded.
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
    """Where the libraries are; DASKPS_LIBRARY_FOLDER names another place, for example of a sanitizer's build."""
    return Path(os.environ.get("DASKPS_LIBRARY_FOLDER", LIBRARY_FOLDER))


def runnable_variants() -> list[str]:
    """The variants that this CPU can run, baseline first."""
    flags = _cpu_flags()
    return [name for name in variants() if _NEEDS.get(name, set()) <= flags]


def variant() -> str:
    """The variant to load: DASKPS_VARIANT, else the best that this CPU has and that was built."""
    asked = os.environ.get("DASKPS_VARIANT")
    if asked:
        return asked
    built = [name for name in runnable_variants() if (library_folder() / f"daskps-{name}.so").exists()]
    return built[-1] if built else next(iter(variants()))


class Function:
    """One native function. Call it by keyword; pointers take C-contiguous arrays of exactly the declared dtype."""

    def __init__(self, signature: Signature, symbol: Any) -> None:
        self.signature = signature
        self.arguments = signature.arguments
        self._names = frozenset(argument.name for argument in signature.arguments)
        self._plan = [(a, a.name, a.dtype if a.pointer else None) for a in signature.arguments]
        self._symbol = symbol
        scalars = [ctypes.c_void_p if a.pointer else _CTYPES[a.type_name] for a in signature.arguments]
        shares = [ctypes.c_int64, ctypes.c_int64] if signature.kernel else []
        symbol.argtypes = [*scalars, *shares]
        symbol.restype = _CTYPES[signature.result]

    def __call__(self, **values: Any) -> Any:
        """Run a NATIVE in the calling thread, or a KERNEL as its only share."""
        converted = self.convert(values)
        return self._symbol(*converted, 0, 1) if self.signature.kernel else self._symbol(*converted)

    def share(self, converted: list[Any], share_index: int, share_count: int) -> None:
        """Run one share of a KERNEL whose arguments `convert` has checked."""
        self._symbol(*converted, share_index, share_count)

    def convert(self, values: dict[str, Any]) -> list[Any]:
        """Check `values` against the signature and turn them into what ctypes takes."""
        if values.keys() != self._names:
            missing, extra = self._names - values.keys(), values.keys() - self._names
            raise ArgumentError(
                f"{self.signature.name}: missing arguments {sorted(missing)}, unknown arguments {sorted(extra)}"
            )
        converted = []
        for argument, name, dtype in self._plan:
            value = values[name]
            # An array as it should be. Its address costs 0.3 us like this, and 1.6 us as `value.ctypes.data`.
            if type(value) is np.ndarray and value.dtype is dtype and value.flags.carray and value.size:
                converted.append(ctypes.addressof(_FIRST_BYTE(value)))
            else:
                converted.append(self._convert(argument, value))
        return converted

    def _convert(self, argument: Argument, value: Any) -> Any:
        if not argument.pointer:
            return argument.scalar(self.signature.name, value)
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
        return value.ctypes.data if value.size else _NOWHERE_ADDRESS


class Library:
    """The loaded shared library; `library().name(...)` calls the native function `name`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise NativeLibraryError(
                f"the native library {path} is missing: reinstall daskps with `pip install .`, or in a checkout "
                "build it with `python -m daskps.backend.compile`"
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
                f"if its source below {PACKAGE.name}/ is new, run `python -m daskps.backend.compile`"
            ) from None


@functools.cache
def library() -> Library:
    """The library of this process, loaded once."""
    return Library(library_folder() / f"daskps-{variant()}.so")
