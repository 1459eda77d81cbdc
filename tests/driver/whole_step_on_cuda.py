"""Train three overlapping batches on the CuPy path and print what was learned. Run by test_cuda_step.py.

``python -m tests.driver.whole_step_on_cuda BACKEND DEVICES MODEL OPTIMIZER SEED OUT.npz``. With BACKEND cuda, CuPy and
cuDF come from ptxrun, whose folder must be on PYTHONPATH: launches and copies wait in their streams and run in an order
that SEED draws, and a race ends the process with an error.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np


def learn(backend: str, devices: int, model: str, optimizer: str, out: str) -> dict[str, Any]:
    """Return rows, dense parameters and metrics after three batches that share keys; two are in flight at a time."""
    from daskps.config import make_job
    from daskps.node import stages
    from daskps.node.begin import begin
    from daskps.node.node import OpenNode
    from daskps.types import BatchId

    dimension = 1 if model == "lr" else 4
    job = make_job(
        {
            "out": out,
            "data": {
                "format": "synthetic",
                "synthetic": {"examples": 144, "slots": 3, "keys_per_bag": 2, "keys_per_slot": 40, "dense_features": 2},
            },
            "tables": {
                "main": {"dimension": dimension, "optimizer": {"kind": optimizer}, "initialiser": {"scale": 0.1}},
            },
            "model": {"kind": model, "hidden": [8, 4]},
            "train": {"minibatch_examples": 24, "block_examples": 8},
            "cluster": {"devices": devices, "backend": backend, "partitions": 1, "cores": 2},
        }
    )
    node = OpenNode("run", 0, 1, job, begin(job, "run"))
    node.join([""])
    tokens = [BatchId("run", node.incarnation.number, batch, 2 * batch, 2 * batch + 2) for batch in range(3)]

    def prepare(token: BatchId) -> None:
        for stage in ("read", "dedup", "pull", "load"):
            stages.STAGES[stage](node, token)

    try:
        prepare(tokens[0])
        for token, following in zip(tokens, [*tokens[1:], None], strict=True):
            if following is not None:  # it pulls while this batch is out, so the rows they share come late
                prepare(following)
                assert len(node.flights.get(following).pulled["main"].forwarded) > 0, "the batches share no key"
            for stage in ("train", "push"):  # pushed: from here on, only the next batch's copy keeps the table
                stages.STAGES[stage](node, token)
        keys = np.unique(np.concatenate([node.training.read_steps(step, step + 1)[0].keys for step in range(6)]))
        learned = {"keys": keys, "rows": node.lookup(0, keys, batch=2, number=0)}
        for number, network in enumerate(dict.fromkeys(node.networks)):
            learned |= {f"dense{number}/{name}": value for name, value in network.export().items()}
        return learned | {"log_loss": np.array(node.metrics_summary()["log_loss"])}
    finally:
        node.close()


if __name__ == "__main__":
    backend, devices, model, optimizer, seed, path = sys.argv[1:]
    if backend == "cuda":
        import fakecudf

        fakecudf.install(devices=int(devices), streams="async", seed=int(seed), racecheck=True, weak=True)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(path, **learn(backend, int(devices), model, optimizer, folder))
