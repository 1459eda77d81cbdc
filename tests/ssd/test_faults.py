"""Whatever breaks, the last committed snapshot opens bit for bit, and what is broken is named."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.errors import CapacityError, CorruptionError, LockedError, StoreError
from daskps.ssd import Options, Store
from daskps.storage.files import LocalFiles
from daskps.storage.sealed import canonical
from daskps.types import Field, RowLayout
from tests.ssd.disks import ForgetfulDisk, FullDisk
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, check, contents, rows_for

SMALL = {"file_rows": 32, "block_bytes": 64}


def test_what_was_not_synced_may_be_lost_but_no_commit(tmp_path, pool: ComputePool) -> None:
    chance = random.Random(1)
    committed: list[str] = []  # ids whose commit has returned
    states: dict[str, dict[int, bytes]] = {}
    cuts: list[tuple[Path, int]] = []

    def maybe_cut(disk: ForgetfulDisk) -> None:
        if committed and chance.random() < 0.02:
            target = tmp_path / f"cut-{len(cuts)}"
            cuts.append((target, len(committed)))
            disk.power_cut(target, chance)

    disk = ForgetfulDisk(tmp_path / "store", maybe_cut)
    rng = np.random.default_rng(1)
    with Store.create(LocalFiles(tmp_path / "store", disk), LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
        model: dict[int, bytes] = {}
        for step in range(8):
            for _ in range(3):
                keys = rng.integers(0, 150, 60).astype(np.uint64)
                rows = rows_for(keys)
                store.append(keys, rows)
                model |= as_dict(keys, rows)
            states[f"s{step}"] = dict(model)
            store.commit(f"s{step}", save_index=step % 2 == 0)
            committed.append(f"s{step}")
            cuts.append((tmp_path / f"cut-{len(cuts)}", len(committed)))
            disk.power_cut(cuts[-1][0], chance)
            if step >= 2:
                store.drop(f"s{step - 2}")
    assert len(cuts) > 10
    for target, count in cuts:
        with Store.open(target, pool=pool, options=QUIET) as store:
            newest = store.snapshots()[-1].id
            assert newest in list(states)[count - 1 : count + 1]  # the last commit, or the one under way
            check(store, states[newest])
            store.verify()


def test_a_full_disk_is_an_error_with_figures_and_loses_nothing(tmp_path, pool: ComputePool) -> None:
    keys = [np.random.default_rng(step).permutation(120)[:100].astype(np.uint64) for step in range(4)]
    rows = [rows_for(part) for part in keys]

    def run(path: Path, disk: FullDisk, full_after: int | None) -> int:
        """The whole story, each step tried again after an error; returns how many errors there were."""
        errors = 0
        model: dict[int, bytes] = {}
        with Store.create(LocalFiles(path, disk), LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
            if full_after is not None:
                disk.full_from = disk.operations + full_after
            for step in range(4):
                before, after = model, model | as_dict(keys[step], rows[step])
                calls = [
                    lambda step=step: store.append(keys[step], rows[step]),
                    lambda step=step: store.commit(f"s{step}", save_index=step == 1),
                    lambda step=step: store.drop(f"s{step - 1}") if step else None,
                    store.compact,
                ]
                for call in calls:
                    try:
                        call()
                    except CapacityError as error:
                        errors += 1
                        words.add(str(error).split(": ", 1)[1].split(":")[0])
                        found = contents(store)
                        assert all(row in (before.get(key), after[key]) for key, row in found.items())
                        assert before.keys() <= found.keys()
                        disk.full_from = None
                        call()
                model = after
                check(store, model)
            store.verify()
        with Store.open(path, pool=pool, options=QUIET) as store:
            check(store, model)
        return errors

    words: set[str] = set()
    disk = FullDisk()
    assert run(tmp_path / "good", disk, None) == 0
    points = random.Random(5).sample(range(disk.operations), 12)
    met = sum(run(tmp_path / f"full-{n}", FullDisk(), n) for n in points)
    assert met > 5
    assert words == {"the disk is full"}


def test_after_space_was_freed_no_failure_from_before_is_met(tmp_path, pool: ComputePool) -> None:
    class SlowToSayNo(FullDisk):
        """Tells each writer a little later than the one before that there is no room."""

        def __init__(self) -> None:
            super().__init__()
            self.refused = 0

        def _need_room(self) -> None:
            try:
                super()._need_room()
            except OSError:
                with self._lock:
                    self.refused += 1
                    seconds = 0.1 * self.refused
                time.sleep(seconds)
                raise

    disk = SlowToSayNo()
    keys = np.arange(100, dtype=np.uint64)
    rows = rows_for(keys)
    with Store.create(LocalFiles(tmp_path, disk), LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
        disk.full_from = disk.operations
        with pytest.raises(CapacityError, match="the disk is full"):
            store.append(keys, rows)
        disk.full_from = None
        store.append(keys, rows)
        store.commit("a")
        assert disk.refused > 1
        check(store, as_dict(keys, rows))


def test_the_disk_budget_is_kept_with_figures_and_a_remedy(tmp_path, pool: ComputePool) -> None:
    options = Options(disk_bytes=60_000, background_compaction=False)
    keys = np.arange(1000, dtype=np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=options, **SMALL) as store:
        rows = rows_for(keys)
        store.append(keys, rows)
        store.commit("a", save_index=False)
        again = np.concatenate([keys, keys])
        with pytest.raises(CapacityError, match=r"(?s)budget is 60,000, .*live rows .*kept snapshots .*raise"):
            store.append(again, rows_for(again))
        assert store.disk_bytes < 60_000 + store.shape.data_bytes(32) * 4
        assert contents(store, "a") == as_dict(keys, rows)
        store.drop("a")
        rows = rows_for(keys)
        store.append(keys, rows)
        check(store, as_dict(keys, rows))


@pytest.mark.parametrize("disk_bytes", [None, 200_000, 60_000])
def test_an_index_is_saved_only_where_the_disk_budget_has_room_for_it(
    tmp_path, pool: ComputePool, disk_bytes: int | None
) -> None:
    keys = np.arange(1000, dtype=np.uint64)
    options = Options(disk_bytes=disk_bytes, background_compaction=False)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=options, **SMALL) as store:
        rows = rows_for(keys)
        for _ in range(5):  # more bytes than the index has: from then on it is worth saving
            store.append(keys, rows)
        snapshot = store.commit("a")
        assert (snapshot.index_bytes is None) == (disk_bytes == 60_000)
        assert store.disk_bytes <= (disk_bytes or store.disk_bytes)
    with Store.open(tmp_path, pool=pool) as store:
        check(store, as_dict(keys, rows))


def test_a_store_cannot_be_made_on_a_full_disk_but_later(tmp_path, pool: ComputePool) -> None:
    for full_from in (0, 3, 9):
        disk = FullDisk(full_from)
        with pytest.raises(CapacityError, match="the disk is full"):
            Store.create(LocalFiles(tmp_path, disk), LAYOUT, pool=pool)
        disk.full_from = None
    Store.create(tmp_path, LAYOUT, pool=pool).close()


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def open_and_check(path: Path, pool: ComputePool) -> None:
    with Store.open(path, pool=pool, read_only=True, options=QUIET) as store:
        contents(store)
        store.verify()


def test_one_flipped_byte_anywhere_is_found_and_named(tmp_path, pool: ComputePool) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 100, np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
        store.append(keys, rows_for(keys))
        store.commit("a", save_index=True)
        store.append(keys[:50], rows_for(keys[:50]))
        store.commit("b", save_index=False)
    chance = random.Random(3)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.name != "lock"]
    assert len(files) > 20
    for path in files:
        size = path.stat().st_size
        for position in {0, size - 1, *(chance.randrange(size) for _ in range(6))}:
            flip(path, position)
            with pytest.raises(StoreError, match=str(path.relative_to(tmp_path))):
                open_and_check(tmp_path, pool)
            flip(path, position)
    with Store.open(tmp_path, pool=pool, options=QUIET) as store:
        store.verify()


@pytest.mark.parametrize("array", ["rows", "checksums"])
def test_a_load_never_returns_a_damaged_row(tmp_path, pool: ComputePool, array: str) -> None:
    keys = np.arange(100, dtype=np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
        store.append(keys, rows_for(keys))
        store.commit("a", save_index=True)
    flip(next((tmp_path / array).glob("c.1*")), 40)
    with (
        Store.open(tmp_path, pool=pool, options=QUIET) as store,
        pytest.raises(CorruptionError, match=rf"{array}/c\.1.*\(array {array}\)"),
    ):
        store.load(keys)


@pytest.mark.parametrize("narrow_places", [2**24 - 2, 1000])
def test_a_damaged_index_can_be_rebuilt(tmp_path, pool: ComputePool, narrow_places: int, monkeypatch) -> None:
    monkeypatch.setattr("daskps.ssd.index.NARROW_PLACES", narrow_places)  # both kinds of cells in a small store
    keys = np.arange(5000, dtype=np.uint64)
    rows = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=QUIET) as store:
        store.append(keys, rows)
        store.commit("a", save_index=True)
    with Store.open(tmp_path, pool=pool) as store:
        check(store, as_dict(keys, rows))
    image = tmp_path / "index" / "1" / "c.0"
    for position, what in ((0, "head"), (5000, "head"), (11_000, "head"), (image.stat().st_size - 1, "group 255")):
        flip(image, position)
        with pytest.raises(CorruptionError, match=f"index/1/c.0 .*{what} is damaged.*rebuild_index=True"):
            Store.open(tmp_path, pool=pool)
        with Store.open(tmp_path, pool=pool, rebuild_index=True) as store:
            check(store, as_dict(keys, rows))
        flip(image, position)


def test_a_missing_file_is_named_and_never_read_as_zeros(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(100, dtype=np.uint64)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
        store.append(keys, rows_for(keys))
        store.commit("a")
    for name in ("rows/c.1.0", "keys/c.1", "checksums/c.1", "live/1/c.0", "rows/zarr.json"):
        text = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(CorruptionError, match=rf"{name}.*missing"):
            open_and_check(tmp_path, pool)
        (tmp_path / name).write_bytes(text)


def test_a_newer_format_a_cut_manifest_and_another_width_are_refused_in_words(tmp_path, pool: ComputePool) -> None:
    Store.create(tmp_path, LAYOUT, pool=pool).close()
    manifest = tmp_path / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(canonical({**json.loads(text), "version": 2}))
    with pytest.raises(StoreError, match=r"is of version 2, this daskps reads up to 1; install a newer daskps"):
        Store.open(tmp_path, pool=pool)
    manifest.write_bytes(text[:40])
    with pytest.raises(CorruptionError, match=r"manifest.json is damaged or cut short \(40 bytes .*; restore it"):
        Store.open(tmp_path, pool=pool)
    manifest.write_bytes(text)
    other = tmp_path / "other"
    Store.create(other, RowLayout((Field("embedding", 9),)), pool=pool).close()
    (tmp_path / "rows" / "zarr.json").write_bytes((other / "rows" / "zarr.json").read_bytes())
    with pytest.raises(
        CorruptionError, match=r"rows/zarr.json: array rows is not the one of the manifest \(.* 5 values"
    ):
        Store.open(tmp_path, pool=pool)


def test_a_second_writer_is_refused_with_the_holder_and_a_dead_one_is_no_obstacle(tmp_path, pool: ComputePool) -> None:
    with (
        Store.create(tmp_path, LAYOUT, pool=pool),
        pytest.raises(LockedError, match=rf"process {os.getpid()} is writing .* read_only=True"),
    ):
        Store.open(tmp_path, pool=pool)
    script = (
        "import sys, os; from daskps.device.pool import ComputePool; from daskps.ssd import Store;"
        "store = Store.open(sys.argv[1], pool=ComputePool(1)); print('open', flush=True); sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(LockedError, match=rf"process {writer.pid} is writing"):
            Store.open(tmp_path, pool=pool)
        Store.open(tmp_path, pool=pool, read_only=True).close()
        writer.kill()
        writer.wait()
    Store.open(tmp_path, pool=pool).close()


def test_only_our_own_orphans_are_removed(tmp_path, pool: ComputePool) -> None:
    keys = np.arange(100, dtype=np.uint64)
    rows = rows_for(keys)
    with Store.create(tmp_path, LAYOUT, pool=pool, options=QUIET, **SMALL) as store:
        store.append(keys, rows)
        store.commit("a")
        store.append(keys, rows_for(keys))
    (tmp_path / "rows" / "notes.txt").write_text("mine")
    (tmp_path / "manifest.json.new").write_text("half")
    with Store.open(tmp_path, pool=pool, options=QUIET) as store:
        stats = store.stats()
        assert stats.recovered_files == 10  # three parameter files of three chunks, and half a manifest
        assert stats.recovered_bytes > 0
        check(store, as_dict(keys, rows))
    assert (tmp_path / "rows" / "notes.txt").read_text() == "mine"
