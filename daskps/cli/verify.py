"""``daskps verify``: check every byte of a model."""

from __future__ import annotations

from typing import Any

import click

from daskps.cli.command import command
from daskps.cli.options import model_argument
from daskps.handle import open_model
from daskps.view.words import size

EPILOG = """\b
Example:
  daskps verify runs/demo && echo intact

The first damage is named, and the exit code is 5.
"""


@click.command(epilog=EPILOG)
@model_argument
@command
def verify(model: str) -> tuple[Any, ...]:
    """Check every byte of all snapshots of MODEL against its checksums."""
    with open_model(model) as opened:
        checked = opened.verify()
        count = len(opened.snapshots())
    words = f"intact: {size(checked)} checked, {count} snapshot{'s' if count != 1 else ''}"
    return {"model": model, "intact": True, "checked_bytes": checked, "snapshots": count}, words
