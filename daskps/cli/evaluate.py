"""``daskps evaluate``: metrics of a model on data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
import numpy as np

from daskps.cli.command import bad_rows_facts, bad_rows_value, command, facts, table
from daskps.cli.options import format_option, model_argument, snapshot_option
from daskps.handle import open_model
from daskps.model.group_metrics import GroupValues

SHOWN = 20

EPILOG = """\b
Examples:
  daskps evaluate runs/demo
  daskps evaluate runs/criteo day_23.gz --json
  daskps evaluate runs/criteo day_23.gz --by C6
"""


@click.command(epilog=EPILOG)
@model_argument
@click.argument("data", nargs=-1)
@format_option
@snapshot_option
@click.option("--by", metavar="SLOT", help="Metrics for each value of a slot; the text shows the heaviest ones.")
@command
def evaluate(
    model: str, data: tuple[str, ...], format: str | None, snapshot: str | None, by: str | None
) -> tuple[Any, ...]:
    """Metrics of MODEL on DATA (files, globs, URLs), by default on the validation data of its job.

    The model is only read: unseen keys are answered with their initial rows and not inserted.
    """
    with open_model(model, snapshot=snapshot) as opened:
        name = opened.snapshot.id
        if by is not None:
            values = opened.evaluate_by(by, list(data) or None, format)
            value: dict[str, Any] = {"by": by, **asdict(values)}
            text = "\n".join([_groups(by, values), *(" ".join(fact) for fact in bad_rows_facts(opened.bad_rows))])
        else:
            metrics = opened.evaluate(list(data) or None, format)
            value = {"metrics": metrics}
            pairs = [(key.replace("_", " "), f"{number:,.6g}") for key, number in metrics.items()]
            text = facts([*pairs, *bad_rows_facts(opened.bad_rows), ("snapshot", name)])
        return {"model": model, "snapshot": name, **value, "bad_rows": bad_rows_value(opened.bad_rows)}, text


def _groups(by: str, values: GroupValues) -> str:
    """The heaviest values of the slot, and the mean of their AUC."""
    fields = ("weight", "mean_label", "mean_prediction", "calibration", "log_loss", "auc")
    heaviest = np.argsort(-values.weight, kind="stable")[:SHOWN]
    lines = [
        (str(values.keys[at]), *(f"{getattr(values, field)[at]:,.5g}" for field in fields)) for at in heaviest.tolist()
    ]
    told = table(lines, head=(f"key of {by}", *(field.replace("_", " ") for field in fields)))
    return f"{told}\n{len(heaviest)} of {values.groups_seen:,.0f} values shown; GAUC {values.gauc:.6g}"
