"""Rows that a batch takes from the table of the batch before, on one to three stand-ins for devices."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from daskps.device.device import CpuDevice, Device
from daskps.device.pool import ComputePool
from daskps.errors import ProtocolError
from daskps.hbm.dedup import find_working_set
from daskps.hbm.optimizer import Optimizer, optimizer_fields
from daskps.hbm.table import HbmTable, TableSpec
from daskps.types import Batch, RowLayout

SPEC = TableSpec("main", 0, (0,), 2, "sum", Optimizer("sgd", 1.0), RowLayout(optimizer_fields("sgd", 2)))


def loaded(keys: np.ndarray, devices: list[Device], factor: float) -> tuple[HbmTable, np.ndarray]:
    """A table in which the row of a key is a multiple of it, and its keys in order."""
    offsets = np.arange(len(keys) + 1, dtype=np.int64)
    found = find_working_set(Batch(0, 1, np.zeros(len(keys), np.float32), keys, offsets), (0,), devices)
    rows = (factor * found.keys.astype(np.float32))[:, None].repeat(SPEC.layout.width, axis=1)
    table = HbmTable(SPEC, devices, found, rows)
    table.load()
    return table, found.keys


@pytest.mark.parametrize("count", [1, 2, 3])
def test_late_rows_come_from_the_batch_before_which_is_searched_no_longer(count: int, pool: ComputePool) -> None:
    devices: list[Device] = [CpuDevice(number, pool) for number in range(count)]
    before, _ = loaded(np.arange(0, 500, dtype=np.uint64), devices, 2.0)
    table, keys = loaded(np.arange(300, 900, dtype=np.uint64), devices, 1.0)
    late = np.flatnonzero(keys < 500)
    table.copy_from(before, late)
    wanted = np.where(keys < 500, 2.0, 1.0) * keys
    np.testing.assert_array_equal(table.rows_on_host(), wanted.astype(np.float32)[:, None].repeat(2, axis=1))
    # The budget of the devices has room for one such hash table, not for one of every batch in flight.
    assert all(shard.slots is None for shard in before.shards.shards)
    table.copy_from(before, late)  # it can be made again


def test_a_late_row_that_is_not_there_is_an_error(pool: ComputePool) -> None:
    devices: list[Device] = [CpuDevice(0, pool)]
    before, _ = loaded(np.arange(0, 100, dtype=np.uint64), devices, 2.0)
    table, keys = loaded(np.arange(50, 200, dtype=np.uint64), devices, 1.0)
    with pytest.raises(ProtocolError, match="a forwarded row is not in the previous batch's table"):
        table.copy_from(before, np.flatnonzero(keys == 150))


@pytest.mark.skipif("DASKPS_PTXRUN" not in os.environ, reason="DASKPS_PTXRUN does not name a folder of ptxrun")
@pytest.mark.parametrize("case", ["copy_and_free", "put", "put_late", "copy_from"])
@pytest.mark.parametrize(("count", "seed"), [(2, 1), (3, 2)])
def test_gpus_wait_for_each_others_rows_and_frees_wait_for_readers(case: str, count: int, seed: int) -> None:
    """Also where the host does not happen to wait between them."""
    script = Path(__file__).with_name("table_on_cuda.py")
    done = subprocess.run([sys.executable, script, case, str(count), str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
