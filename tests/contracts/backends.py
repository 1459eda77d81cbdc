"""The backends that contract tests of devices run on: the CPU, a real GPU, or CuPy's stand-in with interpreted PTX.

The stand-in replaces CuPy for a whole process. So `run_on_ptx` starts another pytest, with DASKPS_TEST_BACKEND=ptxrun,
for the classes of a file whose names contain "Cuda".
"""

import os

import pytest

from daskps.device import cuda
from tests.processes import run_tests_on_ptxrun

if os.environ.get("DASKPS_TEST_BACKEND") == "ptxrun":
    import fakecudf

    fakecudf.install(devices=3, streams="async", seed=1, racecheck=True)

needs_gpu = pytest.mark.skipif(cuda.problem() is not None, reason=f"no GPU: {cuda.problem()}")


def run_on_ptx(file: str) -> None:
    """Run the Cuda tests of `file` in another process, where ptxrun stands in for CuPy, cuDF and the GPU."""
    assert "DASKPS_TEST_BACKEND" not in os.environ, "the inner run must not start another one"
    assert " skipped" not in run_tests_on_ptxrun(file, "Cuda and not interpreted", seed=1)
