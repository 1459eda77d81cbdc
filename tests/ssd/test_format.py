"""The format is open: Zarr and JSON read it without daskps, and Zarr would write the same bytes, by either pipeline."""

import json
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr

from daskps.device.pool import ComputePool
from daskps.ssd import Store
from daskps.ssd.format import block_sums, crc32c
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, read_plainly, rows_for

PIPELINES = ["zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"]


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest):
    if request.param.startswith("zarrs"):
        pytest.importorskip("zarrs", reason="the zarrs package is not installed")
    with zarr.config.set({"codec_pipeline.path": request.param}):
        yield request.param


def filled(path: Path, pool: ComputePool) -> dict[str, dict[int, bytes]]:
    """Two snapshots, with updates, deletes, compaction and a short last file."""
    states = {}
    keys = np.random.default_rng(0).integers(0, 2**64, 700, np.uint64)
    with Store.create(path, LAYOUT, pool=pool, file_rows=128, options=QUIET) as store:
        rows = rows_for(keys)
        store.append(keys, rows)
        store.commit("first")
        states["first"] = as_dict(keys, rows)
        newer = rows_for(keys[100:400])
        store.append(keys[100:400], newer)
        store.delete(keys[:50])
        store.compact(0.0)
        store.prepare("second")
        states["second"] = as_dict(keys[50:], rows[50:]) | as_dict(keys[100:400], newer)
    return states


def test_ten_lines_of_zarr_and_json_read_a_snapshot(tmp_path, pool: ComputePool, pipeline: str) -> None:
    for name, rows in filled(tmp_path, pool).items():
        assert as_dict(*read_plainly(tmp_path, name)) == rows


def test_zarr_writes_the_same_bytes(tmp_path, pool: ComputePool, pipeline: str) -> None:
    filled(tmp_path / "ours", pool)
    ours = zarr.open_group(tmp_path / "ours", mode="r")
    with zarr.config.set({"array.write_empty_chunks": True}):
        theirs = zarr.open_group(tmp_path / "theirs", mode="w")
        for name in ("keys", "rows", "checksums"):
            array = ours[name]
            copy = theirs.create_array(
                name,
                shape=array.shape,
                chunks=array.chunks,
                dtype=array.dtype,
                compressors=None,
                filters=None,
                chunk_key_encoding={"name": "default", "separator": "."},
            )
            copy[...] = array[...]
    chunks = [path for path in (tmp_path / "ours").glob("*/c.*") if path.is_file()]
    assert len(chunks) > 20
    for path in chunks:
        assert path.read_bytes() == (tmp_path / "theirs" / path.relative_to(tmp_path / "ours")).read_bytes()


def test_fields_and_sizes_are_in_the_metadata(tmp_path, pool: ComputePool) -> None:
    filled(tmp_path, pool)
    group = zarr.open_group(tmp_path, mode="r")
    assert [field["name"] for field in group["rows"].attrs["fields"]] == ["embedding", "accumulator", "steps"]
    assert group["rows"].shape[1] == LAYOUT.width
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["file_rows"]) == ("daskps-ssd", 1, 128)
    assert [snapshot["state"] for snapshot in manifest["snapshots"]] == ["confirmed", "prepared"]


def test_checksums_are_those_of_other_libraries(tmp_path, pool: ComputePool) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_001).astype(np.uint8)
    assert crc32c(data) == google_crc32c.value(data.tobytes())
    assert crc32c(data[:77], data[77:]) == crc32c(data)
    for total in (10_001, 10_240, 20_000):
        sums = block_sums(data, total, 512)
        padded = data.tobytes() + bytes(total - len(data))
        assert sums.tolist() == [google_crc32c.value(padded[i : i + 512]) for i in range(0, total, 512)]
    filled(tmp_path, pool)
    group = zarr.open_group(tmp_path, mode="r")
    keys = (tmp_path / "keys" / "c.0").read_bytes()
    assert group["checksums"][0] == google_crc32c.value(keys[:4096])
