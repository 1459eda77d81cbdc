"""The slides' comparison on synthetic clicks: LR and DNN on all features, DNN on features hashed by OP+OSRP to k bins.

``python pipelines/hashing.py [--examples N]`` (about two minutes) prints a table: AUC on rows that were not trained on,
weights kept, and how far each AUC is from the DNN on all features.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from daskps import make_job, open_model
from daskps.build import synthetic
from daskps.device.pool import ComputePool
from daskps.driver.dask import run_job

BINS = (2**18, 2**16, 2**14, 2**12)


def settings(examples: int, kind: str, bins: int | None) -> dict[str, Any]:
    """A job of the comparison."""
    return {
        "data": {
            "format": "synthetic",
            "synthetic": {"examples": examples, "slots": 20, "keys_per_slot": 50_000, "zipf_exponent": 1.05},
            "validation_rows": 100_000,
            "osrp": None if bins is None else {"bins": bins},
        },
        "tables": {
            "main": {
                "dimension": 1 if kind == "lr" else 8,
                "optimizer": {"learning_rate": 0.05 if kind == "lr" else 0.02, "initial_accumulator": 1e-6},
            }
        },
        "model": {"kind": kind, "hidden": [128, 64], "optimizer": {"learning_rate": 0.01}},
        "train": {"minibatch_examples": 512},
        "budget": {"memory_bytes": "1GiB"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=400_000)
    examples = parser.parse_args().examples
    lines: list[tuple[str, float, float]] = []
    runs = [("LR", "lr", None), ("DNN", "dnn", None), *((f"hashed DNN, k = {k:,}", "dnn", k) for k in BINS)]
    for name, kind, bins in runs:
        with tempfile.TemporaryDirectory() as out:
            job = make_job(settings(examples, kind, bins) | {"out": out})
            progress = run_job(job).progress
            with open_model(out) as model:
                rows = model.statistics()["tables"]["main"]["rows"]
        lines.append((name, progress.validations[-1].metrics["auc"], rows * job.tables["main"].dimension))
    with ComputePool(2) as pool:
        best = synthetic(job).best(examples, examples + 100_000, pool)
    reference = next(auc for name, auc, _ in lines if name == "DNN")
    print(f"{'model':<26} {'AUC':>7} {'to DNN':>9} {'sparse weights':>15}")
    for name, auc, weights in lines:
        print(f"{name:<26} {auc:>7.4f} {100 * (auc / reference - 1):>8.2f}% {weights:>15,.0f}")
    print(f"{'best possible':<26} {best.auc:>7.4f}")


if __name__ == "__main__":
    main()
