"""Schema of a job's data: slots, dense features, label and example weight; and the rules that turn values into keys.

A key is the XXH64 hash of the value's bytes, with a seed that depends on the job's hash seed and the slot's name. Key
rule 1 hashes the text of a value, or the decimal digits of an integer. Key rule 2, the default, also maps equal numbers
in different spellings to one key: whole floats become integers and booleans become 1 or 0, also in text.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic
from pydantic import Field

from daskps.device.native import library
from daskps.errors import ArgumentError, ConfigError
from daskps.settings import RECORDED, Finite, Settings
from daskps.types import Int64s, Keys
from daskps.version import KEY_RULE

SlotKind = Literal["categorical", "integer", "multi", "dense"]
# Settings that only slots of some kinds have.
SETTINGS_OF_KINDS: dict[str, tuple[SlotKind, ...]] = {
    "raw": ("categorical", "multi"),
    "missing": ("categorical", "integer", "multi"),
    "separator": ("multi",),
    "weights": ("multi",),
    "transform": ("dense",),
    "missing_value": ("dense",),
}


class Slot(Settings):
    """Feature field of an example, as the job names it.

    With key rule 2, the numbers 7 and 7.0 and the texts "7" and "7.0" are one key of a categorical slot, and True is
    the same key as 1. An integer slot has buckets as in Criteo models: x > 2 is in bucket floor(log(x)^2), every
    smaller value has a bucket of its own. The values of a multi slot are those of a list column, or in delimited text
    those between `separator`.

    >>> Slot(name="tags", kind="multi", separator=";").source
    'tags'
    """

    name: str = Field(min_length=1, description="Name of the slot; it is part of the hash of every key.")
    column: str | None = Field(default=None, description="Column to read; by default the slot's name.")
    kind: SlotKind = Field(
        default="categorical",
        description="categorical: one value, hashed. integer: an integer in logarithmic buckets. multi: any number of "
        "values. dense: a number that goes to the network and has no rows.",
    )
    raw: bool = Field(
        default=False,
        description="Integers are keys as they are, not hashed with their slot; negative ones in two's complement.",
    )
    missing: Literal["auto", "key", "none"] = Field(
        default="auto",
        description="A missing value becomes a key of its own (key) or no key (none). auto: key, but none with kind "
        "multi, with raw, and in libsvm, libffm and multislot.",
    )
    separator: str = Field(default="|", description="multi in csv and criteo: the byte between two values.")
    weights: str | None = Field(
        default=None, description="multi in parquet and frame: list column with one weight per value."
    )
    transform: Literal["none", "log"] = Field(
        default="none", description="dense: log replaces x by sign(x) log(1 + |x|), which suits counts."
    )
    missing_value: Finite = Field(
        default=0.0, description="dense: number in place of a missing value, before the transform."
    )
    table: str = Field(default="main", description="Table that has the rows of the slot's keys.")

    @pydantic.model_validator(mode="after")
    def _settings_fit_the_kind(self, info: pydantic.ValidationInfo) -> Slot:
        if info.context == RECORDED:
            return self
        for name, kinds in SETTINGS_OF_KINDS.items():
            if self.kind not in kinds and name in self.changed:
                raise ValueError(f"a slot of kind {self.kind} has no {name}; kinds with it: {', '.join(kinds)}")
        if self.raw and self.missing == "key":
            raise ValueError(
                "raw keys are the integers themselves, so there is none for a missing value: set missing = 'none'"
            )
        if len(self.separator.encode()) != 1 or self.separator in "\n\r":
            raise ValueError(f"the separator must be one byte and no line end, got {self.separator!r}")
        return self

    @property
    def changed(self) -> list[str]:
        """Return the names of the settings that differ from their defaults."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]

    @property
    def source(self) -> str:
        """Return the name of the column that this slot is read from."""
        return self.column or self.name

    @property
    def missing_key(self) -> bool:
        """Return True if a missing value becomes a key of its own. By default it does if the slot has exactly one value
        and it is hashed."""
        return self.missing == "key" or (self.missing == "auto" and self.kind != "multi" and not self.raw)


@dataclass(frozen=True, slots=True)
class Schema:
    """Features of an example: slots in the order of a batch's bags, dense slots in the order of its columns, label and
    example weight."""

    slots: tuple[Slot, ...]  # all but the dense ones
    dense: tuple[Slot, ...] = ()
    label: str = "label"  # column; empty: the data has no labels, and every label is 0
    example_weight: str = ""  # column; empty: every example has weight 1
    label_needed: bool = True  # if False, an example with an unreadable label is kept, with the label NaN
    key_rule: int = KEY_RULE  # how values become keys; see the module's docstring

    def __post_init__(self) -> None:
        if not self.slots:
            raise ConfigError("a schema needs at least one slot")
        if self.key_rule not in (1, 2):
            raise ConfigError(f"key rule {self.key_rule} is not known here; it is 1 or 2. Use a newer daskps")
        names = [slot.name for slot in self.slots]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"slots named more than once: {twice}; a slot's name is part of its keys")

    @property
    def columns(self) -> list[str]:
        """Return every column that is read, once, in the order of first use."""
        lists = [slot.weights for slot in self.slots]
        sources = [slot.source for slot in self.slots] + [dense.source for dense in self.dense]
        named = dict.fromkeys([self.label, *sources, *lists, self.example_weight])
        return [name for name in named if name]

    @property
    def log_columns(self) -> tuple[int, ...]:
        """Return the numbers of the dense features with a logarithmic scale."""
        return tuple(number for number, slot in enumerate(self.dense) if slot.transform == "log")

    @property
    def weighted(self) -> bool:
        """Return True if a slot has a column of weights."""
        return any(slot.weights for slot in self.slots)

    def unlabelled(self) -> Schema:
        """Return the schema without label and example weight, for data whose labels are absent or ignored."""
        return replace(self, label="", example_weight="")

    def for_prediction(self) -> Schema:
        """Return the schema for predictions: an example with a bad label is kept, and example weights are ignored."""
        return replace(self, example_weight="", label_needed=False)

    def check_columns(self, there: Iterable[str], where: str) -> None:
        """Raise ConfigError if a column of the schema is missing or occurs twice in `there`. The message names all such
        columns; `where` names the data in it."""
        known = list(there)
        if twice := [column for column in self.columns if known.count(column) > 1]:
            raise ConfigError(
                f"{where}: columns of the schema occur more than once: {twice}, so it is not clear which ones to read. "
                "Rename them in the data, or remove those that are not wanted"
            )
        absent = [column for column in self.columns if column not in set(known)]
        if absent:
            advice = "the slots' `column` settings"
            if set(absent) <= {self.label, self.example_weight}:
                advice = "data.label or data.weight; predictions need neither where the data is read as unlabelled"
            if len(known) == 1 and (sign := next((sign for sign in ";\t|" if sign in known[0]), "")):
                advice = f"the file: its header has no comma, but {sign!r}; csv is text between commas"
            if folders := [name for name in absent if f"/{name}=" in where]:
                advice = (
                    f"the data: {folders} are in the names of its folders (hive partitions), which are not read as "
                    "columns; write them into the files"
                )
            raise ConfigError(
                f"{where}: the schema names columns that are not there: {absent}; the data has "
                f"{known if len(known) <= 60 else [*known[:60], '...']}. Correct {advice}"
            )


CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


def criteo_schema(dense_integers: bool = False) -> Schema:
    """Return the schema of Criteo's display advertising data: 13 integers and 26 categories, 39 slots of one key each.

    With `dense_integers` the integers are log-scaled dense features, as in DLRM, and there are 26 slots.
    """
    integers = CRITEO_COLUMNS[1:14]
    categories = tuple(Slot(name=name) for name in CRITEO_COLUMNS[14:])
    if dense_integers:
        return Schema(categories, tuple(Slot(name=name, kind="dense", transform="log") for name in integers))
    return Schema((*(Slot(name=name, kind="integer") for name in integers), *categories))


SMALL_VALUES = 65536  # smaller integers find their bucket in a table, others by binary search


def hash_bytes(value: bytes, seed: int) -> int:
    """Return the XXH64 hash of `value`."""
    array = np.frombuffer(value, np.uint8)
    return int(library().data_xxh64(bytes=array, size=len(array), seed=seed))


def slot_seed(hash_seed: int, slot: str) -> int:
    """Return the hash seed for the values of a slot."""
    return hash_bytes(slot.encode(), hash_seed)


def key_of(value: str | bytes | int | float | None, slot: Slot, hash_seed: int = 0, key_rule: int = KEY_RULE) -> int:
    """Return the key of `value` in `slot`, as readers compute it. None, NaN and the empty text are missing values."""
    seed = slot_seed(hash_seed, slot.name)
    if isinstance(value, float) and not math.isnan(value):
        if not value.is_integer() or abs(value) >= 2**53:
            raise ArgumentError(f"slot {slot.name!r}: no key for {value!r}: a float must be a whole number < 2**53")
        value = int(value)
    elif isinstance(value, bool | np.bool_):
        value = int(value)
    if value is None or value in ("", b"") or value != value:
        if not slot.missing_key:
            raise ArgumentError(f"slot {slot.name!r} has no key for a missing value")
        return hash_bytes(b"", seed)
    text = value if isinstance(value, bytes) else str(value).encode()
    if key_rule != 1:
        text = respelled(text)
    if slot.raw:
        return int(text) % 2**64
    if slot.kind == "integer":
        return hash_bytes(bucket_text(int(text)), seed)
    return hash_bytes(text, seed)


def respelled(text: bytes) -> bytes:
    """Return the text that key rule 2 hashes for the text of a value, for example ``7`` for ``7.0``."""
    room = np.empty(24, np.uint8)
    size = int(library().data_respell(bytes=np.frombuffer(text, np.uint8), size=len(text), room=room))
    return text if size < 0 else room[:size].tobytes()


@functools.cache
def bucket_bounds() -> Int64s:
    """Return the smallest integer of every bucket floor(log(x)^2), up to 2^63. They are computed with 30 digits, so
    that no difference between math libraries moves a boundary.
    e^sqrt(b) is never an integer for b > 0, so the smallest x with log(x)^2 >= b is the next integer above it.
    """
    context = Context(prec=30)
    bounds = [1]
    while (bound := int(context.exp(context.sqrt(Decimal(len(bounds))))) + 1) < 2**63:
        bounds.append(bound)
    array = np.array(bounds, np.int64)
    array.flags.writeable = False
    return array


@functools.cache
def small_buckets() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bucket of every value below SMALL_VALUES; the entries of 0 to 2 are not used."""
    buckets = np.searchsorted(bucket_bounds(), np.arange(SMALL_VALUES), side="right") - 1
    array = np.maximum(buckets, 0).astype(np.uint8)
    array.flags.writeable = False
    return array


def bucket_text(value: int) -> bytes:
    """Return the text that is hashed for the integer `value`: its bucket, or SP and the value up to 2."""
    if value <= 2:
        return b"SP%d" % value
    return b"%d" % (int(np.searchsorted(bucket_bounds(), value, side="right")) - 1)


def bucket_keys(seed: int) -> Keys:
    """Return the keys of SP0, SP1, SP2 and of every bucket, hashed with `seed`; native parsers look them up here."""
    keys = np.empty(3 + len(bucket_bounds()), np.uint64)
    library().data_bucket_keys(count=len(bucket_bounds()), seed=seed, keys=keys)
    return keys


# The struct SlotPlan of slot.cuh.
_SLOT = np.dtype(
    [(name, np.int32) for name in "column kind missing_key separator key_rule".split()]
    + [("seed", np.uint64), ("bucket_keys", np.int64)],
    align=True,
)
HASHED, RAW, BUCKETS = 0, 1, 2  # results of `slot_kind`, as in slot.cuh


def slot_kind(slot: Slot) -> int:
    """Return how a value of `slot` becomes a key: HASHED, RAW or BUCKETS."""
    return BUCKETS if slot.kind == "integer" else RAW if slot.raw else HASHED


class SlotPlan:
    """Slots as structs for the native parsers; `arguments` has the keyword arguments that all of them take."""

    def __init__(
        self,
        slots: Sequence[Slot],
        columns: Sequence[int],
        missing_keys: Sequence[bool],
        hash_seed: int,
        key_rule: int,
    ) -> None:
        plan: npt.NDArray[Any] = np.zeros(len(slots), _SLOT)
        tables: list[Keys] = []
        for number, slot in enumerate(slots):
            seed, kind = slot_seed(hash_seed, slot.name), slot_kind(slot)
            separator = ord(slot.separator) if slot.kind == "multi" else -1
            place = sum(len(table) for table in tables)
            plan[number] = (columns[number], kind, missing_keys[number], separator, key_rule, seed, place)
            if kind == BUCKETS:
                tables.append(bucket_keys(seed))
        self.arguments: dict[str, Any] = {
            "slots": plan,
            "least": bucket_bounds(),
            "small": small_buckets(),
            "buckets": len(bucket_bounds()),
            "bucket_keys": np.concatenate(tables) if tables else np.empty(0, np.uint64),
        }
