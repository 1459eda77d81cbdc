"""``daskps compact``: free the disk space of stale rows and older snapshots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from daskps.cli.command import command, model_argument
from daskps.model import compact as compact_model
from daskps.view.words import size

EPILOG = """\b
Example:
  daskps compact runs/demo
"""


@click.command(epilog=EPILOG)
@model_argument
@command
def compact(model: str) -> tuple[Any, ...]:
    """Rewrite the live rows of MODEL and drop all snapshots, except the last one and those that a reader has open.

    Training compacts in the background; use this command for models that are no longer trained. No run may be training
    the model at the same time.
    """
    done = compact_model(model)
    words = (
        f"{done.moved_rows:,} rows moved: {size(done.bytes_before)} on disk before, {size(done.bytes_after)} now "
        f"(snapshot {done.snapshot})"
    )
    return {"model": model, **asdict(done)}, words
