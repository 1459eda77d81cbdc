"""A model larger than this machine's memory: 30 GB of rows and more, trained for 50 batches; figures over time.

``bench.py large`` (or ``bench.py train --large``) takes about ten minutes and 60 GB of disk below DASKPS_BENCH_FOLDER,
or where temporary files go; ``--plot FILE`` draws throughput, hit rate, disk and compaction, as the paper does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Result, missing
from daskps import open_model
from daskps.config import make_job
from daskps.driver.dask import run_job
from daskps.reports import Progress

DIMENSION = 64
WINDOW = 5  # batches that a rate is taken over
ROW_BYTES = 4 * (DIMENSION + 1)  # rowwise Adagrad has one field of its own


@dataclass(frozen=True, slots=True)
class Point:
    """After a batch of the model that is larger than memory."""

    batch: int
    examples: int
    ended: float  # seconds since 1970
    hit_percent: float  # of the memory tier
    disk_gb: float
    compacted_millions: float  # rows, since the start


def larger_than_memory(cores: int, plot: Path | None) -> list[Result]:
    """Train a model whose rows are 30 GB and more; figures over time, as the paper shows them."""
    folder = Path(os.environ.get("DASKPS_BENCH_FOLDER", tempfile.gettempdir())) / "daskps-large"
    free = shutil.disk_usage(folder.parent).free
    if free < 66 << 30:
        return [missing("larger than memory", "disk", f"{free >> 30} GiB free in {folder.parent}, 66 wanted")]
    settings: dict[str, Any] = {
        "out": str(folder),
        "data": {
            "format": "synthetic",
            "synthetic": {"examples": 11_600_000, "slots": 30, "keys_per_slot": 8_000_000, "zipf_exponent": 0.8},
        },
        "tables": {"main": {"dimension": DIMENSION, "optimizer": {"kind": "rowwise_adagrad", "learning_rate": 0.01}}},
        "model": {"hidden": [128, 64]},
        "train": {"minibatch_examples": 8192, "batch_examples": 8192 * 22, "depth": 3},
        "budget": {"memory_bytes": "11GiB", "hbm_bytes": "8GiB"},
        "cluster": {"cores": cores},
    }
    curve: list[Point] = []

    def note(progress: Progress) -> None:
        report = progress.reports[-1]
        if not curve or curve[-1].batch != progress.batch:
            counts, levels = report.counts, report.levels
            pulled = sum(counts.get(name, 0) for name in ("hits", "misses", "new_keys"))
            curve.append(
                Point(
                    progress.batch,
                    report.examples,
                    report.stages[-1].ended,
                    100 * counts.get("hits", 0) / max(pulled, 1),
                    levels["disk_bytes"] / 1e9,
                    levels["compacted_rows"] / 1e6,
                )
            )
            print(curve[-1], flush=True)

    try:
        run_job(make_job(settings), on_progress=note)
        with open_model(str(folder)) as model:
            rows = model.rows()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if plot is not None:
        _draw(curve, plot)
    rate = sum(point.examples for point in curve[1:]) / (curve[-1].ended - curve[0].ended) / 1e3
    lines = [
        ("rows at the end", rows * ROW_BYTES / 1e9, "GB"),
        ("throughput", rate, "k examples/s"),
        (f"throughput of the last {WINDOW} batches", float(_rates(curve)[-1]), "k examples/s"),
        ("disk at the end", curve[-1].disk_gb, "GB"),
        ("hit rate at the end", curve[-1].hit_percent, "%"),
        ("rows moved by compaction", curve[-1].compacted_millions, "million"),
    ]
    return [Result(f"larger than memory: {what}", value, "", None, None, None, unit) for what, value, unit in lines]


def _rates(curve: list[Point]) -> np.ndarray:
    """Thousand examples a second over the last few batches, of every one but the first: a single batch may end right
    after the one before."""
    examples = np.cumsum([point.examples for point in curve])
    ended = np.array([point.ended for point in curve])
    before = np.maximum(np.arange(1, len(curve)) - WINDOW, 0)
    return (examples[1:] - examples[before]) / (ended[1:] - ended[before]) / 1e3


def _draw(curve: list[Point], path: Path) -> None:
    import matplotlib.pyplot as plt

    later = curve[1:]
    panels = {
        "thousand examples a second": _rates(curve),
        "hit rate of the memory tier, %": [point.hit_percent for point in later],
        "disk, GB": [point.disk_gb for point in later],
        "rows moved by compaction, million": [point.compacted_millions for point in later],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 2.8), constrained_layout=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.plot([point.batch for point in later], values)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("batch")
        axis.set_ylim(0, max(1.0, 1.05 * max(values)))
    figure.savefig(path, dpi=110)


def run(arguments: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py large")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--plot", type=Path, help="where to draw it")
    options = parser.parse_args(arguments)
    return larger_than_memory(options.cores, options.plot)
