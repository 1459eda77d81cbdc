"""Rows that one GPU writes and another reads at once, while the host does not wait. Run by test_table.py.

``python -m tests.hbm.table_on_cuda CASE DEVICES SEED`` takes CuPy and cuDF from ptxrun, whose folder must be on
PYTHONPATH. Launches and copies wait in their streams and run in an order that SEED draws; CuPy's pool is modelled.
"""

import sys
from collections.abc import Callable

import numpy as np

from daskps.device.device import Device, devices
from daskps.device.pool import ComputePool
from daskps.hbm.dedup import find_working_set
from daskps.hbm.optimizer import Optimizer, optimizer_fields
from daskps.hbm.table import HbmTable, TableSpec
from daskps.types import Batch, RowLayout

SPEC = TableSpec("main", 0, (0,), 2, "sum", Optimizer("sgd", 1.0), RowLayout(optimizer_fields("sgd", 2)))


def loaded(keys: np.ndarray, devices: list[Device], factor: float) -> tuple[HbmTable, np.ndarray]:
    """Return a table in which every row is `factor` times its key, and the table's keys in order."""
    offsets = np.arange(len(keys) + 1, dtype=np.int64)
    found = find_working_set(Batch(0, 1, np.zeros(len(keys), np.float32), keys, offsets), (0,), devices)
    rows = (factor * found.keys.astype(np.float32))[:, None].repeat(SPEC.layout.width, axis=1)
    table = HbmTable(SPEC, devices, found, rows)
    table.load()
    return table, found.keys


def copy_and_free(gpus: list[Device]) -> None:
    """Check forwarded rows although their table is freed, and its memory reused, right after the copy was started."""
    others = [*gpus[1:], gpus[0]]  # the table before has each key's row on another GPU
    before, _ = loaded(np.arange(0, 500, dtype=np.uint64), others, 2.0)
    shapes = {shard.device: shard.rows.shape for shard in before.shards.shards}
    table, keys = loaded(np.arange(300, 900, dtype=np.uint64), gpus, 1.0)
    table.copy_from(before, np.flatnonzero(keys < 500))
    del before
    used_again = [gpu.zeros(shape, np.float32) for gpu, shape in shapes.items()]
    wanted = np.where(keys < 500, 2.0, 1.0) * keys
    np.testing.assert_array_equal(table.rows_on_host()[:, 0], wanted.astype(np.float32))
    assert not any(gpu.to_host(array).any() for gpu, array in zip(shapes, used_again, strict=True))


def write_and_pool(write: str, gpus: list[Device]) -> None:
    """Check that every GPU pools the last values that any GPU wrote."""
    keys = np.arange(300, dtype=np.uint64)
    table, keys = loaded(keys, gpus, 1.0)
    positions = np.arange(300)
    row_of = np.empty(300, np.int32)  # one occurrence for each key, in the order of `keys`
    row_of[:] = positions if table._row_at is None else table._row_at
    cuts = [300 * m // len(gpus) for m in range(len(gpus) + 1)]
    part = table.part(row_of, np.arange(301), None, cuts)
    rows = np.repeat((3 * keys.astype(np.float32))[:, None], 2, axis=1)
    if write == "put":
        table.put(positions.astype(np.int32), rows)
    elif write == "put_late":
        table._host[...] = rows
        table.put_deferred(positions)
    else:
        before, _ = loaded(keys, gpus, 3.0)
        table.copy_from(before, positions)
    pooled = [table.pool(part, m) for m in range(len(gpus))]
    found = [gpu.to_host(values) for gpu, values in zip(gpus, pooled, strict=True)]
    np.testing.assert_array_equal(np.concatenate(found), rows)


CASES: dict[str, Callable[[list[Device]], None]] = {
    "copy_and_free": copy_and_free,
    "put": lambda gpus: write_and_pool("put", gpus),
    "put_late": lambda gpus: write_and_pool("put_late", gpus),
    "copy_from": lambda gpus: write_and_pool("copy_from", gpus),
}

if __name__ == "__main__":
    import fakecudf

    case, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fakecudf.install(devices=count, streams="async", seed=seed)
    with ComputePool(2) as pool:
        CASES[case](devices("cuda", count, pool=pool))
