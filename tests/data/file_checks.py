"""Write text to a file, read it, and compare with what a twin says about every line."""

from pathlib import Path

import pytest

from daskps.data.bad import REASONS, BadRowPolicy
from daskps.data.reader import Source
from daskps.device.pool import ComputePool
from daskps.errors import DataError
from tests.data.text_twins import BadLineError, Row, expect

LENIENT = BadRowPolicy("lenient", max_share=1.0)


def check(
    path: Path,
    text: bytes,
    source: Source,
    rows: list[Row | BadLineError | None],
    pool: ComputePool,
    unit: str = "column",
) -> None:
    """Lenient reading gives the twin's rows; strict reading stops at the twin's first bad line, column and reason."""
    path.write_bytes(text)
    index = source.index()
    assert index.rows == len(rows)
    lenient = Source(source.urls, source.format, source.schema, source.hash_seed, LENIENT)
    with lenient.open(index, pool) as reader:
        expect(reader.read(0, len(rows)), [None if isinstance(row, BadLineError) else row for row in rows])
        assert reader.bad_rows.bad == sum(isinstance(row, BadLineError) for row in rows)
    first = next((number for number, row in enumerate(rows) if isinstance(row, BadLineError)), None)
    with source.open(index, pool) as reader:
        if first is None:
            expect(reader.read(0, len(rows)), rows)
            return
        with pytest.raises(DataError) as caught:
            reader.read(0, len(rows))
    reason, column = rows[first].args
    words = str(caught.value)
    assert f"{path}, line {first + 1}" in words
    assert REASONS[reason] in words
    assert (f": {column}, the schema" if reason == 1 else f"{unit} {column}") in words
