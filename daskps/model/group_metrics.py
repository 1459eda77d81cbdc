"""Metrics by the value of one slot: per country, per position, per user; and the AUC within groups (GAUC).

In: batches with their logits. Out: `GroupValues`, one line per group.

A group is a key of the slot; an example counts in the group of every key that it has there. The number of groups is
bounded: where more than `groups` come up, those with the smallest mixed keys stay, which is a fair sample of them, and
the weight of the others is counted. Which groups stay, and every sum, does not depend on order, batches or nodes: a
group that is not among the smallest of a part is not among the smallest of the whole, and integer sums are associative.

Memory grows with the pairs of (group, bucket) that occur, at 44 bytes each in a table at most half full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.errors import ArgumentError, CapacityError
from daskps.model.metrics import LOGIT_LIMIT, WEIGHT_ONE, check_examples
from daskps.types import Batch, Floats, Int64s, Keys

GROUPS = 4096
GROUP_BUCKETS = 1000  # 0.032 wide in the logit: a tie within one costs an AUC about 1e-5
GROUP_ONE = 2**24  # a loss or prediction of 1 in a group's sums, as in metrics.cpp
_FIRST_CAPACITY = 1 << 12
_TOTAL_LIMIT = 2**62
_EVERY_GROUP = 2**64 - 1

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The metrics of each group, by rising key, and what they add up to. NaN is what cannot be said of a group."""

    keys: Keys  # (G,)
    weight: Float64s  # (G,)
    mean_label: Float64s
    mean_prediction: Float64s
    calibration: Float64s
    log_loss: Float64s
    auc: Float64s
    gauc: float  # mean of the groups' AUC by weight, over groups that have both labels
    groups_seen: float  # exact while all fit, else estimated from the mixed keys that stayed
    overflow_weight: float  # weight of occurrences in groups that did not stay


class GroupMetrics:
    """Metrics of at most `groups` values of slot number `slot`."""

    def __init__(
        self, slot: int, groups: int = GROUPS, buckets: int = GROUP_BUCKETS, logit_limit: float = LOGIT_LIMIT
    ) -> None:
        if slot < 0 or groups < 1 or not 1 <= buckets < 2**31 or not 0 < logit_limit < math.inf:
            raise ArgumentError(
                f"group metrics need a slot number and at least one group and bucket; got {slot=}, {groups=}, "
                f"{buckets=}, {logit_limit=}"
            )
        self._clear(slot, groups, buckets, logit_limit)

    def update(self, batch: Batch, logits: Floats) -> None:
        """Count a batch; examples that cannot be counted raise, and then none is."""
        if self.slot >= batch.slots:
            raise ArgumentError(f"metrics by slot {self.slot} cannot count a batch of {batch.slots} slots")
        check_examples(batch.labels, logits, batch.example_weights)
        losses, predictions = np.empty((2, batch.examples), np.float64)
        library().metric_score(
            labels=batch.labels, logits=logits, n=batch.examples, losses=losses, predictions=predictions
        )
        done = 0
        while True:
            done = library().metric_group_update(
                labels=batch.labels,
                logits=logits,
                weights=batch.example_weights,
                losses=losses,
                predictions=predictions,
                first_example=done,
                n=batch.examples,
                keys=batch.keys,
                offsets=batch.offsets,
                slots=batch.slots,
                slot=self.slot,
                limit=self.logit_limit,
                buckets=self.buckets,
                highest=self._highest,
                totals=self._totals,
                **self._table(),
            )
            if done == batch.examples:
                break
            bag = batch.offsets[done * batch.slots + self.slot :][:2]
            self._make_room(int(bag[1] - bag[0]))
        self._check_total()

    def merge(self, other: GroupMetrics) -> None:
        """Count what `other` has counted; it must be of the same slot, groups and buckets."""
        if self._settings() != other._settings():
            raise ArgumentError(
                f"group metrics {other._settings()} do not merge into {self._settings()}; make them alike"
            )
        groups, places, sums = other._entries()
        self._make_room(len(groups))
        self._insert(groups, places, sums)
        self._totals[:2] += other._totals[:2]  # two numbers under 2**62 each
        self._check_total()

    def values(self) -> GroupValues:
        """The metrics now."""
        mixed, _, sums = self._entries()
        starts = (
            np.flatnonzero(np.concatenate([[True], mixed[1:] != mixed[:-1]])) if len(mixed) else np.zeros(0, np.int64)
        )
        aucs = np.empty(len(starts), np.float64)
        library().metric_group_aucs(sums=sums, starts=np.append(starts, len(mixed)), groups=len(starts), aucs=aucs)
        keys = _unmixed(mixed[starts])
        order = np.argsort(keys)
        totals = np.add.reduceat(sums, starts, axis=0)[order] if len(starts) else np.zeros((0, 4), np.int64)
        units = (totals[:, 0] + totals[:, 1]).astype(np.float64)
        positive, weight = totals[:, 0] / WEIGHT_ONE, units / WEIGHT_ONE
        loss, prediction = totals[:, 2] / GROUP_ONE, totals[:, 3] / GROUP_ONE
        aucs = aucs[order]
        known = ~np.isnan(aucs)
        with np.errstate(divide="ignore", invalid="ignore"):
            calibration = np.where(positive > 0, prediction / positive, np.nan)
            means = [np.where(weight > 0, total / weight, np.nan) for total in (positive, prediction, loss)]
        known_weight = math.fsum(weight[known])
        return GroupValues(
            keys=keys[order],
            weight=weight,
            mean_label=means[0],
            mean_prediction=means[1],
            calibration=calibration,
            log_loss=means[2],
            auc=aucs,
            gauc=math.fsum(weight[known] * aucs[known]) / known_weight if known_weight else math.nan,
            groups_seen=self._groups_seen(len(starts)),
            overflow_weight=(int(self._totals[0]) - int(totals[:, :2].sum())) / WEIGHT_ONE,
        )

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """All of it as arrays, in a fixed order; `tolist` of each makes JSON."""
        groups, places, sums = self._entries()
        return {
            "settings": np.array([self.slot, self.groups, self.buckets, self.logit_limit], np.float64),
            "totals": self._totals[:2].copy(),
            "groups": groups,
            "places": places,
            "sums": sums,
        }

    def load(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Become what `state` was taken of; arrays may have become lists on the way."""
        slot, groups, buckets, limit = np.asarray(state["settings"], np.float64).tolist()
        self._clear(int(slot), int(groups), int(buckets), limit)
        mixed = np.asarray(state["groups"], np.uint64)
        self._make_room(len(mixed))
        self._insert(mixed, np.asarray(state["places"], np.uint32), np.asarray(state["sums"], np.int64).reshape(-1, 4))
        self._totals[:2] = state["totals"]

    def _clear(self, slot: int, groups: int, buckets: int, logit_limit: float) -> None:
        self.slot = slot
        self.groups = groups
        self.buckets = buckets
        self.logit_limit = logit_limit
        self._highest = _EVERY_GROUP  # mixed keys over this cannot stay
        self._totals = np.zeros(3, np.int64)  # weight, loss, entries in the table
        self._make_table(_FIRST_CAPACITY)

    def _settings(self) -> dict[str, Any]:
        return {"slot": self.slot, "groups": self.groups, "buckets": self.buckets, "logit_limit": self.logit_limit}

    def _make_table(self, capacity: int) -> None:
        self._groups: Keys = np.empty(capacity, np.uint64)
        self._places: npt.NDArray[np.uint32] = np.zeros(capacity, np.uint32)
        self._sums: Int64s = np.zeros((capacity, 4), np.int64)
        self._totals[2] = 0

    def _table(self) -> dict[str, Any]:
        """What natives take."""
        return {"groups": self._groups, "places": self._places, "sums": self._sums, "mask": len(self._places) - 1}

    def _insert(self, groups: Keys, places: npt.NDArray[np.uint32], sums: Int64s) -> None:
        """Add entries for which there is room."""
        self._totals[2] = library().metric_group_insert(
            from_groups=groups,
            from_places=places,
            from_sums=sums,
            n=len(groups),
            entries=int(self._totals[2]),
            **self._table(),
        )

    def _make_room(self, entries: int) -> None:
        """Drop groups that cannot stay; then make a table in which `entries` more are a quarter at most."""
        kept = self._entries()
        capacity = _FIRST_CAPACITY
        while capacity < 4 * (len(kept[0]) + entries):
            capacity *= 2
        self._make_table(capacity)
        self._insert(*kept)

    def _entries(self) -> tuple[Keys, npt.NDArray[np.uint32], Int64s]:
        """The entries of the groups that stay, by (mixed key, place)."""
        filled = np.flatnonzero(self._places)
        groups, places = self._groups[filled], self._places[filled]
        distinct = np.unique(groups)
        if len(distinct) >= self.groups:
            self._highest = int(distinct[self.groups - 1])
            stays = groups <= distinct[self.groups - 1]
            filled, groups, places = filled[stays], groups[stays], places[stays]
        order = np.lexsort((places, groups))
        return groups[order], places[order], self._sums[filled[order]]

    def _groups_seen(self, kept: int) -> float:
        """The k-th smallest of n uniform numbers in [0, 1] lies at about k / (n + 1)."""
        if kept < self.groups:
            return float(kept)
        return max(float(kept), (kept - 1) / (self._highest / 2**64) if kept > 1 else 1.0)

    def _check_total(self) -> None:
        weight, loss, _ = self._totals.tolist()
        if max(weight, loss) >= _TOTAL_LIMIT:
            raise CapacityError(
                f"a total weight of {weight / WEIGHT_ONE:.4g} and a total loss of {loss / GROUP_ONE:.4g} do not fit, "
                f"group metrics hold less than {_TOTAL_LIMIT / WEIGHT_ONE:.4g} and {_TOTAL_LIMIT / GROUP_ONE:.4g}; "
                "begin new ones"
            )


def _unmixed(mixed: Keys) -> Keys:
    """The keys whose `mix64` these are: each of its steps undone, last first."""
    x: Keys = mixed ^ (mixed >> np.uint64(31)) ^ (mixed >> np.uint64(62))
    x = x * np.uint64(0x319642B2D24D8EC3)
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x = x * np.uint64(0x96DE1B173F119089)
    x = x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))
    return x
