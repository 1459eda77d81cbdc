"""The CuPy path of the whole step (table, late rows, model, optimizers) gives the CPU's bits, on 1, 2 and 3 devices.

It runs on interpreted PTX with asynchronous streams, in a process of its own: launches and copies run as late as CUDA
allows, in an order that the seed draws, and two that nothing orders end the test. DASKPS_PTXRUN names the folder of
ptxrun. More seeds: ``pytest -m slow tests/driver/test_cuda_step.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.driver.conftest import model_bits

STEP = Path(__file__).with_name("whole_step_on_cuda.py")
TRAIN = Path(__file__).with_name("train_on_cuda.py")
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

pytestmark = pytest.mark.skipif(
    "DASKPS_PTXRUN" not in os.environ, reason="DASKPS_PTXRUN does not name a folder of ptxrun"
)


def run(script: Path, *arguments: object) -> None:
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def learned(backend: str, devices: int, model: str, optimizer: str, seed: int, path: Path) -> dict[str, np.ndarray]:
    run(STEP, backend, devices, model, optimizer, seed, path)
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
    run(TRAIN, "cpu", nodes if sync_every > 1 else 1, 1, sync_every, seed, tmp_path / "cpu")
    run(TRAIN, "cuda", nodes, devices, sync_every, seed, tmp_path / "cuda")
    assert model_bits(tmp_path / "cuda") == model_bits(tmp_path / "cpu")
