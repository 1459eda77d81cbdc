"""Pulls from an owner that answers something else than it was asked for: refused, never taken for rows."""

from typing import Any

import numpy as np
import pytest

from daskps.errors import ProtocolError
from daskps.storage.partition import KeysByOwner
from daskps.wire import client
from daskps.wire.client import PullResult
from daskps.wire.message import MessageKind
from daskps.wire.session import Session
from tests.simulation.net import Joined, on_all

ORDERED = KeysByOwner(None, np.array([0, 0, 3]))  # node 1 owns all three keys, which stand in that order
SHUFFLED = KeysByOwner(np.array([2, 0, 1]), np.array([0, 0, 3]))
NONE = np.empty(0, np.uint32)
NOBODY = np.empty(0, np.uint64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def pull_from(owners: KeysByOwner, answer: tuple[Any, ...], deferred: tuple[Any, ...] = (), note: str = "all") -> Any:
    """What node 0 makes of an owner, node 1, that sends this: the rows, or the error."""
    out = np.full((3, 2), np.nan, np.float32)

    async def play(session: Session) -> np.ndarray | None:
        if session.rank == 1:
            session.send(0, MessageKind.ANSWER, 0, table="t", note=note, arrays=answer)
            if deferred:
                session.send(0, MessageKind.DEFERRED, 0, table="t", arrays=deferred)
            return None
        session.handle(MessageKind.PULL, lambda message: None)
        session.send(0, MessageKind.ANSWER, 0, table="t", arrays=(NONE, NONE, NONE, NOBODY, ROWS[:0]))
        keys = np.array([10, 11, 12], np.uint64)
        pulled: PullResult = await client.pull(session, 0, "t", keys, owners, out, client.run_inline)
        async for _ in client.deferred_rows(session, pulled, out, client.run_inline):
            pass
        return out

    joined = Joined(2)
    joined.sessions[1].handle(MessageKind.PULL, lambda message: None)
    return on_all(joined, play)[0]


@pytest.mark.parametrize(("owners", "places"), [(ORDERED, [0, 1, 2]), (SHUFFLED, [2, 0, 1])], ids=["ordered", "any"])
def test_rows_of_all_keys_of_some_and_deferred_ones_come_to_their_places(
    owners: KeysByOwner, places: list[int]
) -> None:
    expected = np.empty_like(ROWS)
    expected[places] = ROWS
    found = [
        pull_from(owners, (NONE, NONE, NONE, NOBODY, ROWS)),
        pull_from(owners, (NONE, numbers(1), NONE, NOBODY, ROWS[[2, 0]], numbers(2, 0)), (numbers(1), ROWS[[1]])),
    ]
    for rows in found:
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("owners", [ORDERED, SHUFFLED], ids=["ordered", "any"])
@pytest.mark.parametrize(
    "answer",
    [
        (),
        (NONE, NONE, NONE, NOBODY),  # as if the rows were in place
        (NONE, NONE, NONE, NOBODY, ROWS[:2]),
        (NONE, NONE, NONE, NOBODY, ROWS.reshape(2, 3)),
        (NONE, NONE, NONE, NOBODY, np.zeros((3, 3), np.float32)),
        (NONE, NONE, NONE, NOBODY, ROWS.astype(np.float64)),
        (NONE, NONE, NONE, NOBODY, ROWS[:2], numbers(0, 1)),  # nothing is said of the third
        (NONE, NONE, NONE, NOBODY, ROWS, numbers(0, 1, 3)),
        (NONE, NONE, NONE, NOBODY, ROWS, np.array([0, 1, 2])),
        (NONE, NONE, NONE, NOBODY, ROWS, numbers(0, 1)),
        (numbers(3), NONE, NONE, NOBODY, ROWS[:2], numbers(0, 1)),
        (numbers(0).reshape(1, 1), NONE, NONE, NOBODY, ROWS[:2], numbers(1, 2)),
        (numbers(0).reshape(()), NONE, NONE, NOBODY, ROWS[:2], numbers(1, 2)),
        (NONE, NONE, numbers(7), np.array([3], np.uint64), ROWS),
        (NONE, NONE, numbers(0, 1), np.array([3], np.uint64), ROWS),
    ],
    ids=repr,
)
def test_an_answer_that_does_not_fit_what_was_asked_for_is_refused(
    owners: KeysByOwner, answer: tuple[Any, ...]
) -> None:
    result = pull_from(owners, answer, note="in place")
    assert isinstance(result, ProtocolError), result
    assert "node 1" in str(result) or "were wanted" in str(result)


@pytest.mark.parametrize("owners", [ORDERED, SHUFFLED], ids=["ordered", "any"])
@pytest.mark.parametrize(
    "deferred",
    [
        (numbers(1),),  # as if the row were in place
        (NONE, ROWS[:0]),
        (numbers(1, 2), ROWS[:2]),
        (numbers(3), ROWS[:1]),
        (numbers(1), ROWS[:2]),
        (numbers(1), ROWS[:1].astype(np.float64)),
    ],
    ids=repr,
)
def test_deferred_rows_that_are_not_the_ones_owed_are_refused(owners: KeysByOwner, deferred: tuple[Any, ...]) -> None:
    result = pull_from(owners, (NONE, numbers(1), NONE, NOBODY, ROWS[[2, 0]], numbers(2, 0)), deferred)
    assert isinstance(result, ProtocolError), result


@pytest.mark.parametrize("found", [ROWS[:2], ROWS.reshape(2, 3), ROWS.astype(np.float64)], ids=repr)
def test_rows_looked_up_that_do_not_fit_are_refused(found: np.ndarray) -> None:
    joined, out = Joined(2), np.empty((3, 2), np.float32)

    async def play(session: Session) -> None:
        session.handle(MessageKind.LOOKUP, lambda message: None)
        if session.rank == 1:
            session.send(0, MessageKind.FOUND, 1, table="t", arrays=(found,))
            return
        session.send(0, MessageKind.FOUND, 1, table="t", arrays=(ROWS[:0],))
        keys = np.array([10, 11, 12], np.uint64)
        await client.lookup(session, 0, 0, "t", keys, ORDERED, out, client.run_inline)

    result = on_all(joined, play)[0]
    assert isinstance(result, ProtocolError), result
    assert "3 rows of 2 float32 values were wanted" in str(result)
