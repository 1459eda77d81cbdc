"""An owner serves what it is asked for in turn; who asks for something else stops the run and is named."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from daskps.errors import DaskpsError, PeerError, ProtocolError, StaleError, TrainingError
from daskps.wire.client import hash_rows, run_inline
from daskps.wire.message import Message, MessageKind
from daskps.wire.owner import Owner
from daskps.wire.session import Session
from tests.simulation.net import Joined, on_all

KEYS = np.array([5], np.uint64)
ROW = np.zeros((1, 2), np.float32)


class Rows:
    """A partition that takes everything and gives nothing, or raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def pull(self, *args: Any, **options: Any) -> list[Any]:
        if self.error is not None:
            raise self.error
        return []

    def push(self, *args: Any) -> list[Any]:
        return []

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        return np.zeros((len(keys), 2), np.float32)

    def flush_begin(self, batch: int, snapshot_id: str) -> None: ...

    def next_piece(self) -> None:
        return None


def serving(play: Callable[[Session, Owner], Awaitable[Any]], error: Exception | None = None) -> Any:
    """What comes of `play` on node 0 of two, which owns table "t" from batch 3 on."""

    async def main(session: Session) -> Any:
        owner = Owner(session, {"t": Rows(error)}, run_inline, run_inline, 3)
        try:
            return await play(session, owner)
        finally:
            owner.close()

    return on_all(Joined(2, wait_seconds=10), main, ranks=[0])[0]


def said(
    kind: MessageKind, batch: int, sender: int = 1, *arrays: np.ndarray, table: str = "t", note: str = ""
) -> Message:
    return Message(kind, "run", 1, sender, batch, table=table, note=note, arrays=arrays or (KEYS,))


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([said(MessageKind.PULL, 3, table="x")], ProtocolError, "node 1 asks for table 'x'; there are t"),
        (
            [said(MessageKind.PULL, 3), said(MessageKind.PULL, 3)],
            StaleError,
            "message pull of batch 3, step 0, table 't', from node 1 came twice",
        ),
        ([said(MessageKind.PUSH, 2)], StaleError, "came after that batch was over; batch 3 is being served"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_asks_out_of_turn_is_refused_and_named(messages: list[Message], error: type[Exception], text: str) -> None:
    async def play(session: Session, owner: Owner) -> None:
        for message in messages:
            session.deliver(message)

    result = serving(play)
    assert type(result) is error
    assert text in str(result)


async def failed(session: Session) -> DaskpsError:
    """What has stopped the node, when it has."""
    with pytest.raises(DaskpsError) as raised:
        await session.receive(MessageKind.FOUND, 99, 1)
    return raised.value


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [said(MessageKind.PULL, 3, sender) for sender in (0, 1)],
            "node 0 cannot serve its rows: OSError('no such disk')",
        ),
        ([said(MessageKind.PUSH, 3)], "node 0 cannot serve its rows: ValueError"),  # keys, but no rows
    ],
    ids=["disk", "push"],
)
def test_what_goes_wrong_in_serving_stops_the_run(messages: list[Message], text: str) -> None:
    async def play(session: Session, owner: Owner) -> DaskpsError:
        for message in messages:
            session.deliver(message)
        return await failed(session)

    result = serving(play, OSError("no such disk"))
    assert isinstance(result, TrainingError)
    assert text in str(result)


def test_a_lookup_while_batches_are_pushed_stops_the_run() -> None:
    async def play(session: Session, owner: Owner) -> DaskpsError:
        for message in [
            *(said(MessageKind.PUSH, batch, node, KEYS, ROW) for batch in (3, 4) for node in (0, 1)),
            said(MessageKind.LOOKUP, 3),
        ]:
            session.deliver(message)
        return await failed(session)

    result = serving(play)
    assert isinstance(result, ProtocolError)
    assert "looks up table 't' as of batch 3, but rows of batch 5 were pushed" in str(result)


def test_replicas_that_differ_stop_the_run_and_the_row_is_named() -> None:
    async def play(session: Session, owner: Owner) -> DaskpsError:
        for node in (0, 1):
            session.deliver(said(MessageKind.PUSH, 3, node, KEYS, ROW, KEYS, hash_rows(ROW + np.float32(node))))
        return await failed(session)

    result = serving(play)
    assert isinstance(result, TrainingError)
    assert "replicas differ after batch 3: table 't', key 5, nodes 0 and 1, and 0 more" in str(result)


def test_a_snapshot_that_is_never_prepared_is_given_up_and_named() -> None:
    result = serving(lambda session, owner: owner.prepared("000001-00000003", 3))
    assert isinstance(result, PeerError)
    assert "node 0, stage flush, batch 3: waited 10 s for snapshot 000001-00000003 of table 't'" in str(result)
