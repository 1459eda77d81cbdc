"""The CuPy path of the whole step (table, late rows, model, optimizers) gives the CPU's bits, on 1, 2 and 3 devices.

It runs on interpreted PTX with asynchronous streams, in a process of its own: launches and copies run as late as CUDA
allows, in an order that the seed draws, and two that nothing orders end the test. DASKPS_PTXRUN names the folder of
ptxrun. More seeds: ``pytest -m slow tests/driver/test_cuda_step.py``.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.driver.helpers import model_bits
from tests.processes import needs_ptxrun, run_module

STEP, TRAIN = "tests.driver.whole_step_on_cuda", "tests.driver.train_on_cuda"
MODELS = [("deepfm", "rowwise_adagrad"), ("dnn", "adam"), ("lr", "ftrl"), ("fm", "adagrad")]
CASES = [
    *((devices, *MODELS[devices], 1) for devices in (1, 2, 3)),
    *(
        pytest.param(devices, *model, seed, marks=pytest.mark.slow)
        for devices in (1, 2, 3)
        for model in MODELS
        for seed in range(2, 9)
    ),
]

pytestmark = needs_ptxrun


def learned(backend: str, devices: int, model: str, optimizer: str, seed: int, path: Path) -> dict[str, np.ndarray]:
    run_module(STEP, backend, devices, model, optimizer, seed, path)
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize(("devices", "model", "optimizer", "seed"), CASES)
def test_the_cupy_path_learns_what_the_cpu_learns(
    devices: int, model: str, optimizer: str, seed: int, tmp_path: Path
) -> None:
    """Bit for bit: ptxrun's matrix product is NumPy's. On a GPU cuBLAS sums in another order."""
    on_cpu = learned("cpu", 1, model, optimizer, seed, tmp_path / "cpu.npz")
    on_cuda = learned("cuda", devices, model, optimizer, seed, tmp_path / "cuda.npz")
    replicas = {name.split("/")[0] for name in on_cuda if name.startswith("dense")}
    assert replicas == {f"dense{number}" for number in range(devices)}
    for name, value in on_cuda.items():
        same = f"dense0/{name.split('/', 1)[1]}" if name.startswith("dense") else name
        np.testing.assert_array_equal(value, on_cpu[same], err_msg=name)


@pytest.mark.parametrize(
    ("nodes", "devices", "sync_every", "seed"),
    [
        pytest.param(1, 1, 1, 1, marks=pytest.mark.slow),
        (1, 3, 1, 2),
        pytest.param(2, 2, 1, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_a_whole_run_on_gpus_gives_the_bits_of_the_cpu(
    nodes: int, devices: int, sync_every: int, seed: int, tmp_path: Path
) -> None:
    """With Dask's threads, overlapped batches, validation and snapshot; nodes do not count unless they step alone."""
    run_module(TRAIN, "cpu", nodes if sync_every > 1 else 1, 1, sync_every, seed, tmp_path / "cpu")
    run_module(TRAIN, "cuda", nodes, devices, sync_every, seed, tmp_path / "cuda")
    assert model_bits(tmp_path / "cuda") == model_bits(tmp_path / "cpu")
