"""The native library loads, runs kernels in shares, and refuses wrong arguments with words that help."""

import subprocess
import sys

import numpy as np
import pytest

from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError


def mixed(keys: np.ndarray, seed: int) -> np.ndarray:
    """The NumPy twin of `mix_keys`."""

    def mix64(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    return mix64(keys ^ mix64(np.array([seed], np.uint64)))


@pytest.mark.parametrize("cores", [1, 2, 3, 7])
def test_any_number_of_shares_mixes_every_key(cores: int) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 1001, np.uint64)
    out = np.zeros_like(keys)
    with ComputePool(cores) as pool:
        pool.launch(library().mix_keys, keys=keys, n=len(keys), seed=7, mixed=out)
    np.testing.assert_array_equal(out, mixed(keys, 7))


def test_a_wrong_dtype_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"keys wants dtype uint64, got int64; convert it"):
        library().mix_keys(keys=np.zeros(3, np.int64), n=3, seed=0, mixed=np.zeros(3, np.uint64))


def test_a_strided_array_is_refused() -> None:
    with pytest.raises(ArgumentError, match="wants a C-contiguous array"):
        library().mix_keys(keys=np.zeros(6, np.uint64)[::2], n=3, seed=0, mixed=np.zeros(3, np.uint64))


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"missing arguments \['mixed'\]"):
        library().mix_keys(keys=np.zeros(3, np.uint64), n=3, seed=0)


def test_the_package_does_not_import_the_module_that_builds_it() -> None:
    """Else ``python -m daskps.device.compile`` runs it a second time, and Python warns."""
    look = "import sys, daskps, daskps.cli; print('daskps.device.compile' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
