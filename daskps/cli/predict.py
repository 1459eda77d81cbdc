"""``daskps predict``: write a click probability for every example of some data."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.cli.command import (
    bad_rows_facts,
    bad_rows_value,
    command,
    format_option,
    key_counts_value,
    model_argument,
    snapshot_option,
    unseen_words,
)
from daskps.model import open_model
from daskps.storage.output import atomic_output

EPILOG = """\b
Examples:
  daskps predict runs/demo clicks.parquet -o predictions.parquet
  daskps predict runs/criteo day_23.gz -o predictions.parquet
  daskps predict runs/criteo test.txt --unlabelled -o predictions.parquet
"""
SCHEMA = pa.schema([("row", pa.int64()), ("label", pa.float32()), ("probability", pa.float32())])


@click.command(epilog=EPILOG)
@model_argument
@click.argument("data", nargs=-1, required=True)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The Parquet file to write.")
@format_option
@click.option("--unlabelled", is_flag=True, help="DATA has no labels (Criteo: 39 columns), and neither has the output.")
@snapshot_option
@command
def predict(
    model: str, data: tuple[str, ...], output: str, format: str | None, unlabelled: bool, snapshot: str | None
) -> tuple[Any, ...]:
    """Predict every example of DATA with MODEL; write example number, label and probability as Parquet.

    With data.bad_lines = "lenient", an example that cannot be read has null for label and probability. If
    only its label cannot be read, it has a probability.
    """
    schema = SCHEMA.remove(SCHEMA.get_field_index("label")) if unlabelled else SCHEMA
    rows, predicted, clicks = 0, 0, 0.0
    with (
        open_model(model, snapshot=snapshot) as opened,
        atomic_output(output) as unfinished,
        pq.ParquetWriter(unfinished, schema, compression="zstd") as writer,
    ):
        examples = opened.read(data, format, labelled=not unlabelled, label_needed=False)
        for batch, probabilities in opened.predict_batches(examples):
            numbers = np.arange(batch.first_example, batch.first_example + batch.examples)
            bad = np.zeros(batch.examples, np.bool_) if batch.bad is None else batch.bad
            columns = {
                "row": pa.array(numbers),
                "label": pa.array(batch.labels, mask=bad | np.isnan(batch.labels)),
                "probability": pa.array(probabilities, mask=bad),
            }
            writer.write_table(pa.table({name: columns[name] for name in schema.names}, schema=schema))
            rows += batch.examples
            predicted += batch.examples - int(bad.sum())
            clicks += float(probabilities[~bad].sum(dtype=np.float64))
        name, bad_rows, counts, unseen = opened.snapshot.id, opened.bad_rows, opened.key_counts, opened.unseen_keys
    mean = clicks / predicted if predicted else float("nan")
    value = {
        "model": model,
        "snapshot": name,
        "rows": rows,
        "predicted": predicted,
        "mean_probability": mean,
        "output": output,
        "unseen_keys": unseen,
        "key_counts": key_counts_value(counts),
        "bad_rows": bad_rows_value(bad_rows),
    }
    done = f"{predicted:,} examples predicted into {output}, {mean:.4f} on average (snapshot {name})"
    if predicted < rows:
        done += f"; {rows - predicted:,} of {rows:,} examples could not be read and have null"
    told = [done, f"keys that the model has never seen: {unseen_words(counts)}"]
    return value, "\n".join([*told, *(what for _, what in bad_rows_facts(bad_rows))])
