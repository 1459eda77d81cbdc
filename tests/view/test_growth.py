"""What a run of 100,000 batches on 8 nodes leaves in the driver and the scheduler, and in its report: next to nothing.

Driver, record, log and live pages are the real ones; the workers answer at once and do nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daskps.api import Watch, train
from daskps.config import make_job
from daskps.data.order import Steps
from daskps.driver import driver
from daskps.driver.dask import local_workers
from daskps.driver.driver import Outcome, Recording, drive
from daskps.driver.tasks import Tasks, WorkerClaim
from daskps.node.begin import IncarnationStart
from daskps.node.memory import CapacityReport
from daskps.node.node import NodeInfo
from daskps.node.stages import Request
from daskps.reports import (
    POINTS,
    TIMELINE_BATCHES,
    BatchReport,
    Progress,
    StageTime,
    Summary,
    Validation,
    kept_validations,
    validation_line,
)
from daskps.storage.record import RecordWriter, read_record
from daskps.types import BatchId, Stage
from daskps.view.dask import NAME, TOPIC, Collector, Live
from daskps.view.figures import Record
from daskps.view.report import render

BATCHES, NODES, STEP = 100_000, 8, 64
MOST_BYTES = 5_000_000
JOB = make_job(
    {
        "name": "long",
        "data": {
            "format": "synthetic",
            "synthetic": {"examples": BATCHES * STEP, "slots": 4, "keys_per_slot": 1_000},
            "validation_rows": 1_000,
        },
        "train": {
            "minibatch_examples": STEP,
            "batch_examples": STEP,
            "snapshot_every_batches": 100,
        },
        "cluster": {"nodes": NODES},
    }
)
METRICS = ("examples", "auc", "log_loss", "normalised_entropy", "calibration", "mean_label", "mean_prediction")
COUNTS = "keys distinct_keys hits misses new_keys late waits bytes_read bytes_written written_back".split()
LEVELS = (
    "row_capacity read_steps hbm_rows hbm_bytes memory_rows memory_bytes disk_rows disk_bytes stale_rows files "
    "compactions compacted_rows"
).split()


def report_of(token: BatchId, rank: int, now: float) -> BatchReport:
    """Return one as large as a real one, and no number twice."""
    own = token.batch + rank / 16
    times = tuple(
        StageTime(stage, now + at / 7 + own / 1e6, now + at / 7 + 0.1 + own / 1e6, 0.01)
        for at, stage in enumerate(Stage)
    )
    return BatchReport(
        token=token,
        rank=rank,
        examples=STEP // NODES,
        stages=times,
        counts={name: own + at for at, name in enumerate(COUNTS)},
        metrics=dict.fromkeys(METRICS, 0.5 + own / 10000000.0) if rank == 0 else {},
        levels=dict.fromkeys(LEVELS, 1000000.0 + own),
    )


@dataclass(slots=True)
class Done:
    """A task that has ended."""

    key: int
    value: Any
    status: str = "finished"

    def done(self) -> bool:
        return True


@dataclass
class Instant:
    """A cluster whose workers have always just answered; node 0 writes the record if there is a `writer`."""

    writer: RecordWriter | None = None
    now: float = 1e9
    count: int = 0
    lines: int = 0
    summary: Summary = field(default_factory=Summary)

    def present(self) -> dict[str, float]:
        return {f"tcp://10.0.0.{rank}:1": 0.0 for rank in range(NODES)}

    def unfit(self, workers: Collection[str]) -> dict[str, str]:
        return {}

    def claim(self, run: str, nodes: int, model: str, fit: Sequence[str]) -> WorkerClaim:
        return WorkerClaim(tuple(fit))

    def held(self, run: str) -> dict[str, str]:
        return {}

    def prepare(self, run: str, workers: Sequence[str]) -> None:
        pass

    def watch(self, task: Done) -> None:
        pass

    def time(self) -> float:
        return self.now

    async def fetch(self, task: Done, seconds: float) -> Any:
        return task.value

    def error(self, task: Done) -> None:
        return None

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, worker: str, task: Stage | Request, run: str, *values: Any) -> Done:
        self.count += 1
        rank = int(worker.rpartition(":")[0].rpartition(".")[2])
        return Done(self.count, self._answer(rank, task, run, *values))

    def _answer(self, rank: int, task: Stage | Request, run: str, *values: Any) -> Any:
        if task is Request.BEGIN:
            return IncarnationStart(1, 1, None, None, "id")
        if task is Request.OPEN:
            return NodeInfo(1, "here", "out", None, -1, 0, BATCHES * STEP, Steps(STEP), 1_000, 10, {})
        if task is Stage.DEDUP:
            return CapacityReport(rank, 10, ((1,) * NODES,), (10**9,))
        if task is Stage.PUSH:
            self.now += 0.1 / NODES
            return report_of(values[0], rank, self.now)
        if task is Request.EVALUATE:
            return dict.fromkeys(METRICS, self.now)
        if task is Request.PUBLISH:
            self._write(values[-1].lines, values[-1].last_batch)
            if self.writer is not None:
                self.writer.end_file()
            return ()
        if task is Request.PREPARE:
            return {}
        if task is Request.RECORD:
            self._write(*values[-2:])
        return self.summary if task is Request.SUMMARY else None

    def _write(self, lines: list[str], last_batch: int) -> None:
        self.lines += len(lines)
        if self.writer is not None:
            self.writer.write(lines, last_batch)


class Events:
    """A Dask client whose events a collector on the scheduler hears."""

    def __init__(self) -> None:
        self.collector = Collector()

    def log_event(self, topic: str, message: dict[str, Any]) -> None:
        assert topic == TOPIC
        self.collector.log_event(topic, message)


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(cluster: Any, on_progress: Any, stop: int = BATCHES) -> Outcome:
    done = [0]

    def tell(progress: Progress) -> None:
        done[0] = progress.batch + 1
        on_progress(progress)

    return asyncio.run(drive(cluster, JOB, "run", on_progress=tell, should_stop=lambda: done[0] >= stop))


def check_that_batches_are_not_kept(batches: int) -> None:
    """Finish so many batches: progress, record, log, live pages and what the scheduler keeps for them."""
    cluster, events, before = Instant(), Events(), 0
    watch = Watch(Live(events, JOB))  # type: ignore[arg-type]
    progress = Progress(0, batches * STEP, -1)
    recording = Recording(Tasks(cluster, list(cluster.present()), "run", 1.0), 1)

    async def finish_batches() -> None:
        nonlocal before
        for batch in range(batches):
            token = BatchId("run", 1, batch, batch, batch + 1)
            cluster.now += 0.1
            progress.finish(token, [report_of(token, rank, cluster.now) for rank in range(NODES)], (batch + 1) * STEP)
            await recording.add(progress.line)
            if batch % 25 == 0:
                validation = Validation(batch, progress.position, dict.fromkeys(METRICS, cluster.now))
                progress.validations = kept_validations([*progress.validations, validation], 3)
                await recording.add(validation_line(validation, "run", 1))
            watch(progress)
            if batch % 2_000 == 1_999:
                now = resident_bytes()
                before = before or now  # caches of Python and Dask are warm
                assert now - before < MOST_BYTES, f"{now - before:,} bytes in {batch:,} batches"

    asyncio.run(finish_batches())
    assert cluster.lines + len(asyncio.run(recording.rest())[0]) == batches + batches // 25
    assert len(progress.reports) == NODES
    collector = events.collector
    assert len(collector.batches) <= POINTS
    assert collector.batches.last["batch"] == batches - 1
    assert next(iter(collector.batches))["batch"] == 0  # the whole run is shown


@pytest.mark.parametrize("batches", [10_000, pytest.param(BATCHES, marks=pytest.mark.slow)])
def test_what_is_kept_of_the_batches_does_not_grow(batches: int) -> None:
    """The driver once kept 3.4 KB a node. In a process of its own: others leave things that grow."""
    code = f"from tests.view.test_growth import check_that_batches_are_not_kept as check; check({batches})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def grown_bytes(between: int, part: int) -> int:
    """Run the driver, and return by how much it grows between two parts of a run that are so many batches apart.

    Lines of the record wait for each other before they are sent, so one moment says little: the least of a part does.
    """
    sizes = []

    def look(progress: Progress) -> None:
        if progress.batch >= part and progress.batch % between < 2 * part:  # the first part warms up caches
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    run(Instant(), look, stop=between + 2 * part)
    assert len(sizes) == 3 * part
    return min(sizes[-part:]) - min(sizes[:part])


def test_the_driver_itself_keeps_nothing_of_a_batch() -> None:
    """Less than 50 bytes each, with all that it does for them. In a process of its own: all threads are counted."""
    between, part = 600, 100
    code = f"from tests.view.test_growth import grown_bytes; print(grown_bytes({between}, {part}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) < between * MOST_BYTES // BATCHES


def test_the_report_of_a_long_run_is_small_and_its_sums_are_exact(tmp_path: Path) -> None:
    """100,000 batches, as node 0 sums up what it wrote of the first 1,000 a hundred times over."""
    cluster = Instant(RecordWriter(str(tmp_path), incarnation=1, first_batch=0, header={"run": "run"}))
    outcome = run(cluster, lambda _: None, stop=1_000)
    written = list(read_record(tmp_path, "batch"))
    assert [line["batch"] for line in written] == list(range(outcome.progress.batch + 1))
    summary = Summary()
    times = BATCHES // len(written)
    for again in range(times):
        for line in written:
            number = again * len(written) + line["batch"]
            summary.add(line | {"batch": number, "position": (number + 1) * STEP})
    validations = [Validation(number, number, dict.fromkeys(METRICS, 0.1)) for number in range(5_000)]
    known = [{"batch": one.batch, "position": one.position, "metrics": one.metrics} for one in validations]
    record = Record(JOB.model_dump(mode="json"), "1", summary=summary, validations=known)
    assert len(render(record).encode()) < MOST_BYTES
    assert summary.examples == times * len(written) * STEP
    assert summary.counts["keys"] == pytest.approx(times * sum(line["counts"]["keys"] for line in written))
    assert len(summary.timeline) == TIMELINE_BATCHES
    assert summary.batches // 2 < summary.timeline[0]["batch"] < summary.batches


def test_the_report_of_64_nodes_is_small() -> None:
    """Each has its bars in the timeline, so fewer batches are shown."""
    progress, summary = Progress(0, BATCHES * STEP, -1), Summary()
    for batch in range(POINTS + TIMELINE_BATCHES):
        token = BatchId("run", 1, batch, batch, batch + 1)
        progress.finish(token, [report_of(token, rank, 1e9 + batch) for rank in range(64)], (batch + 1) * STEP)
        summary.add(progress.line)
    text = render(Record(JOB.model_dump(mode="json"), "1", summary=summary))
    assert len(text.encode()) < MOST_BYTES / 2
    assert "batches 320 to 329, of the 540 of this run" in text


def test_kept_validations_are_bounded_and_have_the_best() -> None:
    kept: list[Validation] = []
    for batch in range(20_000):
        loss = 0.2 if batch == 3_333 else 0.5 - batch / 1e6
        kept = kept_validations([*kept, Validation(batch, batch, {"log_loss": loss, "auc": float("nan")})], patience=7)
    assert len(kept) <= 1_001
    assert kept[-1].batch == 19_999
    assert [one.batch for one in kept[-250:]] == [*range(19_750, 20_000)]
    assert min(kept, key=lambda one: one.metrics["log_loss"]).batch == 3_333


def test_dask_forgets_the_tasks_of_a_run_as_it_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every task depends on the one before it of its stage, and Dask keeps what a task that it knows depends on."""
    monkeypatch.setattr(driver, "LINKED_BATCHES", 4)
    counts = []
    job = {
        "out": str(tmp_path),
        "data": {"format": "synthetic", "synthetic": {"examples": 40 * STEP, "slots": 2, "keys_per_slot": 10}},
        "train": {"minibatch_examples": STEP, "batch_examples": STEP},
        "budget": {"memory_bytes": "64MB", "hbm_bytes": "64MB"},
    }
    with local_workers(1, processes=False) as client:
        scheduler = client.cluster.scheduler
        train(job, client=client, on_progress=lambda _: counts.append(len(scheduler.tasks)), report=False)
    assert len(counts) > 40
    assert max(counts) < len(Stage) * 20


def test_live_pages_of_a_resumed_run_show_all_of_it(tmp_path: Path) -> None:
    """On a scheduler that never heard of its first part: what that was is read from the record."""
    job = {
        "out": str(tmp_path),
        "data": {"format": "synthetic", "synthetic": {"examples": 8 * STEP, "slots": 2, "keys_per_slot": 10}},
        "train": {"minibatch_examples": STEP, "batch_examples": STEP},
        "budget": {"memory_bytes": "64MB", "hbm_bytes": "64MB"},
    }
    done: list[Progress] = []
    with local_workers(1, processes=False) as client:
        train(job, client=client, on_progress=done.append, should_stop=lambda: len(done) >= 3)
    with local_workers(1, processes=False) as client:
        train(job, client=client)
        shown = list(client.cluster.scheduler.plugins[NAME].batches)
    assert [batch["batch"] for batch in shown] == list(range(8))
    assert [batch["position"] for batch in shown] == [STEP * (number + 1) for number in range(8)]
