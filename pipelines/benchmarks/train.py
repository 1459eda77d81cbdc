"""Training as a whole: beside torch and FBGEMM, with smaller caches, stage by stage, what is learned, beyond memory.

``bench.py train`` runs all but the last; ``--only peers|cache|stages|learning`` one of them; ``--large`` instead trains
a model of 30 GB and more (large.py) and draws it, with ``--plot FILE``. ``--only stages --trace FILE`` also writes a
trace of each workload, for ui.perfetto.dev.

Peers get the same raw 64-bit keys and turn them into indices, which is counted: by a multiplicative hash, under which
keys share rows, and FBGEMM also by a dictionary (pandas), under which each has its own, as in ours. Their tables are
allocated, and the dictionary is filled, before. Ours goes through all stages and tiers, Dask tasks and all, from
examples in memory; its first pass makes the rows, the second is timed. All use the same cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Result, missing
from benchmarks.kernels import EXPONENT, RATE, WORKLOADS, Workload, fbgemm_tables, indices
from benchmarks.large import larger_than_memory
from daskps import build
from daskps.budget import cached_row_bytes
from daskps.config import Job, make_job
from daskps.data.order import Steps
from daskps.driver.dask import run_job
from daskps.driver.driver import Outcome
from daskps.reports import Progress
from daskps.trace import merge
from daskps.types import Batch, Int64s

HIDDEN = (128, 64)
PEER_STEPS = 24  # mini-batches that a peer is timed on: more than any cache holds, and their rate does not change
MOST_KEYS = 1 << 29  # of a pass: they are in memory beside all rows
CACHE_BATCH_STEPS = 32  # staged together when the cache is small: a good part of every file is wanted then
ODD = np.uint64(0x9E3779B97F4A7C15)
PEERS = {  # its embedding, and how it numbers raw keys
    "FBGEMM CPU TBE": ("fbgemm", "hash"),
    "FBGEMM CPU TBE, dictionary": ("fbgemm", "dictionary"),
    "torch EmbeddingBag": ("torch", "hash"),
}


class Preloaded:
    """Examples in memory, served as a reader serves them."""

    def __init__(self, batch: Batch, minibatch_examples: int, epochs: int) -> None:
        self._batch, self._epochs = batch, epochs
        self._steps = Steps(minibatch_examples)
        self.examples = batch.examples * epochs

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        bounds = [self._steps.examples(step, self.examples) for step in range(first_step, last_step)]
        start = bounds[0][0] % self._batch.examples
        starts = np.cumsum([0, *(stop - begin for begin, stop in bounds)]).astype(np.int64)
        stop, whole = start + int(starts[-1]), self._batch
        first, last = whole.offsets[[start * whole.slots, stop * whole.slots]]
        batch = Batch(
            first_example=start,
            slots=whole.slots,
            labels=whole.labels[start:stop],
            keys=whole.keys[first:last],
            offsets=whole.offsets[: (stop - start) * whole.slots + 1],  # all bags have as many keys
        )
        return batch, starts

    def close(self) -> None: ...


def examples(work: Workload, steps: int) -> Batch:
    """`steps` mini-batches of a workload, as raw keys."""
    rng = np.random.default_rng(4)
    return batch_of(work, np.concatenate([indices(rng, work) for _ in range(steps)]))


def batch_of(work: Workload, index: np.ndarray) -> Batch:
    """Examples whose keys have these numbers within their slots (examples, slots, keys)."""
    keys = (index + (np.arange(work.slots) * work.slot_keys)[None, :, None]).astype(np.uint64) * ODD
    labels = (np.random.default_rng(7).random(len(index)) < 0.25).astype(np.float32)
    offsets = np.arange(len(index) * work.slots + 1, dtype=np.int64) * index.shape[2]
    return Batch(first_example=0, slots=work.slots, labels=labels, keys=keys.ravel(), offsets=offsets)


def joined(first: Batch, second: Batch) -> Batch:
    """The examples of two batches."""
    return Batch(
        first_example=0,
        slots=first.slots,
        labels=np.concatenate([first.labels, second.labels]),
        keys=np.concatenate([first.keys, second.keys]),
        offsets=np.concatenate([first.offsets, first.offsets[-1] + second.offsets[1:]]),
    )


def job_of(work: Workload, out: str, **changes: Any) -> Job:
    """The training job of a workload."""
    settings: dict[str, Any] = {
        "out": out,
        "data": {
            "format": "synthetic",
            "synthetic": {"examples": 1, "slots": work.slots, "keys_per_bag": work.keys_per_bag},
        },
        "tables": {"main": {"dimension": work.dim, "optimizer": {"kind": "rowwise_adagrad", "learning_rate": RATE}}},
        "model": {"hidden": HIDDEN, "optimizer": {"kind": "adagrad", "learning_rate": RATE}},
        "train": {"minibatch_examples": work.examples, "epochs": 2},
        "budget": {"memory_bytes": "6GiB", "hbm_bytes": "9GiB"},
    }
    for path, value in changes.items():
        group, name = path.split("__")
        settings.setdefault(group, {})[name] = value
    return make_job(settings)


def run_ours(
    job: Job, batch: Batch, on_progress: Callable[[Progress], None] = lambda _: None, traces: str = ""
) -> Outcome:
    """Train on `batch`, in memory."""
    original = build.open_training
    build.open_training = lambda *_: Preloaded(batch, job.train.minibatch_examples, job.train.epochs)  # type: ignore
    try:
        return run_job(job, on_progress=on_progress, trace=traces)
    finally:
        build.open_training = original


def second_pass_seconds(outcome: Outcome) -> float:
    """From the end of the first pass's last push to the end of the second's."""
    ends = [(line["stop_step"], line["ended"]) for line in outcome.batches()]
    steps_of_pass = ends[-1][0] // 2
    first = max(end for step, end in ends if step <= steps_of_pass)
    return ends[-1][1] - first


# -- peers ---------------------------------------------------------------------------------------------------------


def numbering(kind: str, work: Workload, table_rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """How a peer gets from raw keys (B, S, K) to row numbers within tables of `table_rows`."""
    if kind == "hash":
        return lambda keys: (((keys * ODD) >> np.uint64(32)) % np.uint64(table_rows)).astype(np.int64)
    import pandas

    vocabulary = pandas.Index(np.arange(work.rows, dtype=np.uint64) * ODD)
    return lambda keys: vocabulary.get_indexer(keys.ravel()).reshape(keys.shape) % table_rows


def peer_step(kind: str, work: Workload, cores: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """One step of a torch model: keys (B, S, K) and labels (B,) in, everything updated."""
    import torch

    library, numbers = PEERS[kind]

    torch.set_num_threads(cores)
    layers: list[Any] = []
    width = work.slots * work.dim
    for size in HIDDEN:
        layers += [torch.nn.Linear(width, size), torch.nn.ReLU()]
        width = size
    net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
    dense = torch.optim.Adagrad(net.parameters(), lr=RATE)
    offsets = torch.arange(work.slots * work.examples + 1, dtype=torch.int64) * work.keys_per_bag
    loss = torch.nn.BCEWithLogitsLoss()
    number = numbering(numbers, work, work.slot_keys if library == "fbgemm" else work.rows)
    if library == "fbgemm":
        tables = fbgemm_tables(work)

        def embed(keys: np.ndarray) -> Any:
            return tables(torch.from_numpy(number(keys).transpose(1, 0, 2).ravel()), offsets)

        sparse: list[Any] = []
    else:
        bags = torch.nn.EmbeddingBag(work.rows, work.dim, mode="sum", sparse=True, include_last_offset=True)
        sparse = [torch.optim.Adagrad(bags.parameters(), lr=RATE)]

        def embed(keys: np.ndarray) -> Any:
            return bags(torch.from_numpy(number(keys).ravel()), offsets).reshape(work.examples, -1)

    def step(keys: np.ndarray, labels: np.ndarray) -> None:
        for optimizer in (dense, *sparse):
            optimizer.zero_grad()
        logits = net(embed(keys)).squeeze(1)
        loss(logits, torch.from_numpy(labels)).backward()
        for optimizer in (dense, *sparse):
            optimizer.step()

    return step


def peer_seconds(step: Callable[[np.ndarray, np.ndarray], None], work: Workload, batch: Batch) -> float:
    """Seconds of one pass over `batch`."""
    keys = batch.keys.reshape(-1, work.slots, work.keys_per_bag)
    start = time.perf_counter()
    for first in range(0, batch.examples, work.examples):
        step(keys[first : first + work.examples], batch.labels[first : first + work.examples])
    return time.perf_counter() - start


def against_peers(work: Workload, steps: int, rounds: int, cores: int) -> list[Result]:
    """Whole training beside torch and FBGEMM, turn by turn."""
    steps = min(steps, MOST_KEYS // work.occurrences)
    batch, title = examples(work, steps), f"training: {work.name}"
    part = batch.slice(0, work.examples * min(steps, PEER_STEPS))
    peers, results = {}, []
    for kind in PEERS:
        try:
            peers[kind] = peer_step(kind, work, cores)
            peer_seconds(peers[kind], work, batch.slice(0, work.examples * 2))  # warm up
        except ImportError:
            results.append(missing(title, kind, "pip install '.[bench]'"))
    seconds: dict[str, list[float]] = {"ours": [], **{kind: [] for kind in peers}}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as out:
            outcome = run_ours(job_of(work, out, cluster__cores=cores), batch)
            seconds["ours"].append(second_pass_seconds(outcome))
        for kind, step in peers.items():
            seconds[kind].append(peer_seconds(step, work, part) * batch.examples / part.examples)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ours = batch.examples / medians["ours"] / 1e3
    best = min(peers, key=lambda kind: medians[kind], default="")
    for kind in peers:
        ratio = medians[kind] / medians["ours"]
        target = 2.0 if kind == best else None
        results.append(Result(title, ours, kind, ours / ratio, ratio, target, "k examples/s"))
    return results


# -- tiers ---------------------------------------------------------------------------------------------------------


def row_bytes_in_memory(work: Workload) -> float:
    """What a cached row costs with its bookkeeping."""
    return cached_row_bytes(4 * (work.dim + 1), nodes=1)


def drop_page_cache() -> str:
    """How the page cache is kept out."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return "page cache could not be dropped"
    return "page cache dropped before every batch"


def every_row_once(work: Workload) -> Batch:
    """As few mini-batches as have every key of every slot."""
    steps = -(-work.slot_keys // work.examples)
    rng = np.random.default_rng(6)
    index = np.stack([np.resize(rng.permutation(work.slot_keys), steps * work.examples) for _ in range(work.slots)], 1)
    return batch_of(work, index[:, :, None])


def with_smaller_caches(cores: int, steps: int, shares: tuple[float, ...]) -> list[Result]:
    """One workload with a cache of a share of its rows, beside index and rows of batches in flight. All rows are made
    first; of the mini-batches after that, the second half is timed, when the popular rows are in the cache."""
    work, depth = WORKLOADS[0], 3
    makes_rows, later = every_row_once(work), examples(work, steps)
    first_timed = (makes_rows.examples + later.examples // 2) // work.examples
    batch = joined(makes_rows, later)
    staged = len(np.unique(later.keys[: depth * CACHE_BATCH_STEPS * work.occurrences]))
    beside = int(12 * work.rows + staged * row_bytes_in_memory(work))
    results, reference = [], 0.0
    print(
        f"cache: {work.rows:,} rows of {4 * (work.dim + 1)} bytes; beside it an index of {12 * work.rows / 1e6:.0f} MB "
        f"and {staged:,} rows of {depth} batches of {CACHE_BATCH_STEPS} mini-batches in flight; {drop_page_cache()}"
    )
    for share in shares:
        memory = int(work.rows * share * row_bytes_in_memory(work)) + beside
        with tempfile.TemporaryDirectory() as out:
            job = job_of(
                *(work, out),
                cluster__cores=cores,
                budget__memory_bytes=memory,
                train__depth=depth,
                train__epochs=1,
                train__batch_examples=CACHE_BATCH_STEPS * work.examples,
            )
            lines = [*run_ours(job, batch, on_progress=lambda _: drop_page_cache()).batches()]
        timed = [line for line in lines if line["first_step"] >= first_timed]
        began = max(line["ended"] for line in lines if line["first_step"] < first_timed)
        rate = sum(line["examples"] for line in timed) / (timed[-1]["ended"] - began) / 1e3
        pulled = sum(line["counts"].get(name, 0) for line in timed for name in ("hits", "misses", "new_keys"))
        hits = sum(line["counts"].get("hits", 0) for line in timed)
        reference = reference or rate
        name = f"cache of {share:.0%} of the rows, hit rate {hits / max(pulled, 1):.1%}"
        target = 0.8 if share == 0.1 else None
        results.append(
            Result(name, rate, f"cache of {shares[0]:.0%}", reference, rate / reference, target, "k examples/s")
        )
    return results


def stage_times(cores: int, steps: int, trace: Path | None = None) -> list[Result]:
    """Busy and idle seconds of every stage, and the whole against its lower bound; from the end of the first batch to
    the end of the last."""
    results = []
    for number, work in enumerate(WORKLOADS[:2], 1):
        batch = examples(work, steps)
        cpu_seconds: list[float] = []
        with tempfile.TemporaryDirectory() as out:
            traces = f"{out}/traces" if trace is not None else ""
            outcome = run_ours(
                job_of(work, out, cluster__cores=cores),
                batch,
                on_progress=lambda _, seen=cpu_seconds: seen.append(time.process_time()),
                traces=traces,
            )
            if trace is not None:
                merge(traces, str(trace.with_stem(f"{trace.stem}-{number}")))
            first, *later = outcome.batches()
        began, ended = first["ended"], later[-1]["ended"]
        total, cpu = ended - began, cpu_seconds[len(later)] - cpu_seconds[0]
        busy: dict[str, float] = {}
        for line in (first, *later):
            for _, stage, start, end, waited in line["stages"]:
                overlap = max(0.0, min(line["started"] + end, ended) - max(line["started"] + start, began))
                busy[stage] = busy.get(stage, 0.0) + max(0.0, overlap - waited)
        for stage_name, seconds in busy.items():
            name = f"stage {stage_name}: {work.name}"
            results.append(Result(name, seconds, "idle", total - seconds, None, None, "s"))
        bound = max(max(busy.values()), cpu / cores)
        unit = "s (larger of slowest stage, CPU/cores)"
        results.append(Result(f"bound / total: {work.name}", bound, "total", total, bound / total, 1 / 1.15, unit))
    return results


# -- learning ------------------------------------------------------------------------------------------------------


def learning(cores: int, examples: int = 4_000_000, validation: int = 200_000) -> list[Result]:
    """How far one pass goes from an AUC of 0.5 to the best one that the generator's own probabilities reach."""
    table = {"optimizer": {"kind": "adagrad", "learning_rate": 0.05, "initial_accumulator": 1e-6}}
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "dnn, 10 slots of 1 k keys with interactions": (
            0.95,
            {
                "data": {"synthetic": {"slots": 10, "keys_per_slot": 1_000}},
                "tables": {"main": {"dimension": 16, **table, "initialiser": {"kind": "normal", "scale": 0.01}}},
                "model": {"hidden": HIDDEN, "optimizer": {"kind": "adagrad", "learning_rate": 0.02}},
                "train": {"minibatch_examples": 512},
            },
        ),
        "lr, 20 slots of 10 k keys with weights only": (
            0.98,
            {
                "data": {"synthetic": {"slots": 20, "keys_per_slot": 10_000, "interaction_scale": 0}},
                "tables": {"main": {"dimension": 1, **table, "initialiser": {"kind": "constant", "scale": 0.0}}},
                "model": {"kind": "lr"},
                "train": {"minibatch_examples": 1024},
            },
        ),
    }
    results = []
    for name, (wanted, settings) in cases.items():
        settings["data"]["synthetic"]["examples"] = examples
        settings["data"] |= {"format": "synthetic", "validation_rows": validation}
        with tempfile.TemporaryDirectory() as out:
            job = make_job({**settings, "out": out, "cluster": {"cores": cores}})
            best = build.synthetic(job).best(examples, examples + validation).auc
            reached = run_job(job).progress.validations[-1].metrics["auc"]
        way = (reached - 0.5) / (best - 0.5)
        results.append(Result(f"learning: {name}", reached, "best AUC", best, way, wanted, "AUC (ratio: of the way)"))
    return results


def run(arguments: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py train")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=384, help="mini-batches of a pass, with keys of up to 4 GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["peers", "cache", "stages", "learning"])
    parser.add_argument("--workload", type=int, choices=[1, 2, 3], help="one of the three workloads")
    parser.add_argument("--large", action="store_true", help="the model that is larger than memory, and nothing else")
    parser.add_argument("--plot", type=Path, help="with --large: where to draw it")
    parser.add_argument("--trace", type=Path, help="of the stages: a trace file; -1 and -2 are added to its name")
    options = parser.parse_args(arguments)
    print(f"Zipf keys with exponent {EXPONENT}; dnn {HIDDEN}; {options.cores} cores each")
    if options.large:
        return larger_than_memory(options.cores, options.plot)
    results: list[Result] = []
    if options.only in {None, "peers"}:
        for number, work in enumerate(WORKLOADS, 1):
            if options.workload in {None, number}:
                results += against_peers(work, options.steps, options.rounds, options.cores)
    if options.only in {None, "cache"}:
        results += with_smaller_caches(options.cores, options.steps // 2, (1.0, 0.5, 0.2, 0.1, 0.05))
    if options.only in {None, "learning"}:
        results += learning(options.cores)
    if options.only in {None, "stages"}:
        results += stage_times(options.cores, options.steps // 2, options.trace)
    return results
