"""The kernel tests under AddressSanitizer and ThreadSanitizer, four threads and more on contended keys.

Takes minutes: ``pytest -m slow tests/kernels/test_sanitizers.py``. The library is built with the sanitizer; Python and
NumPy are not, so leaks (Python frees nothing at exit) are not looked for. Their synchronisation is seen all the same,
because the sanitizer's runtime is loaded before them and intercepts locks and semaphores.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from daskps.device.compile import build, system_compiler, variants

OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0"},
}


def runtime(sanitizer: str) -> str | None:
    """The path of the sanitizer's runtime library, as the compiler tells it."""
    compiler = shutil.which("g++")
    if compiler is None or system_compiler() != [compiler]:
        return None
    name = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if Path(path).is_absolute() else None


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", OPTIONS)
def test_kernel_tests_pass_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    preload = runtime(sanitizer)
    if preload is None:
        pytest.skip(f"g++ with its {sanitizer} sanitizer's runtime is not installed")
    variant = next(iter(variants()))
    flags = (f"-fsanitize={sanitizer}", "-O1", "-g", "-fno-omit-frame-pointer")
    build(tmp_path, extra_flags=flags, only=variant)
    environment = {
        **os.environ,
        **OPTIONS[sanitizer],
        "LD_PRELOAD": preload,
        "DASKPS_LIBRARY_FOLDER": str(tmp_path),
        "DASKPS_VARIANT": variant,
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    command += ["-k", "not nvrtc and not ptxrun and not variants"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    assert " passed" in result.stdout
