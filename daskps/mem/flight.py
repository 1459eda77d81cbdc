"""Batches in flight: which rows of a batch are pinned, what waits for it, and whether a push may be taken.

In: a working set and the slots its rows are pinned in. Out: a `Flight` that lives until every row is pushed; the slots
a push goes to, or the error that says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from daskps.errors import ProtocolError
from daskps.mem.cache import BATCHES_IN_FLIGHT, NONE, Cache, Slots
from daskps.mem.delivery import Positions
from daskps.mem.working_set import WorkingSet
from daskps.types import Floats, Keys


@dataclass(frozen=True, slots=True)
class Waiting:
    """Late rows of one node's pull that the owner sends when `after` has pushed them."""

    node: int
    after: int  # batch
    positions: Positions
    slots: Slots
    out: Floats | None


@dataclass(frozen=True, slots=True)
class Push:
    """Rows that a node has trained, on their way into `slots`."""

    slots: Slots
    rows: Floats


@dataclass(slots=True)
class Flight:
    """A batch whose rows are pinned: it is over when all of them are pushed."""

    batch: int
    slots: Slots  # (U,) of each key
    remaining: int  # rows not taken back yet
    working_set: WorkingSet | None = None  # with more than one node: who holds what
    pushed: npt.NDArray[np.uint8] | None = None  # with more than one node: (U,) 1 where the row has come
    deferred: list[Push] = field(default_factory=list)  # came before earlier batches were over
    waiting: list[Waiting] = field(default_factory=list)

    def move(self, first: int, moved: Slots) -> None:
        """Rows from slot `first` on have moved: to moved[0], moved[1] and so on."""
        self.slots = _moved(self.slots, first, moved)
        self.deferred = [Push(_moved(push.slots, first, moved), push.rows) for push in self.deferred]
        self.waiting = [
            Waiting(one.node, one.after, one.positions, _moved(one.slots, first, moved), one.out)
            for one in self.waiting
        ]

    def claim(self, keys: Keys, node: int, cache: Cache) -> Slots:
        """Slots of keys that `node` may push; each can be claimed once. If any may not: ProtocolError, and no claim."""
        if self.working_set is not None:
            return self._claim_shared(keys, node)
        # Pushed in the order of the pull, as a device's table does, nothing needs to be found.
        if len(keys) == len(self.slots) and cache.check(keys, self.slots, self.batch, claims=False) < 0:
            return self.slots
        slots = cache.find(keys)
        wrong = cache.check(keys, slots, self.batch, claims=True)
        if wrong >= 0:
            raise self._refusal(keys[wrong], node, self._reason(slots[wrong], cache))
        return slots

    def _claim_shared(self, keys: Keys, node: int) -> Slots:
        assert self.working_set is not None
        assert self.pushed is not None
        slots, wrong, why = self.working_set.claim(keys, node, self.pushed, self.slots)
        if wrong < 0:
            return slots
        holders = int(self.working_set.holders_of(keys[wrong : wrong + 1])[0])
        pusher = (holders & -holders).bit_length() - 1
        reasons = {
            1: "no node has pulled in that batch",
            2: f"node {pusher} has to push: the lowest-ranked holder",
            3: "has been pushed already",
            4: "this push names twice",
        }
        raise self._refusal(keys[wrong], node, reasons[why])

    def _reason(self, slot: np.uint32, cache: Cache) -> str:
        if slot == NONE or not np.any(self.slots == slot):
            return "no node has pulled in that batch"
        if not int(cache.entries["holds"][slot]) >> self.batch % BATCHES_IN_FLIGHT & 1:
            return "has been pushed already"
        return "this push names twice"

    def _refusal(self, key: np.uint64, node: int, reason: str) -> ProtocolError:
        return ProtocolError(f"node {node} pushes key {key} in batch {self.batch}, which {reason}; nothing was changed")


def _moved(slots: Slots, first: int, moved: Slots) -> Slots:
    away = slots >= first
    slots = slots.copy()
    slots[away] = moved[slots[away] - np.uint32(first)]
    return slots
