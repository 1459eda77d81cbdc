"""Token text: a label and any number of tokens a line.

libsvm ``label index:value``, all keys in the schema's one slot; libffm ``label field:index:value``, the field names the
slot's column; slots ``label slot:key[:weight]``. In: `Tokens` as a format and a schema. Out: a parser on top of
tokens.cpp. Labels of libsvm and libffm may be -1 for 0. An index is hashed as it is written. A slot may have any
number of keys in a line; an absent one is an empty bag, unless the schema asks for a key with missing="key".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.data import text
from daskps.data.bad import Origin
from daskps.data.files import DataFile, list_files
from daskps.data.index import FileBlocks, Part
from daskps.data.keys import hash_bytes
from daskps.data.piece import Piece, Shape
from daskps.data.schema import Schema
from daskps.data.slots import SlotPlan
from daskps.errors import ConfigError

_TOKENS = np.dtype([(name, np.int32) for name in "style slots ignore_unknown lookup_mask".split()])
_STYLES = {"libsvm": 0, "libffm": 1, "slots": 2}


@dataclass(frozen=True, slots=True)
class Tokens:
    """One of the three styles. Without `weights`, values are checked and then left out of the batches."""

    style: Literal["libsvm", "libffm", "slots"]
    weights: bool = True
    ignore_unknown_slots: bool = False  # else a slot that the schema does not name makes its row bad
    block_bytes: int = text.BLOCK_BYTES
    blocks_ahead: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if self.style not in _STYLES:
            raise ConfigError(f"token text of style {self.style!r} is not known; it is one of {', '.join(_STYLES)}")

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """The files in their global order."""
        return list_files(urls)

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """More than one where all files are plain."""
        return text.text_fetch_threads(files)

    def index(self, file: DataFile) -> FileBlocks:
        """Count the lines of `file`."""
        return text.index_text(file, block_bytes=self.block_bytes)

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """The longest run of lines."""
        return text.longest_block(blocks)

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> text.PlainText | text.CompressedText:
        """Open an indexed file."""
        return text.open_text(blocks)

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> TokenParser:
        """Check that the schema asks only for what token text has."""
        return TokenParser(self, schema, hash_seed)


class TokenParser:
    """Calls tokens.cpp with the schema as structs."""

    task_rows = 1 << 62  # a block of text is small enough for one thread

    def __init__(self, format: Tokens, schema: Schema, hash_seed: int) -> None:
        if not schema.label:
            raise ConfigError(
                f"lines of {format.style} text begin with a label, so it cannot be read as unlabelled: write a 0 where "
                "there is none, and read it as it is"
            )
        columns = [dense.name for dense in schema.dense] + [slot.weights for slot in schema.slots if slot.weights]
        columns += [schema.example_weight] if schema.example_weight else []
        if columns:
            raise ConfigError(f"{format.style} text has no columns, but the schema names {columns}; leave them out")
        names = [slot.source for slot in schema.slots]
        if format.style == "libsvm" and len(names) > 1:
            raise ConfigError(f"libsvm text has no fields, so its schema has one slot, not {names}")
        if len(set(names)) < len(names):
            raise ConfigError(f"two slots read the same tokens: {names}")
        slots = len(schema.slots)
        self.shape = Shape(slots, dense=0, weighted=format.weights, example_weighted=False, fixed=False)
        explicit = [slot.missing == "key" for slot in schema.slots]
        self._missing_keys = sum(explicit)
        self._slots = SlotPlan(schema.slots, range(slots), explicit, hash_seed)
        lookup = _lookup([name.encode() for name in names])
        head = (_STYLES[format.style], slots, format.ignore_unknown_slots, len(lookup) - 1)
        self._plan = {
            "tokens": np.array([head], _TOKENS),
            "names": np.frombuffer("".join(names).encode(), np.uint8),
            "name_ends": np.cumsum([0, *(len(name.encode()) for name in names)]).astype(np.int64),
            "lookup": lookup,
        }

    def prepare(self, payload: text.TextBlock) -> text.TextBlock:
        """Text is parsed as it is."""
        return payload

    def most_keys(self, payload: text.TextBlock, part: Part) -> int:
        """Every key has a colon."""
        return text.count_byte(payload.text, payload.size, ord(":")) + part.rows * self._missing_keys

    def parse(self, payload: text.TextBlock, part: Part, out: Piece) -> int:
        """Fill `out` from the lines of `part`."""
        room = len(out.keys)
        written = library().data_parse_tokens(
            text=payload.text,
            size=payload.size,
            skip=part.first,
            rows=part.rows,
            **self._plan,
            **self._slots.arguments,
            key_base=out.key_base,
            places=np.empty(self.shape.slots, np.int64),
            token_slots=np.empty(room, np.int32),
            token_keys=np.empty(room, np.uint64),
            token_weights=np.empty(room, np.float32),
            labels=out.labels,
            keys=out.keys,
            ends=out.ends,
            weights=out.weights,
            status=out.status,
        )
        return int(written)

    def origin(self, file: DataFile, first_row: int) -> Origin:
        """Names lines of `file`."""
        return Origin(file.url, first_row, unit="line", column_unit="token")


def _lookup(names: Sequence[bytes]) -> npt.NDArray[np.int32]:
    """Open addressing by the hash of the name, at most half full: slot + 1, or 0 where empty."""
    size = 1 << (2 * len(names) - 1).bit_length()
    table = np.zeros(size, np.int32)
    for slot, name in enumerate(names):
        place = hash_bytes(name, 0) % size
        while table[place]:
            place = (place + 1) % size
        table[place] = slot + 1
    return table
