"""The workload of a run that has finished: its own stage times and counts.

In: a run's directory, its report (HTML, with the record inside) or the record as JSON. Out: a `Workload`, its values.
Batches of the first third are left out: caches fill and batch sizes are still being found.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from daskps.config import make_job
from daskps.errors import DataError
from daskps.flow.inputs import features
from daskps.flow.parts import table_specs
from daskps.plan.values import Value, Workload
from daskps.plan.work import SHARED_SHARE

MARK = 'id="record">'


def calibrate(path: str | Path, rows: float | None = None) -> tuple[Workload, list[Value]]:
    """What a finished run measured; `rows` if the model is to grow to more than it had then."""
    record = read_record(Path(path))
    batches = [batch for batch in record["batches"] if batch["examples"]]
    if len(batches) < 3:
        raise DataError(f"{path}: a plan needs at least 3 batches to go by, the run had {len(batches)}")
    steady = batches[len(batches) // 3 :]
    job = make_job(record["settings"], str(path))
    nodes = job.cluster.nodes
    known = features(job)
    specs = table_specs(job, known)
    examples = sum(batch["examples"] for batch in steady)
    counts = {name: sum(batch["counts"].get(name, 0) for batch in steady) for name in ("keys", "distinct_keys")}
    stages = {stage: 0.0 for batch in steady for stage in batch["stage_seconds"]}
    for stage in stages:
        stages[stage] = sum(batch["stage_seconds"].get(stage, 0.0) for batch in steady) / len(steady)
    before = batches[len(batches) // 3 - 1]["ended"] if len(batches) > 3 else steady[0]["ended"]
    timed = steady if len(batches) > 3 else steady[1:]
    batch_seconds = (timed[-1]["ended"] - before) / len(timed)
    slack = batch_seconds / max(stages.values())
    levels = batches[-1]["levels"]
    found = max(levels.get("disk_rows", 0), levels.get("memory_rows", 0), 1.0)
    inputs = sum(len(spec.slots) * spec.dim for spec in specs) + known.dense
    widths = [inputs, *job.model.layers, 1]
    workload = Workload(
        name=f"{job.name}, as it ran on {nodes} node{'s' if nodes > 1 else ''}",
        batch_examples=examples / len(steady) / nodes,
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
    why = f"mean of the run's last {len(steady)} of {len(batches)} batches"
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


def read_record(path: Path) -> dict[str, Any]:
    """The record of a run's directory (its last report), of a report, or of a JSON file."""
    if path.is_dir():
        reports = sorted(path.glob("reports/*.html"), key=lambda report: report.stat().st_mtime)
        if not reports:
            raise DataError(f"{path} has no report of a run; train with a report, or name a record's file")
        path = reports[-1]
    try:
        text = path.read_text(encoding="utf-8")
        if MARK in text:
            text = text.split(MARK, 1)[1].split("</script>", 1)[0].replace("<\\/", "</")
        record = json.loads(text)
        if not {"batches", "settings"} <= record.keys():
            raise ValueError("it has no batches and settings")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no report or record of a run: {error}") from None
    return dict(record)
