"""``daskps evaluate``: compute the metrics of a model on data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
import numpy as np

from daskps.cli.command import (
    bad_rows_facts,
    bad_rows_value,
    command,
    facts,
    format_option,
    key_counts_value,
    model_argument,
    snapshot_option,
    table,
    unseen_words,
)
from daskps.model import open_model
from daskps.nn.group_metrics import GroupValues

SHOWN = 20  # groups in the text of --by

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
@click.option(
    "--by", metavar="SLOT", help="Metrics for each value of a slot; the text shows those with the most weight."
)
@command
def evaluate(
    model: str, data: tuple[str, ...], format: str | None, snapshot: str | None, by: str | None
) -> tuple[Any, ...]:
    """Compute metrics of MODEL on DATA (files, globs, URLs), by default on the validation data of its job.

    The model is only read: unseen keys get their initial rows, which are not inserted.
    """
    with open_model(model, snapshot=snapshot) as opened:
        name = opened.snapshot.id
        if by is not None:
            values = opened.evaluate_by(by, list(data) or None, format)
            keys = [str(key) for key in values.keys.tolist()]  # many JSON readers round numbers above 2**53
            value: dict[str, Any] = {"by": by, **asdict(values), "keys": keys}
            told = [("keys never seen", unseen_words(opened.key_counts)), *bad_rows_facts(opened.bad_rows)]
            text = "\n".join([_groups(by, values), *(" ".join(fact) for fact in told)])
        else:
            metrics = opened.evaluate(list(data) or None, format)
            metrics.pop("unseen_keys")  # reported below, as with --by
            value = {"metrics": metrics}
            pairs = [(key.replace("_", " "), f"{number:,.6g}") for key, number in metrics.items()]
            pairs.append(("keys never seen", unseen_words(opened.key_counts)))
            text = facts([*pairs, *bad_rows_facts(opened.bad_rows), ("snapshot", name)])
        value |= {"unseen_keys": opened.unseen_keys, "key_counts": key_counts_value(opened.key_counts)}
        return {"model": model, "snapshot": name, **value, "bad_rows": bad_rows_value(opened.bad_rows)}, text


def _groups(by: str, values: GroupValues) -> str:
    """Return a table of the groups with the most weight, and the mean AUC of all groups (GAUC)."""
    fields = ("weight", "mean_label", "mean_prediction", "calibration", "log_loss", "auc")
    heaviest = np.argsort(-values.weight, kind="stable")[:SHOWN]
    lines = [
        (str(values.keys[at]), *(f"{getattr(values, field)[at]:,.5g}" for field in fields)) for at in heaviest.tolist()
    ]
    told = table(lines, head=(f"key of {by}", *(field.replace("_", " ") for field in fields)))
    return f"{told}\n{len(heaviest)} of {values.groups_seen:,.0f} values shown; GAUC {values.gauc:.6g}"
