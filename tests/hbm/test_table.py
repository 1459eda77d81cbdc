"""Rows that a batch takes from the table of the batch before, on one to three stand-ins for devices."""

import numpy as np
import pytest

from daskps.device.device import CpuDevice, Device
from daskps.device.pool import ComputePool
from daskps.errors import ProtocolError
from tests.hbm.table_on_cuda import loaded
from tests.processes import needs_ptxrun, run_module


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
    assert all(shard.cells is None for shard in before.shards.shards)
    table.copy_from(before, late)  # it can be made again


def test_a_late_row_that_is_not_there_is_an_error(pool: ComputePool) -> None:
    devices: list[Device] = [CpuDevice(0, pool)]
    before, _ = loaded(np.arange(0, 100, dtype=np.uint64), devices, 2.0)
    table, keys = loaded(np.arange(50, 200, dtype=np.uint64), devices, 1.0)
    with pytest.raises(ProtocolError, match="a forwarded row is not in the previous batch's table"):
        table.copy_from(before, np.flatnonzero(keys == 150))


@needs_ptxrun
@pytest.mark.parametrize("case", ["copy_and_free", "put", "put_late", "copy_from"])
@pytest.mark.parametrize(("count", "seed"), [(2, 1), (3, 2)])
def test_gpus_wait_for_each_others_rows_and_frees_wait_for_readers(case: str, count: int, seed: int) -> None:
    """Also where the host does not happen to wait between them."""
    run_module("tests.hbm.table_on_cuda", case, count, seed)
