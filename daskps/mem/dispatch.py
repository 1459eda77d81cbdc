"""Rows on their way out: what each node gets of a batch at once, what it copies itself, and what comes later.

In: the pinned rows of a batch, what earlier batches are out with. Out: `Delivery` values; what has to wait is noted in
the `Flight`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from daskps.backend.device import MEMORY
from daskps.mem.cache import Cache, Slots, Visit
from daskps.mem.delivery import NOBODY, NOWHERE, Delivery, Positions
from daskps.mem.flight import Flight, Waiting
from daskps.mem.working_set import Pull, WorkingSet
from daskps.types import Bools, Floats


def first_alone(pull: Pull, visit: Visit, flight: Flight, rows: Floats) -> Delivery:
    """The only node's answer. Its free rows are in `rows` already; only what is late has to be told."""
    later = visit.distances > 1
    late = visit.late[later]
    _wait(flight, pull, late, visit.slots[late], visit.distances[later])
    positions = None
    if len(visit.late):
        free = np.ones(len(pull.keys), np.bool_)
        free[visit.late] = False
        positions = _where(free)
        if pull.out is None:
            rows = rows[positions]
    return Delivery(
        node=pull.node,
        batch=flight.batch,
        first=True,
        positions=positions,
        rows=rows,
        in_place=pull.out is not None,
        copied=visit.late[~later],
        late=late,
        shared=NOWHERE,
        holders=NOBODY,
    )


def first_shared(
    working_set: WorkingSet, visit: Visit, flight: Flight, previous: Flight | None, cache: Cache
) -> list[Delivery]:
    """The answers to all nodes: free rows, and who else holds what."""
    distances = np.zeros(len(working_set), np.uint8)
    distances[visit.late] = visit.distances
    held = None if previous is None or previous.working_set is None else previous.working_set
    before = working_set.held_before(held, distances)
    answers = []
    for pull, indices in zip(working_set.pulls, working_set.indices, strict=True):
        part = working_set.deal(pull.node, indices, distances, before, visit.slots)
        _wait(flight, pull, part.late, part.late_slots, part.late_distances)
        answers.append(
            Delivery(
                node=pull.node,
                batch=flight.batch,
                first=True,
                positions=part.free if len(part.free) < len(indices) else None,
                rows=_copy(cache, part.free_slots, part.free, pull.out),
                in_place=pull.out is not None,
                copied=part.copied,
                late=part.late,
                shared=part.shared,
                holders=part.holders,
            )
        )
    return answers


def late_rows(flight: Flight, pushed: int, cache: Cache) -> list[Delivery]:
    """Rows that waited for batch `pushed` and are here now."""
    answers, still = [], []
    for one in flight.waiting:
        if one.after != pushed:
            still.append(one)
            continue
        ready = cache.ready(one.slots, pushed)
        if not ready.all():
            still.append(Waiting(one.node, pushed, one.positions[~ready], one.slots[~ready], one.out))
        if ready.any():
            positions = one.positions[ready]
            answers.append(
                Delivery(
                    node=one.node,
                    batch=flight.batch,
                    first=False,
                    positions=positions,
                    rows=_copy(cache, one.slots[ready], positions, one.out),
                    in_place=one.out is not None,
                    copied=NOWHERE,
                    late=NOWHERE,
                    shared=NOWHERE,
                    holders=NOBODY,
                )
            )
    flight.waiting = still
    return answers


def _where(chosen: Bools) -> Positions:
    return np.flatnonzero(chosen).astype(np.uint32)


def _wait(flight: Flight, pull: Pull, positions: Positions, slots: Slots, distances: npt.NDArray[np.uint8]) -> None:
    for distance in np.unique(distances):
        mine = distances == distance
        flight.waiting.append(Waiting(pull.node, flight.batch - int(distance), positions[mine], slots[mine], pull.out))


def _copy(cache: Cache, slots: Slots, positions: Positions, out: Floats | None) -> Floats:
    """The rows of `slots`: by themselves, or in `out` at `positions`."""
    if out is not None:
        cache.gather(slots, out, positions=positions)
        return out
    rows: Floats = MEMORY.empty((len(slots), cache.width), np.float32)
    cache.gather(slots, rows)
    return rows
