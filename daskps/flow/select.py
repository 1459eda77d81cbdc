"""The keys of some of a batch's slots: what one table sees of it.

In: a batch, slot numbers. Out: keys, offsets and weights of those slots, example by example; the batch's own arrays where
all slots are asked for.
"""

from __future__ import annotations

import numpy as np

from daskps.types import Batch, Floats, Int64s, Keys


def select_slots(batch: Batch, slots: tuple[int, ...]) -> tuple[Keys, Int64s, Floats | None]:
    """Keys, offsets (examples * len(slots) + 1) and weights of `slots`."""
    if slots == tuple(range(batch.slots)):
        return batch.keys, batch.offsets, batch.weights
    bags = (np.arange(batch.examples)[:, None] * batch.slots + np.array(slots, np.int64)).ravel()
    starts, lengths = batch.offsets[bags], batch.offsets[bags + 1] - batch.offsets[bags]
    offsets = np.zeros(len(bags) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return batch.keys[index], offsets, None if batch.weights is None else batch.weights[index]
