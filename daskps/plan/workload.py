"""The workload of a job: measured by a finished run, or estimated from rates that were measured elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from pathlib import Path

from daskps.budget import Term, flight_row_bytes
from daskps.build import features, table_specs
from daskps.config import Job, make_job
from daskps.driver.sizing import TARGET_SECONDS
from daskps.errors import ConfigError, DataError
from daskps.node.memory import projected_terms
from daskps.plan.estimate import Value, Workload, hbm_row_bytes
from daskps.reports import Summary
from daskps.storage.record import last_run, read_record


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one core, but `disk_bytes` of one node.

    The defaults were measured with the project's benchmarks, on the machine of the README's tables.
    """

    read_keys: float = 20e6  # keys/s read from files or generated
    dedup_keys: float = 30e6  # keys/s
    pull_rows: float = 12e6  # rows/s into and out of the memory tier
    step_keys: float = 7e6  # keys/s: pooling, gradient sums and row optimizer
    dense_flops: float = 68e9  # flop/s of the network, forward and backward
    disk_bytes: float = 0.9e9  # bytes/s of rows read by key, per node


RATES = Rates()
# Assumptions for jobs that have not run yet.
DISTINCT_SHARE = 0.3  # distinct keys of a batch / key occurrences
SHARED_SHARE = 0.5  # fraction of touched rows that another node holds
BATCH_FRACTION = 1 / 2  # of budget.memory_bytes: batches in flight; the rest is for the index and older rows
HIT_RATE = 0.8  # fraction of pulled rows that are in the memory tier


def workload_of(
    job: Job, *, cores: int, rows: float | None = None, rates: Rates = RATES
) -> tuple[Workload, list[Value]]:
    """Return the workload of a job on nodes of `cores` cores, and every value that was measured or assumed for it.

    `rows` is the number of rows that the model will have. It is needed if the data is not synthetic.
    """
    known = features(job)
    specs = table_specs(job, known)
    keys = _keys_per_example(job, len(known.slots))
    rows = rows or _rows(job)
    row_bytes = sum(len(spec.slots) * spec.layout.row_bytes for spec in specs) / len(known.slots)
    inputs = sum(len(spec.slots) * spec.dim for spec in specs) + known.dense
    widths = [inputs, *job.model.layers, 1]
    dense = sum(a * b + b for a, b in itertools.pairwise(widths))
    moved = DISTINCT_SHARE * (1 - HIT_RATE) * row_bytes / rates.disk_bytes
    seconds = {  # per example
        "read": keys / rates.read_keys / cores,
        "dedup": keys / rates.dedup_keys / cores,
        "pull": keys * (DISTINCT_SHARE / rates.pull_rows / 2 / cores + moved),
        "train": keys / rates.step_keys / cores + 6 * dense / rates.dense_flops / cores,
        "push": keys * DISTINCT_SHARE / rates.pull_rows / 2 / cores,
    }
    total = sum(seconds.values())
    minibatch = job.train.minibatch_examples / job.cluster.nodes
    # Training splits batches so that they fit the budgets.
    budget, depth, distinct = job.budget, job.train.depth, keys * DISTINCT_SHARE
    in_memory = budget.memory_bytes * BATCH_FRACTION / depth / distinct / flight_row_bytes(row_bytes, job.cluster.nodes)
    on_devices = budget.hbm_bytes / distinct / hbm_row_bytes(row_bytes, depth + 1)
    fitting = min(TARGET_SECONDS / total, in_memory, on_devices)
    batch = (job.train.batch_examples or 0) / job.cluster.nodes or minibatch * max(1, int(fitting / minibatch))
    values = [
        *(Value(f"rates.{field.name}", getattr(rates, field.name), "measured", "a core") for field in fields(rates)),
        Value("distinct_share", DISTINCT_SHARE, "assumed", "distinct keys of a batch / occurrences"),
        Value(
            "shared_share", SHARED_SHARE, "assumed", "touched rows that another node holds; 2 nodes, Zipf 1.05: 0.52"
        ),
        Value("hit_rate", HIT_RATE, "assumed", "of the memory tier"),
        Value("batch_examples", batch, "assumed", "of a node: three seconds' work, what fits, or the job's own"),
        Value("rows", rows, "assumed", "of the whole model: --rows, or every key that the synthetic data can have"),
    ]
    workload = Workload(
        name=job.name,
        batch_examples=batch,
        minibatch_examples=minibatch,
        keys_per_example=keys,
        distinct_share=DISTINCT_SHARE,
        rows=rows,
        row_bytes=row_bytes,
        dimension=sum(len(spec.slots) * spec.dim for spec in specs) / len(known.slots),
        dense_parameters=dense,
        stage_seconds={stage: each * batch for stage, each in seconds.items()},
        measured_nodes=1,
        sums="pairwise",
        shared_share=SHARED_SHARE,
        slack=total / max(seconds.values()),
        in_flight=job.train.depth,
        tables=job.train.depth + 1,
    )
    return workload, values


def memory_terms(job: Job, work: Workload, nodes: int) -> list[Term]:
    """Return the memory terms of one of `nodes` nodes that train batches of `work` with the job's budgets."""
    specs = table_specs(job, features(job))
    slots = sum(len(spec.slots) for spec in specs)
    return projected_terms(
        job,
        nodes=nodes,
        rows={spec.name: round(work.rows * len(spec.slots) / slots) for spec in specs},
        examples=round(work.batch_examples),
        keys=round(work.batch_examples * work.keys_per_example),
        distinct_keys=round(work.distinct_keys),
    )


def _keys_per_example(job: Job, slots: int) -> float:
    return slots * (job.data.synthetic.keys_per_bag if job.data.synthetic is not None else 1)


def _rows(job: Job) -> float:
    data = job.data.synthetic
    if data is None:
        raise ConfigError(
            f"how many rows {job.name} will have depends on its data ({job.data.format}): give --rows, or --calibrate "
            "with the directory of a finished run"
        )
    occurrences = float(data.examples) * data.slots * data.keys_per_bag
    return min(float(data.slots) * data.keys_per_slot, occurrences)


def calibrate(path: str | Path, rows: float | None = None) -> tuple[Workload, list[Value]]:
    """Return the workload that a finished run measured, and the values behind it.

    `rows` replaces the run's number of rows, to predict a model that has grown.
    """
    head = last_run(path)
    run = head["run"] if head is not None else ""
    count = sum(1 for line in read_record(path, "batch", run=run) if line["examples"])
    if head is None or count < 3:
        raise DataError(f"{path}: a plan needs at least 3 batches to go by, its last run had {count}")
    job = make_job(head["settings"], str(path))
    nodes = job.cluster.nodes
    known = features(job)
    specs = table_specs(job, known)
    first = count // 3
    batches = (line for line in read_record(path, "batch", run=run) if line["examples"])
    steady, ended = Summary(), []
    for number, line in enumerate(itertools.islice(batches, count)):  # a run that is still training may add lines
        if number >= first:
            steady.add(line)
        if number in (max(first - 1, 0), count - 1):
            ended.append(line["ended"])
    examples, counts, levels = steady.examples, steady.counts, steady.points.last["levels"]
    stages = {stage: seconds / steady.batches for stage, seconds in steady.stage_seconds.items()}
    batch_seconds = (ended[1] - ended[0]) / (count - max(first, 1))
    slack = batch_seconds / max(stages.values())
    found = max(levels.get("disk_rows", 0), levels.get("memory_rows", 0), 1.0)
    inputs = sum(len(spec.slots) * spec.dim for spec in specs) + known.dense
    widths = [inputs, *job.model.layers, 1]
    workload = Workload(
        name=f"{job.name}, as it ran on {nodes} node{'s' if nodes > 1 else ''}",
        batch_examples=examples / steady.batches / nodes,
        minibatch_examples=job.train.minibatch_examples / nodes,
        keys_per_example=counts["keys"] / examples,
        distinct_share=counts["distinct_keys"] / max(counts["keys"], 1),
        rows=rows or found,
        row_bytes=sum(len(spec.slots) * spec.layout.row_bytes for spec in specs) / len(known.slots),
        dimension=sum(len(spec.slots) * spec.dim for spec in specs) / len(known.slots),
        dense_parameters=sum(a * b + b for a, b in itertools.pairwise(widths)),
        stage_seconds=stages,
        measured_nodes=nodes,
        sums="pairwise",
        shared_share=SHARED_SHARE,
        slack=slack,
        in_flight=job.train.depth,
        tables=job.train.depth + 1,
    )
    why = f"mean of the run's last {steady.batches} of {count} batches"
    values = [
        Value("batch_examples", workload.batch_examples, "measured", f"of a node; {why}"),
        Value("keys_per_example", workload.keys_per_example, "measured", why),
        Value("distinct_share", workload.distinct_share, "measured", why),
        *(Value(f"{stage}_seconds", seconds, "measured", why) for stage, seconds in stages.items()),
        Value("slack", slack, "measured", "time of a batch / time of its slowest stage"),
        Value("rows", workload.rows, "measured" if rows is None else "assumed", "at the end of the run, or --rows"),
        Value(
            "shared_share", SHARED_SHARE, "assumed", "touched rows that another node holds; 2 nodes, Zipf 1.05: 0.52"
        ),
    ]
    return workload, values
