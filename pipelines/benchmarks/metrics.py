"""Streaming metrics: ``python pipelines/bench.py metrics [--examples N]``.

Ours counts AUC, log loss and calibration of one step in one thread. Peers: the same histograms and sums in NumPy, and
1% of the 30 ms that a step of this size takes, which is what metrics may cost.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.harness import Result, alternate, compare
from daskps.data.synthetic import Synthetic
from daskps.nn.group_metrics import GroupMetrics
from daskps.nn.metrics import Metrics

STEPS = 50  # counted in one turn
STEP_SECONDS = 0.030


class NumpyMetrics:
    """What one would write: two histograms, two sums in float64."""

    def __init__(self, buckets: int = 1_000_000) -> None:
        self.buckets = buckets
        self.counts = np.zeros((2, buckets), np.int64)
        self.loss = self.prediction = 0.0

    def update(self, labels: np.ndarray, logits: np.ndarray) -> None:
        z = logits.astype(np.float64)
        bucket = ((np.clip(z, -16, 16) + 16) * (self.buckets / 32)).astype(np.int64).clip(0, self.buckets - 1)
        np.add.at(self.counts, (labels.astype(np.int64), bucket), 1)
        self.loss += float((np.logaddexp(0, z) - labels * z).sum())
        self.prediction += float((1 / (1 + np.exp(-z))).sum())


def run(argv: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py metrics", description=__doc__)
    parser.add_argument("--examples", type=int, default=4096, help="examples of a step")
    arguments = parser.parse_args(argv)
    n = arguments.examples
    config = Synthetic(n * STEPS, slots=4, keys_per_slot=(10**6, 100, 100, 100))
    steps = [config.read(step * n, (step + 1) * n) for step in range(STEPS)]
    random = np.random.default_rng(0)
    logits = [random.normal(-2, 1.5, n).astype(np.float32) for _ in steps]

    def overall(metrics: Metrics | NumpyMetrics) -> None:
        for batch, step_logits in zip(steps, logits, strict=True):
            metrics.update(batch.labels, step_logits)

    def grouped(metrics: GroupMetrics) -> None:
        for batch, step_logits in zip(steps, logits, strict=True):
            metrics.update(batch, step_logits)

    ours, numpy, by_group, by_user = Metrics(), NumpyMetrics(), GroupMetrics(1), GroupMetrics(0)
    seconds = alternate(
        {
            "ours": lambda: overall(ours),
            "numpy": lambda: overall(numpy),
            "by group": lambda: grouped(by_group),
            "by user": lambda: grouped(by_user),
        }
    )
    results = compare("metrics", seconds, items=n * STEPS, unit="examples/s", targets={"numpy": None})
    allowed = 0.01 * STEP_SECONDS
    for name, contender in (
        ("metrics of a step", "ours"),
        ("metrics of a step, by a slot of 100 values", "by group"),
        ("metrics of a step, by a slot of 1e6 values", "by user"),
    ):
        taken = seconds[contender] / STEPS
        results.append(Result(name, taken, "1% of a 30 ms step", allowed, allowed / taken, 1.0, "s (less is better)"))
    return results
