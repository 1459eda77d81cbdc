"""Disk use stays under twice the live rows plus kept snapshots, compaction's own output counted, at every moment."""

import threading
import time

import numpy as np
from disks import WatchedDisk, allocated_bytes
from helpers import LAYOUT, QUIET, as_dict, check, contents, rows_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskps.backend.pool import ComputePool
from daskps.ssd import Options, Store
from daskps.ssd.files import LocalFiles
from daskps.ssd.format import chunk_names

FILE_ROWS = 2048
ROW_BYTES = 8 + LAYOUT.row_bytes
PAGES = 3 * 4096  # a file's three chunks each end in a page that is not full

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "delete", "commit", "drop", "compact"]),
        st.integers(0, 2**32),
        st.integers(1, 6000),
    ),
    min_size=5,
    max_size=30,
)


def kept_bytes(store: Store, path) -> int:
    """What the files of kept snapshots take."""
    kept = {name for s in store.snapshots() for entry in s.files for name in chunk_names(entry.number)}
    return sum((path / name).stat().st_blocks * 512 for name in kept) + sum(
        allocated_bytes(path / array / str(s.number)) for s in store.snapshots() for array in ("live", "index")
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_disk_use_is_bounded_at_every_moment(tmp_path_factory, pool: ComputePool, actions: list) -> None:
    path = tmp_path_factory.mktemp("store")
    disk = WatchedDisk()
    worst: list[float] = []
    with Store.create(LocalFiles(path, disk), LAYOUT, pool=pool, file_rows=FILE_ROWS, options=QUIET) as store:
        empty = allocated_bytes(path)

        def files() -> int:
            return len(list((path / "rows").glob("c.*")))

        def look() -> None:
            before = files()
            used = allocated_bytes(path / "keys") + allocated_bytes(path / "rows") + allocated_bytes(path / "checksums")
            pages = max(before, files()) * PAGES  # threads write files and remove them while this one looks
            bound = 2 * len(store) * ROW_BYTES + kept_bytes(store, path) + pages + empty
            worst.append(used / bound)

        model: dict[int, bytes] = {}
        for number, (action, seed, count) in enumerate(actions):
            keys = np.random.default_rng(seed).integers(0, 8000, count).astype(np.uint64)
            disk.look = look if action in {"append", "delete", "compact"} else lambda: None
            if action == "append":
                rows = rows_for(keys)
                store.append(keys, rows)
                model |= as_dict(keys, rows)
            elif action == "delete":
                store.delete(keys)
                model = {key: row for key, row in model.items() if key not in set(keys.tolist())}
            elif action == "commit":
                store.commit(str(number), save_index=False)
            elif action == "drop" and store.snapshots():
                store.drop(store.snapshots()[seed % len(store.snapshots())].id)
            elif action == "compact":
                store.compact()
            look()
        check(store, model)
    assert max(worst, default=0) <= 1


def test_steady_updates_reach_the_bound_but_never_pass_it(tmp_path, pool: ComputePool) -> None:
    disk, worst = WatchedDisk(), [0.0]
    rng = np.random.default_rng(0)
    keys = np.arange(80_000, dtype=np.uint64)
    with Store.create(LocalFiles(tmp_path, disk), LAYOUT, pool=pool, file_rows=4096, options=QUIET) as store:
        store.append(keys, rows_for(keys))

        def look() -> None:
            used = sum(allocated_bytes(tmp_path / array) for array in ("keys", "rows"))
            worst.append(used / (2 * len(keys) * ROW_BYTES))

        disk.look = look
        for _ in range(20):
            part = rng.permutation(keys)[:24_000]
            store.append(part, rows_for(part))
        assert len(store) == len(keys)
    assert 0.8 < max(worst) <= 1


def test_compaction_leaves_kept_snapshots_alone(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(5000, dtype=np.uint64)
    first = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=512, options=QUIET) as store:
        store.append(keys, first)
        store.prepare("kept")
        for _ in range(5):
            rows = rows_for(keys)
            store.append(keys, rows)
        store.compact(0.0)
        assert contents(store, "kept") == as_dict(keys, first)
        check(store, as_dict(keys, rows))
        store.verify()
        before = store.disk_bytes
        store.discard("kept")
        assert store.disk_bytes < before - 5000 * ROW_BYTES / 2
        check(store, as_dict(keys, rows))


def test_appends_wait_for_compaction_and_are_counted(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(4000, dtype=np.uint64)
    rng = np.random.default_rng(0)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=256, options=QUIET) as store:
        rows = rows_for(keys)
        store.append(keys, rows)
        for _ in range(30):
            part = rng.permutation(keys)[:1000]
            store.append(part, rows_for(part))
        stats = store.stats()
        assert stats.append_waits > 0
        assert stats.compactions > 0
        assert stats.write_amplification > 1
        assert stats.live_rows == 4000
        assert stats.stale_rows <= 4000


def test_the_background_thread_compacts_while_rows_are_loaded(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(4000, dtype=np.uint64)
    rng = np.random.default_rng(0)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=256, options=Options(compact_above=1.1)) as store:
        first = rows_for(keys)
        store.append(keys, first)
        sevenths, expected = keys[::7].copy(), first[::7].tobytes()
        seen: list[bool] = []
        stop = threading.Event()

        def reader() -> None:
            while not stop.is_set():
                rows, found = store.load(sevenths)
                seen.append(bool(found.all()) and rows.tobytes() == expected)

        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        others = keys[keys % 7 != 0]
        model = as_dict(keys, first)
        try:
            for _ in range(40):
                part = rng.permutation(others)[:700]
                rows = rows_for(part)
                store.append(part, rows)
                model |= as_dict(part, rows)
            for _ in range(200):  # the thread takes its time: it is throttled
                if store.stats().compactions:
                    break
                time.sleep(0.02)
        finally:
            stop.set()
            thread.join()
        assert store.stats().compactions > 0
        assert len(seen) > 3
        assert all(seen)
        check(store, model)
