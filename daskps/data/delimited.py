"""Delimited text, such as Criteo's TSV: lines of fields with a one-byte delimiter. Column names come from a header line
or from the settings.

Input: `Delimited` as the format, and a schema. Output: a parser that calls delimited.cpp. Quoted fields are not
supported: in a comma-separated file a field that starts with a quote makes its example bad; with other delimiters a
quote is an ordinary byte. Windows line ends and a missing last newline are accepted. Bytes are hashed without decoding
them, in any encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskps.data import text
from daskps.data.bad import Origin
from daskps.data.batches import Piece, Shape
from daskps.data.files import DataFile
from daskps.data.format import Part
from daskps.data.schema import CRITEO_COLUMNS, Schema, SlotPlan
from daskps.device.native import library
from daskps.errors import ConfigError, DataError

# The structs of delimited.cpp.
_COLUMNS = np.dtype(
    [(name, np.int32) for name in "count label example_weight delimiter slots dense refuse_quotes label_needed".split()]
)
_DENSE = np.dtype([("column", np.int32), ("missing", np.float32)])


@dataclass(frozen=True, slots=True)
class Delimited(text.TextFormat):
    """Format of delimited text."""

    delimiter: str = "\t"
    columns: tuple[str, ...] = ()  # column names; empty: the first line of every file is a header with the names

    def __post_init__(self) -> None:
        if len(self.delimiter.encode()) != 1 or self.delimiter in '\n\r"':
            raise ConfigError(f"the delimiter must be one byte and no quote or line end, got {self.delimiter!r}")
        if len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"columns named more than once in {list(self.columns)}")

    @property
    def header_lines(self) -> int:
        """Return 1 if the first line of every file has the column names, else 0."""
        return int(not self.columns)

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> DelimitedParser:
        """Return a parser. Raise ConfigError if the schema does not fit the columns."""
        columns = self.columns or self._header(files)
        schema.check_columns(columns, files[0].url if files else "no files")
        return DelimitedParser(schema, hash_seed, columns, self.delimiter, self.header_lines)

    def _header(self, files: Sequence[DataFile]) -> tuple[str, ...]:
        """Return the column names of the header lines. All files must have the same; empty files are ignored."""
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
    """Return the format of Criteo's files: tabs, no header, 40 columns; 39 without the label, as in the test files of
    Criteo's contest."""
    return Delimited("\t", CRITEO_COLUMNS if labelled else CRITEO_COLUMNS[1:], block_bytes=block_bytes)


class DelimitedParser(text.TextParser):
    """Parser of delimited text: passes the schema as structs to delimited.cpp."""

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
            log_columns=schema.log_columns,
        )
        label, weight = (place[name] if name else -1 for name in (schema.label, schema.example_weight))
        slots, dense = len(schema.slots), len(schema.dense)
        head = (len(columns), label, weight, ord(delimiter), slots, dense, delimiter == ",", schema.label_needed)
        self._columns = np.array([head], _COLUMNS)
        places = [place[slot.source] for slot in schema.slots]
        missing_keys = [slot.missing_key for slot in schema.slots]
        self._slots = SlotPlan(schema.slots, places, missing_keys, hash_seed, schema.key_rule)
        self._dense = np.array([(place[dense.source], dense.missing_value) for dense in schema.dense], _DENSE)

    def most_keys(self, payload: text.TextBlock, part: Part) -> int:
        """Return an upper bound for the number of keys: one per slot and example, and for every slot one more for each
        separator of multi slots in the block."""
        separators = sum(text.count_byte(payload.text, payload.size, byte) for byte in self._separators)
        return part.examples * self.shape.slots + separators * self.shape.slots

    def parse(self, payload: text.TextBlock, part: Part, out: Piece) -> int:
        """Parse the lines of `part` into `out`. Return the number of keys."""
        written = library().data_parse_delimited(
            text=payload.text,
            size=payload.size,
            skip=part.first,
            examples=part.examples,
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

    def origin(self, file: DataFile, first_example: int) -> Origin:
        """Return the location of line `first_example` of `file`, for messages."""
        return Origin(file.url, first_example, self.header_lines, "line", self.columns)
