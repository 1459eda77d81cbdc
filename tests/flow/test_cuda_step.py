"""The CuPy path of the whole step (table, late rows, model, optimizers) agrees with the CPU, on 1 and 2 devices.

It runs on interpreted PTX in a process of its own. DASKPS_PTXRUN names the folder of ptxrun.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("whole_step_on_cuda.py")


def learned(backend: str, devices: int, model: str, optimizer: str, path: Path) -> dict[str, np.ndarray]:
    subprocess.run([sys.executable, SCRIPT, backend, str(devices), model, optimizer, path], check=True)
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.skipif("DASKPS_PTXRUN" not in os.environ, reason="DASKPS_PTXRUN does not name a folder of ptxrun")
@pytest.mark.parametrize(
    ("devices", "model", "optimizer"),
    [(1, "deepfm", "rowwise_adagrad"), (2, "dnn", "adam"), (2, "lr", "ftrl"), (1, "fm", "adagrad")],
)
def test_the_cupy_path_learns_what_the_cpu_learns(devices: int, model: str, optimizer: str, tmp_path: Path) -> None:
    on_cpu = learned("cpu", devices, model, optimizer, tmp_path / "cpu.npz")
    on_cuda = learned("cuda", devices, model, optimizer, tmp_path / "cuda.npz")
    np.testing.assert_array_equal(on_cuda["keys"], on_cpu["keys"])
    replicas = sorted({name.split("/")[0] for name in on_cuda if name.startswith("dense")})
    assert len(replicas) == devices
    for name, value in on_cpu.items():
        if name.startswith("dense0/"):
            for replica in replicas:
                found = on_cuda[name.replace("dense0", replica)]
                np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(on_cuda["rows"], on_cpu["rows"], rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(on_cuda["log_loss"], on_cpu["log_loss"], rtol=1e-5)
