"""Delimited text, Criteo's TSV above all: lines of fields between one delimiter, with a header line or known columns.

In: `Delimited` as a format and a schema. Out: a parser whose work is done by delimited.cpp. Fields are not quoted: in a
comma-separated file a field that starts with a quote makes its row bad, elsewhere quotes are bytes like others. Windows
line ends and a missing last newline are fine. Bytes are hashed as they are, whatever their encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from daskps.backend.native import library
from daskps.data import text
from daskps.data.bad import Origin
from daskps.data.files import DataFile, list_files
from daskps.data.index import FileBlocks, Part
from daskps.data.piece import Piece, Shape
from daskps.data.schema import CRITEO_COLUMNS, Schema
from daskps.data.slots import SlotPlan
from daskps.errors import ConfigError, DataError

# The structs of delimited.cpp.
_COLUMNS = np.dtype(
    [(name, np.int32) for name in "count label example_weight delimiter slots dense refuse_quotes".split()]
)
_DENSE = np.dtype([("column", np.int32), ("missing", np.float32)])


@dataclass(frozen=True, slots=True)
class Delimited:
    """Fields between `delimiter`; column names from `columns`, else from the header line of each file."""

    delimiter: str = "\t"
    columns: tuple[str, ...] = ()  # empty: the first line of every file names them
    block_bytes: int = text.BLOCK_BYTES
    blocks_ahead: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if len(self.delimiter.encode()) != 1 or self.delimiter in '\n\r"':
            raise ConfigError(f"the delimiter must be one byte and no quote or line end, got {self.delimiter!r}")
        if len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"columns named more than once in {list(self.columns)}")

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """The files in their global order."""
        return list_files(urls)

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """More than one where all files are plain."""
        return text.text_fetch_threads(files)

    def index(self, file: DataFile) -> FileBlocks:
        """Count the lines of `file`, without its header."""
        return text.index_text(file, header_lines=not self.columns, block_bytes=self.block_bytes)

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """The longest run of lines."""
        return text.longest_block(blocks)

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> text.PlainText | text.CompressedText:
        """Open an indexed file."""
        return text.open_text(blocks)

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> DelimitedParser:
        """Resolve the schema against the columns."""
        columns = self.columns or self._header(files)
        schema.check_columns(columns, files[0].url if files else "no files")
        return DelimitedParser(schema, hash_seed, columns, self.delimiter, header_lines=int(not self.columns))

    def _header(self, files: Sequence[DataFile]) -> tuple[str, ...]:
        """The columns by the header lines, which must agree. Empty files say nothing."""
        found: tuple[str, tuple[str, ...]] | None = None
        for file in files:
            line = text.first_lines(file, 1).removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            names = tuple(name.strip('"') for name in line.decode(errors="replace").split(self.delimiter))
            if not line:
                continue
            if found is not None and names != found[1]:
                raise DataError(f"{file.url} has the columns {list(names)}, but {found[0]} has {list(found[1])}")
            found = (file.url, names) if found is None else found
        return found[1] if found else ()


def criteo(block_bytes: int = text.BLOCK_BYTES, labelled: bool = True) -> Delimited:
    """Criteo's own layout: tabs, no header, 40 columns; 39 without the label, as in the test files of its contest."""
    return Delimited("\t", CRITEO_COLUMNS if labelled else CRITEO_COLUMNS[1:], block_bytes)


class DelimitedParser:
    """Calls delimited.cpp with the schema as structs."""

    task_rows = 1 << 62  # a block of text is small enough for one thread

    def __init__(
        self, schema: Schema, hash_seed: int, columns: tuple[str, ...], delimiter: str, header_lines: int
    ) -> None:
        self.columns, self.header_lines = columns, header_lines
        place = {name: number for number, name in enumerate(columns)}
        weighted = [slot.name for slot in schema.slots if slot.weights]
        if weighted:
            raise ConfigError(f"slots {weighted} name columns of weights, which delimited text does not have")
        self._separators = sorted({ord(slot.separator) for slot in schema.slots if slot.kind == "multi"})
        if ord(delimiter) in self._separators:
            raise ConfigError(f"a multi slot's separator is the delimiter {delimiter!r} itself; set another separator")
        self.shape = Shape(
            slots=len(schema.slots),
            dense=len(schema.dense),
            weighted=False,
            example_weighted=bool(schema.example_weight),
            fixed=all(slot.kind != "multi" and slot.missing_key for slot in schema.slots),
            log_columns=tuple(number for number, dense in enumerate(schema.dense) if dense.scale == "log"),
        )
        label, weight = (place[name] if name else -1 for name in (schema.label, schema.example_weight))
        slots, dense = len(schema.slots), len(schema.dense)
        head = (len(columns), label, weight, ord(delimiter), slots, dense, delimiter == ",")
        self._columns = np.array([head], _COLUMNS)
        places = [place[slot.source] for slot in schema.slots]
        self._slots = SlotPlan(schema.slots, places, [slot.missing_key for slot in schema.slots], hash_seed)
        self._dense = np.array([(place[dense.source], dense.missing) for dense in schema.dense], _DENSE)

    def prepare(self, payload: text.TextBlock) -> text.TextBlock:
        """Text is parsed as it is."""
        return payload

    def most_keys(self, payload: text.TextBlock, part: Part) -> int:
        """One key per slot, and one more for each separator of multi slots in the block."""
        separators = sum(text.count_byte(payload.text, payload.size, byte) for byte in self._separators)
        return part.rows * self.shape.slots + separators * self.shape.slots

    def parse(self, payload: text.TextBlock, part: Part, out: Piece) -> int:
        """Fill `out` from the lines of `part`."""
        written = library().data_parse_delimited(
            text=payload.text,
            size=payload.size,
            skip=part.first,
            rows=part.rows,
            columns=self._columns,
            dense_columns=self._dense,
            **self._slots.arguments,
            key_base=out.key_base,
            stops=np.empty(len(self.columns) + 1, np.int64),
            labels=out.labels,
            keys=out.keys,
            ends=out.ends,
            dense=out.dense,
            weights=out.example_weights,
            status=out.status,
        )
        return int(written)

    def origin(self, file: DataFile, first_row: int) -> Origin:
        """Names lines of `file`."""
        return Origin(file.url, first_row, self.header_lines, "line", self.columns)
