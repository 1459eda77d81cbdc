"""Reading takes no more than its part of the budgets: batches that are read ahead, and blocks of files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskps.budget import BudgetName, total_bytes
from daskps.build import features
from daskps.config import make_job
from daskps.data.delimited import criteo
from daskps.data.order import Steps
from daskps.data.reader import ANY_BYTES, Source
from daskps.data.schema import criteo_schema
from daskps.device.pool import ComputePool
from daskps.driver.driver import Outcome
from daskps.errors import CapacityError
from daskps.node.memory import INPUT_FRACTION, InputBudget, raw_bytes
from daskps.types import Batch
from tests.data.criteo_rows import criteo_text
from tests.driver.helpers import SMALL, Settings, merged, model_bits

Trained = Callable[..., tuple[Outcome, Path]]


def reading(*changes: Settings, rows: int = 10**9, on_cpu: bool = True, nodes: int = 1) -> InputBudget:
    job = make_job(merged(SMALL, {"train": {"batch_examples": None}}, *changes))
    steps = Steps(job.train.minibatch_examples, nodes, 0, block_examples=job.train.block_examples)
    return InputBudget(job, features(job), steps, rows=rows, on_cpu=on_cpu)


def taken(one: InputBudget, budget: BudgetName) -> int:
    """Bytes that reading takes of a budget."""
    return total_bytes(one.terms(), budget)


def batch_of(examples: int, keys: int) -> Batch:
    labels, offsets = np.zeros(examples, np.float32), np.zeros(examples * 5 + 1, np.int64)
    return Batch(0, 5, labels, np.zeros(examples * keys, np.uint64), offsets)


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("hbm_bytes", [3_000_000, 100_000_000])
def test_as_many_batches_as_may_be_in_flight_fit_their_part(depth: int, hbm_bytes: int) -> None:
    one = reading({"train": {"depth": depth}, "budget": {"hbm_bytes": hbm_bytes}})
    batch = batch_of(500 * one.steps(), 10)
    assert one.shares(batch) == 1
    assert (
        (depth + 1) * raw_bytes(batch)
        <= taken(one, "hbm_bytes")
        <= max(int(hbm_bytes * INPUT_FRACTION), (depth + 1) * 500 * 128)
    )
    assert taken(one, "memory_bytes") == 0


def test_on_a_gpu_batches_are_in_the_nodes_memory() -> None:
    one = reading({"budget": {"memory_bytes": 10_000_000}}, on_cpu=False)
    assert taken(one, "hbm_bytes") == 0
    assert 0 < taken(one, "memory_bytes") <= 10_000_000 * INPUT_FRACTION


def test_no_more_is_set_aside_than_the_data_or_the_batches_need() -> None:
    assert taken(reading(rows=1_000), "hbm_bytes") == 4 * 1_000 * 128
    assert taken(reading({"train": {"batch_examples": 2_000}}), "hbm_bytes") == 4 * 2_000 * 128


def test_examples_that_grow_make_later_reads_smaller_and_count_as_several_until_then() -> None:
    one = reading({"budget": {"hbm_bytes": 3_000_000}})
    steps = one.steps()
    assert one.shares(batch_of(500 * steps, 10)) == 1
    assert one.shares(batch_of(500 * steps, 40)) == 2
    assert one.steps() < steps


def lines_of(kind: str, *changes: Settings) -> Settings:
    data = {"format": "multislot", "paths": ["x"], "synthetic": None}
    return merged({"data": data, "slots": [{"name": "terms", "kind": kind}]}, *changes)


@pytest.mark.parametrize("kind", ["multi", "categorical"])  # where a line names slots, any may come any number of times
def test_where_the_schema_bounds_nothing_the_first_reads_have_one_step(kind: str) -> None:
    one = reading(lines_of(kind))
    assert one.steps() == 1
    one.shares(batch_of(500, 7))
    assert one.steps() > 1


def test_a_node_without_examples_does_not_hold_up_the_others() -> None:
    small_steps = {"train": {"minibatch_examples": 64, "block_examples": 256}, "cluster": {"nodes": 2}}
    one = reading(lines_of("multi", small_steps), nodes=2)
    assert one.shares(batch_of(0, 0)) == 1
    assert one.steps() > 1


def test_a_window_to_be_shuffled_has_each_row_once_however_many_epochs_there_are() -> None:
    files = {"format": "criteo", "paths": ["rows.tsv"], "synthetic": None}
    shuffled = {"data": {**files, "shuffle_window_rows": 10**9}}
    five = reading(shuffled, {"train": {"epochs": 5}}, rows=5_000)
    assert taken(five, "memory_bytes") == taken(reading(shuffled, rows=1_000), "memory_bytes") > 0


def test_batches_that_are_part_of_the_result_are_read_whole_or_refused() -> None:
    apart = {"train": {"sync_every": 4, "batch_examples": 50_000}, "cluster": {"nodes": 2}}
    assert reading(apart, nodes=2).steps() == 50_000 // 500
    with pytest.raises(CapacityError, match="more than half of budget"):
        reading(apart, {"budget": {"hbm_bytes": 3_000_000}}, nodes=2).check()
    reading({"train": {"batch_examples": 50_000}, "budget": {"hbm_bytes": 3_000_000}}).check()


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


def write_lists(path: Path, lengths: list[int]) -> Settings:
    """Rows of two slots with so many keys each, as a job names them."""
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {"label": pa.array(rng.integers(0, 2, len(lengths)).astype(np.uint8))}
    for slot in ("a", "b"):
        columns[slot] = pa.array([rng.integers(0, 300, length).tolist() for length in lengths], pa.list_(pa.uint64()))
    pq.write_table(pa.table(columns), path, row_group_size=400)
    return {
        "data": {"format": "parquet", "paths": [str(path)], "synthetic": None},
        "slots": [{"name": slot, "kind": "multi", "raw": True} for slot in ("a", "b")],
        "train": {"minibatch_examples": 100, "batch_examples": 400},
    }


def test_a_batch_is_read_in_pieces_only_until_the_size_of_examples_is_known(trained: Trained, tmp_path: Path) -> None:
    job = write_lists(tmp_path / "rows.parquet", [3] * 2_400)
    outcome, _ = trained(job, {"train": {"batch_examples": 1_200, "depth": 2}})
    sizes = [line["stop_step"] - line["first_step"] for line in outcome.batches()]
    assert sum(sizes) == 24
    assert sizes[0] == 1
    assert sizes[-1] == 12
    assert sizes.count(1) <= 4  # two were in flight, and two may have begun before the first was over


def test_a_batch_that_came_out_larger_holds_up_others_until_it_is_pushed(trained: Trained, tmp_path: Path) -> None:
    """The second half of the examples has 85 times as many keys, which nobody could know before."""
    rows = 2_400
    job = write_lists(tmp_path / "rows.parquet", [1 if row < rows // 2 else 85 for row in range(rows)])
    plain = trained(job, {"train": {"depth": 1}})
    tight = trained(job, {"budget": {"hbm_bytes": 4_000_000}})
    assert tight[0].progress.counts["read_waits"] >= 1
    assert model_bits(tight[1]) == model_bits(plain[1])
