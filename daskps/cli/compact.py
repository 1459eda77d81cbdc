"""``daskps compact``: free what stale rows and older snapshots take on disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from daskps import maintenance
from daskps.cli.command import command
from daskps.cli.options import model_argument
from daskps.view.words import size

EPILOG = """\b
Example:
  daskps compact runs/demo
"""


@click.command(epilog=EPILOG)
@model_argument
@command
def compact(model: str) -> tuple[Any, ...]:
    """Write the live rows of MODEL anew and drop all snapshots but the last.

    Training compacts in the background by itself; this is for models that are kept. No run may be training the model.
    """
    done = maintenance.compact(model)
    words = (
        f"{done.moved_rows:,} rows moved: {size(done.bytes_before)} on disk before, {size(done.bytes_after)} now "
        f"(snapshot {done.snapshot})"
    )
    return {"model": model, **asdict(done)}, words
