"""Inputs that several kernel tests share."""

import os

import numpy as np

PTXRUN = os.environ.get("DASKPS_TEST_BACKEND") == "ptxrun"  # interpreted PTX is slow: fewer and smaller inputs
DIMS = [1, 4, 8, 13, 16, 32, 64, 128, 256]
ALL_DIMS = DIMS if PTXRUN else sorted({*DIMS, 2, 3, 5, 7, 9, 12, 17, 24, 31, 33, 48, 63, 65, 100, 127, 129, 200, 255})


def bags(rng, count, rows, longest=5):
    """Return offsets of `count` bags, a fifth of them empty, and row_of with some absent rows."""
    lengths = rng.integers(0, longest + 1, count) * (rng.random(count) < 0.8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return offsets, rng.integers(-1, rows, offsets[-1]).astype(np.int32)


def wait_for_each_other(devices):
    """Let kernels of every device wait for the copies to all devices, which are asynchronous on a GPU."""
    for device in devices:
        device.wait_for(devices)
