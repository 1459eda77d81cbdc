"""How many steps of a batch all nodes can take, from the distinct keys that each found in it.

In: one `Fit` of every node. Out: a number of steps; the tightest device or owner decides, for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 0.9  # of what fits: fewer steps have more distinct keys each


@dataclass(frozen=True, slots=True)
class Fit:
    """What one node says of a batch when it knows its keys. A few numbers a table and node."""

    rank: int
    device_steps: int  # from the batch's first, whose rows fit the devices of this node
    asked: tuple[tuple[int, ...], ...]  # by table: distinct keys that it will ask of each rank
    capacity: tuple[int, ...]  # by table: rows of one batch that this node can serve to all
    shares: int = 1  # of the memory for batches in flight that it takes here, one for each that may be


def fitting_steps(steps: int, fits: Sequence[Fit]) -> int:
    """Steps, from the batch's first, that fit everywhere; at least one, which a node has refused if it cannot be.

    A key that several nodes ask for counts several times: who shares what is known only when it is too late to cut.
    """
    fitting = min(fit.device_steps for fit in fits)
    for owner in fits:
        for table, capacity in enumerate(owner.capacity):
            wanted = sum(fit.asked[table][owner.rank] for fit in fits)
            if wanted > capacity:
                fitting = min(fitting, max(1, int(steps * capacity * SLACK / wanted)))
    return fitting
