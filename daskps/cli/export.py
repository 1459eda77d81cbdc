"""``daskps export``: write a model as plain Parquet or NumPy files, for programs that do not use daskps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskps import build
from daskps.cli.command import command, facts, model_argument, snapshot_option
from daskps.config import Job
from daskps.model import Model, open_model
from daskps.storage.output import atomic_output
from daskps.types import Field, Floats, RowLayout
from daskps.view.words import size

EPILOG = """\b
Examples:
  daskps export runs/demo -o exported
  daskps export runs/demo -o exported --format numpy --state

For each table it writes TABLE.parquet (one key and its embedding per row), or TABLE.keys.npy and
TABLE.embedding.npy; the dense network as dense.npz; and export.json. That file has the network's kind and layers;
tables and fields; slots and dense features in their order, with their columns; and how features become keys, how the
rows of a slot are pooled, and the initial values of rows. The folder gets its final name when it is complete.
"""


@click.command(epilog=EPILOG)
@model_argument
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="A new folder.")
@click.option("--format", "kind", type=click.Choice(["parquet", "numpy"]), default="parquet", show_default=True)
@click.option("--state", is_flag=True, help="With the optimizers' state.")
@snapshot_option
@command
def export(model: str, output: Path, kind: str, state: bool, snapshot: str | None) -> tuple[Any, ...]:
    """Write MODEL as plain files: keys and embeddings of every table, and the dense network."""
    if output.exists() and any(output.iterdir()):
        raise click.BadParameter(f"{output} is not empty; choose a new folder", param_hint="--output")
    with open_model(model, snapshot=snapshot) as opened, atomic_output(output, folder=True) as unfinished:
        rows = {}
        for table in opened.tables:
            fields = _fields(opened, table, state)
            write = _write_parquet if kind == "parquet" else _write_numpy
            rows[table] = write(opened, table, fields, unfinished)
        dense: dict[str, Any] = opened.dense(state)
        np.savez(unfinished / "dense.npz", **dense)
        value = {
            "model": model,
            "snapshot": opened.snapshot.id,
            "format": kind,
            "network": {"kind": opened.job.model.kind, "hidden": list(opened.job.model.layers)},
            "seed": opened.job.seed,
            "hash_seed": opened.job.data.hash_seed,
            "key_rule": opened.job.data.key_rule,
            "osrp": opened.job.data.osrp.model_dump() if opened.job.data.osrp else None,
            **_features(opened.job),
            "tables": {
                table: {
                    "rows": rows[table],
                    "slots": list(opened.slots[table]),
                    "pooling": opened.job.tables[table].pooling,
                    "initialiser": opened.job.tables[table].initialiser.model_dump(),  # for keys without a row
                    "fields": {field.name: field.width for field in _fields(opened, table, state)},
                }
                for table in opened.tables
            },
            "dense": {name: list(array.shape) for name, array in dense.items()},
        }
        (unfinished / "export.json").write_text(json.dumps(value, indent=2) + "\n")
    pairs = [(f"table {table}", f"{count:,} rows") for table, count in rows.items()]
    pairs.append(("dense", f"{sum(array.size for array in dense.values()):,} numbers"))
    written = sum(path.stat().st_size for path in output.iterdir())
    pairs.append(("written", f"{output} ({size(written)}, snapshot {value['snapshot']})"))
    return {**value, "output": str(output), "bytes": written}, facts(pairs)


# Settings of slots and of dense features that a prediction needs.
KEY_SETTINGS = {"name", "kind", "raw", "missing", "separator", "weights"}
DENSE_SETTINGS = {"name", "transform", "missing_value"}


def _features(job: Job) -> dict[str, Any]:
    """Return the features that a prediction needs, in the order of the network's inputs.

    If OP+OSRP hashes several slots together, all of them have the one table of the hashed keys.
    """
    schema, tables = build.job_schema(job), build.features(job).tables
    if len(tables) < len(schema.slots):
        tables = tables * len(schema.slots)
    return {
        "slots": [
            {**slot.model_dump(include=KEY_SETTINGS), "column": slot.source, "table": table}
            for slot, table in zip(schema.slots, tables, strict=True)
        ],
        "dense_features": [{**slot.model_dump(include=DENSE_SETTINGS), "column": slot.source} for slot in schema.dense],
    }


def _fields(model: Model, table: str, state: bool) -> list[Field]:
    """Return the embedding field, and with `state` also the fields of the optimizer's state."""
    return [field for field in model.layout(table).fields if state or field.name == "embedding"]


def _values(rows: Floats, layout: RowLayout, field: Field) -> np.ndarray[Any, Any]:
    """Return one field of rows, (n, count), in the field's own type: float32 or uint32."""
    values = np.ascontiguousarray(rows[:, layout.place(field.name)])
    return values.view(np.uint32) if field.dtype == "uint32" else values


def _write_parquet(model: Model, table: str, fields: list[Field], output: Path) -> int:
    layout, total = model.layout(table), 0
    kinds = {field.name: pa.uint32() if field.dtype == "uint32" else pa.float32() for field in fields}
    columns = [(field.name, pa.list_(kinds[field.name], field.width)) for field in fields]
    schema = pa.schema([("key", pa.uint64()), *columns])
    with pq.ParquetWriter(output / f"{table}.parquet", schema, compression="zstd") as writer:
        for keys, rows in model.scan(table):
            lists = [
                pa.FixedSizeListArray.from_arrays(pa.array(_values(rows, layout, field).reshape(-1)), field.width)
                for field in fields
            ]
            writer.write_table(pa.Table.from_arrays([pa.array(keys), *lists], schema=schema))
            total += len(keys)
    return total


def _write_numpy(model: Model, table: str, fields: list[Field], output: Path) -> int:
    layout, total = model.layout(table), model.rows(table)
    keys_out = np.lib.format.open_memmap(output / f"{table}.keys.npy", "w+", np.uint64, (total,))
    outs = {
        field.name: np.lib.format.open_memmap(
            output / f"{table}.{field.name}.npy", "w+", np.dtype(field.dtype), (total, field.width)
        )
        for field in fields
    }
    at = 0
    for keys, rows in model.scan(table):
        keys_out[at : at + len(keys)] = keys
        for field in fields:
            outs[field.name][at : at + len(keys)] = _values(rows, layout, field)
        at += len(keys)
    for out in (keys_out, *outs.values()):
        out.flush()
    return total
