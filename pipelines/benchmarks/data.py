"""Reading: Criteo text and Parquet to batches of keys, against what people use today.

Rows are generated in Criteo's layout with its skew: Zipf categories of very different sizes, lognormal counts, missing
fields. Peers get less to do than we do: pandas and polars end with hashed columns, not with batches in row order.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.harness import Result, alternate, compare, missing
from daskps.data.columns import Parquet
from daskps.data.delimited import criteo
from daskps.data.reader import Source
from daskps.data.schema import CRITEO_COLUMNS, criteo_schema
from daskps.device.pool import ComputePool

INTEGERS, CATEGORIES = list(CRITEO_COLUMNS[1:14]), list(CRITEO_COLUMNS[14:])
# Distinct values of Criteo's 26 categories in the first 45 million rows, rounded.
SIZES = [1500, 600, 10**7, 2 * 10**6, 300, 25, 12000, 600, 3, 93000, 5700, 8 * 10**6, 3200, 27, 15000, 5 * 10**6]
SIZES += [10, 5600, 2200, 4, 7 * 10**6, 18, 15, 286000, 105, 142000]
TORCHREC_ROWS = 50_000  # its Python loop is slow; rows a second do not depend on the number of rows


def criteo_table(rows: int) -> pa.Table:
    """Rows in Criteo's layout."""
    rng = np.random.default_rng(0)
    columns = {"label": pa.array((rng.random(rows) < 0.26).astype(np.int8))}
    for number, name in enumerate(INTEGERS):
        values = np.floor(rng.lognormal(1 + 0.4 * number, 1.5, rows)).astype(np.int64)
        columns[name] = pa.array(values, mask=rng.random(rows) < 0.2)
    for size, name in zip(SIZES, CATEGORIES, strict=True):
        ranks = np.minimum(rng.zipf(1.15, rows), size).astype(np.uint64)
        distinct, places = np.unique(ranks, return_inverse=True)
        words = pa.array([f"{int(x) * 2654435761 % 2**32:08x}" for x in distinct])
        indices = pa.array(places.astype(np.int32), mask=rng.random(rows) < 0.1)
        columns[name] = pa.DictionaryArray.from_arrays(indices, words).cast(pa.string())
    return pa.table(columns)


def write(table: pa.Table, folder: Path) -> tuple[Path, Path]:
    """The rows as Criteo writes them, and as Parquet."""
    text, parquet = folder / "rows.tsv", folder / "rows.parquet"
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(table, text, options)
    pq.write_table(table, parquet, row_group_size=1 << 17)
    return text, parquet


def ours(source: Source, pool: ComputePool, batch_examples: int) -> Callable[[], object]:
    """Index and read everything."""

    def work() -> int:
        with source.open(source.index(), pool) as reader:
            return sum(len(batch.keys) for batch in reader.batches(batch_examples))

    return work


def read_pandas(text: Path) -> object:
    """read_csv, then a hash of every category and bucket."""
    import pandas as pd

    types = dict.fromkeys(CATEGORIES, "str") | dict.fromkeys(INTEGERS, "float64")
    frame = pd.read_csv(text, sep="\t", header=None, names=list(CRITEO_COLUMNS), dtype=types)
    hashed = {name: pd.util.hash_array(frame[name].to_numpy(object, na_value="")) for name in CATEGORIES}
    for name in INTEGERS:
        values = frame[name].to_numpy()
        buckets = np.where(values > 2, np.floor(np.log(np.maximum(values, 1)) ** 2), values)
        hashed[name] = pd.util.hash_array(np.nan_to_num(buckets, nan=-1))
    return hashed


def read_polars(text: Path) -> object:
    """scan_csv with a hash of every category and bucket, in its own parallel engine."""
    import polars as pl

    schema = {name: pl.String if name in CATEGORIES else pl.Int64 for name in CRITEO_COLUMNS}
    rows = pl.scan_csv(text, separator="\t", has_header=False, schema=schema, quote_char=None)
    buckets = [
        pl.when(pl.col(name) > 2).then(pl.col(name).log().pow(2).floor().cast(pl.Int64)).otherwise(pl.col(name)).hash(1)
        for name in INTEGERS
    ]
    categories = [pl.col(name).hash(number) for number, name in enumerate(CATEGORIES)]
    return rows.select("label", *[x.alias(n) for x, n in zip(buckets, INTEGERS, strict=True)], *categories).collect()


def read_torchrec_style(text: Path) -> object:
    """What torchrec's `tsv_to_npys` does with Criteo's rows: a Python loop, integers to float, hexadecimals to int."""
    labels, dense, sparse = [], [], []
    with open(text, newline="") as file:
        for row in itertools.islice(csv.reader(file, delimiter="\t"), TORCHREC_ROWS):
            labels.append(int(row[0] or "0"))
            dense.append([int(field or "0") for field in row[1:14]])
            sparse.append([int(field or "0", 16) for field in row[14:]])
    return np.array(labels, np.int32), np.array(dense, np.float32), np.array(sparse, np.int64)


def run(argv: list[str]) -> list[Result]:
    """Text, then Parquet."""
    parser = argparse.ArgumentParser(prog="bench.py data", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch-examples", type=int, default=1 << 18)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    rows, rounds = arguments.rows, arguments.rounds
    results = []
    with tempfile.TemporaryDirectory() as folder, ComputePool(arguments.cores) as pool:
        text, parquet = write(criteo_table(rows), Path(folder))
        contenders: dict[str, Callable[[], object]] = {
            "ours": ours(Source([str(text)], criteo(), criteo_schema()), pool, arguments.batch_examples)
        }
        absent = []
        for peer, work in (("pandas", read_pandas), ("polars", read_polars)):
            try:
                __import__(peer)
            except ImportError:
                absent.append(missing("criteo tsv to batches", peer, f"pip install {peer}"))
                continue
            contenders[peer] = lambda work=work: work(text)
        seconds = alternate(contenders, rounds)
        seconds["torchrec-style NumPy"] = (
            alternate({"torchrec": lambda: read_torchrec_style(text)}, 1)["torchrec"] * rows / min(rows, TORCHREC_ROWS)
        )
        wanted = {"pandas": 3.0, "polars": 1.0, "torchrec-style NumPy": None}
        targets = {peer: wanted[peer] for peer in wanted if peer in seconds}
        results += compare("criteo tsv to batches", seconds, items=rows, unit="rows/s", targets=targets) + absent
        source = Source([str(parquet)], Parquet(), criteo_schema())
        seconds = alternate(
            {"ours": ours(source, pool, arguments.batch_examples), "pyarrow alone": lambda: pq.read_table(parquet)},
            rounds,
        )
        results += compare(
            "criteo parquet to batches", seconds, items=rows, unit="rows/s", targets={"pyarrow alone": 0.7}
        )
    return results
