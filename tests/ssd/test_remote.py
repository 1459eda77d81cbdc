"""Any path that Zarr opens works: fsspec's memory, an S3 server, obstore. Local disk is only the fast case."""

import uuid
from typing import Any

import numpy as np
import pytest
from zarr.storage import MemoryStore, ObjectStore

from daskps.device.pool import ComputePool
from daskps.errors import CorruptionError, StoreError
from daskps.ssd import Store, TableStore
from daskps.storage.files import ObjectFiles
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, check, contents, rows_for

KEYS = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64)


def use(path, pool: ComputePool) -> None:
    """All of a store's life at `path`."""
    first, second = rows_for(KEYS), rows_for(KEYS[:200])
    with Store.create(path, LAYOUT, pool=pool, file_rows=128, options=QUIET) as store:
        store.append(KEYS, first)
        store.commit("a", save_index=True)
        store.append(KEYS[:200], second)
        store.delete(KEYS[300:])
        store.prepare("b", save_index=False)
        store.append(KEYS, rows_for(KEYS))
    both = as_dict(KEYS[:200], second) | as_dict(KEYS[200:300], first[200:300])
    with Store.open(path, pool=pool, snapshot="b", options=QUIET) as store:
        assert store.stats().recovered_files > 0
        check(store, both, others=np.arange(20, dtype=np.uint64))
        assert contents(store, "a") == as_dict(KEYS, first)
        store.confirm("b")
        store.drop("a")
        store.verify()
    with Store.open(path, pool=pool, read_only=True) as store:
        check(store, both)


def test_a_store_in_fsspec_memory(pool: ComputePool) -> None:
    use(f"memory://{uuid.uuid4()}", pool)


def test_a_store_on_s3(pool: ComputePool, s3: Any) -> None:
    s3.mkdir("rows")
    use(f"s3://rows/{uuid.uuid4()}", pool)


def test_a_store_through_obstore(pool: ComputePool) -> None:
    obstore = pytest.importorskip("obstore.store", reason="obstore is not installed")
    shared = obstore.MemoryStore()
    use(ObjectFiles(ObjectStore(shared), "obstore memory"), pool)


def test_a_zarr_store_object(pool: ComputePool) -> None:
    use(ObjectFiles(MemoryStore(), "zarr memory"), pool)


def test_partitions_in_fsspec_memory(pool: ComputePool) -> None:
    path = f"memory://{uuid.uuid4()}"
    rows = rows_for(KEYS)
    with TableStore.create(path, LAYOUT, pool=pool, partitions=3, options=QUIET) as table:
        table.append(KEYS, rows)
        table.commit("a")
    with TableStore.open(path, pool=pool, options=QUIET) as table:
        check(table, as_dict(KEYS, rows))


def test_a_damaged_or_missing_object_is_named(pool: ComputePool) -> None:
    path = f"memory://{uuid.uuid4()}"
    with Store.create(path, LAYOUT, pool=pool, file_rows=128, options=QUIET) as store:
        store.append(KEYS, rows_for(KEYS))
        store.commit("a", save_index=True)
    files = ObjectFiles.from_url(path)
    good = files.read("rows/c.1.0")
    files.write("rows/c.1.0", [good[:50] + b"!" + good[51:]], len(good))
    with Store.open(path, pool=pool) as store, pytest.raises(CorruptionError, match=r"rows/c\.1\.0 \(array rows\)"):
        store.load(KEYS)
    files.remove("rows/c.1.0")
    with Store.open(path, pool=pool) as store, pytest.raises(CorruptionError, match=r"rows/c\.1\.0.*missing"):
        store.load(KEYS)
    with pytest.raises(StoreError, match=r"no manifest\.json there"):
        Store.open(f"memory://{uuid.uuid4()}", pool=pool)
