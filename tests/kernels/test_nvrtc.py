"""Every kernel compiles for the GPUs we promise, and none spills registers. NVRTC runs ptxas and reports; no GPU."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from daskps.device.compile import KERNELS
from daskps.device.cuda import DIM_CLASSES, kernel_files, options
from tests.kernels.kernel_nvrtc import compile_source, find_nvrtc

pytestmark = pytest.mark.skipif(find_nvrtc() is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc")

FILES = sorted({file for file, _ in kernel_files().values()})
CASES = [
    (file, size)
    for file in FILES
    for size in (DIM_CLASSES if "WITH_DIMENSION" in (KERNELS / file).read_text() else (None,))
]


ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_120"]


def compiled(file, size, architecture):
    return compile_source((KERNELS / file).read_text(), architecture, options(size))


@pytest.fixture(scope="module")
def compilations() -> Iterator[dict[tuple[str, int | None, str], Future]]:
    """All of them at once, because NVRTC compiles in one thread each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cases = [(file, size, architecture) for architecture in ARCHITECTURES for file, size in CASES]
        futures = {case: pool.submit(compiled, *case) for case in cases}
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("file", "size"), CASES)
def test_kernels_compile_without_spills(compilations, file, size, architecture):
    ptx, log = compilations[file, size, architecture].result()
    names = {name for name, (home, _) in kernel_files().items() if home == file}
    assert set(re.findall(r"\.entry (\w+)", ptx.decode())) == names
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(frames) == len(names), log
    assert set(frames) == {("0", "0", "0")}, log


def test_every_kernel_argument_has_the_width_that_its_signature_says():
    """The launcher converts by the text of the source; PTX tells what the compiler made of it."""
    widths = {"u8": 1, "u32": 4, "u64": 8, "f32": 4, "f64": 8}
    for file, size in CASES:
        if size not in (None, 8):
            continue
        ptx, _ = compiled(file, size, "sm_80")
        for name, text in re.findall(r"\.entry (\w+)\((.*?)\)", ptx.decode(), re.DOTALL):
            signature = kernel_files()[name][1]
            parameters = re.findall(r"\.param (?:\.align 8 \.b8 \w+\[(\d+)\]|\.(\w+))", text)  # a struct, or a number
            bytes_in_ptx = [int(size) if size else widths[kind] for size, kind in parameters]
            assert bytes_in_ptx == [8 if a.pointer else a.dtype.itemsize for a in signature.arguments], name
