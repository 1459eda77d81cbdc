"""Partitions belong to one model: they are copied for another one durably, and never cleared or opened by another."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.errors import CorruptionError, StoreError
from daskps.node.tables import Base, check_clearable, clear_partition, open_rows
from daskps.ssd import Options, Store, recovery, table_store
from daskps.ssd.format import MANIFEST
from daskps.storage.files import LocalFiles
from daskps.storage.partition import Placement
from daskps.types import Field, RowLayout

LAYOUT = RowLayout((Field("embedding", 3),))
KEYS = np.arange(100, dtype=np.uint64)
ROWS = np.arange(300, dtype=np.float32).reshape(100, 3)
PLACEMENT = Placement(2, "mixed")
OPTIONS = Options(background_compaction=False, io_threads=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    with ComputePool(1) as pool:
        yield pool


def open_table(path: Path, pool: ComputePool, model: str, snapshot: str | None = None, **options: Any) -> Any:
    table_store.make_table(path, PLACEMENT)  # as the beginning of an incarnation does
    known = {"placement": PLACEMENT, "owned": [0, 1], "options": OPTIONS, "live": options.pop("live", ())}
    return open_rows(str(path), LAYOUT, pool=pool, model=model, snapshot=snapshot, **known, **options)


def make_table(path: Path, pool: ComputePool, model: str, snapshot: str = "000001-00000004") -> None:
    """A table with one published snapshot."""
    with open_table(path, pool, model) as rows:
        rows.append(KEYS, ROWS)
        rows.commit(snapshot)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def forget_model(path: Path) -> None:
    """Make of partitions what daskps wrote before models had ids."""
    for folder in path.glob("partition-*"):
        files = LocalFiles(folder)
        files.replace(MANIFEST, replace(recovery.read_manifest(files), model="").text())


def test_what_is_copied_survives_a_power_cut(
    tmp_path: Path, pool: ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    make_table(tmp_path / "base", pool, "one")
    monkeypatch.setattr(os, "fsync", noting)
    base = Base(str(tmp_path / "base"), "one")
    with open_table(tmp_path / "table", pool, "two", "000001-00000004", base=base) as rows:
        np.testing.assert_array_equal(rows.load(KEYS)[0], ROWS)
        for folder in sorted((tmp_path / "table").glob("partition-*")):
            assert recovery.read_manifest(LocalFiles(folder)).model == "two"
            chunk = folder / "rows" / "c.0.0"
            assert chunk.samefile(tmp_path / "base" / folder.name / "rows" / "c.0.0")  # a link: it was synced before
            files = [file for file in folder.rglob("*.json") if file.name != MANIFEST]
            assert {str(path) for path in [folder, *(file.parent for file in files), *files]} <= synced
            assert str(folder / "manifest.json.new") in synced


def test_a_copy_has_nothing_of_other_snapshots(tmp_path: Path, pool: ComputePool) -> None:
    make_table(tmp_path / "base", pool, "one")
    with open_table(tmp_path / "base", pool, "one", "000001-00000004", live=["000001-00000004"]) as rows:
        rows.append(KEYS, ROWS + 1)
        rows.commit("000001-00000009")
        rows.append(KEYS, ROWS + 2)  # written, and of no snapshot
        base = Base(str(tmp_path / "base"), "one")
        with open_table(tmp_path / "table", pool, "two", "000001-00000004", base=base) as copy:
            np.testing.assert_array_equal(copy.load(KEYS)[0], ROWS)
            assert copy.stats().recovered_files == 0


def test_partitions_of_another_model_are_never_cleared(tmp_path: Path, pool: ComputePool) -> None:
    make_table(tmp_path / "t", pool, "one")
    before = contents(tmp_path / "t")
    with pytest.raises(StoreError, match=r"partition-00000 belongs to model one and has the snapshots 000001-00000004"):
        open_table(tmp_path / "t", pool, "two")
    assert contents(tmp_path / "t") == before
    make_table(tmp_path / "base", pool, "three")
    with pytest.raises(StoreError, match="nothing was removed"):
        open_table(tmp_path / "t", pool, "two", "000001-00000004", base=Base(str(tmp_path / "base"), "three"))
    assert contents(tmp_path / "t") == before


def test_partitions_of_this_model_that_were_never_published_are_cleared(tmp_path: Path, pool: ComputePool) -> None:
    with open_table(tmp_path / "t", pool, "one") as rows:
        rows.append(KEYS, ROWS)
        rows.prepare("000001-00000004")
    with open_table(tmp_path / "t", pool, "one") as rows:
        assert len(rows) == 0


@pytest.mark.parametrize("published", [True, False])
def test_partitions_from_before_ids_are_cleared_only_if_nothing_was_published(
    tmp_path: Path, pool: ComputePool, published: bool
) -> None:
    with open_table(tmp_path / "t", pool, "one") as rows:
        rows.append(KEYS, ROWS)
        (rows.commit if published else rows.prepare)("000001-00000004")
    forget_model(tmp_path / "t")
    if published:
        with pytest.raises(StoreError, match="made before models had ids"):
            open_table(tmp_path / "t", pool, "two")
    else:
        open_table(tmp_path / "t", pool, "two").close()


def test_a_folder_without_a_manifest_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "p" / "rows").mkdir(parents=True)
    (tmp_path / "p" / "rows" / "c.0.0").write_text("left by a crash")
    check_clearable(str(tmp_path / "p"), "one")
    clear_partition(str(tmp_path / "p"), "one", lambda: None)
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["lock"]


def test_a_partition_of_another_model_is_not_opened(tmp_path: Path, pool: ComputePool) -> None:
    make_table(tmp_path / "t", pool, "one")
    with pytest.raises(CorruptionError, match=r"partition-0000\d is a partition of model one, .* of model two"):
        open_table(tmp_path / "t", pool, "two", "000001-00000004")
    with pytest.raises(CorruptionError, match="is a partition of model one"):
        Store.open(tmp_path / "t" / "partition-00000", pool=pool, model="two", read_only=True)
    base = Base(str(tmp_path / "t"), "two")
    with pytest.raises(CorruptionError, match="is a partition of model one"):
        open_table(tmp_path / "new", pool, "three", "000001-00000004", base=base)


def test_a_partition_from_before_ids_gets_one_from_its_writer(tmp_path: Path, pool: ComputePool) -> None:
    make_table(tmp_path / "t", pool, "")
    path = tmp_path / "t" / "partition-00000"
    Store.open(path, pool=pool, model="one", read_only=True).close()
    assert recovery.read_manifest(LocalFiles(path)).model == ""
    with open_table(tmp_path / "t", pool, "one", "000001-00000004", live=["000001-00000004"]) as rows:
        assert recovery.read_manifest(LocalFiles(path)).model == "one"
        assert rows.verify() > 0
        np.testing.assert_array_equal(rows.load(KEYS)[0], ROWS)
