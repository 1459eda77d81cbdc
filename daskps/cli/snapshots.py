"""``daskps snapshots``: list snapshots, drop them, or roll back to one."""

from __future__ import annotations

from typing import Any

import click

from daskps.cli.command import command, model_argument
from daskps.cli.inspect import iso_time, snapshot_table
from daskps.model import drop_snapshots, roll_back
from daskps.reports import from_record
from daskps.storage.model_directory import ModelDirectory

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
    """List all snapshots of MODEL that can be opened, oldest first."""
    return _listing(model)


@snapshots.command(epilog="\b\nExample:\n  daskps snapshots drop runs/demo 000001-00000080\n")
@model_argument
@click.argument("ids", nargs=-1, required=True)
@command
def drop(model: str, ids: tuple[str, ...]) -> tuple[Any, ...]:
    """Drop the snapshots IDS of MODEL and free their disk space. The last snapshot cannot be dropped."""
    drop_snapshots(model, ids)
    return _listing(model)


@snapshots.command(epilog="\b\nExample:\n  daskps snapshots rollback runs/demo 000001-00000040\n")
@model_argument
@click.argument("id")
@command
def rollback(model: str, id: str) -> tuple[Any, ...]:
    """Make snapshot ID the last one of MODEL, which readers and --resume use. Newer ones stay until dropped."""
    roll_back(model, id)
    return _listing(model)
