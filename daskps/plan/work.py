"""The workload of a job that has not run yet, from rates that were measured elsewhere.

In: a `Job`, the cores of a node, rates. Out: a `Workload`, and every value measured elsewhere or assumed. On CPU nodes
all stages share the cores, so a batch takes the sum of what its stages take.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

from daskps.config import Job
from daskps.errors import ConfigError
from daskps.flow.inputs import features
from daskps.flow.parts import table_specs
from daskps.flow.sizing import WANTED_SECONDS
from daskps.plan.estimate import CACHE_EXTRA_BYTES, HBM_EXTRA_BYTES
from daskps.plan.values import Value, Workload


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one core. The defaults were measured on the machine of README's tables, with its benchmarks."""

    read_keys: float = 20e6  # keys/s from files or generated
    dedup_keys: float = 30e6  # keys/s
    pull_rows: float = 12e6  # rows/s in and out of the memory tier
    step_keys: float = 7e6  # keys/s pooled, summed and stepped
    dense_flops: float = 68e9  # of the network, forward and backward
    disk_bytes: float = 0.9e9  # bytes/s of rows read by key, of one node


RATES = Rates()
DISTINCT_SHARE = 0.3
SHARED_SHARE = 0.5
HIT_RATE = 0.8


def workload_of(
    job: Job, *, cores: int, rows: float | None = None, rates: Rates = RATES
) -> tuple[Workload, list[Value]]:
    """The job on nodes of `cores` cores; `rows` is how many the model will have, where the job cannot know."""
    known = features(job)
    specs = table_specs(job, known)
    keys = _keys_per_example(job, len(known.slots))
    rows = rows or _rows(job)
    row_bytes = sum(len(spec.slots) * spec.layout.row_bytes for spec in specs) / len(known.slots)
    inputs = sum(len(spec.slots) * spec.dim for spec in specs) + known.dense
    widths = [inputs, *job.model.layers, 1]
    dense = sum(a * b + b for a, b in itertools.pairwise(widths))
    moved = DISTINCT_SHARE * (1 - HIT_RATE) * row_bytes / rates.disk_bytes
    seconds = {  # of an example
        "read": keys / rates.read_keys / cores,
        "dedup": keys / rates.dedup_keys / cores,
        "pull": keys * (DISTINCT_SHARE / rates.pull_rows / 2 / cores + moved),
        "train": keys / rates.step_keys / cores + 6 * dense / rates.dense_flops / cores,
        "push": keys * DISTINCT_SHARE / rates.pull_rows / 2 / cores,
    }
    total = sum(seconds.values())
    minibatch = job.train.minibatch_examples / job.cluster.nodes
    # Training cuts batches to what fits the budgets; half of the memory is left to the index and to older rows.
    budget, depth, distinct = job.budget, job.train.depth, keys * DISTINCT_SHARE
    in_memory = budget.memory_bytes / 2 / depth / distinct / (row_bytes + CACHE_EXTRA_BYTES)
    on_devices = budget.hbm_bytes / (depth + 1) / distinct / (row_bytes + HBM_EXTRA_BYTES)
    fitting = min(WANTED_SECONDS / total, in_memory, on_devices)
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
