"""Metrics grouped by the value of one slot (per country, per position, per user), and the AUC within groups (GAUC).

In: batches with their logits. Out: `GroupValues`, with one entry per group.

A group is one key of the slot. An example counts in the group of each key that it has in the slot. AUC is exact: every
distinct (logit, label) pair of a group is kept with the sum of its weights. Pairs are kept in memory; if there are more
than `entries`, they are spilled to a temporary file. At the end, all pairs of one group are in memory at the same time,
about 100 bytes per pair.

The number of groups is bounded. If the data has more, only groups whose mixed (hashed) key is below 2**64 / 2**cut are
kept, with the smallest cut that fits. This is a uniform sample of the groups, by hash; the weight of the others is
counted. So the groups kept, and every sum, do not depend on the order of examples or on batches. Weights are added
exactly, as in daskps.nn.metrics.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.device.native import library
from daskps.errors import ArgumentError
from daskps.nn.metrics import WEIGHT_BITS, check_examples, ratio
from daskps.types import Batch, Floats, Int32s, Int64s, Keys

GROUPS = 4096  # default bound of the number of groups
ENTRIES = 1 << 23  # default number of entries in memory: 16 bytes each, and three times as much while they are sorted
GROUP_ONE = 2.0**24  # fixed point: the integer for a loss or prediction of 1 and a weight mantissa of 1 (of [1, 2))
_SUM_BITS = 126 + 24  # totals of losses and predictions are in units of 2**-_SUM_BITS
_ONE_EXPONENT = 127  # float32 exponent bits of a weight of 1
_WAITING = 1 << 18  # occurrences that are buffered and then counted together
# The code of an entry, from the highest bit down: group number (25 bits), logit (32), label (1), limb (5). The entry's
# sum is in units of 2**(8 * limb - 150): a weight's mantissa, shifted by the lowest 3 bits of its exponent.
_GROUP_SHIFT, _LABEL_SHIFT, _LIMB_BITS = 38, 5, 8  # bits; metrics.cpp builds the codes

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The metrics of each group, in ascending order of keys, and totals. NaN: a metric is undefined for a group."""

    keys: Keys  # (G,)
    weight: Float64s  # (G,), as all arrays below
    mean_label: Float64s
    mean_prediction: Float64s
    calibration: Float64s
    log_loss: Float64s
    auc: Float64s
    gauc: float  # weighted mean of the groups' AUC, over the groups that have both labels
    groups_seen: float  # exact while all groups fit, otherwise an estimate from the groups kept
    overflow_weight: float  # weight of the occurrences in groups that were not kept


class GroupMetrics:
    """Streaming metrics of at most `groups` groups: one group per key of slot number `slot`."""

    def __init__(self, slot: int, groups: int = GROUPS, entries: int = ENTRIES) -> None:
        if slot < 0 or groups < 1 or entries < 1:
            raise ArgumentError(
                "group metrics need a slot number, and at least one group and one entry; "
                f"got {slot=}, {groups=}, {entries=}"
            )
        self.slot, self.groups = slot, groups
        self._cut = 0  # groups whose mixed key is at least 2**64 >> cut are not kept
        self._weight = 0  # of all occurrences, in units of 2**-WEIGHT_BITS
        self._known: Keys = np.zeros(0, np.uint64)  # mixed keys of the groups kept, sorted
        self._numbers: Int64s = np.zeros(0, np.int64)  # group number of each `_known`: order of first occurrence
        self._numbered = 0  # group numbers given so far, also to groups that were dropped later
        self._totals: dict[int, list[int]] = {}  # by group number: weight, weight of positives, loss, prediction
        self._entries = _Entries(entries)
        self._pending: list[tuple[Any, ...]] = []  # occurrences not counted yet: keys, labels, logits, weights or None
        self._pending_count = 0

    def update(self, batch: Batch, logits: Floats) -> None:
        """Count the examples of a batch. If one of them is invalid, raise and count none of them."""
        if self.slot >= batch.slots:
            raise ArgumentError(f"metrics by slot {self.slot} cannot count a batch of {batch.slots} slots")
        weights = batch.example_weights
        check_examples(batch.labels, logits, weights)
        starts, stops = batch.offsets[self.slot : -1 : batch.slots], batch.offsets[self.slot + 1 :: batch.slots]
        counts = stops - starts
        if (counts == 1).all():
            keys, columns = (
                batch.keys[starts],
                [None if c is None else c.copy() for c in (batch.labels, logits, weights)],
            )
        else:
            at = np.repeat(np.arange(batch.examples), counts)  # example number of each occurrence
            before = np.cumsum(counts) - counts
            keys = batch.keys[np.repeat(starts - before, counts) + np.arange(len(at))]
            columns = [None if c is None else c[at] for c in (batch.labels, logits, weights)]
        self._pending.append((keys, *columns))
        self._pending_count += len(keys)
        if self._pending_count >= _WAITING:
            self._count_pending()

    def values(self) -> GroupValues:
        """Return the metrics of all examples counted so far."""
        self._count_pending()
        keys = _unmix64(self._known)
        order = np.argsort(keys)
        numbers = self._numbers[order].tolist()
        totals = [self._totals[number] for number in numbers]
        shift = _SUM_BITS - WEIGHT_BITS
        weight = np.array([ratio(total[0], 1 << WEIGHT_BITS) for total in totals])
        by_number = self._aucs()
        aucs = np.array([by_number.get(number, math.nan) for number in numbers])
        known = ~np.isnan(aucs)
        known_weight = math.fsum(weight[known])
        kept = sum(total[0] for total in totals)
        return GroupValues(
            keys=keys[order],
            weight=weight,
            mean_label=np.array([ratio(positive, weight) for weight, positive, _, _ in totals]),
            mean_prediction=np.array([ratio(prediction, weight << shift) for weight, _, _, prediction in totals]),
            calibration=np.array([ratio(prediction, positive << shift) for _, positive, _, prediction in totals]),
            log_loss=np.array([ratio(loss, weight << shift) for weight, _, loss, _ in totals]),
            auc=aucs,
            gauc=math.fsum(weight[known] * aucs[known]) / known_weight if known_weight else math.nan,
            groups_seen=float(len(totals) << self._cut),
            overflow_weight=ratio(self._weight - kept, 1 << WEIGHT_BITS),
        )

    def _count_pending(self) -> None:
        """Count the pending occurrences."""
        if not self._pending:
            return
        every = zip(*self._pending, strict=True)
        keys, labels, logits = (np.concatenate(parts) for parts in itertools.islice(every, 3))
        weights = _joined_weights(self._pending)
        self._pending, self._pending_count = [], 0
        exponents = np.bincount([_ONE_EXPONENT])
        if weights is None:
            self._weight += len(keys) << 23 + _ONE_EXPONENT - 1
        else:
            mantissas, each = _split(weights)
            exponents = np.bincount(each)
            by_exponent = np.bincount(each, weights=mantissas)
            self._weight += sum(int(by_exponent[e]) << (e - 1) for e in np.flatnonzero(by_exponent).tolist())
        groups = self._find(keys)
        self._add_totals(groups, labels, logits, weights, np.flatnonzero(exponents).tolist())
        codes = np.empty(len(keys), np.int64)
        sums = None if weights is None else np.empty(len(keys), np.int64)
        used = library().metric_entries(
            groups=groups,
            numbers=self._numbers,
            labels=labels,
            logits=logits,
            weights=weights,
            n=len(keys),
            codes=codes,
            sums=sums,
        )
        self._entries.add(codes[:used], None if sums is None else sums[:used])

    def _find(self, keys: Keys) -> Int32s:
        """Return the index in `_known` of each key's group, -1 for groups that are not kept. New groups are added."""
        groups, fresh = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint64)
        while True:
            mask = (1 << (2 * len(self._known)).bit_length()) - 1
            new = library().metric_groups(
                keys=keys,
                n=len(keys),
                known=self._known,
                count=len(self._known),
                cut=self._cut,
                mask=mask,
                table=np.empty(mask + 1, np.int32),
                groups=groups,
                fresh=fresh,
            )
            if not new:
                return groups
            self._add_groups(np.unique(fresh[:new]))

    @property
    def _highest(self) -> np.uint64:
        """Return the largest mixed key that is kept."""
        return np.uint64((1 << 64 - self._cut) - 1)

    def _add_groups(self, new: Keys) -> None:
        """Number the new groups, then raise the cut and drop groups until at most `groups` are kept."""
        known = np.concatenate([self._known, new])
        numbers = np.concatenate([self._numbers, self._numbered + np.arange(len(new))])
        self._numbered += len(new)
        while np.count_nonzero(known <= self._highest) > self.groups:
            self._cut += 1
        order = np.argsort(known)
        order = order[known[order] <= self._highest]
        self._known, self._numbers = known[order], numbers[order]
        if self._numbered >= 1 << 63 - _GROUP_SHIFT:
            raise ArgumentError(f"{self._numbered:,} groups are more than can be told apart; ask for fewer `groups`")
        self._totals = {number: self._totals.get(number, [0, 0, 0, 0]) for number in self._numbers.tolist()}

    def _add_totals(
        self, groups: Int32s, labels: Floats, logits: Floats, weights: Floats | None, exponents: list[int]
    ) -> None:
        """Add the weights, losses and predictions of occurrences to the totals of their groups; each sum is exact."""
        losses, predictions = np.empty((2, len(groups)), np.float64)
        library().metric_score(labels=labels, logits=logits, n=len(groups), losses=losses, predictions=predictions)
        for exponent in exponents:
            sums = np.zeros((len(self._known), 4), np.int64)
            library().metric_group_totals(
                groups=groups,
                labels=labels,
                losses=losses,
                predictions=predictions,
                weights=weights,
                n=len(groups),
                exponent=exponent,
                one=GROUP_ONE,
                totals=sums,
            )
            for group in np.flatnonzero(sums.any(axis=1)).tolist():
                totals = self._totals[int(self._numbers[group])]
                for number, total in enumerate(sums[group].tolist()):
                    totals[number] += total << (exponent - 1)

    def _aucs(self) -> dict[int, float]:
        """Return the AUC by group number, of the groups that have both labels."""
        aucs: dict[int, float] = {}
        for codes, sums in self._entries.groups():
            cells, weights = _cells(codes, sums)
            edges = np.flatnonzero(np.diff(cells >> _GROUP_SHIFT - _LABEL_SHIFT, prepend=-1, append=-1))
            for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                auc = _auc(cells[start:stop] & (1 << _GROUP_SHIFT - _LABEL_SHIFT) - 1, weights[start:stop])
                if auc is not None:
                    aucs[int(cells[start] >> _GROUP_SHIFT - _LABEL_SHIFT)] = auc
        return aucs


class _Entries:
    """Sums of weights by code: sorted runs in memory, spilled to temporary files if there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most  # entries kept in memory
        self._runs: list[tuple[Int64s, Int64s]] = []
        self._spilled: list[npt.NDArray[Any]] = []

    def add(self, codes: Int64s, sums: Int64s | None) -> None:
        """Add `sums` by code, or weights of 1 if `sums` is None. A code may occur any number of times."""
        self._runs.append(_summed(codes, sums))
        if sum(len(run[0]) for run in self._runs) > self._most:
            self._runs = [_joined(self._runs)]
            if len(self._runs[0][0]) > self._most // 2:
                self._spill()

    def groups(self) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield all entries ordered by group, several whole groups at a time. The entries are not removed."""
        if self._runs:
            self._runs = [_joined(self._runs)]
        runs = [*self._runs, *((spilled[0], spilled[1]) for spilled in self._spilled)]
        found = [run[0][np.flatnonzero(np.diff(run[0] >> _GROUP_SHIFT, prepend=-1))] >> _GROUP_SHIFT for run in runs]
        numbers = np.unique(np.concatenate(found)) if runs else np.zeros(0, np.int64)
        edges = [np.append(np.searchsorted(run[0], numbers << _GROUP_SHIFT), len(run[0])) for run in runs]
        first = 0
        while first < len(numbers):
            sizes = np.cumsum(sum(edge[first + 1 :] - edge[first:-1] for edge in edges))
            stop = first + max(1, int(np.searchsorted(sizes, self._most, side="right")))
            yield _joined(
                [
                    (np.array(codes[edge[first] : edge[stop]]), np.array(sums[edge[first] : edge[stop]]))
                    for (codes, sums), edge in zip(runs, edges, strict=True)
                ]
            )
            first = stop

    def _spill(self) -> None:
        with tempfile.TemporaryFile(prefix="daskps-") as file:
            np.stack(self._runs[0]).tofile(file)
            self._spilled.append(np.memmap(file, np.int64, "r", shape=(2, len(self._runs[0][0]))))
        self._runs = []


def _joined(runs: Iterable[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    codes, sums = zip(*runs, strict=True)
    return _summed(np.concatenate(codes), np.concatenate(sums))


def _joined_weights(pending: Sequence[tuple[Any, ...]]) -> Floats | None:
    """Return the weights of all pending occurrences, or None if no batch has weights."""
    if all(weights is None for *_, weights in pending):
        return None
    return np.concatenate([np.ones(len(keys), np.float32) if w is None else w for keys, *_, w in pending])


def _summed(codes: Int64s, sums: Int64s | None) -> tuple[Int64s, Int64s]:
    """Sort by code and add the sums of equal codes. If `sums` is None, every code counts with a weight of 1."""
    if sums is None:
        codes = np.sort(codes)
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        return codes[starts], np.diff(starts, append=len(codes)) << 23 + (_ONE_EXPONENT & 7)
    order = np.argsort(codes)
    codes, sums = codes[order], sums[order]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    return codes[starts], np.add.reduceat(sums, starts) if len(starts) else sums


def _cells(codes: Int64s, sums: Int64s) -> tuple[Int64s, Float64s]:
    """Return each (group, logit, label) and its weight, in units of 2**-150, rounded once. `codes` must be sorted."""
    cells, limbs = codes >> _LABEL_SHIFT, codes & 31
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    counts = np.diff(starts, append=len(cells))
    weights = np.ldexp(sums[starts].astype(np.float64), _LIMB_BITS * limbs[starts])
    for cell in np.flatnonzero(counts > 1).tolist():
        parts = slice(starts[cell], starts[cell] + counts[cell])
        pairs = zip(sums[parts].tolist(), limbs[parts].tolist(), strict=True)
        weights[cell] = float(sum(total << (_LIMB_BITS * limb) for total, limb in pairs))
    return cells[starts], weights


def _auc(cells: Int64s, weights: Float64s) -> float | None:
    """Return the AUC of one group, or None if it has only one label.

    `cells` are its (logit, label) pairs in ascending order. Pairs of examples with equal logits count half.
    """
    positive = (cells & 1).astype(np.bool_)
    positives, negatives = np.where(positive, weights, 0), np.where(positive, 0, weights)
    pairs = math.fsum(positives) * math.fsum(negatives)
    if not pairs:
        return None
    # If a logit occurs with both labels, its negatives stand directly before its positives.
    tied = np.append(0.0, np.where(np.diff(cells >> 1) == 0, negatives[:-1], 0))
    return math.fsum(positives * (np.cumsum(negatives) - tied / 2)) / pairs


def _split(weights: Floats) -> tuple[Int64s, Int64s]:
    """Return mantissas (24 bits) and exponents (1 to 254) of weights: weight = mantissa * 2**(exponent - 150)."""
    bits = weights.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    return (bits & 0x7FFFFF) | ((bits >= 1 << 23).astype(np.int64) << 23), np.maximum(bits >> 23, 1)


def _unmix64(mixed: Keys) -> Keys:
    """Return the keys of mixed keys: the inverse of `mix64`, its steps undone in reverse order."""
    x: Keys = mixed ^ (mixed >> np.uint64(31)) ^ (mixed >> np.uint64(62))
    x = x * np.uint64(0x319642B2D24D8EC3)
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x = x * np.uint64(0x96DE1B173F119089)
    x = x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))
    return x
