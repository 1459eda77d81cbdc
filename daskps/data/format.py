"""What a format must do, and nothing else: list and index its files, fetch blocks of rows, parse parts of a block.

Formats are frozen, small values that travel in a job; what is open belongs to `BlockFile`. A payload is whatever
`fetch` returns, `prepare` improves and `parse` takes: padded text, the columns of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from daskps.data.bad import Origin
from daskps.data.files import DataFile
from daskps.data.index import FileBlocks, Part
from daskps.data.piece import Piece, Shape
from daskps.data.schema import Schema


class BlockFile(Protocol):
    """One open file."""

    def fetch(self, block: int) -> Any:
        """The payload of a block; fastest when blocks are asked for in order."""

    def close(self) -> None:
        """Let go of the file."""


class Parser(Protocol):
    """Turns payloads into pieces of a batch. It has no state, so any number of threads may parse."""

    @property
    def shape(self) -> Shape:
        """What a piece of a batch needs room for."""

    @property
    def task_rows(self) -> int:
        """The most rows that one thread should take at once."""

    def prepare(self, payload: Any) -> Any:
        """What can be done once for a block, in the background."""

    def most_keys(self, payload: Any, part: Part) -> int:
        """No fewer than the keys that the rows of `part` give."""

    def parse(self, payload: Any, part: Part, out: Piece) -> int:
        """Fill `out` from the rows of `part`; returns the number of keys."""

    def origin(self, file: DataFile, first_row: int) -> Origin:
        """How to name the rows from `first_row` of `file` in messages."""


class Format(Protocol):
    """One way in which rows are kept."""

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """How many blocks may be fetched at the same time: 1 where a decoder goes through a file in order."""

    @property
    def blocks_ahead(self) -> int:
        """How many blocks may wait in memory: many of text, few where a block is a whole row group."""

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """The most that `columns` of one block of the file take; 0 where nobody knows before it is there."""

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """The files in their global order."""

    def index(self, file: DataFile) -> FileBlocks:
        """Count the rows of `file`, block by block."""

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> BlockFile:
        """Open an indexed file of which `columns` will be needed."""

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> Parser:
        """Resolve the schema against the files' columns; a schema that does not fit is refused here."""
