"""Train a tiny job with `daskps.train` on nodes of this process. Run by test_cuda_step.py.

``python -m tests.driver.train_on_cuda BACKEND NODES DEVICES SYNC_EVERY SEED OUT``. With BACKEND cuda, CuPy and cuDF
come from ptxrun, whose folder must be on PYTHONPATH: launches and copies wait in their streams and run in an order that
SEED draws, and a race ends the run with an error.
"""

from __future__ import annotations

import sys


def train(backend: str, nodes: int, devices: int, sync_every: int, out: str) -> None:
    """Train six steps in batches of two, all in flight together, with forwarded rows, a validation and a snapshot."""
    import daskps
    from daskps.driver.dask import local_workers

    synthetic = {"examples": 144, "slots": 3, "keys_per_bag": 2, "keys_per_slot": 40, "dense_features": 2}
    job = {
        "out": out,
        "data": {"format": "synthetic", "synthetic": synthetic, "validation_rows": 24},
        "tables": {
            "main": {"dimension": 4, "optimizer": {"kind": "rowwise_adagrad"}, "initialiser": {"scale": 0.1}},
        },
        "model": {"kind": "deepfm", "hidden": [8, 4]},
        "train": {
            "minibatch_examples": 24,
            "batch_examples": 48,
            "block_examples": 4,
            "sync_every": sync_every,
        },
        "budget": {"memory_bytes": "64MB", "hbm_bytes": "64MB"},
        "cluster": {"nodes": nodes, "devices": devices, "backend": backend, "partitions": 2, "cores": 1},
    }
    with local_workers(nodes, processes=False) as client:
        daskps.train(job, client=client, report=False)


if __name__ == "__main__":
    backend, nodes, devices, sync_every, seed, out = sys.argv[1:]
    if backend == "cuda":
        import fakecudf

        fakecudf.install(devices=int(devices), streams="async", seed=int(seed))
    train(backend, int(nodes), int(devices), int(sync_every), out)
