"""OP+OSRP feature hashing (one permutation + one sign random projection), as a transform of batches.

Input: batches whose keys are the columns 0 .. columns - 1 of a huge sparse matrix, and whose weights are the values of
that matrix (1 if a batch has no weights). Output: batches of binary features with keys 0 .. 2k - 1, for k bins.

The columns are permuted once and cut into k equal bins. Each column has a random sign. In each bin, the values of an
example are added with these signs. The sign of the sum becomes two binary dimensions: [0 1] if it is positive (key
2 * bin + 1), [1 0] if it is negative (key 2 * bin), [0 0] if it is zero (no key). The permutation is a keyed bijection
of [0, columns) and the signs are hashes, so nothing is stored, for any number of columns. Sums are exact: the order of
an example's keys, the number of threads and the machine do not change a bit. The keys of a bag are ascending.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from daskps.types import Batch, Int64s, Keys


@dataclass(frozen=True, slots=True)
class Osrp:
    """Settings of OP+OSRP. Equal settings give equal hashes in all versions."""

    bins: int  # k
    columns: int = 2**64
    seed: int = 0
    per_slot: bool = False  # True: each slot is hashed alone, to its own 2k dimensions; False: all slots together

    def __post_init__(self) -> None:
        if not 1 <= self.columns <= 2**64:
            raise ConfigError(f"there are 1 to 2**64 columns, got {self.columns}")
        if not 1 <= self.bins <= min(self.columns, 2**63):
            raise ConfigError(
                f"columns are cut into 1 to min(columns, 2**63) bins, got {self.bins} bins of {self.columns} columns"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"the seed is a 64-bit number without a sign, got {self.seed}")

    def dimensions(self, slots: int) -> int:
        """Return the number of binary dimensions after hashing, for examples with `slots` slots."""
        return 2 * self.bins * (slots if self.per_slot else 1)

    def apply(self, batch: Batch, pool: ComputePool | None = None) -> Batch:
        """Return the hashed batch. It has one slot, or with `per_slot` as many as before. Labels and dense features
        stay the same."""
        slots = batch.slots if self.per_slot else 1
        if self.dimensions(slots) > 2**64:
            raise ConfigError(f"{slots} slots of {self.bins} bins need more than 2**64 keys; use fewer bins")
        if batch.weights is not None and not np.isfinite(batch.weights).all():
            place = int(np.flatnonzero(~np.isfinite(batch.weights))[0])
            raise DataError(f"the weight of {_where(batch, place)} is {batch.weights[place]}; signs need finite values")
        bags = batch.examples * slots
        cores = 1 if pool is None else pool.cores
        cuts = [bags * share // cores for share in range(cores + 1)]
        offsets = np.zeros(bags + 1, np.int64)

        def share(index: int) -> Keys:
            return self._hash(batch, slots, cuts[index], cuts[index + 1], offsets[1:])

        parts = [share(0)] if pool is None else pool.map(share, range(cores))
        np.cumsum(offsets, out=offsets)
        return dataclasses.replace(batch, slots=slots, keys=np.concatenate(parts), offsets=offsets, weights=None)

    def _hash(self, batch: Batch, slots: int, first_bag: int, stop_bag: int, counts: Int64s) -> Keys:
        """Return the hashed keys of bags [first_bag, stop_bag), and write the number of keys of each bag to `counts`
        (one entry for each bag of the batch)."""
        stride = batch.slots // slots
        offsets = batch.offsets[first_bag * stride : stop_bag * stride + 1]
        largest = int(np.diff(offsets[::stride]).max(initial=0))
        hashed = np.empty(int(offsets[-1] - offsets[0]), np.uint64)
        wrong = library().osrp_hash(
            keys=batch.keys,
            weights=batch.weights,
            offsets=offsets,
            stride=stride,
            first_bag=first_bag,
            bags=stop_bag - first_bag,
            groups=slots,
            last_column=self.columns - 1,
            bins=self.bins,
            seed=self.seed,
            scratch=np.empty(4 * largest, np.uint64),
            scratch_keys=largest,
            heads=np.empty(2 * largest + 2, np.uint32),
            hashed=hashed,
            counts=counts[first_bag:stop_bag],
        )
        if wrong >= 0:
            raise DataError(
                f"{_where(batch, wrong)} is no column of {self.columns}; declare more, up to 2**64 for hashed keys"
            )
        return hashed[: int(counts[first_bag:stop_bag].sum())]


def _where(batch: Batch, place: int) -> str:
    bag = int(np.searchsorted(batch.offsets, place, side="right")) - 1
    example, slot = divmod(bag, batch.slots)
    return f"key {batch.keys[place]} in slot {slot} of example {batch.first_example + example}"
