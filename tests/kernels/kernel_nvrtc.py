"""NVRTC of the nvidia-cuda-nvrtc wheel by ctypes: compiles CUDA source for an architecture without any GPU."""

import ctypes
import functools
import sys
from pathlib import Path


@functools.cache
def find_nvrtc() -> Path | None:
    """Return the path of the newest libnvrtc in the nvidia wheels of this environment, or None."""
    found = [path for entry in sys.path if entry for path in Path(entry).glob("nvidia/*/lib/libnvrtc.so.*")]
    return max((path for path in found if "alt" not in path.name), default=None)


@functools.cache
def _library() -> ctypes.CDLL:
    path = find_nvrtc()
    assert path is not None
    return ctypes.CDLL(str(path))


def compile_source(source: str, architecture: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Return the PTX of `source` and the log, in which ptxas reports registers and spills."""
    nvrtc, program, size = _library(), ctypes.c_void_p(), ctypes.c_size_t()
    words = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *options]
    arguments = (ctypes.c_char_p * len(words))(*[word.encode() for word in words])
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(words), arguments)
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert not failed, log.value.decode()
        nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(program, ptx)
        return ptx.value, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
