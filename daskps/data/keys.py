"""From values to 64-bit keys: XXH64 of the value's bytes, seeded by the job's hash seed and the slot's name.

In: bytes, text, or integers. Out: keys that are the same on any machine, forever; tests hold golden values. Text is
hashed as its bytes stand in the file (UTF-8 or not); an integer is hashed as its decimal text; a missing value is the
empty text. A bucketised integer is hashed as "SP-1" ... "SP2" when it is at most 2, and else as its bucket's number.
"""

from __future__ import annotations

import functools
from decimal import Context, Decimal

import numpy as np

from daskps.backend.native import library
from daskps.data.schema import Slot
from daskps.errors import ArgumentError
from daskps.types import Int64s, Keys

SMALL_VALUES = 65536  # below it, a table gives the bucket; above, a search


def hash_bytes(value: bytes, seed: int) -> int:
    """XXH64 of `value`."""
    array = np.frombuffer(value, np.uint8)
    return int(library().data_xxh64(bytes=array, size=len(array), seed=seed))


def slot_seed(hash_seed: int, slot: str) -> int:
    """The seed under which the values of a slot are hashed."""
    return hash_bytes(slot.encode(), hash_seed)


def key_of(value: str | bytes | int | None, slot: Slot, hash_seed: int = 0) -> int:
    """The key that readers give `value` in `slot`; None is a missing value."""
    seed = slot_seed(hash_seed, slot.name)
    if value is None or value in ("", b""):
        if not slot.missing_key:
            raise ArgumentError(f"slot {slot.name!r} has no key for a missing value")
        return hash_bytes(b"", seed)
    if slot.raw:
        return int(value) % 2**64
    if slot.kind == "integer":
        return hash_bytes(bucket_text(int(value)), seed)
    return hash_bytes(value if isinstance(value, bytes) else str(value).encode(), seed)


@functools.cache
def bucket_bounds() -> Int64s:
    """The least integer of every bucket floor(log(x)^2) up to 2^63, from 30 digits: no libm decides a boundary.

    e^sqrt(b) is never an integer for b > 0, so the least x with log(x)^2 >= b is the next integer above it.
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
    """(65536,) the bucket of every small value; the entries of 0 to 2 are not used."""
    buckets = np.searchsorted(bucket_bounds(), np.arange(SMALL_VALUES), side="right") - 1
    array = np.maximum(buckets, 0).astype(np.uint8)
    array.flags.writeable = False
    return array


def bucket_text(value: int) -> bytes:
    """What is hashed for the integer `value`."""
    if value <= 2:
        return b"SP%d" % value
    return b"%d" % (int(np.searchsorted(bucket_bounds(), value, side="right")) - 1)


def bucket_keys(seed: int) -> Keys:
    """The keys of SP0, SP1, SP2 and every bucket under `seed`, as the native parsers look them up."""
    keys = np.empty(3 + len(bucket_bounds()), np.uint64)
    library().data_bucket_keys(count=len(bucket_bounds()), seed=seed, keys=keys)
    return keys
