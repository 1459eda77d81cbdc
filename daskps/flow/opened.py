"""What the driver learns of a node that has opened the model: where training goes on, and over what."""

from __future__ import annotations

from dataclasses import dataclass

from daskps.data.order import Steps
from daskps.flow.progress import Validation


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node tells the driver when it is open."""

    epoch: int
    address: str  # of its link, for the other nodes
    directory: str
    snapshot: str | None  # that it was opened from
    batch: int  # the last one that the snapshot holds; -1 for a new model
    position: int
    rows: int  # of all epochs of the data
    steps: Steps
    validation_rows: int
    read_steps: int  # that one read may have
    metrics: dict[str, float]
    validations: tuple[Validation, ...] = ()  # that came before the snapshot
