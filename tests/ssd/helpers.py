"""Helpers for tests of the store: a small layout, rows of any bits, and a reader of snapshots without daskps."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from daskps.ssd import Options, Store
from daskps.types import Field, RowLayout

LAYOUT = RowLayout((Field("embedding", 3), Field("accumulator", 1), Field("steps", 1, "uint32")))
QUIET = Options(background_compaction=False)
_versions = itertools.count(1)


def rows_for(keys: np.ndarray, version: int | None = None) -> np.ndarray:
    """Return rows that differ between keys and versions; any bits, NaN included."""
    version = next(_versions) if version is None else version
    rng = np.random.default_rng(version)
    rows = rng.integers(0, 2**32, (len(keys), LAYOUT.width), np.uint32)
    rows[:, 0] ^= keys.astype(np.uint32)
    return rows.view(np.float32)


def as_dict(keys: np.ndarray, rows: np.ndarray) -> dict[int, bytes]:
    """Return the bytes of each key's row; of equal keys the last one counts."""
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def contents(store: Store, snapshot: str | None = None) -> dict[int, bytes]:
    """Return every live row of a store, and check that no key comes twice."""
    found: dict[int, bytes] = {}
    for keys, rows in store.scan(snapshot):
        part = as_dict(keys, rows)
        assert len(part) == len(keys)
        assert not found.keys() & part.keys()
        found |= part
    return found


def check(store: Store, model: dict[int, bytes], others: np.ndarray | None = None) -> None:
    """Check that the store holds exactly `model`, by load, scan and count."""
    keys = np.array(list(model), np.uint64)
    rows, found = store.load(keys)
    assert found.all()
    assert as_dict(keys, rows) == model
    assert contents(store) == model
    assert len(store) == len(model)
    if others is not None:
        absent = np.array([key for key in others.tolist() if key not in model], np.uint64)
        rows, found = store.load(absent)
        assert not found.any()
        assert not rows.any()


def read_plainly(path: Path | str, snapshot_id: str, **storage: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the live rows of a snapshot with zarr and json alone: the format is open."""
    group = zarr.open_group(path, mode="r", **storage)
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    snapshot = next(s for s in manifest["snapshots"] if s["id"] == snapshot_id)
    live = np.unpackbits(group[f"live/{snapshot['number']}"][:], bitorder="little").astype(bool)
    keys, rows = group["keys"][: len(live)][live], group["rows"][: len(live)][live]
    return keys, rows
