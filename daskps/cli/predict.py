"""``daskps predict``: a click probability for every row of some data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.cli.command import bad_rows_facts, bad_rows_value, command
from daskps.cli.options import format_option, model_argument, snapshot_option
from daskps.handle import open_model

EPILOG = """\b
Examples:
  daskps predict runs/demo clicks.parquet -o predictions.parquet
  daskps predict runs/criteo day_23.gz -o predictions.parquet
  daskps predict runs/criteo test.txt --unlabelled -o predictions.parquet
"""
SCHEMA = pa.schema([("row", pa.int64()), ("label", pa.float32()), ("probability", pa.float32())])


@contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Where to write what is to be at `path`: it gets there when all of it is written, after an error not at all."""
    unfinished = f"{path}.unfinished"
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            os.remove(unfinished)


@click.command(epilog=EPILOG)
@model_argument
@click.argument("data", nargs=-1, required=True)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The Parquet file to write.")
@format_option
@click.option("--unlabelled", is_flag=True, help="DATA has no labels (Criteo: 39 columns), nor has the output.")
@snapshot_option
@command
def predict(
    model: str, data: tuple[str, ...], output: str, format: str | None, unlabelled: bool, snapshot: str | None
) -> tuple[Any, ...]:
    """Predict every row of DATA with MODEL and write row number, label and probability as Parquet."""
    schema = SCHEMA.remove(SCHEMA.get_field_index("label")) if unlabelled else SCHEMA
    rows, clicks = 0, 0.0
    with (
        open_model(model, snapshot=snapshot) as opened,
        whole_file(output) as unfinished,
        pq.ParquetWriter(unfinished, schema, compression="zstd") as writer,
    ):
        for batch, probabilities in opened.predict_batches(opened.read(data, format, labelled=not unlabelled)):
            numbers = np.arange(batch.first_row, batch.first_row + batch.examples)
            columns = {"row": numbers, "label": batch.labels, "probability": probabilities}
            writer.write_table(pa.table({name: columns[name] for name in schema.names}, schema=schema))
            rows += batch.examples
            clicks += float(probabilities.sum(dtype=np.float64))
        name, bad_rows = opened.snapshot.id, opened.bad_rows
    mean = clicks / rows if rows else float("nan")
    value = {
        "model": model,
        "snapshot": name,
        "rows": rows,
        "mean_probability": mean,
        "output": output,
        "bad_rows": bad_rows_value(bad_rows),
    }
    done = f"{rows:,} rows predicted into {output}, {mean:.4f} on average (snapshot {name})"
    return value, "\n".join([done, *(f"{what}; predicted without keys" for _, what in bad_rows_facts(bad_rows))])
