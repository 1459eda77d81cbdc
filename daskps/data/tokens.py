"""Token text: lines of a label and any number of tokens, in one of three styles.

- libsvm: ``label index:value``; all keys belong to the only slot of the schema.
- libffm: ``label field:index:value``; the field is the slot's column.
- multislot: ``label slot:key[:weight]``.

Input: `Tokens` as the format, and a schema. Output: a parser that calls tokens.cpp. In libsvm and libffm the label 0
may be written -1. An index is hashed as the text that is written. A slot may have any number of keys in a line. A slot
without keys is an empty bag, or gets a key of its own if the schema has missing="key". In libsvm and libffm a token
that begins with # starts a comment. A line with only a comment is skipped and keeps its example number, like a bad
example, but is not counted as bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from daskps.data import text
from daskps.data.bad import Origin
from daskps.data.batches import Piece, Shape
from daskps.data.files import DataFile
from daskps.data.format import Part
from daskps.data.schema import Schema, SlotPlan, hash_bytes
from daskps.device.native import library
from daskps.errors import ConfigError

_TOKENS = np.dtype([(name, np.int32) for name in "style slots ignore_unknown lookup_mask label_needed".split()])
Style = Literal["libsvm", "libffm", "multislot"]
_STYLES: dict[Style, int] = {"libsvm": 0, "libffm": 1, "multislot": 2}


@dataclass(frozen=True, slots=True)
class Tokens(text.TextFormat):
    """Format of token text. Without `weights`, values are checked but not put into the batches."""

    style: Style
    weights: bool = True
    ignore_unknown_slots: bool = False  # if False, a slot that is not in the schema makes its example bad

    def __post_init__(self) -> None:
        if self.style not in _STYLES:
            raise ConfigError(f"token text of style {self.style!r} is not known; it is one of {', '.join(_STYLES)}")

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> TokenParser:
        """Return a parser. Raise ConfigError if the schema needs what token text does not have, for example columns."""
        return TokenParser(self, schema, hash_seed)


class TokenParser(text.TextParser):
    """Parser of token text: passes the schema as structs to tokens.cpp."""

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
        self._slots = SlotPlan(schema.slots, range(slots), explicit, hash_seed, schema.key_rule)
        lookup = _lookup([name.encode() for name in names])
        head = (_STYLES[format.style], slots, format.ignore_unknown_slots, len(lookup) - 1, schema.label_needed)
        self._plan = {
            "tokens": np.array([head], _TOKENS),
            "names": np.frombuffer("".join(names).encode(), np.uint8),
            "name_ends": np.cumsum([0, *(len(name.encode()) for name in names)]).astype(np.int64),
            "lookup": lookup,
        }

    def most_keys(self, payload: text.TextBlock, part: Part) -> int:
        """Return an upper bound for the number of keys: every key has a colon, and absent slots may get a key."""
        return text.count_byte(payload.text, payload.size, ord(":")) + part.examples * self._missing_keys

    def parse(self, payload: text.TextBlock, part: Part, out: Piece) -> int:
        """Parse the lines of `part` into `out`. Return the number of keys."""
        room = len(out.keys)
        written = library().data_parse_tokens(
            text=payload.text,
            size=payload.size,
            skip=part.first,
            examples=part.examples,
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

    def origin(self, file: DataFile, first_example: int) -> Origin:
        """Return the location of line `first_example` of `file`, for messages."""
        return Origin(file.url, first_example, unit="line", column_unit="token")


def _lookup(names: Sequence[bytes]) -> npt.NDArray[np.int32]:
    """Return a hash table from slot names to slot numbers: open addressing, at most half full. An entry is the slot
    number + 1, or 0 if empty."""
    size = 1 << (2 * len(names) - 1).bit_length()
    table = np.zeros(size, np.int32)
    for slot, name in enumerate(names):
        place = hash_bytes(name, 0) % size
        while table[place]:
            place = (place + 1) % size
        table[place] = slot + 1
    return table
