"""What a job reads from its data: slots of keys, dense features, label and weight, each with its source column.

In: plain values from a job's settings. Out: a checked `Schema`, which every format resolves against its own columns.
In slotted text (libffm, multi-slot) a column is the name written before the colon.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from daskps.errors import ConfigError

SlotKind = Literal["categorical", "integer", "multi"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One feature field.

    categorical: one value, hashed with its slot; an integer column hashes its decimal text, so 7 and "7" are one key.
    integer: bucketised as Criteo models do: x > 2 falls into bucket floor(log(x)^2), a smaller one stands for itself.
    multi: any number of values: a list column, or in delimited text values between `separator`.
    """

    name: str
    column: str = ""  # where it is read from; empty: the slot's name
    kind: SlotKind = "categorical"
    raw: bool = False  # the integer itself is the key; negative ones in two's complement
    missing: Literal["auto", "key", "none"] = "auto"  # an absent value: a key of its own, or no key
    separator: str = "|"  # between the values of a multi slot in delimited text
    weights: str = ""  # list column that runs beside a multi slot (Parquet, data frames)
    table: str = ""  # for the model; the reader does not look at it
    dimension: int | None = None  # for the model, too

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a slot needs a name; it is part of every key's hash")
        if self.kind not in ("categorical", "integer", "multi"):
            raise ConfigError(f"slot {self.name!r}: kind {self.kind!r} is not one of categorical, integer, multi")
        if self.missing not in ("auto", "key", "none"):
            raise ConfigError(f"slot {self.name!r}: missing {self.missing!r} is not one of auto, key, none")
        if self.raw and (self.kind == "integer" or self.missing == "key"):
            raise ConfigError(
                f"slot {self.name!r}: raw keys are the integers themselves, so they have neither buckets nor a key for "
                "a missing value; use kind 'categorical' or 'multi' and missing 'none'"
            )
        if len(self.separator.encode()) != 1:
            raise ConfigError(f"slot {self.name!r}: the separator must be one byte, got {self.separator!r}")
        if self.weights and self.kind != "multi":
            raise ConfigError(f"slot {self.name!r}: only a multi slot has a column of weights, not {self.kind!r}")

    @property
    def source(self) -> str:
        """The column this slot is read from."""
        return self.column or self.name

    @property
    def missing_key(self) -> bool:
        """Whether an absent value becomes a key of its own: by default where there is exactly one hashed value."""
        return self.missing == "key" or (self.missing == "auto" and self.kind != "multi" and not self.raw)


@dataclass(frozen=True, slots=True)
class Dense:
    """One dense float feature; `log` scales to sign(x) log(1 + |x|), as dense nets on counts want."""

    name: str
    column: str = ""
    missing: float = 0.0
    scale: Literal["linear", "log"] = "linear"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a dense feature needs a name")
        if self.scale not in ("linear", "log"):
            raise ConfigError(f"dense feature {self.name!r}: scale {self.scale!r} is not one of linear, log")

    @property
    def source(self) -> str:
        """The column this feature is read from."""
        return self.column or self.name


@dataclass(frozen=True, slots=True)
class Schema:
    """Slots in the order of a batch's bags, dense features in the order of its columns, label and example weight."""

    slots: tuple[Slot, ...]
    dense: tuple[Dense, ...] = ()
    label: str = "label"  # empty: the data has none, every label is 0
    example_weight: str = ""  # empty: every example weighs 1

    def __post_init__(self) -> None:
        if not self.slots:
            raise ConfigError("a schema needs at least one slot")
        names = [slot.name for slot in self.slots]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"slots named more than once: {twice}; a slot's name is part of its keys")

    @property
    def columns(self) -> list[str]:
        """Every source column, once, in the order of first use."""
        lists = [slot.weights for slot in self.slots]
        sources = [slot.source for slot in self.slots] + [dense.source for dense in self.dense]
        named = dict.fromkeys([self.label, *sources, *lists, self.example_weight])
        return [name for name in named if name]

    @property
    def weighted(self) -> bool:
        """Whether any slot brings weights from a column of its own."""
        return any(slot.weights for slot in self.slots)

    def unlabelled(self) -> Schema:
        """The same features of data whose labels and example weights are not looked at, be they there or not."""
        return replace(self, label="", example_weight="")

    def check_columns(self, there: Iterable[str], where: str) -> None:
        """Refuse a file that lacks a column, naming every one that is missing."""
        known = list(there)
        absent = [column for column in self.columns if column not in set(known)]
        if absent:
            advice = "the slots' `column` settings"
            if set(absent) <= {self.label, self.example_weight}:
                advice = "data.label or data.weight; predictions need neither where the data is read as unlabelled"
            raise ConfigError(
                f"{where}: the schema names columns that are not there: {absent}; the data has "
                f"{known if len(known) <= 60 else [*known[:60], '...']}. Correct {advice}"
            )


CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


def criteo_schema(dense_integers: bool = False) -> Schema:
    """Criteo's display advertising layout: 13 integers and 26 categories, 39 slots of one key each.

    With `dense_integers` the integers are log-scaled dense features instead, as DLRM takes them: 26 slots.
    """
    integers = CRITEO_COLUMNS[1:14]
    categories = tuple(Slot(name) for name in CRITEO_COLUMNS[14:])
    if dense_integers:
        return Schema(categories, tuple(Dense(name, scale="log") for name in integers))
    return Schema((*(Slot(name, kind="integer") for name in integers), *categories))
