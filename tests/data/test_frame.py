"""A Dask DataFrame is read by partitions, with and without a cluster, into the batches of the same Parquet files."""

from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, Worker

from daskps.data.columns import Parquet
from daskps.data.frame import frame_source
from daskps.data.reader import Source
from daskps.data.schema import Schema, Slot
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from daskps.types import Batch

SCHEMA = Schema(
    (Slot(name="user"), Slot(name="n", kind="integer"), Slot(name="words", kind="multi"), Slot(name="shop")),
    (Slot(name="price", kind="dense"),),
    label="y",
)


def pandas_frame(examples: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "y": rng.integers(0, 2, examples),
            "user": rng.integers(0, 50, examples),
            "n": np.where(rng.random(examples) < 0.2, np.nan, rng.integers(0, 99, examples)),
            "words": [[f"w{i}" for i in range(k)] for k in rng.integers(0, 4, examples)],
            "shop": pd.Categorical(rng.choice(["a", "b", None], examples)),
            "price": rng.random(examples),
            "unused": rng.random(examples),
        }
    )


def dask_frame(examples: pd.DataFrame, partitions: int) -> dd.DataFrame:
    with dask.config.set({"dataframe.convert-string": False}):  # else lists become text
        return dd.from_pandas(examples, npartitions=partitions, sort=False)


def same(left: Batch, right: Batch) -> None:
    for name in ("labels", "keys", "offsets", "dense"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def parquet_batch(path: Path, examples: pd.DataFrame, pool: ComputePool) -> Batch:
    examples.to_parquet(path)
    source = Source([str(path)], Parquet(), SCHEMA, 9)
    with source.open(source.index(), pool) as reader:
        return reader.read(0, len(examples))


def test_partitions_give_what_the_same_examples_give_as_parquet(tmp_path: Path, pool: ComputePool) -> None:
    examples = pandas_frame(100)
    wanted = parquet_batch(tmp_path / "a.parquet", examples, pool)
    source = frame_source(dask_frame(examples, 7), SCHEMA, 9)
    index = source.index()
    assert index.examples == 100
    with source.open(index, pool) as reader:
        same(reader.read(0, 100), wanted)
        same(reader.read(37, 61), wanted.slice(37, 61))


def test_a_persisted_frame_is_read_from_the_workers_that_hold_it(tmp_path: Path, pool: ComputePool) -> None:
    """Inside a task there is no default client, as in a worker of its own; workers in this process need no start."""
    examples = pandas_frame(60)
    wanted = parquet_batch(tmp_path / "a.parquet", examples, pool)
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with client.as_current():
            source = frame_source(client.persist(dask_frame(examples, 4)), SCHEMA, 9)
            index = source.index()
            with source.open(index, pool) as reader:
                same(reader.read(10, 50), wanted.slice(10, 50))

        def inside_a_task() -> Batch:
            with ComputePool(1) as one, source.open(index, one) as reader:
                return reader.read(0, 60)

        async def close_client(dask_worker: Worker) -> None:
            """Dask leaves it open while another cluster lives in this process, and as the default client at that."""
            if dask_worker._client is not None:
                await dask_worker._client.close()

        same(client.submit(inside_a_task).result(), wanted)
        client.run(close_client)


def test_a_frame_that_changes_is_refused(pool: ComputePool) -> None:
    frame = dask_frame(pandas_frame(10), 2)
    source = frame_source(frame, SCHEMA)
    longer = frame_source(dask_frame(pandas_frame(12), 2), SCHEMA)
    with (
        longer.open(source.index(), pool) as reader,
        pytest.raises(DataError, match="partition 0 has 6 examples, but 5"),
    ):
        reader.read(0, 10)


def test_lists_that_dask_turned_into_text_are_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"words is large_string.* wants a list .*dataframe\.convert-string"):
        frame_source(dd.from_pandas(pandas_frame(10), npartitions=2, sort=False), SCHEMA).index()


def test_a_missing_column_is_named() -> None:
    frame = dd.from_pandas(pandas_frame(4).drop(columns="shop"), npartitions=1)
    with pytest.raises(ConfigError, match=r"Dask DataFrame: .* not there: \['shop'\]"):
        frame_source(frame, SCHEMA)
