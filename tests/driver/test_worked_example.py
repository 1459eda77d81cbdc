"""The worked example of the slides: two nodes, two devices each, nine keys, with exactly the sets that they show.

Node 1 owns the odd keys and node 2 the even ones; GPU 1 of a node holds keys up to 50 and GPU 2 those above.
"""

import itertools

import numpy as np
import pytest

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.hbm.dedup import find_working_set
from daskps.hbm.optimizer import Optimizer, optimizer_fields
from daskps.hbm.table import HbmTable, TableSpec
from daskps.storage.partition import KeyPartition, Placement
from daskps.types import Batch, RowLayout, WorkingSet

MINI_BATCHES = [[[11, 87], [98]], [[50, 56, 61], [61, 87]], [[87], [4, 53]], [[4, 61], [5, 56]]]
EXAMPLES = [example for mini_batch in MINI_BATCHES for example in mini_batch]
NODE_1, NODE_2 = 1, 0  # ranks: a key's remainder by two


def batch() -> Batch:
    keys = np.array([key for example in EXAMPLES for key in example], np.uint64)
    offsets = np.cumsum([0, *map(len, EXAMPLES)]).astype(np.int64)
    return Batch(0, 1, np.zeros(len(EXAMPLES), np.float32), keys, offsets)


@pytest.fixture
def devices(pool: ComputePool) -> list[CpuDevice]:
    return [CpuDevice(0, pool), CpuDevice(1, pool)]


@pytest.fixture
def working_set(devices: list[CpuDevice]) -> WorkingSet:
    return find_working_set(batch(), (0,), devices, device_of=lambda keys: (keys > 50).astype(np.int32))


def keys_of_shard(working_set: WorkingSet, m: int) -> set[int]:
    rows = slice(working_set.shard_starts[m], working_set.shard_starts[m + 1])
    assert working_set.key_of is not None
    return set(working_set.keys[working_set.key_of[rows]].tolist())


def test_the_working_set_is_the_nine_keys(working_set: WorkingSet) -> None:
    assert sorted(working_set.keys.tolist()) == [4, 5, 11, 50, 53, 56, 61, 87, 98]


def test_node_1_pulls_odd_keys_at_home_and_even_ones_from_node_2(working_set: WorkingSet, pool: ComputePool) -> None:
    grouped = KeyPartition(Placement(2, "modulo"), 2, pool).group(working_set.keys)
    parts = itertools.pairwise(grouped.starts)
    pulled = [set(working_set.keys[grouped.order[first:last]].tolist()) for first, last in parts]
    assert pulled[NODE_1] == {5, 11, 53, 61, 87}
    assert pulled[NODE_2] == {4, 50, 56, 98}


def test_gpu_1_holds_keys_up_to_50_and_gpu_2_the_others(working_set: WorkingSet) -> None:
    assert keys_of_shard(working_set, 0) == {4, 5, 11, 50}
    assert keys_of_shard(working_set, 1) == {53, 56, 61, 87, 98}


def test_worker_1_finds_11_on_its_own_gpu_and_87_and_98_on_the_other(working_set: WorkingSet) -> None:
    first_mini_batch = working_set.row_of[: int(working_set.offsets[2])]
    local = {11: True, 87: False, 98: False}
    found = {
        int(working_set.keys[working_set.key_of[row]]): row < working_set.shard_starts[1] for row in first_mini_batch
    }
    assert found == local


def test_training_reads_rows_of_both_gpus(working_set: WorkingSet, devices: list[CpuDevice]) -> None:
    layout = RowLayout(optimizer_fields("sgd", 1))
    spec = TableSpec("main", 0, (0,), 1, "sum", Optimizer("sgd", 1.0), layout)
    rows = working_set.keys.astype(np.float32)[:, None]  # the row of a key is the key itself
    table = HbmTable(spec, devices, working_set, rows.copy())
    table.load()
    part = table.part(working_set.row_of, working_set.offsets, working_set.weights, [0, 4, 8])
    pooled = [table.pool(part, 0), table.pool(part, 1)]
    assert np.concatenate(pooled).ravel().tolist() == [sum(example) for example in EXAMPLES]
    table.update(part, [np.ones_like(array) for array in pooled], weight=1.0)
    occurrences = {key: sum(example.count(key) for example in EXAMPLES) for key in working_set.keys.tolist()}
    trained = dict(zip(working_set.keys.tolist(), table.rows_on_host().ravel().tolist(), strict=True))
    assert trained == {key: key - count for key, count in occurrences.items()}
