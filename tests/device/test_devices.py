"""The choice of a backend is explicit, and asking for a GPU that is not there is a clear error."""

import importlib.machinery
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.device import cuda
from daskps.device.compile import KERNELS
from daskps.device.device import CpuDevice, Workspace, check_array, chosen_backend, devices
from daskps.device.native import signatures
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, BackendError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it then fails, as where it is not installed
    monkeypatch.delenv("DASKPS_BACKEND", raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_cpu_where_no_gpu_can_be_used() -> None:
    assert chosen_backend() == chosen_backend("auto") == chosen_backend("cpu") == "cpu"


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_an_error_that_says_what_is_missing(pool: ComputePool) -> None:
    with pytest.raises(
        BackendError, match=r"cuda was asked for, but CuPy cannot be imported .* or choose the backend cpu"
    ):
        devices("cuda", pool=pool)


@pytest.mark.usefixtures("no_gpu")
def test_the_environment_chooses_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKPS_BACKEND", "cuda")
    with pytest.raises(BackendError):
        chosen_backend()
    assert chosen_backend("cpu") == "cpu"
    with pytest.raises(BackendError):
        chosen_backend("auto")  # as a job has it by default
    monkeypatch.setenv("DASKPS_BACKEND", "tpu")
    with pytest.raises(ArgumentError, match="unknown backend 'tpu'; use auto, cpu or cuda"):
        chosen_backend()


class FakeCupy(ModuleType):
    """As much of CuPy as says how many GPUs there are and compiles kernels."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.modules: list[dict[str, Any]] = []
        runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
        self.cuda = SimpleNamespace(runtime=runtime)

    def RawModule(self, **values: Any) -> object:  # noqa: N802 (CuPy's name)
        self.modules.append(values)
        return object()


def test_cupy_without_cudf_is_reported_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASKPS_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    cudf = ModuleType("cudf")
    cudf.__spec__ = importlib.machinery.ModuleSpec("cudf", None)
    monkeypatch.setitem(sys.modules, "cudf", cudf)
    assert chosen_backend("auto") == "cuda"
    monkeypatch.setitem(sys.modules, "cudf", None)  # importing it then fails, as where it is not installed
    assert chosen_backend("auto") == "cpu"
    with pytest.raises(BackendError, match=r"but cuDF, which finds .* is not installed; install daskps with the extra"):
        chosen_backend("cuda")


@pytest.mark.parametrize("changed", sorted(path.name for path in KERNELS.glob("*.cu*")))
def test_compiled_kernels_are_not_kept_when_any_kernel_source_changes(changed: str, tmp_path: Path) -> None:
    """CuPy's cache on disk knows the options and the text of the .cu alone, not what it includes."""
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    before = cuda.options(8, folder)
    assert before == cuda.options(8, folder)
    assert before[-2].split("=")[1] == cuda.options()[-1].split("=")[1], "the folder itself does not count"
    with (folder / changed).open("a") as file:
        file.write("\n")
    assert cuda.options(8, folder) != before


def test_every_kernel_is_compiled_with_the_digest_of_all_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cuda._module.__wrapped__("pool.cu", 16)
    assert cupy.modules[0]["options"] == cuda.options(16)
    assert any(option.startswith("-DDASKPS_KERNELS=") for option in cuda.options(16))


def test_a_real_gpu_is_used_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := cuda.problem():
        pytest.skip(f"no GPU: {problem}; all kernel tests run on the CPU only")
    monkeypatch.delenv("DASKPS_BACKEND", raising=False)
    assert chosen_backend() == "cuda"


def test_stand_ins_are_as_many_as_asked_for(pool: ComputePool) -> None:
    assert [device.name for device in devices("cpu", 3, pool=pool)] == ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(ArgumentError, match="at least one device, got 0"):
        devices("cpu", 0, pool=pool)


def test_arrays_are_checked_for_dtype_shape_order_and_place(pool: ComputePool) -> None:
    device = CpuDevice(0, pool)
    good = np.zeros((4, 6), np.float32)
    check_array("call", "rows", good, device, np.float32, (None, 6))
    for bad, message in [
        (good.astype(np.float64), r"call: rows wants .* float32 array \(n, 6\) on cpu:0, got dtype float64"),
        (good[0], r"got shape \(6,\)"),
        (np.zeros((4, 12), np.float32)[:, ::2], r"got strides .* ascontiguousarray"),
        ([[1.0]], r"got list; bring it there with device\.from_host"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            check_array("call", "rows", bad, device, np.float32, (None, 6))


def test_scalars_that_do_not_fit_their_width_are_refused(pool: ComputePool) -> None:
    with pytest.raises(ArgumentError, match=r"partition_parts: parts wants a int32 from -2147483648 to 2147483647"):
        CpuDevice(0, pool).launch(
            "partition_parts",
            0,
            keys=np.zeros(0, np.uint64),
            n=0,
            parts=2**31,
            salt=0,
            modulo=0,
            part=np.zeros(0, np.int32),
        )


def test_signatures_tell_where_a_kernel_runs() -> None:
    text = "KERNEL(a, const float* x, int32_t n) {\nCPU_KERNEL(b, void* x) {\nNATIVE(int64_t, c, double y) {\n"
    a, b, c = signatures(text)
    assert (a.kind, b.kind, c.kind) == ("KERNEL", "CPU_KERNEL", "NATIVE")
    assert (a.kernel, b.kernel, c.kernel) == (True, True, False)
    assert c.result == "int64_t"
    assert [x.constant for x in a.arguments] == [True, False]


def test_a_workspace_keeps_its_memory(pool: ComputePool) -> None:
    workspace = Workspace(CpuDevice(0, pool))
    first = workspace.take("a", (10, 3), np.int64)
    again = workspace.take("a", 5, np.float32)
    assert again.ctypes.data == first.ctypes.data
    assert again.shape == (5,)
    larger = workspace.take("a", 100_000, np.float32)
    assert workspace.take("b", 3, np.uint8).ctypes.data != larger.ctypes.data
    assert workspace.size_bytes >= 400_000
