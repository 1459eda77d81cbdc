"""The devices that kernel tests run on.

Every test that takes `node` runs on CPU stand-ins and, where CuPy finds one, on a real GPU. `test_ptxrun.py` runs them
once more in a process of its own on the CuPy path, with PTX interpreted by ptxrun: there DASKPS_TEST_BACKEND=ptxrun.
"""

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from daskps.device import cuda, device
from daskps.device.device import Device, devices
from daskps.device.pool import ComputePool
from tests.kernels.kernel_inputs import PTXRUN

BACKENDS = ["cpu"] if cuda.problem() else ["cpu", "cuda"]
Node = Callable[[int], list[Device]]

settings.register_profile("kernels", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("ptxrun", settings.get_profile("kernels"), max_examples=3, derandomize=True)
settings.load_profile("ptxrun" if PTXRUN else "kernels")

if PTXRUN:
    import fakecudf

    seed = int(os.environ["DASKPS_TEST_SEED"])
    fakecudf.install(devices=3, streams="async", seed=seed, racecheck=True, weak=True)


@pytest.fixture(autouse=True)
def _shares_of_small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs too are cut into shares, so that small tests see threads."""
    monkeypatch.setattr(device, "SMALL", 1)


@pytest.fixture(scope="session", params=["cuda"] if PTXRUN else BACKENDS)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """``node(M)``: M devices of the backend, or a skip that says how many are missing."""

    def make(count: int) -> list[Device]:
        if request.param == "cuda" and count > cuda.device_count():
            pytest.skip(f"{count} GPUs wanted, {cuda.device_count()} visible")
        return devices(request.param, count, pool=compute)

    with ComputePool(4) as compute:
        yield make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)
