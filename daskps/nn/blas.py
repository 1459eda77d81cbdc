"""NumPy's BLAS: limited to one thread, and named, because the bits of matrix products depend on both."""

from __future__ import annotations

import functools

import numpy as np
import threadpoolctl

from daskps.errors import BackendError


@functools.cache
def hold_to_one_thread() -> None:
    """Limit every BLAS loaded in this process to one thread, for the rest of the process.

    Raises BackendError if a BLAS does not obey: then results would depend on the number of cores.
    """
    threadpoolctl.threadpool_limits(limits=1, user_api="blas")
    for info in threadpoolctl.threadpool_info():
        if info["user_api"] == "blas" and info["num_threads"] != 1:
            raise BackendError(
                f"the BLAS {info['filepath']} still uses {info['num_threads']} threads after being held to 1; "
                "results would depend on the number of cores: set OPENBLAS_NUM_THREADS=1 before Python starts"
            )


@functools.cache
def blas_build() -> str:
    """Return name, version and core type of NumPy's BLAS, such as ``openblas 0.3.31 SkylakeX``.

    Equal strings mean equal bits of matrix products. A snapshot records the one that made it.
    """
    builds = [
        f"{info['internal_api']} {info['version']} {info.get('architecture', '')}".strip()
        for info in threadpoolctl.threadpool_info()
        if info["user_api"] == "blas" and "numpy" in info["filepath"]
    ]
    if builds:
        return " + ".join(sorted(builds))
    # NumPy does not bring its own BLAS: use what it was built with.
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
