"""Train two overlapping batches on the CuPy path and print what was learned. Run by test_cuda_step.py.

As a script it takes CuPy and cuDF from ptxrun, whose folder DASKPS_PTXRUN names:
``python whole_step_on_cuda.py BACKEND DEVICES MODEL OPTIMIZER OUT.npz``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import numpy as np


def learn(backend: str, devices: int, model: str, optimizer: str, out: str) -> dict[str, Any]:
    """Rows, dense parameters and logits' metrics after two batches that share keys and are in flight together."""
    from daskps.config import make_job
    from daskps.flow import stages
    from daskps.flow.begin import begin
    from daskps.flow.open_node import OpenNode
    from daskps.types import Token

    dimension = 1 if model == "lr" else 4
    job = make_job(
        {
            "out": out,
            "data": {
                "format": "synthetic",
                "synthetic": {"examples": 96, "slots": 3, "keys_per_bag": 2, "keys_per_slot": 40, "dense_features": 2},
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
    tokens = [Token("run", node.epoch.number, batch, 2 * batch, 2 * batch + 2) for batch in range(2)]
    try:
        for token in tokens:  # the second batch pulls while the first is out, so its common rows come late
            for stage in ("read", "dedup", "pull", "load"):
                stages.STAGES[stage](node, token)
        assert len(node.flights.get(tokens[1]).pulled["main"].copied) > 0, "the batches share no key"
        for token in tokens:
            stages.STAGES["train"](node, token)
        for token in tokens:
            stages.STAGES["push"](node, token)
        keys = np.unique(np.concatenate([node.training.read_steps(step, step + 1)[0].keys for step in range(4)]))
        learned = {"keys": keys, "rows": node.lookup(0, keys, batch=1, number=0)}
        for number, network in enumerate(dict.fromkeys(node.networks)):
            learned |= {f"dense{number}/{name}": value for name, value in network.export().items()}
        return learned | {"log_loss": np.array(node.metrics_summary()["log_loss"])}
    finally:
        node.close()


if __name__ == "__main__":
    backend, devices, model, optimizer, path = sys.argv[1:]
    if backend == "cuda":
        sys.path.insert(0, os.environ["DASKPS_PTXRUN"])
        import fakecudf

        fakecudf.install(devices=int(devices), seed=1, racecheck=True, weak=True)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(path, **learn(backend, int(devices), model, optimizer, folder))
