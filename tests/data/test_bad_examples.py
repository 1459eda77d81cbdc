"""Lenient reading counts bad examples by reason, keeps their places in the order, and stops past a set share."""

from pathlib import Path

import numpy as np
import pytest

from daskps.data.bad import BadExamplePolicy
from daskps.data.delimited import criteo
from daskps.data.reader import Reader, Source
from daskps.data.schema import criteo_schema
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from tests.data.criteo_rows import criteo_text


def opened(folder: Path, text: bytes, pool: ComputePool, **policy: float) -> Reader:
    (folder / "a.tsv").write_bytes(text)
    source = Source([str(folder)], criteo(1500), criteo_schema(), bad_examples=BadExamplePolicy("lenient", **policy))
    return source.open(source.index(), pool)


def spoil(examples: int, *changes: tuple[int, bytes]) -> bytes:
    lines = criteo_text(examples).splitlines()
    for example, line in changes:
        lines[example] = line
    return b"\n".join(lines) + b"\n"


def good_line(label: bytes = b"1", first: bytes = b"5") -> bytes:
    return b"\t".join([label, first, *[b"1"] * 12, *[b"ab"] * 26])


def test_bad_examples_are_counted_by_reason_with_their_places(tmp_path: Path, pool: ComputePool) -> None:
    text = spoil(
        200,
        (3, b"short"),
        (50, good_line(label=b"2")),
        (51, good_line(label=b"yes")),
        (60, good_line(first=b"99999999999999999999")),
        (61, good_line(first=b"1.5")),
    )
    with opened(tmp_path, text, pool, max_share=0.1) as reader:
        batch = reader.read(0, 200)
        counts = dict(reader.bad_examples.by_reason)
        report = reader.bad_examples.report()
    assert counts == {
        "wrong number of columns": 1,
        "the label is not 0 or 1": 2,
        "number out of range": 1,
        "not an integer": 1,
    }
    assert "line 61, column 2 (I1): number out of range" in report
    assert batch.example_weights is not None
    assert [example for example in range(200) if batch.example_weights[example] == 0] == [3, 50, 51, 60, 61]
    assert len(batch.keys) == 195 * 39
    counts_of_keys = np.diff(batch.offsets).reshape(200, 39)
    np.testing.assert_array_equal(counts_of_keys, np.repeat(batch.example_weights[:, None], 39, axis=1))


def test_a_batch_without_bad_examples_has_no_weights(tmp_path: Path, pool: ComputePool) -> None:
    with opened(tmp_path, spoil(100, (3, b"short")), pool, max_share=0.1) as reader:
        assert reader.read(0, 50).example_weights is not None
        assert reader.read(4, 50).example_weights is None


def test_reading_stops_past_the_share(tmp_path: Path, pool: ComputePool) -> None:
    text = spoil(100, *((example, b"x") for example in range(40, 51)))
    with opened(tmp_path, text, pool, max_share=0.1) as reader:
        reader.read(0, 50)
        with pytest.raises(DataError, match=r"11 of \d+ examples read are bad, .* 0\.1 .*11 x wrong number of columns"):
            reader.read(50, 100)


def test_early_bad_examples_are_judged_against_some_examples(tmp_path: Path, pool: ComputePool) -> None:
    """One bad example among the first two is not half of the data."""
    text = spoil(100, (0, b"x"))
    with opened(tmp_path, text, pool, max_share=0.02) as reader:
        reader.read(0, 2)
    with (
        opened(tmp_path, text, pool, max_share=0.02, least_examples=2) as reader,
        pytest.raises(DataError, match="1 of 2"),
    ):
        reader.read(0, 2)


def test_an_impossible_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_share must be within 0 and 1, got 2"):
        BadExamplePolicy("lenient", max_share=2)
