"""Disk use keeps the bound of FORMAT.md ("Compaction") at every moment, compaction's own output counted."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskps.device.pool import ComputePool
from daskps.ssd import Options, Store
from daskps.ssd.format import MANIFEST_JSON
from daskps.storage.files import LocalFiles
from daskps.types import Field, RowLayout
from tests.ssd.disks import WatchedDisk, allocated_bytes
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, check, contents, rows_for

FILE_ROWS = 32
ROW_BYTES = 8 + LAYOUT.row_bytes
PAGE = RowLayout((Field("embedding", 1024),))  # a row is one page, so what `rows/` takes on disk is rows, exactly

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "update", "update", "delete", "commit", "commit", "roll", "drop", "compact"]),
        st.integers(0, 2**32),
        st.sampled_from([1, 3, 10, 30, 60]),  # percent of the live rows
    ),
    min_size=10,
    max_size=60,
)


class Watched:
    """A store, what it should hold, and the bound that its files must keep whenever a file was written."""

    def __init__(self, path: Path, pool: ComputePool) -> None:
        self.disk = WatchedDisk()
        self.store = Store.create(LocalFiles(path, self.disk), PAGE, pool=pool, file_rows=FILE_ROWS, options=QUIET)
        self.kept: dict[str, tuple[int, int]] = {}  # rows of a snapshot, and `changed` when it was made
        self.changed = self.next_key = 0
        self.live: set[int] = set()
        self.worst = 0.0
        self.leaving = 0  # rows that a call is deleting: they count until it returns, as a snapshot being dropped does
        self._path = path
        self.disk.look = self.look

    def look(self) -> None:
        used = allocated_bytes(self._path / "rows") - (self._path / "rows" / "zarr.json").stat().st_blocks * 512
        snapshots = sum(min(2 * count, 2.2 * (self.changed - then)) for count, then in self.kept.values())
        rows = len(self.store) + self.leaving
        self.worst = max(self.worst, used / PAGE.row_bytes / (2 * rows + snapshots + FILE_ROWS))

    def put(self, keys: np.ndarray) -> None:
        self.changed += len(keys)
        rows = np.repeat(keys.astype(np.float32)[:, None] + self.changed, PAGE.width, axis=1)
        self.store.append(keys, rows)
        self.live.update(keys.tolist())

    def insert(self, count: int) -> None:
        self.next_key += count
        self.put(np.arange(self.next_key - count, self.next_key, dtype=np.uint64))

    def some(self, seed: int, percent: int) -> np.ndarray:
        live = np.array(sorted(self.live), np.uint64)
        return np.random.default_rng(seed).permutation(live)[: -(-len(live) * percent // 100)]

    def delete(self, keys: np.ndarray) -> None:
        self.changed += len(keys)
        self.live -= set(keys.tolist())
        self.leaving = len(keys)
        self.store.delete(keys)
        self.leaving = 0

    def commit(self) -> None:
        name = f"{self.changed}-{len(self.kept)}"
        if name not in self.kept:
            self.store.commit(name, save_index=False)
            self.kept[name] = len(self.live), self.changed

    def drop(self, index: int) -> None:
        name = list(self.kept)[index]
        self.store.drop(name)
        del self.kept[name]

    def act(self, action: str, seed: int, percent: int) -> None:
        if action == "insert":
            self.insert(1 + len(self.live) * percent // 100)
        elif action == "update":
            self.put(self.some(seed, percent))
        elif action == "delete":
            self.delete(self.some(seed, percent))
        elif action == "commit":
            self.commit()
        elif action == "roll" and len(self.kept) > 1:  # as a run does that keeps its oldest snapshot for somebody
            self.drop(1)
        elif action == "drop" and self.kept:
            self.drop(seed % len(self.kept))
        elif action == "compact":
            self.store.compact()
        self.look()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_disk_use_is_bounded_at_every_moment(tmp_path_factory, pool: ComputePool, actions: list) -> None:
    watched = Watched(tmp_path_factory.mktemp("store"), pool)
    with watched.store as store:
        watched.insert(400)
        for seed in range(5):  # old rows everywhere, as many as there may be
            watched.put(watched.some(seed, 40))
        for action, seed, percent in actions:
            watched.act(action, seed, percent)
        assert len(store) == len(watched.live)
        store.verify()
    assert watched.worst <= 1


@pytest.mark.parametrize("change", ["update", "delete", "both"])
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_no_interval_of_snapshots_breaks_the_bound(tmp_path, pool: ComputePool, change: str, keep: int) -> None:
    watched = Watched(tmp_path, pool)
    with watched.store:
        watched.insert(1000)
        for seed in range(5):
            watched.put(watched.some(seed, 40))
        watched.commit()  # somebody reads this one all the time
        for seed in range(60):
            kind = change if change != "both" else ("update", "delete")[seed % 2]
            watched.act(kind, seed, 3)
            watched.commit()
            if len(watched.kept) > 1 + keep:
                watched.drop(1)
            watched.look()
        for _ in range(keep + 1):
            watched.drop(0)
            watched.look()
    assert 0.5 < watched.worst <= 1


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


def test_many_small_snapshots_leave_few_files_and_little_beside_them(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(40_000, dtype=np.uint64)
    rng = np.random.default_rng(0)
    files = LocalFiles(tmp_path, WatchedDisk())
    with Store.create(files, LAYOUT, pool=pool, file_rows=4096, options=QUIET) as store:
        store.append(keys, rows_for(keys))
        for number in range(150):
            part = rng.permutation(keys)[:40]
            store.append(part, rows_for(part))
            store.commit(str(number), save_index=True)
            if number:
                store.drop(str(number - 1))
        snapshot = store.snapshots()[-1]
        beside = sum((tmp_path / array / str(snapshot.number) / "c.0").stat().st_size for array in ("live", "index"))
        assert store.stats().files < 50  # 150 and more if every snapshot's short file stayed
        assert beside <= 14 * len(keys) + 40_000  # an index has 12 bytes a key + 40 KB
        assert store.load(keys)[1].all()


def test_the_bound_holds_across_openings(tmp_path, pool: ComputePool) -> None:
    watched = Watched(tmp_path, pool)
    watched.insert(400)
    for seed in range(30):
        watched.put(watched.some(seed, 20))
        watched.commit()
        if len(watched.kept) > 2:
            watched.drop(seed % 2)
        watched.store.close()
        watched.store = Store.open(LocalFiles(tmp_path, watched.disk), pool=pool, options=QUIET)
        watched.look()
    assert watched.store.stats().live_rows == 400
    watched.store.close()
    assert watched.worst <= 1


def test_a_store_that_an_older_daskps_left_full_of_stale_rows_becomes_compact(
    tmp_path, pool: ComputePool, monkeypatch
) -> None:
    keys = np.arange(4000, dtype=np.uint64)
    rng = np.random.default_rng(0)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=256, options=QUIET) as store:
        monkeypatch.setattr(store._rows, "victim", lambda *_, **__: None)  # it never compacted
        monkeypatch.setattr(store._rows, "compact_for_snapshot", lambda: None)
        for number in range(20):
            part = rng.permutation(keys)[:2000]
            store.append(part, rows_for(part))
            store.commit(str(number))
        for number in range(19):
            store.drop(str(number))
        assert store.stats().stale_rows > 2 * len(store)
    manifest = tmp_path / "manifest.json"
    document = MANIFEST_JSON.read(manifest.read_bytes(), str(manifest))
    for snapshot in document["snapshots"]:
        del snapshot["changed_rows"]  # nor did it count the changes
    manifest.write_bytes(MANIFEST_JSON.write(document))
    with Store.open(tmp_path, pool=pool, options=QUIET) as store:
        before = contents(store)
        store.commit("new")
        store.drop("19")
        assert store.stats().stale_rows < 0.6 * len(store)
        check(store, before)
        store.verify()
