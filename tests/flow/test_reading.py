"""Reading takes no more than its part of the budgets: batches that are read ahead, and blocks of files."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskps.backend.pool import ComputePool
from daskps.config import make_job
from daskps.data.delimited import criteo
from daskps.data.order import Steps
from daskps.data.reader import ANY_BYTES
from daskps.data.schema import criteo_schema
from daskps.data.source import Source
from daskps.flow.inputs import features
from daskps.flow.progress import Outcome
from daskps.flow.reading import READING, Reading, raw_bytes
from daskps.types import Batch
from tests.data.criteo_rows import criteo_text
from tests.flow.conftest import SMALL, Settings, merged, model_bits

Trained = Callable[..., tuple[Outcome, Path]]


def reading(*changes: Settings, rows: int = 10**9, on_cpu: bool = True) -> Reading:
    job = make_job(merged(SMALL, {"train": {"batch_examples": None}}, *changes))
    reader: Any = SimpleNamespace(rows=rows)
    return Reading(job, features(job), Steps(job.train.minibatch_examples), reader, on_cpu=on_cpu)


def batch_of(examples: int, keys: int) -> Batch:
    labels, offsets = np.zeros(examples, np.float32), np.zeros(examples * 5 + 1, np.int64)
    return Batch(0, 5, labels, np.zeros(examples * keys, np.uint64), offsets)


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("hbm_bytes", [3_000_000, 100_000_000])
def test_as_many_batches_as_may_be_in_flight_fit_their_part(depth: int, hbm_bytes: int) -> None:
    one = reading({"train": {"depth": depth}, "budget": {"hbm_bytes": hbm_bytes}})
    batch = batch_of(500 * one.steps(), 10)
    assert one.shares(batch) == 1
    assert (depth + 1) * raw_bytes(batch) <= one.hbm_bytes <= max(hbm_bytes // READING, (depth + 1) * 500 * 128)
    assert one.memory_bytes == 0


def test_on_a_gpu_batches_are_in_the_nodes_memory() -> None:
    one = reading({"budget": {"memory_bytes": 10_000_000}}, on_cpu=False)
    assert one.hbm_bytes == 0
    assert 0 < one.memory_bytes <= 10_000_000 // READING


def test_no_more_is_set_aside_than_the_data_or_the_batches_need() -> None:
    assert reading(rows=1_000).hbm_bytes == 4 * 1_000 * 128
    assert reading({"train": {"batch_examples": 2_000}}).hbm_bytes == 4 * 2_000 * 128


def test_examples_that_grow_make_later_reads_smaller_and_count_as_several_until_then() -> None:
    one = reading({"budget": {"hbm_bytes": 3_000_000}})
    steps = one.steps()
    assert one.shares(batch_of(500 * steps, 10)) == 1
    assert one.shares(batch_of(500 * steps, 40)) == 2
    assert one.steps() < steps


def test_where_the_schema_bounds_nothing_the_first_reads_have_one_step() -> None:
    slots = [{"name": "terms", "kind": "multi"}]
    job = {"data": {"format": "multislot", "paths": ["x"], "synthetic": None}, "slots": slots}
    one = reading(job)
    assert one.steps() == 1
    one.shares(batch_of(500, 7))
    assert one.steps() > 1


def test_blocks_of_files_are_as_few_as_fit_and_the_rows_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(criteo_text(3_000))
    source = Source([str(tmp_path / "rows")], criteo(block_bytes=1 << 15), criteo_schema())
    with ComputePool(2) as pool:
        index = source.index()
        read = []
        for most in (0, 5 << 15, ANY_BYTES):
            with source.open(index, pool, blocks_bytes=most) as reader:
                assert reader.held_bytes <= max(most, 2 * (1 << 15) + 2_000)
                read.append(reader.read(0, 3_000))
    assert all(np.array_equal(read[0].keys, other.keys) for other in read[1:])
    assert all(np.array_equal(read[0].labels, other.labels) for other in read[1:])


def test_a_batch_that_came_out_larger_holds_up_others_until_it_is_pushed(trained: Trained, tmp_path: Path) -> None:
    """The second half of the examples has 85 times as many keys, which nobody could know before."""
    rng, rows = np.random.default_rng(1), 2_400
    columns: dict[str, Any] = {"label": pa.array(rng.integers(0, 2, rows).astype(np.uint8))}
    for slot in ("a", "b"):
        lists = [rng.integers(0, 300, 1 if row < rows // 2 else 85).tolist() for row in range(rows)]
        columns[slot] = pa.array(lists, pa.list_(pa.uint64()))
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=400)
    job = {
        "data": {"format": "parquet", "paths": [str(tmp_path / "rows.parquet")], "synthetic": None},
        "slots": [{"name": slot, "kind": "multi", "raw": True} for slot in ("a", "b")],
        "train": {"minibatch_examples": 100, "batch_examples": 400},
    }
    plain = trained(job, {"train": {"depth": 1}})
    tight = trained(job, {"budget": {"hbm_bytes": 4_000_000}})
    assert "read_waits" not in plain[0].progress.counts
    assert tight[0].progress.counts["read_waits"] >= 1
    assert model_bits(tight[1]) == model_bits(plain[1])
