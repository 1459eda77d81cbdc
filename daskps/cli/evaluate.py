"""``daskps evaluate``: metrics of a model on data."""

from __future__ import annotations

from typing import Any

import click

from daskps.cli.command import command, facts
from daskps.cli.options import format_option, model_argument, snapshot_option
from daskps.handle import open_model

EPILOG = """\b
Examples:
  daskps evaluate runs/demo
  daskps evaluate runs/criteo day_23.gz --json
"""


@click.command(epilog=EPILOG)
@model_argument
@click.argument("data", nargs=-1)
@format_option
@snapshot_option
@command
def evaluate(model: str, data: tuple[str, ...], format: str | None, snapshot: str | None) -> tuple[Any, ...]:
    """Metrics of MODEL on DATA (files, globs, URLs), by default on the validation data of its job.

    The model is only read: unseen keys are answered with their initial rows and not inserted.
    """
    with open_model(model, snapshot=snapshot) as opened:
        metrics = opened.evaluate(list(data) or None, format)
        name = opened.snapshot.id
    text = facts([*((key.replace("_", " "), f"{value:,.6g}") for key, value in metrics.items()), ("snapshot", name)])
    return {"model": model, "snapshot": name, "metrics": metrics}, text
