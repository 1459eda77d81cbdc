"""The kernel tests once more on the CuPy path: real PTX, interpreted with random interleaving, bounds, race and
weak-memory checks, on 1, 2 and 3 devices. In a process of its own, so that the stand-in for CuPy disturbs nobody.

DASKPS_PTXRUN names the folder of ptxrun. More seeds: ``pytest -m slow tests/kernels/test_ptxrun.py``.
"""

from pathlib import Path

import pytest

from tests.kernels.kernel_inputs import PTXRUN
from tests.kernels.kernel_nvrtc import find_nvrtc
from tests.processes import needs_ptxrun, run_tests_on_ptxrun

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 9))]


@pytest.mark.skipif(PTXRUN, reason="this is the inner run")
@needs_ptxrun
@pytest.mark.skipif(find_nvrtc() is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("seed", SEEDS)
def test_all_kernel_tests_pass_on_interpreted_ptx(seed):
    run_tests_on_ptxrun(str(Path(__file__).parent), "cuda", seed)
