"""``daskps verify``: check every byte of a model against its checksums."""

from __future__ import annotations

from typing import Any

import click

from daskps.cli.command import command, model_argument
from daskps.model import open_model
from daskps.view.words import size

EPILOG = """\b
Example:
  daskps verify runs/demo && echo intact

If something is damaged, the first damaged file is named and the exit code is 5. The model may be training meanwhile.
"""


@click.command(epilog=EPILOG)
@model_argument
@command
def verify(model: str) -> tuple[Any, ...]:
    """Check every byte of all snapshots of MODEL against its checksums."""
    with open_model(model) as opened:
        checked, found = opened.verify_snapshots()
    count = len(found)
    words = f"intact: {size(checked)} checked, {count} snapshot{'s' if count != 1 else ''}"
    return {"model": model, "intact": True, "checked_bytes": checked, "snapshots": count}, words
