"""``daskps export``: a model as plain Parquet or NumPy files, for anything that is not daskps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.cli.command import command, facts
from daskps.cli.options import model_argument, snapshot_option
from daskps.handle import Model, open_model
from daskps.types import Field, Floats, RowLayout
from daskps.view.words import size

EPILOG = """\b
Examples:
  daskps export runs/demo -o exported
  daskps export runs/demo -o exported --format numpy --state

Written are, for each table, TABLE.parquet (a key and its embedding in every row) or TABLE.keys.npy and
TABLE.embedding.npy; the dense network as dense.npz; and export.json, which names tables, slots and fields,
and says how features become keys and a slot's rows are pooled.
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
    output.mkdir(parents=True, exist_ok=True)
    with open_model(model, snapshot=snapshot) as opened:
        rows = {}
        for table in opened.tables:
            fields = _fields(opened, table, state)
            write = _write_parquet if kind == "parquet" else _write_numpy
            rows[table] = write(opened, table, fields, output)
        dense: dict[str, Any] = opened.dense(state)
        np.savez(output / "dense.npz", **dense)
        value = {
            "model": model,
            "snapshot": opened.snapshot.id,
            "format": kind,
            "seed": opened.job.seed,
            "hash_seed": opened.job.data.hash_seed,
            "osrp": opened.job.data.osrp.model_dump() if opened.job.data.osrp else None,
            "tables": {
                table: {
                    "rows": rows[table],
                    "slots": list(opened.slots[table]),
                    "pooling": opened.job.tables[table].pooling,
                    "fields": {field.name: field.count for field in _fields(opened, table, state)},
                }
                for table in opened.tables
            },
            "dense": {name: list(array.shape) for name, array in dense.items()},
        }
    (output / "export.json").write_text(json.dumps(value, indent=2) + "\n")
    pairs = [(f"table {table}", f"{count:,} rows") for table, count in rows.items()]
    pairs.append(("dense", f"{sum(array.size for array in dense.values()):,} numbers"))
    written = sum(path.stat().st_size for path in output.iterdir())
    pairs.append(("written", f"{output} ({size(written)}, snapshot {value['snapshot']})"))
    return {**value, "output": str(output), "bytes": written}, facts(pairs)


def _fields(model: Model, table: str, state: bool) -> list[Field]:
    """The embedding, and the optimizer's state if it is wanted."""
    return [field for field in model.layout(table).fields if state or field.name == "embedding"]


def _values(rows: Floats, layout: RowLayout, field: Field) -> np.ndarray[Any, Any]:
    """One field of rows, (n, count), as what it is."""
    values = np.ascontiguousarray(rows[:, layout.place(field.name)])
    return values.view(np.uint32) if field.dtype == "uint32" else values


def _write_parquet(model: Model, table: str, fields: list[Field], output: Path) -> int:
    layout, total = model.layout(table), 0
    kinds = {field.name: pa.uint32() if field.dtype == "uint32" else pa.float32() for field in fields}
    columns = [(field.name, pa.list_(kinds[field.name], field.count)) for field in fields]
    schema = pa.schema([("key", pa.uint64()), *columns])
    with pq.ParquetWriter(output / f"{table}.parquet", schema, compression="zstd") as writer:
        for keys, rows in model.scan(table):
            lists = [
                pa.FixedSizeListArray.from_arrays(pa.array(_values(rows, layout, field).reshape(-1)), field.count)
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
            output / f"{table}.{field.name}.npy", "w+", np.dtype(field.dtype), (total, field.count)
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
