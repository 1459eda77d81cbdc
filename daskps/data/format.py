"""The protocol of an input format (`Format`), and the index of its files, which locates any global example number."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from daskps.data.bad import Origin
from daskps.data.batches import Piece, Shape
from daskps.data.files import DataFile
from daskps.data.schema import Schema
from daskps.errors import DataError
from daskps.types import Int64s, Keys


@dataclass(frozen=True, slots=True, eq=False)
class FileBlocks:
    """Blocks of one file. A block is a run of consecutive examples that is fetched as a whole."""

    file: DataFile
    first_examples: Int64s  # (blocks + 1,) number in the file of each block's first example; last: the file's examples
    starts: Int64s  # (blocks + 1,) first byte of each block in the plain text; empty if blocks are not byte ranges
    # Text: (blocks + 1,) digest of all before each block, with the header. Parquet: (1,) of the footer. Frames: empty.
    digests: Keys = field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def examples(self) -> int:
        """Number of examples in the file."""
        return int(self.first_examples[-1])


@dataclass(frozen=True, slots=True)
class Part:
    """Examples [first, last) of one block, counted from the block's start."""

    file: int  # number of the file in the index
    block: int  # number of the block in the file
    first: int
    last: int

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.last - self.first


class ExampleIndex:
    """Index of the data: the blocks of all files in global order."""

    def __init__(self, files: Sequence[FileBlocks]) -> None:
        self.files = tuple(files)
        self.file_starts = np.concatenate([[0], np.cumsum([blocks.examples for blocks in files])]).astype(np.int64)

    @property
    def examples(self) -> int:
        """Number of examples in the whole data set."""
        return int(self.file_starts[-1])

    def parts(self, start: int, stop: int) -> list[Part]:
        """Return the global examples [start, stop) as parts of blocks, in order."""
        if not 0 <= start <= stop <= self.examples:
            raise DataError(
                f"examples [{start}, {stop}) were asked for, but the data has examples [0, {self.examples})"
            )
        parts = []
        file = int(np.searchsorted(self.file_starts, start, side="right")) - 1
        while start < stop:
            blocks, base = self.files[file], int(self.file_starts[file])
            inside = min(stop - base, blocks.examples)
            first_examples = blocks.first_examples
            block = int(np.searchsorted(first_examples, start - base, side="right")) - 1
            while start - base < inside:
                begin, end = int(first_examples[block]), int(first_examples[block + 1])
                last = min(inside, end)
                if last > start - base:
                    parts.append(Part(file, block, start - base - begin, last - begin))
                    start = base + last
                block += 1
            file += 1
        return parts

    @property
    def fingerprint(self) -> str:
        """Return a digest of the sizes and example counts of the files, in order. It does not depend on where the files
        are stored."""
        digest = xxhash.xxh3_128()
        for blocks in self.files:
            digest.update(f"{blocks.file.size_bytes} {blocks.examples}\n".encode())
        return digest.hexdigest()

    def files_before(self, position: int) -> str:
        """Return a digest of the files that begin before example `position`: of their names without folders and of
        their first example numbers, not of their content."""
        digest = xxhash.xxh3_128()
        for start, blocks in zip(self.file_starts.tolist(), self.files, strict=False):
            if start < position and blocks.examples:
                digest.update(f"{start} {blocks.file.url.rpartition('/')[2]}\n".encode())
        return digest.hexdigest()

    def to_json(self) -> str:
        """Return the index as JSON text."""
        files = [
            {
                "url": blocks.file.url,
                "size_bytes": blocks.file.size_bytes,
                "version": blocks.file.version,
                "first_examples": blocks.first_examples.tolist(),
                "starts": blocks.starts.tolist(),
                "digests": blocks.digests.tolist(),
            }
            for blocks in self.files
        ]
        return json.dumps({"daskps_row_index": 2, "files": files})

    @staticmethod
    def from_json(text: str) -> ExampleIndex:
        """Return the index that `to_json` wrote. Raise DataError for another version."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("daskps_row_index") != 2:
            raise DataError("this is not an index of examples of version 2; build it again")
        return ExampleIndex(
            [
                FileBlocks(
                    DataFile(item["url"], item["size_bytes"], item["version"]),
                    np.array(item["first_examples"], np.int64),
                    np.array(item["starts"], np.int64),
                    np.array(item["digests"], np.uint64),
                )
                for item in value["files"]
            ]
        )

    def check_files(self, files: Sequence[DataFile]) -> None:
        """Raise DataError if the index is not of exactly these files."""
        for old, new in itertools.zip_longest((blocks.file for blocks in self.files), files):
            if old != new:
                raise DataError(f"the index knows {old}, the data set has {new}: it changed; build the index again")


class BlockFile(Protocol):
    """Open file of a format."""

    def fetch(self, block: int) -> Any:
        """Return the payload of a block: text or a table. Fastest if blocks are fetched in order."""

    def close(self) -> None:
        """Close the file."""


class Parser(Protocol):
    """Parser of a format: turns payloads into pieces of a batch. It has no state, so any number of threads may use
    it."""

    @property
    def shape(self) -> Shape:
        """Return which arrays a piece of a batch needs, and their sizes per example."""

    @property
    def task_examples(self) -> int:
        """Return the largest number of examples that one thread should parse at once."""

    def prepare(self, payload: Any) -> Any:
        """Do the work that is needed once per block, in the background, and return the payload for `parse`."""

    def most_keys(self, payload: Any, part: Part) -> int:
        """Return an upper bound for the number of keys in the examples of `part`."""

    def parse(self, payload: Any, part: Part, out: Piece) -> int:
        """Parse the examples of `part` into `out`. Return the number of keys."""

    def origin(self, file: DataFile, first_example: int) -> Origin:
        """Return the location of example `first_example` of `file` and the following ones, for messages."""


class Format(Protocol):
    """Input format, an extension point: how files are listed, indexed, opened and parsed.

    daskps/data/formats.py has the table of formats. Every format passes tests/contracts/test_format.py. `Source` and
    `Reader` call a format like this, here for the first block of the first file:

    >>> from daskps.data.batches import allocate, as_batch
    >>> def first_block(format: Format, urls: list[str], schema: Schema) -> Batch:
    ...     files = format.list(urls)
    ...     parser = format.parser(schema, 0, files)  # raises ConfigError before anything is read
    ...     blocks = format.index(files[0])
    ...     part = Part(file=0, block=0, first=0, last=int(blocks.first_examples[1]))
    ...     payload = parser.prepare(format.open(blocks, schema.columns).fetch(0))
    ...     piece = allocate(part.examples, parser.most_keys(payload, part), parser.shape)
    ...     piece.used = parser.parse(payload, part, piece)
    ...     return as_batch(piece, parser.shape, first_example=0)
    """

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """Return how many blocks may be fetched at the same time: 1 if a decoder must go through a file in order."""

    @property
    def blocks_ahead(self) -> int:
        """Return how many prefetched blocks may wait in memory: many of text, few if a block is a whole row group."""

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """Return an upper bound of the bytes of `columns` in one block of the file; 0 if unknown before the fetch."""

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """Return the files in their global order."""

    def index(self, file: DataFile) -> FileBlocks:
        """Find the blocks of `file` and count their examples."""

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> BlockFile:
        """Open an indexed file, to read `columns`."""

    def digest(self, blocks: FileBlocks, examples: int, fetch: Callable[[int], Any]) -> int:
        """Return a digest of the first `examples` examples (at least one) of a file, to detect changes. It does not
        depend on where the file is stored. `fetch` returns a block of the file."""

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> Parser:
        """Return a parser for the schema. Raise ConfigError if the schema does not fit the columns of the files."""
