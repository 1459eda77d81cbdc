"""Twins of the text parsers in plain Python: the expected result of every line, without code of the package.

An example is either ("good", label, bags of keys, bags of weights, dense, example weight) or ("bad", reason, column).
"""

import itertools
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import xxhash

from daskps.data.schema import Schema, Slot
from daskps.types import Batch

INTEGER = re.compile(rb"[+-]?[0-9]+\Z")
FLOAT = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")
COLUMN_COUNT, LABEL, NOT_INTEGER, NOT_NUMBER, RANGE, TOKEN, UNKNOWN, QUOTED, MISSING, WEIGHT = range(1, 11)


class BadLineError(Exception):
    """An example that must be refused, with its reason and column."""


@dataclass
class Row:
    """An example as it should be read."""

    label: float
    bags: list[list[int]]
    weights: list[list[float]]
    dense: list[np.float32]
    example_weight: float = 1.0


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines without newlines; the last one needs no newline, and blank lines at the end do not count."""
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
        while lines and lines[-1] in (b"", b"\r"):
            lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


def seed_of(slot: Slot, hash_seed: int) -> int:
    return xxhash.xxh64_intdigest(slot.name.encode(), hash_seed)


def log_squared(value: int) -> int:
    """Return floor(log(value)^2), found by search; close cases are decided with integers."""
    from decimal import Context, Decimal

    context = Context(prec=50)
    return int(context.power(context.ln(Decimal(value)), 2))


def integer(field: bytes, low: int, high: int, column: int) -> int:
    if not INTEGER.match(field):
        raise BadLineError(NOT_INTEGER, column)
    value = int(field)
    if not low <= value <= high:
        raise BadLineError(RANGE, column)
    return value


def number(field: bytes, column: int) -> np.float32:
    if not FLOAT.match(field) or len(field) > 511:
        raise BadLineError(NOT_NUMBER, column)
    with np.errstate(over="ignore"):
        value = np.float32(float(field))
    if not np.isfinite(value):
        raise BadLineError(RANGE, column)
    return value


def label_of(field: bytes, minus_one: bool, column: int) -> float:
    try:
        value = number(field, column)
    except BadLineError:
        raise BadLineError(LABEL, column) from None
    if minus_one and value == -1:
        return 0.0
    if value not in (0, 1):
        raise BadLineError(LABEL, column)
    return float(value)


WHOLE_FLOAT = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE]\+?[0-9]+)?\Z")


def respelled(field: bytes) -> bytes:
    """Return a value as key rule 2 spells it: whole floats and booleans in text become the integer's text."""
    if field.lower() in (b"true", b"false") and field in (field.lower(), field.upper(), field.capitalize()):
        return b"1" if field.lower() == b"true" else b"0"
    if len(field) > 32 or not WHOLE_FLOAT.match(field):
        return field
    if field != b"-0" and b"." not in field and b"+" not in field:
        return field
    mantissa, _, exponent = field.lower().partition(b"e")
    shown, _, fraction = mantissa.partition(b".")
    if int(exponent or b"0") > 400:
        return b"0" if not (shown + fraction).strip(b"-0") else field
    value = Fraction(int(shown + fraction), 10 ** len(fraction)) * 10 ** int(exponent or b"0")
    return b"%d" % int(value) if value.denominator == 1 and abs(value) < 2**53 else field


def key(field: bytes, slot: Slot, hash_seed: int, column: int, key_rule: int = 2) -> int:
    if key_rule == 2:
        field = respelled(field)
    if slot.raw:
        return integer(field, -(2**63), 2**64 - 1, column) % 2**64
    if slot.kind == "integer":
        value = integer(field, -(2**63), 2**63 - 1, column)
        field = b"SP%d" % value if value <= 2 else b"%d" % log_squared(value)
    return xxhash.xxh64_intdigest(field, seed_of(slot, hash_seed))


def delimited_row(line: bytes, schema: Schema, columns: list[str], delimiter: bytes, hash_seed: int) -> Row:
    """Return the example of one line of delimited text."""
    fields = line.split(delimiter)
    if delimiter == b",":
        for number_, field in enumerate(fields):
            if field.startswith(b'"'):
                raise BadLineError(QUOTED, number_ + 1)
    if len(fields) != len(columns):
        raise BadLineError(COLUMN_COUNT, len(fields))
    place = {name: at for at, name in enumerate(columns)}
    label = label_of(fields[place[schema.label]], False, place[schema.label] + 1) if schema.label else 0.0
    bags = []
    for slot in schema.slots:
        at = place[slot.source]
        field = fields[at]
        if not field:
            bags.append([xxhash.xxh64_intdigest(b"", seed_of(slot, hash_seed))] if slot.missing_key else [])
            continue
        values = field.split(slot.separator.encode()) if slot.kind == "multi" else [field]
        bag = []
        for value in values:
            if slot.kind == "multi" and not value:
                raise BadLineError(MISSING, at + 1)
            bag.append(key(value, slot, hash_seed, at + 1, schema.key_rule))
        bags.append(bag)
    dense = []
    for feature in schema.dense:
        at = place[feature.source]
        dense.append(number(fields[at], at + 1) if fields[at] else np.float32(feature.missing_value))
    weight = 1.0
    if schema.example_weight:
        at = place[schema.example_weight] + 1
        weight = float(number(fields[at - 1], at))
        if weight < 0:
            raise BadLineError(WEIGHT, at)
    return Row(label, bags, [[1.0] * len(bag) for bag in bags], dense, weight)


def expect(batch: Batch, examples: list[Row | None]) -> None:
    """`batch` holds exactly `examples`; None stands for a skipped one: no keys, label 0, weight 0."""
    assert batch.examples == len(examples)
    assert batch.offsets[0] == 0
    assert batch.offsets[-1] == len(batch.keys)
    weights = np.ones(len(examples), np.float32) if batch.example_weights is None else batch.example_weights
    for number_, example in enumerate(examples):
        bags = batch.offsets[number_ * batch.slots : (number_ + 1) * batch.slots + 1]
        found = [batch.keys[a:b].tolist() for a, b in itertools.pairwise(bags)]
        if example is None:
            assert (found, batch.labels[number_], weights[number_]) == ([[]] * batch.slots, 0, 0)
            continue
        assert found == example.bags
        assert batch.labels[number_] == example.label
        assert weights[number_] == np.float32(example.example_weight)
        if example.dense:
            np.testing.assert_array_equal(batch.dense[number_], np.array(example.dense, np.float32))
        if batch.weights is not None:
            found_weights = [batch.weights[a:b].tolist() for a, b in itertools.pairwise(bags)]
            assert found_weights == example.weights


def token_row(line: bytes, schema: Schema, style: str, ignore_unknown: bool, hash_seed: int) -> Row | None:
    """Return the example of one line of libsvm, libffm or multislot text; None for a comment."""
    tokens = [token for token in re.split(rb"[ \t]", line) if token]
    if not tokens:
        raise BadLineError(LABEL, 1)
    if style != "multislot" and tokens[0].startswith(b"#"):
        return None
    label = label_of(tokens[0], style != "multislot", 1)
    places = {slot.source.encode(): at for at, slot in enumerate(schema.slots)}
    bags: list[list[int]] = [[] for _ in schema.slots]
    weights: list[list[float]] = [[] for _ in schema.slots]
    for column, token in enumerate(tokens[1:], start=2):
        if style != "multislot" and token.startswith(b"#"):
            break
        parts = token.split(b":")
        if len(parts) not in {"libsvm": (2,), "libffm": (3,), "multislot": (2, 3)}[style]:
            raise BadLineError(TOKEN, column)
        at = 0 if style == "libsvm" else places.get(parts.pop(0))
        if at is None and not ignore_unknown:
            raise BadLineError(UNKNOWN, column)
        if not parts[0]:
            raise BadLineError(TOKEN, column)
        if style != "multislot" and not re.fullmatch(rb"[0-9]+", parts[0]):
            raise BadLineError(NOT_INTEGER, column)
        weight = number(parts[1], column) if len(parts) > 1 else np.float32(1)
        if at is not None:
            bags[at].append(key(parts[0], schema.slots[at], hash_seed, column, schema.key_rule))
            weights[at].append(float(weight))
    for at, slot in enumerate(schema.slots):
        if not bags[at] and slot.missing == "key":
            bags[at] = [xxhash.xxh64_intdigest(b"", seed_of(slot, hash_seed))]
            weights[at] = [1.0]
    return Row(label, bags, weights, [])
