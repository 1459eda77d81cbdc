"""A store is a dict of rows: whatever is done to it, in whatever order, it answers as one."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, SnapshotError, StoreError
from daskps.ssd import Store
from daskps.ssd.segments import SegmentFiles
from daskps.storage.model_directory import apply_live
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, check, contents, read_plainly, rows_for

EXTREMES = np.array([0, 1, 2**32, 2**63, 2**64 - 1], np.uint64)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 64, 65, 1000])
def test_appended_rows_are_loaded_bit_for_bit(tmp_path, pool: ComputePool, n: int) -> None:
    keys = np.unique(np.concatenate([EXTREMES, np.random.default_rng(n).integers(0, 2**64, n, np.uint64)]))
    rows = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=64, options=QUIET) as store:
        store.append(keys, rows)
        check(store, as_dict(keys, rows), others=np.arange(3, 50, dtype=np.uint64))
        store.commit("a")
        check(store, as_dict(keys, rows), others=np.arange(3, 50, dtype=np.uint64))


def test_nan_rows_are_kept(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(3, dtype=np.uint64)
    rows = np.array([[0x7FC00000], [0x7F800001], [0xFFFFFFFF]], np.uint32).repeat(5, axis=1).view(np.float32)
    with Store.create(tmp_path, LAYOUT, pool=pool) as store:
        store.append(keys, rows)
        store.commit("a")
    with Store.open(tmp_path, pool=pool) as store:
        assert store.load(keys)[0].tobytes() == rows.tobytes()


def test_the_last_of_equal_keys_wins(tmp_path, pool: ComputePool) -> None:
    keys = np.array([5, 6, 5, 5], np.uint64)
    rows = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool) as store:
        store.append(keys, rows)
        check(store, as_dict(keys, rows))


def test_a_load_may_ask_for_a_key_twice_and_keeps_what_out_had(tmp_path, pool: ComputePool) -> None:
    keys = np.array([5, 6], np.uint64)
    rows = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool) as store:
        store.append(keys, rows)
        out = np.full((4, LAYOUT.width), 7, np.float32)
        loaded, found = store.load(np.array([6, 99, 5, 6], np.uint64), out)
        assert loaded is out
        assert found.tolist() == [True, False, True, True]
        assert loaded[[0, 2, 3]].tobytes() == rows[[1, 0, 1]].tobytes()
        assert (loaded[1] == 7).all()


def test_frequent_snapshots_save_the_index_only_after_as_many_rows_as_it_has_keys(tmp_path, pool: ComputePool) -> None:
    keys, first, second = np.arange(1000, dtype=np.uint64), 1, 2
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=64, options=QUIET) as store:
        store.append(keys, rows_for(keys, first))
        saved = [store.commit("0").index_bytes is not None]
        for number in range(1, 5):
            store.append(keys[:500], rows_for(keys[:500], second))
            saved.append(store.commit(str(number)).index_bytes is not None)
    assert saved == [True, False, True, False, True]
    wanted = as_dict(keys, rows_for(keys, first)) | as_dict(keys[:500], rows_for(keys[:500], second))
    with Store.open(tmp_path, snapshot="3", pool=pool, read_only=True) as store:  # its index is rebuilt
        check(store, wanted)


KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=60).map(lambda keys: np.array(keys, np.uint64))
ACTIONS = st.one_of(
    st.tuples(st.just("append"), KEYS),
    st.tuples(st.just("append"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("commit"), st.booleans()),
    st.tuples(st.just("prepare"), st.booleans()),
    st.tuples(st.sampled_from(["confirm", "discard", "drop", "compact", "compact all"]), st.integers(0, 10)),
    st.tuples(st.just("reopen"), st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, max_size=25))
def test_any_run_of_actions_answers_as_a_dict_does(tmp_path_factory, pool: ComputePool, actions: list) -> None:
    path = tmp_path_factory.mktemp("store")
    store = Store.create(path, LAYOUT, pool=pool, file_rows=16, block_bytes=64, options=QUIET)
    model: dict[int, bytes] = {}
    kept: dict[str, tuple[str, dict[int, bytes]]] = {}
    for number, (action, value) in enumerate(actions):
        named = sorted(kept)[value % len(kept)] if kept and not isinstance(value, np.ndarray) else None
        if action == "append":
            rows = rows_for(value)
            store.append(value, rows)
            model |= as_dict(value, rows)
        elif action == "delete":
            found = store.delete(value)
            seen: set[int] = set()
            for key, was in zip(value.tolist(), found.tolist(), strict=True):
                assert was == (key in model and key not in seen)
                seen.add(key)
            model = {key: row for key, row in model.items() if key not in seen}
        elif action in {"commit", "prepare"}:
            getattr(store, action)(f"s{number}", save_index=value)
            kept[f"s{number}"] = ("confirmed" if action == "commit" else "prepared", dict(model))
        elif action == "confirm" and named:
            store.confirm(named)
            kept[named] = ("confirmed", kept[named][1])
        elif action in {"discard", "drop"} and named:
            if kept[named][0] == ("prepared" if action == "discard" else "confirmed"):
                getattr(store, action)(named)
                del kept[named]
            else:
                with pytest.raises(SnapshotError):
                    getattr(store, action)(named)
        elif action.startswith("compact"):
            store.compact(0.0 if action == "compact all" else 0.5)
        elif action == "reopen":
            store.close()
            store = Store.open(path, pool=pool, options=QUIET, rebuild_index=value)
            confirmed = [name for name, (state, _) in kept.items() if state == "confirmed"]
            model = dict(kept[max(confirmed, key=lambda name: int(name[1:]))][1]) if confirmed else {}
        check(store, model, others=np.arange(45, dtype=np.uint64))
    store.verify()
    assert {s.id: s.state for s in store.snapshots()} == {name: state for name, (state, _) in kept.items()}
    for name, (_, rows) in kept.items():
        assert contents(store, name) == rows
        assert as_dict(*read_plainly(path, name)) == rows
    store.close()
    for name, (_, rows) in kept.items():
        with Store.open(path, pool=pool, snapshot=name, read_only=True) as older:
            check(older, rows)


def test_a_prepared_snapshot_waits_for_the_decision(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(100, dtype=np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=QUIET) as store:
        first, second = rows_for(keys), rows_for(keys)
        store.append(keys, first)
        store.commit("a")
        store.append(keys, second)
        store.prepare("b")
        store.append(keys, rows_for(keys))
    with Store.open(tmp_path, pool=pool, options=QUIET) as store:  # as after a crash before the global manifest
        check(store, as_dict(keys, first))
    with Store.open(tmp_path, pool=pool, snapshot="b", options=QUIET) as store:  # as after a crash behind it
        store.prepare("c")
        apply_live(store, ["a", "b"], discard_unpublished=True)
        assert [(s.id, s.state) for s in store.snapshots()] == [("a", "confirmed"), ("b", "confirmed")]
        check(store, as_dict(keys, second))
    with Store.open(tmp_path, pool=pool, options=QUIET) as store:
        check(store, as_dict(keys, second))


def test_an_older_snapshot_can_be_gone_on_from_without_harm_to_newer_ones(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(100, dtype=np.uint64)
    states = {}
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=16, options=QUIET) as store:
        for name in "ab":
            rows = rows_for(keys)
            store.append(keys, rows)
            store.commit(name)
            states[name] = as_dict(keys, rows)
    with Store.open(tmp_path, pool=pool, snapshot="a", options=QUIET) as store:
        rows = rows_for(keys[:50])
        store.append(keys[:50], rows)
        store.commit("c")
        states["c"] = states["a"] | as_dict(keys[:50], rows)
        for name, state in states.items():
            assert contents(store, name) == state
        store.verify()


def test_a_scan_that_began_before_its_files_left_current_and_snapshots_reads_them_to_the_end(
    tmp_path, pool: ComputePool
) -> None:
    keys = np.arange(160, dtype=np.uint64)
    before = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=16, options=QUIET) as store:
        store.append(keys, before)
        store.commit("a")
        scan = store.scan()
        found = as_dict(*next(scan))
        store.append(keys, rows_for(keys))  # the files leave the current state, and only "a" has them
        store.commit("b")
        store.drop("a")
        for part in scan:
            found |= as_dict(*part)
        assert found == as_dict(keys, before)
        store.commit("c")  # which sweeps
        assert sum(path.is_file() for path in (tmp_path / "keys").rglob("c*")) == 10


def test_a_load_that_fails_returns_only_when_nobody_writes_to_its_buffer(
    tmp_path, pool: ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, run, ended = np.arange(64, dtype=np.uint64), SegmentFiles._run, []

    def slow(self: SegmentFiles, requests: Any, task: Any, out: np.ndarray) -> int:
        if task.segment.number == 0:
            raise StoreError("broken")
        time.sleep(0.1)
        read = run(self, requests, task, out)
        ended.append(task.segment.number)
        return read

    monkeypatch.setattr(SegmentFiles, "_run", slow)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=16, options=QUIET) as store:
        store.append(keys, rows_for(keys))
        store.commit("a")
        with pytest.raises(StoreError, match="broken"):
            store.load(keys)
        assert sorted(ended) == [1, 2, 3]


def test_wrong_arguments_are_named(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(4, dtype=np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool) as store:
        with pytest.raises(ArgumentError, match=r"this store's rows have 5 values\), got \(4, 6\)"):
            store.append(keys, np.zeros((4, 6), np.float32))
        with pytest.raises(ArgumentError, match=r"uint64, got .* of int64"):
            store.load(np.arange(4))
        with pytest.raises(SnapshotError, match="no snapshot 'x' here; there are: none"):
            store.confirm("x")
        store.commit("a")
        with pytest.raises(SnapshotError, match="already"):
            store.commit("a")
        with pytest.raises(ArgumentError, match="1 to 200 characters"):
            store.commit("")
    with pytest.raises(StoreError, match="closed"):
        store.append(keys, np.zeros((4, 5), np.float32))
    with pytest.raises(StoreError, match="there is a store already"):
        Store.create(tmp_path, LAYOUT, pool=pool)
    with pytest.raises(StoreError, match=r"no manifest\.json there"):
        Store.open(tmp_path / "keys", pool=pool, read_only=True)
    with Store.open(tmp_path, pool=pool, read_only=True) as store, pytest.raises(StoreError, match="reading only"):
        store.append(keys, np.zeros((4, 5), np.float32))


def test_figures_add_up(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(1000, dtype=np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool, file_rows=128, options=QUIET) as store:
        store.append(keys, rows_for(keys))
        store.append(keys[:100], rows_for(keys[:100]))
        store.commit("a")
        store.load(keys)
        stats = store.stats()
        on_disk = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file())
        assert (stats.appended_rows, stats.live_rows, stats.loaded_rows) == (1100, 1000, 1000)
        assert stats.loaded_bytes == 20_000
        assert stats.read_bytes >= 20_000
        assert stats.write_amplification > 1
        assert stats.disk_bytes <= on_disk
        assert stats.memory_bytes == store.memory_bytes > 0
