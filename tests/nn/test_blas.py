"""NumPy's BLAS is held to one thread and named."""

import numpy as np
import threadpoolctl

from daskps.device.pool import ComputePool
from daskps.nn.blas import blas_build, hold_to_one_thread
from tests.nn.dense_reference import make


def test_a_network_holds_blas_to_one_thread(pool: ComputePool) -> None:
    make("dnn", pool)
    assert {info["num_threads"] for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas"} <= {1}


def test_one_thread_is_obeyed_by_the_products_themselves() -> None:
    # OpenBLAS gives other bits with two threads for this shape; held to one, a thread of ours changes nothing either.
    hold_to_one_thread()
    random = np.random.default_rng(0)
    left, right = random.normal(size=(256, 416)).astype(np.float32), random.normal(size=(416, 128)).astype(np.float32)
    wanted = left @ right
    with ComputePool(3) as pool:
        for found in pool.map(lambda _: left @ right, range(30)):
            np.testing.assert_array_equal(found, wanted)


def test_the_build_is_named() -> None:
    name = blas_build()
    assert name == blas_build()
    assert name
    assert "/" not in name  # a path would differ between machines that give equal bits
