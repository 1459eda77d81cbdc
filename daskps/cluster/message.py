"""What nodes say to each other: a small header and NumPy arrays. Nothing here is ever unpickled.

In and out: `Message`. Every one carries run, epoch and batch, so that a late one of a run that was given up is known as
such wherever it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message. (kind, batch, step, table, sender) is unique within an epoch."""

    kind: str
    run: str
    epoch: int
    sender: int  # rank
    batch: int
    step: int = 0  # within the batch; also numbers several messages of one kind
    table: str = ""
    note: str = ""  # a snapshot's id, or what went wrong
    arrays: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


ABORT = "abort"  # tells a peer to stop; `note` says why


def refusal(message: Message, rank: int, error: Exception) -> Message:
    """What a node answers to a message that does not belong there, in the sender's own run and epoch: stop."""
    note = f"{type(error).__name__}: {error}"
    return Message(ABORT, message.run, message.epoch, rank, message.batch, note=note)


class Network(Protocol):
    """Carries messages between the nodes of one run. Any order, no duplicates; a lost peer is reported, not hidden."""

    def send(self, rank: int, message: Message) -> None:
        """Put a message on its way and return at once. The arrays are not changed afterwards by the sender."""
        ...
