"""The networks' CuPy path agrees with the CPU to float32 summation error, and replicas with each other bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import dense_on_cuda
import pytest

from daskps.device import cuda


@pytest.mark.skipif(cuda.problem() is not None, reason=f"no GPU: {cuda.problem()}")
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_agrees_with_the_cpu(count: int) -> None:
    if count > cuda.device_count():
        pytest.skip(f"{count} GPUs wanted, {cuda.device_count()} visible")
    dense_on_cuda.compare(count)


@pytest.mark.skipif("DASKPS_PTXRUN" not in os.environ, reason="DASKPS_PTXRUN does not name a folder of ptxrun")
def test_the_cupy_path_agrees_with_the_cpu_on_interpreted_ptx() -> None:
    script = Path(dense_on_cuda.__file__)
    root = str(script.parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split("launches:")[1]) > 1000
