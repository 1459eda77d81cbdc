"""Slots as the native parsers take them: a structured array, and the keys of buckets that bucketised slots look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.data.keys import bucket_bounds, bucket_keys, slot_seed, small_buckets
from daskps.data.schema import Slot
from daskps.types import Keys

# The struct SlotPlan of slot.cuh.
_SLOT = np.dtype(
    [(name, np.int32) for name in "column kind missing_key separator".split()]
    + [("seed", np.uint64), ("bucket_keys", np.int64)]
)
HASHED, RAW, BUCKETS = 0, 1, 2


def slot_kind(slot: Slot) -> int:
    """What is done with a value of `slot`."""
    return BUCKETS if slot.kind == "integer" else RAW if slot.raw else HASHED


class SlotPlan:
    """`arguments` are those that every parser passes on."""

    def __init__(
        self, slots: Sequence[Slot], columns: Sequence[int], missing_keys: Sequence[bool], hash_seed: int
    ) -> None:
        plan: npt.NDArray[Any] = np.zeros(len(slots), _SLOT)
        tables: list[Keys] = []
        for number, slot in enumerate(slots):
            seed, kind = slot_seed(hash_seed, slot.name), slot_kind(slot)
            separator = ord(slot.separator) if slot.kind == "multi" else -1
            place = sum(len(table) for table in tables)
            plan[number] = (columns[number], kind, missing_keys[number], separator, seed, place)
            if kind == BUCKETS:
                tables.append(bucket_keys(seed))
        self.arguments: dict[str, Any] = {
            "slots": plan,
            "least": bucket_bounds(),
            "small": small_buckets(),
            "buckets": len(bucket_bounds()),
            "bucket_keys": np.concatenate(tables) if tables else np.empty(0, np.uint64),
        }
