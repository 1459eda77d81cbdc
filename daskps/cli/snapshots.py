"""``daskps snapshots``: list, drop, go back."""

from __future__ import annotations

from typing import Any

import click

from daskps import maintenance
from daskps.cli.command import command
from daskps.cli.inspect import iso_time, snapshot_table
from daskps.cli.options import model_argument
from daskps.cluster.commit import ModelDirectory
from daskps.flow.progress import from_record

EPILOG = """\b
Examples:
  daskps snapshots list runs/demo
  daskps snapshots rollback runs/demo 000001-00000040
  daskps snapshots drop runs/demo 000001-00000080
"""


@click.group(epilog=EPILOG)
def snapshots() -> None:
    """List, drop and roll back the snapshots of a model."""


def _listing(model: str) -> tuple[dict[str, Any], str]:
    directory = ModelDirectory(model)
    last = directory.state().last
    items: list[dict[str, Any]] = [
        {
            "id": item.id,
            "created": iso_time(item.created_seconds),
            "position": item.draft.position,
            "batch": item.draft.batch,
            "last": item.id == last,
            "metrics": from_record(item.draft.metrics),
        }
        for item in directory.snapshots()
    ]
    return {"model": model, "snapshots": items}, snapshot_table(items) if items else f"{model} has no snapshot"


@snapshots.command("list", epilog="\b\nExample:\n  daskps snapshots list runs/demo --json\n")
@model_argument
@command
def list_(model: str) -> tuple[Any, ...]:
    """All snapshots of MODEL that can be opened, oldest first."""
    return _listing(model)


@snapshots.command(epilog="\b\nExample:\n  daskps snapshots drop runs/demo 000001-00000080\n")
@model_argument
@click.argument("ids", nargs=-1, required=True)
@command
def drop(model: str, ids: tuple[str, ...]) -> tuple[Any, ...]:
    """Give up the snapshots IDS of MODEL and free their disk space; the last one stays."""
    maintenance.drop_snapshots(model, ids)
    return _listing(model)


@snapshots.command(epilog="\b\nExample:\n  daskps snapshots rollback runs/demo 000001-00000040\n")
@model_argument
@click.argument("id")
@command
def rollback(model: str, id: str) -> tuple[Any, ...]:
    """Make snapshot ID the last one of MODEL: opening and --resume take it. Newer ones stay until dropped."""
    maintenance.roll_back(model, id)
    return _listing(model)
