"""The networks' CuPy path agrees with the CPU to float32 summation error, and replicas with each other bit for bit."""

import pytest

from daskps.device import cuda
from tests.nn import dense_on_cuda
from tests.processes import needs_ptxrun, run_module


@pytest.mark.skipif(cuda.problem() is not None, reason=f"no GPU: {cuda.problem()}")
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_agrees_with_the_cpu(count: int) -> None:
    if count > cuda.device_count():
        pytest.skip(f"{count} GPUs wanted, {cuda.device_count()} visible")
    dense_on_cuda.compare(count)


@needs_ptxrun
def test_the_cupy_path_agrees_with_the_cpu_on_interpreted_ptx() -> None:
    assert int(run_module("tests.nn.dense_on_cuda").split("launches:")[1]) > 1000
