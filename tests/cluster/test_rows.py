"""A partition that is taken over from another model is as durable as one that was written here."""

import os
from pathlib import Path

import pytest

from daskps.cluster.rows import copy_partition


def test_what_is_copied_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()

    def fsync(descriptor: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))

    source, target = tmp_path / "base" / "partition-00000", tmp_path / "table" / "partition-00000"
    for name in ("manifest.json", "rows/zarr.json", "rows/c.0.0", "lock"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    monkeypatch.setattr(os, "fsync", fsync)
    copy_partition(str(source), str(target))
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        *("manifest.json", "rows", "rows/c.0.0", "rows/zarr.json")
    ]
    assert (target / "rows" / "c.0.0").samefile(source / "rows" / "c.0.0")  # a link: its bytes were synced before
    new = (target.parent, target, target / "rows", target / "manifest.json", target / "rows" / "zarr.json")
    assert synced == {str(path) for path in new}
