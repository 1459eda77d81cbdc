"""NumPy's BLAS: held to one thread, and named.

The network's bits depend on which BLAS multiplies, on its choice of kernels for this CPU, and on its number of threads
(OpenBLAS adds in another order with two). So a process that trains holds it to one thread, blocks of examples being
what runs in parallel, and a snapshot records `blas_build()`.
"""

from __future__ import annotations

import functools

import numpy as np
import threadpoolctl

from daskps.errors import BackendError


@functools.cache
def hold_to_one_thread() -> None:
    """Hold every BLAS that is loaded in this process to one thread, once; it stays so."""
    threadpoolctl.threadpool_limits(limits=1, user_api="blas")
    for info in threadpoolctl.threadpool_info():
        if info["user_api"] == "blas" and info["num_threads"] != 1:
            raise BackendError(
                f"the BLAS {info['filepath']} still uses {info['num_threads']} threads after being held to 1; "
                "results would depend on the number of cores: set OPENBLAS_NUM_THREADS=1 before Python starts"
            )


@functools.cache
def blas_build() -> str:
    """Name, version and kernels of NumPy's BLAS, such as ``openblas 0.3.31 SkylakeX``; equal names give equal bits."""
    numpys = [
        f"{info['internal_api']} {info['version']} {info.get('architecture', '')}".strip()
        for info in threadpoolctl.threadpool_info()
        if info["user_api"] == "blas" and "numpy" in info["filepath"]
    ]
    if numpys:
        return " + ".join(sorted(numpys))
    blas = np.show_config(mode="dicts")["Build Dependencies"][
        "blas"
    ]  # linked in from outside: what NumPy was built with
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
