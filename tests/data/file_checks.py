"""Writes text to a file, reads it, and compares every line with the result of a twin."""

from pathlib import Path

import pytest

from daskps.data.bad import REASONS, BadExamplePolicy
from daskps.data.reader import Source
from daskps.device.pool import ComputePool
from daskps.errors import DataError
from tests.data.text_twins import BadLineError, Row, expect

LENIENT = BadExamplePolicy("lenient", max_share=1.0)


def check(
    path: Path,
    text: bytes,
    source: Source,
    examples: list[Row | BadLineError | None],
    pool: ComputePool,
    unit: str = "column",
) -> None:
    """Lenient reading gives the twin's examples; strict reading stops at its first bad line, column and reason."""
    path.write_bytes(text)
    index = source.index()
    assert index.examples == len(examples)
    lenient = Source(source.urls, source.format, source.schema, source.hash_seed, LENIENT)
    with lenient.open(index, pool) as reader:
        expect(
            reader.read(0, len(examples)),
            [None if isinstance(example, BadLineError) else example for example in examples],
        )
        assert reader.bad_examples.bad == sum(isinstance(example, BadLineError) for example in examples)
    first = next((number for number, example in enumerate(examples) if isinstance(example, BadLineError)), None)
    with source.open(index, pool) as reader:
        if first is None:
            expect(reader.read(0, len(examples)), examples)
            return
        with pytest.raises(DataError) as caught:
            reader.read(0, len(examples))
    reason, column = examples[first].args
    words = str(caught.value)
    assert f"{path}, line {first + 1}" in words
    assert REASONS[reason] in words
    assert (f": {column}, the schema" if reason == 1 else f"{unit} {column}") in words
