"""What is read comes with the sums of its blocks, as google-crc32c computes them, from any kind of store."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from daskps.errors import CorruptionError, StoreError
from daskps.ssd.segments import first_difference, read_sums
from daskps.storage.files import LocalFiles, files_at


@pytest.mark.parametrize("block_bytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("where", ["local", "memory://"])
def test_sums_are_those_of_the_blocks(tmp_path: Path, where: str, block_bytes: int) -> None:
    files = files_at(tmp_path if where == "local" else f"memory://checked-{block_bytes}")
    content = np.random.default_rng(0).integers(0, 256, 700_001).astype(np.uint8)
    files.write("keys/c.0", [content], len(content))
    data = np.zeros(len(content) - 5, np.uint8)
    sums = read_sums(files, "keys/c.0", 5, data, block_bytes)
    np.testing.assert_array_equal(data, content[5:])
    blocks = [data[first : first + block_bytes].tobytes() for first in range(0, len(data), block_bytes)]
    assert sums.tolist() == [google_crc32c.value(block) for block in blocks]
    files.close()


def test_the_first_wrong_block_is_named() -> None:
    expected = np.arange(10, dtype=np.uint32)
    assert first_difference(expected[:7], expected) is None
    assert first_difference(np.array([0, 1, 9, 3, 8], np.uint32), expected) == 2


def test_a_file_that_ends_early_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write("rows/c.0.0", [np.zeros(100, np.uint8)], 100)
    with pytest.raises(CorruptionError, match=r"rows/c.0.0 \(array rows\): the file ends at byte 100"):
        read_sums(files, "rows/c.0.0", 0, np.zeros(200, np.uint8), 64)
    with pytest.raises(StoreError, match="cannot read: Is a directory"):
        read_sums(files, "rows", 0, np.zeros(200, np.uint8), 64)
