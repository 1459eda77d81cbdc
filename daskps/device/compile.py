"""Build of the native libraries: compiles kernels and helpers into plain shared libraries with a C interface.

Input: every ``*.cu`` and ``*.cpp`` in the package. Output: ``device/lib/daskps-<variant>.so``, one per CPU variant of
this architecture; `native` loads the best one that the running CPU supports. This file imports only the standard
library, because `pip` runs it before the package and its dependencies are installed.

During development, ``python -m daskps.device.compile`` rebuilds what changed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
KERNELS = PACKAGE / "kernels"  # the include path of every kernel, on CPU and GPU
LIBRARY_FOLDER = PACKAGE / "device" / "lib"
OBJECT_FOLDER = PACKAGE.parent / ".build"

# Compiler flag of each variant. The first variant is the baseline; a later one is loaded if the CPU supports it. All
# variants give equal bits: no contraction into fused multiply-add, no reordering of sums (no -ffast-math), and no C++
# standard library.
VARIANTS: dict[str, dict[str, str]] = {
    "x86_64": {
        "x86-64-v2": "-march=x86-64-v2",
        "x86-64-v3": "-march=x86-64-v3",
        "x86-64-v4": "-march=x86-64-v4",
    },
    "aarch64": {"armv8-a": "-march=armv8-a"},
}
FLAGS = (
    "-O3 -std=c++17 -fopenmp-simd -fPIC -fvisibility=hidden -ffp-contract=off -fno-exceptions -fno-rtti "
    "-fno-threadsafe-statics -fno-math-errno -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter"
).split()


def architecture() -> str:
    """Return the name of the architecture as Linux spells it; Windows and macOS use other spellings."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def variants() -> dict[str, str]:
    """Return the compiler flag of every variant by name, baseline first. An unknown architecture has one variant, with
    the compiler's default."""
    return VARIANTS.get(architecture(), {"generic": ""})


def system_compiler() -> list[str] | None:
    """Return the command of the machine's C++ compiler: $CXX, else g++, clang++ or c++ on the PATH; None if absent."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    return [found] if found else None


def compiler() -> list[str]:
    """Return the command of the machine's compiler, else of the one in the ``ziglang`` wheel, which the build hook
    requests."""
    return system_compiler() or [sys.executable, "-m", "ziglang", "cc"]


def sources() -> list[Path]:
    """Return every native source file of the package, in a fixed order."""
    return sorted([*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cpp")])


def kernel_digest(folder: Path = KERNELS) -> str:
    """Return one digest of the names and texts of all kernels and of all headers that they may include."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.cu*") if path.suffix in {".cu", ".cuh"}):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _zig(command: list[str]) -> bool:
    return "ziglang" in command or any(Path(word).name == "zig" for word in command)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the native build failed: {shlex.join(command)}\n{result.stdout}{result.stderr}")


def _object(command: list[str], source: Path, flags: list[str], digest: str) -> Path:
    """Compile one source file, unless an object of the same text, headers, compiler and flags exists already."""
    text = hashlib.sha256(digest.encode() + source.read_bytes() + repr((command, flags)).encode()).hexdigest()[:16]
    target = OBJECT_FOLDER / f"{source.stem}-{text}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.o")
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        include = f"-I{KERNELS}"
        _run([*command, *flags, include, *language, "-c", str(source), "-o", str(partial)])
        partial.replace(target)
    return target


def build(folder: Path = LIBRARY_FOLDER, extra_flags: tuple[str, ...] = (), only: str | None = None) -> list[Path]:
    """Build one library per variant into `folder` and return their paths, baseline first."""
    command = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    OBJECT_FOLDER.mkdir(parents=True, exist_ok=True)
    headers = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.cuh")))
    digest = hashlib.sha256(headers).hexdigest()
    libraries = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, march in variants().items():
            if only and name != only:
                continue
            if _zig(command):  # zig spells the levels with underscores, and uses -mcpu instead of -march
                march = march.replace("-march=", "-mcpu=").replace("-", "_").replace("_mcpu", "-mcpu")
                march = march.replace("armv8_a", "generic")
            flags = [*FLAGS, *([march] if march else []), *extra_flags]
            objects = pool.map(lambda path, flags=flags: _object(command, path, flags, digest), sources())
            target = folder / f"daskps-{name}.so"
            partial = folder / f"{target.name}.{os.getpid()}"
            _run([*command, "-shared", "-Wl,--as-needed", *extra_flags, *map(str, objects), "-o", str(partial)])
            partial.replace(target)  # atomic; a process that has loaded the old library keeps it
            libraries.append(target)
    return libraries


if __name__ == "__main__":
    for library in build():
        print(library.relative_to(PACKAGE.parent))
