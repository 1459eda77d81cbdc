"""``daskps inspect``: show the contents of a model directory."""

from __future__ import annotations

import contextlib
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from daskps.budget import Term, terms_text
from daskps.cli.command import command, facts, model_argument, snapshot_option, table
from daskps.errors import CorruptionError, DataError
from daskps.model import Model, open_model
from daskps.nn.architecture import network_title
from daskps.node.memory import projected_terms
from daskps.reports import from_record
from daskps.storage.record import read_record
from daskps.view.settings import settings_text
from daskps.view.words import metrics_name, percent, size

EPILOG = """\b
Examples:
  daskps inspect runs/demo
  daskps inspect runs/demo --settings > again.toml
"""


RECORD_POINTS = 200  # lines of the record that are read at most, about


@click.command(epilog=EPILOG)
@model_argument
@click.option("--settings", "only_settings", is_flag=True, help="Only the job's settings, as TOML.")
@snapshot_option
@command
def inspect(model: str, only_settings: bool, snapshot: str | None) -> tuple[Any, ...]:
    """Show sizes, tiers, snapshots, settings and health of MODEL."""
    with open_model(model, snapshot=snapshot) as opened:
        settings = opened.snapshot.draft.settings["job"]
        if only_settings:
            return settings, settings_text(settings)
        value = describe(opened)
    return value, as_text(value)


def describe(model: Model) -> dict[str, Any]:
    """Return everything that the command shows, as JSON values."""
    directory, snapshot = model.directory, model.snapshot
    state = directory.state()
    statistics = model.statistics()
    reports = sorted(str(path) for path in Path(directory.path).glob("reports/*.html"))
    return {
        "model": directory.path,
        "name": model.job.name,
        "snapshot": snapshot.id,
        "position": snapshot.draft.position,
        "batch": snapshot.draft.batch,
        "metrics": from_record(snapshot.draft.metrics),
        **statistics,
        "budget": model.job.budget.model_dump(),
        "memory": [term.as_json() for term in memory_terms(model, statistics["tables"])],
        "snapshots": [
            {
                "id": item.id,
                "created": iso_time(item.created_seconds),
                "position": item.draft.position,
                "batch": item.draft.batch,
                "last": item.id == state.last,
                "metrics": from_record(item.draft.metrics),
            }
            for item in directory.snapshots()
        ],
        "reports": reports,
        "health": health(model),
        "numerics": snapshot.draft.settings.get("numerics", 1),
        "blas": snapshot.draft.settings.get("blas"),
        "key_rule": model.job.data.key_rule,
        "settings": snapshot.draft.settings["job"],
    }


def memory_terms(model: Model, tables: dict[str, Any]) -> list[Term]:
    """Return the memory terms of one node that goes on with this model, with batches like a late one of its record."""
    job, batch = model.job, model.snapshot.draft.batch
    nodes = job.cluster.nodes
    line: dict[str, Any] = {"examples": job.train.minibatch_examples, "counts": {}}
    # A model without a record: a batch of one step, without its rows.
    with contextlib.suppress(DataError, CorruptionError, OSError):
        lines = read_record(model.directory.path, "batch", every=max(1, batch // RECORD_POINTS))
        line = next(iter(deque(lines, maxlen=1)), line)
    return projected_terms(
        job,
        nodes=nodes,
        rows={name: item["rows"] for name, item in tables.items()},
        examples=-(-line["examples"] // nodes),
        keys=-(-int(line["counts"].get("keys", 0)) // nodes),
        distinct_keys=-(-int(line["counts"].get("distinct_keys", 0)) // nodes),
    )


def health(model: Model) -> list[str]:
    """Return remarks on problems of the model; an empty list if there are none."""
    notes = []
    state = model.directory.state()
    if state.incarnation > model.snapshot.epoch:
        notes.append(
            f"a run began (incarnation {state.incarnation}) after snapshot {model.snapshot.id} and has published "
            "nothing since: it is training now, had nothing to do, or was interrupted; `daskps train JOB --resume` "
            "goes on from there"
        )
    for name, figures in model.statistics()["tables"].items():
        stale = figures["stale_rows"] / max(figures["stale_rows"] + figures["rows"], 1)
        if stale > 0.5:
            notes.append(f"{percent(stale)} of the rows on disk of table {name} are stale: `daskps compact` frees them")
    return notes


def as_text(value: dict[str, Any]) -> str:
    """Return the values of `describe` as text."""
    settings = value["settings"]
    rows = sum(item["rows"] for item in value["tables"].values())
    metrics = value["metrics"]
    shown = ", ".join(
        f"{name.replace('_', ' ')} {metrics[name]:.4f}" for name in ("auc", "log_loss") if name in metrics
    )
    network = network_title(settings["model"], "-")
    top = facts(
        [
            ("model", f"{value['name']} in {value['model']}"),
            ("snapshot", f"{value['snapshot']}: batch {value['batch']}, example {value['position']:,} of the data"),
            (metrics_name(metrics), shown or "-"),
            ("network", f"{network}, {value['dense_parameters']:,} parameters"),
            ("BLAS", value["blas"] or "not recorded"),
            ("rows", f"{rows:,}"),
            ("data", settings["data"]["format"]),
        ]
    )
    head = ("table", "slots", "rows", "row", "on SSD", "files", "stale", "index in memory")
    tables = table(
        [
            (
                name,
                f"{item['slots']}",
                f"{item['rows']:,}",
                size(item["row_bytes"]),
                size(item["disk_bytes"]),
                f"{item['files']:,}",
                percent(item["stale_rows"] / max(item["stale_rows"] + item["rows"], 1)),
                size(item["memory_bytes"]),
            )
            for name, item in value["tables"].items()
        ],
        head,
    )
    terms = [Term(item["name"], item["bytes"], item["budget"], item["table"]) for item in value["memory"]]
    nodes = settings["cluster"]["nodes"]
    tiers = f"memory of one node ({nodes} in all), by term\n{terms_text(terms, value['budget'])}"
    parts = [top, tables, tiers, snapshot_table(value["snapshots"])]
    if value["reports"]:
        parts.append("reports\n" + "\n".join(f"  {path}" for path in value["reports"]))
    notes = value["health"] or ["no remarks; `daskps verify` checks every byte"]
    parts.append("health\n" + "\n".join(f"  {note}" for note in notes))
    return "\n\n".join(parts)


def iso_time(seconds: float) -> str:
    """Return seconds since 1970 as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def snapshot_table(snapshots: list[dict[str, Any]]) -> str:
    """Return a text table of snapshots, one per line."""
    rows = [
        (
            item["id"] + (" (last)" if item["last"] else ""),
            item["created"],
            f"{item['position']:,}",
            f"{item['metrics'].get('auc', float('nan')):.4f}",
            metrics_name(item["metrics"]),
        )
        for item in snapshots
    ]
    return table(rows, ("snapshot", "created", "example", "AUC", "of"))
