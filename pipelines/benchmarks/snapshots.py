"""Frequent snapshots: what they cost at the end of a long run, and whether disk use keeps its bound.

``bench.py snapshots`` trains pipelines/demo.toml twice a round, once with a snapshot every 5 batches and once with none
before the end, and compares the throughput of the last 20 of 300 batches of 65,536 examples. The order changes from
round to round. ``--batches`` and ``--batch-examples`` make it smaller, to try it; ``--rounds`` repeats it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import Result
from daskps.budget import KEY_BYTES
from daskps.config import make_job
from daskps.driver.dask import run_job
from daskps.reports import Progress
from daskps.ssd.live_bits import PER_CHANGE, PER_ROW
from daskps.ssd.recovery import read_manifest
from daskps.storage.files import files_at

DEMO = Path(__file__).parents[1] / "demo.toml"
EVERY = 5  # batches between snapshots
BESIDE_BYTES = 14  # of live bits and saved index, for each row of a snapshot


def settings_of(out: Path, batches: int, batch_examples: int, every: int, cores: int) -> dict[str, Any]:
    """Return demo.toml with so many batches, and a snapshot every so many of them (0: at the end)."""
    settings = tomllib.loads(DEMO.read_text())
    settings["out"] = str(out)
    settings["data"]["synthetic"]["examples"] = batches * batch_examples
    settings["data"]["validation_rows"] = 0
    settings["train"] |= {"snapshot_every_batches": every, "batch_examples": batch_examples}
    settings["cluster"] = {"cores": cores}
    return settings


def rate_at_end(settings: dict[str, Any], last: int) -> float:
    """Train, and return the examples a second of the `last` batches."""
    ended: dict[int, tuple[float, int]] = {}

    def note(progress: Progress) -> None:
        report = progress.reports[-1]
        ended[progress.batch] = report.stages[-1].ended, report.examples

    run_job(make_job(settings), on_progress=note)
    batches = sorted(ended)[-last - 1 :]
    examples = sum(ended[batch][1] for _, batch in pairwise(batches))
    return examples / (ended[batches[-1]][0] - ended[batches[0]][0])


def disk_bytes(out: Path) -> tuple[float, float]:
    """Return the bytes that storage/FORMAT.md ("Compaction") allows the tables of a model at rest, and those in use."""
    allowed = measured = 0.0
    for path in (out / "tables").glob("*/partition-*"):
        files = files_at(str(path))
        manifest = read_manifest(files)
        files.close()
        last, shape = manifest.newest(), manifest.shape
        assert last is not None
        rows = PER_ROW * last.live_rows + shape.file_rows
        for snapshot in manifest.snapshots:
            changed = last.changed_rows - snapshot.changed_rows
            rows += min(PER_ROW * snapshot.live_rows, PER_CHANGE * changed)
            allowed += BESIDE_BYTES * snapshot.live_rows
        allowed += rows * (KEY_BYTES + shape.row_bytes)
        measured += sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    return allowed, measured


def run(arguments: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py snapshots")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--batch-examples", type=int, default=65_536)
    parser.add_argument("--last", type=int, default=20, help="batches that are timed, at the end")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    rates: dict[int, list[float]] = {EVERY: [], 0: []}
    bounds: list[tuple[float, float]] = []
    for number in range(options.rounds):
        for every in sorted(rates, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory(dir=os.environ.get("DASKPS_BENCH_FOLDER"), prefix="daskps-") as folder:
                out = Path(folder) / "model"
                rates[every].append(
                    rate_at_end(
                        settings_of(out, options.batches, options.batch_examples, every, options.cores), options.last
                    )
                )
                if every:
                    bounds.append(disk_bytes(out))
            print(f"snapshots every {every} batches: {rates[every][-1]:,.0f} examples/s", flush=True)
    ours, without = statistics.median(rates[EVERY]), statistics.median(rates[0])
    allowed, measured = min(bounds, key=lambda pair: pair[0] / pair[1])
    return [
        Result(f"last {options.last} batches", ours, "no snapshots", without, ours / without, 0.9, "examples/s"),
        Result("disk at the end", measured / 1e6, "bound", allowed / 1e6, allowed / measured, 1.0, "MB"),
    ]
