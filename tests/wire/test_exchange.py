"""Sums over nodes: right, equal on all nodes, and loud when a node is missing."""

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import CapacityError, NonFiniteError, PeerError, ProtocolError, StaleError
from daskps.types import Field, RowLayout
from daskps.wire.collective import mean_dense, sum_dense
from daskps.wire.exchange import Buffers, Exchange, Shared, Touched, merge_replicas, tell
from daskps.wire.message import Message, MessageKind
from daskps.wire.session import WAITS, Session
from tests.simulation.net import Joined, on_all, sum_rows

nodes_and_seed = {"nodes": st.integers(1, 9), "seed": st.integers(0, 2**32)}


@given(**nodes_and_seed)
def test_dense_sums_are_the_sum_on_every_node(nodes: int, seed: int) -> None:
    parts = np.random.default_rng(seed).integers(-(2**40), 2**40, (nodes, 5))
    results = on_all(Joined(nodes, seed), lambda session: sum_dense(session, 0, 0, parts[session.rank]))
    for result in results:
        np.testing.assert_array_equal(result, parts.sum(axis=0))


@given(**nodes_and_seed)
def test_dense_means_are_the_same_bits_on_every_node(nodes: int, seed: int) -> None:
    parts = np.random.default_rng(seed).normal(size=(nodes, 7)).astype(np.float32)
    results = on_all(
        Joined(nodes, seed), lambda session: mean_dense(session, 0, 0, parts[session.rank], 7 * session.rank)
    )
    for mean, count in results:
        np.testing.assert_array_equal(mean, results[0][0])
        assert mean.dtype == np.float32
        assert count == 7 * (nodes - 1)
    np.testing.assert_allclose(results[0][0], parts.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_dense_sums_of_unequal_shape_are_refused() -> None:
    results = on_all(Joined(2), lambda session: sum_dense(session, 3, 4, np.zeros(2 + session.rank, np.int64)))
    assert isinstance(results[0], ProtocolError)
    assert "batch 3, step 4: dense of node 1 is int64(3,), mine is int64(2,)" in str(results[0])


@st.composite
def holdings(draw: st.DrawFn) -> tuple[int, list[list[int]], list[list[int]], int]:
    """Nodes, the keys of each, which of them each touches, a seed."""
    nodes = draw(st.integers(1, 5))
    universe = [0, 1, 5, 9, 2**63, 2**64 - 1]
    held = [draw(st.lists(st.sampled_from(universe), unique=True)) for _ in range(nodes)]
    touched = [[key for key in keys if draw(st.booleans())] for keys in held]
    return nodes, held, touched, draw(st.integers(0, 2**32))


async def begun(session: Session, batch: int, shared: dict[str, Shared]) -> Exchange:
    exchange = Exchange(session, batch, shared, Buffers(), ComputePool(1))
    for table, view in shared.items():
        tell(session, batch, table, view)
    await exchange.begin()
    return exchange


def sharing(held: list[list[int]], rank: int) -> Shared:
    keys = held[rank]
    holders = [sum(1 << other for other, theirs in enumerate(held) if key in theirs) for key in keys]
    shared = [place for place, bits in enumerate(holders) if bits & (bits - 1)]
    shared.sort(key=lambda place: str(keys[place])[::-1])  # any order that is the same on all nodes
    bits = np.array([holders[place] for place in shared], np.uint64)
    return Shared.of(len(keys), np.array(shared, np.int32), bits, rank, len(held))


@given(case=holdings())
def test_a_row_touched_anywhere_has_the_sum_over_all_nodes_on_every_holder(
    case: tuple[int, list[list[int]], list[list[int]], int],
) -> None:
    nodes, held, touched, seed = case
    rng = np.random.default_rng(seed)
    sums = [{key: rng.integers(-(2**50), 2**50, 3) for key in keys} for keys in touched]

    async def step(session: Session) -> list[dict[int, tuple[int, ...]]]:
        exchange = await begun(
            session, 0, {"main": sharing(held, session.rank), "other": sharing([[]] * nodes, session.rank)}
        )
        found = []
        for number in range(2):  # the second step must not see the first
            mine = {key: value for key, value in sums[session.rank].items() if number == 0 or key % 2}
            rows = np.array([held[session.rank].index(key) for key in mine], np.int32)
            values = np.array([*mine.values()], np.int64).reshape(-1, 3)
            empty = Touched(np.empty(0, np.int32), np.empty((0, 2), np.int64))
            result = await sum_rows(exchange, session, 0, number, {"main": Touched(rows, values), "other": empty})
            assert [len(some.rows) for some in result["other"]] == [0, 0]
            pairs = [
                pair for some in result["main"] for pair in zip(some.rows.tolist(), some.sums.tolist(), strict=True)
            ]
            assert len(dict(pairs)) == len(pairs)
            found.append({held[session.rank][row]: tuple(total) for row, total in pairs})
        return found

    results = on_all(Joined(nodes, seed), step)
    for rank, steps in enumerate(results):
        for number, found in enumerate(steps):
            expected: dict[int, tuple[int, ...]] = {}
            for key in held[rank]:
                parts = [theirs[key] for theirs in sums if key in theirs and (number == 0 or key % 2)]
                if parts:
                    expected[key] = tuple(int(value) for value in np.sum(parts, axis=0))
            assert found == expected


@given(case=holdings())
def test_merging_gives_the_mean_over_holders_and_the_largest_count(
    case: tuple[int, list[list[int]], list[list[int]], int],
) -> None:
    nodes, held, touched, seed = case
    layout = RowLayout((Field("embedding", 2), Field("count", 1, "uint32", "max")))
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(len(keys), 3)).astype(np.float32) for keys in held]
    for part in rows:
        part.view(np.uint32)[:, 2] = rng.integers(0, 2**32, len(part))

    async def merge(session: Session) -> dict[int, bytes]:
        mine, keys = rows[session.rank], held[session.rank]
        exchange = await begun(session, 0, {"main": sharing(held, session.rank)})
        marks = np.array([key in touched[session.rank] for key in keys], np.bool_)
        merged = await exchange.merge_rows(0, {"main": marks}, {"main": layout}, lambda _, chosen: mine[chosen])
        return {keys[row]: value.tobytes() for row, value in zip(*merged["main"], strict=True)}

    results = on_all(Joined(nodes, seed), merge) if nodes > 1 else [{}]
    for rank, found in enumerate(results):
        for key in held[rank]:
            holders = [other for other, keys in enumerate(held) if key in keys]
            if len(holders) < 2 or not any(key in touched[other] for other in holders):
                assert key not in found
                continue
            assert all(results[other][key] == found[key] for other in holders)
            values = np.array([rows[other][held[other].index(key)] for other in holders])
            value = np.frombuffer(found[key], np.float32)
            np.testing.assert_allclose(value[:2], values[:, :2].astype(np.float64).mean(axis=0), rtol=1e-6)
            assert value.view(np.uint32)[2] == values.view(np.uint32)[:, 2].max()


STATISTICS = RowLayout(
    (
        Field("embedding", 1),
        Field("shows", 1, "uint32", "sum"),
        Field("value", 1, "float32", "sum"),
        Field("last_step", 1, "uint32", "max"),
        Field("peak", 1, "float32", "max"),
    )
)


def statistics_row(embedding: float, shows: int, value: float, last_step: int, peak: float) -> np.ndarray:
    row = np.array([embedding, 0, value, 0, peak], np.float32)
    row.view(np.uint32)[[1, 3]] = shows, last_step
    return row


def test_statistics_merge_to_what_one_node_would_have_counted() -> None:
    base = statistics_row(1.0, 100, 10.0, 7, -5.0)
    added = [(2.0, 3, 0.5, 11, -6.0), (4.0, 0, 0.0, 7, -5.0), (6.0, 20, 2.0, 9, 1.0)]  # by each of three holders
    mine = [statistics_row(e, 100 + shows, 10 + value, step, peak) for e, shows, value, step, peak in added]

    async def merge(session: Session) -> np.ndarray:
        exchange = await begun(session, 0, {"main": sharing([[5]] * 3, session.rank)})
        marks, layouts = np.array([session.rank == 1]), {"main": STATISTICS}
        row, before = mine[session.rank][None], base[None]
        merged = await exchange.merge_rows(
            0, {"main": marks}, layouts, lambda _, chosen: row[chosen], lambda _, chosen: before[chosen]
        )
        return merged["main"][1][0]

    for found in on_all(Joined(3), merge):
        assert found.tobytes() == statistics_row(4.0, 123, 12.5, 11, 1.0).tobytes()


@given(
    base=st.integers(0, 2**32 - 1),
    added=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
)
def test_a_summed_count_stops_at_its_largest_value(base: int, added: list[int]) -> None:
    layout, rows = RowLayout((Field("shows", 1, "uint32", "sum"),)), np.array([4], np.int32)
    counts = [min(base + more, 2**32 - 1) for more in added]
    replicas = [(rows, np.array([[count]], np.uint32).view(np.float32)) for count in counts]
    found = merge_replicas(layout, rows, replicas, np.array([[base]], np.uint32).view(np.float32))
    assert found.view(np.uint32)[0, 0] == min(base + sum(count - base for count in counts), 2**32 - 1)


def test_a_wait_that_takes_too_long_names_node_stage_and_batch_and_stops_all_nodes() -> None:
    joined = Joined(3, wait_seconds=10)

    async def step(session: Session) -> None:
        exchange = await begun(session, 4, {"main": sharing([[1], [1], [1]], session.rank)})
        joined.lose(2)
        nothing = Touched(np.empty(0, np.int32), np.empty((0, 1), np.int64))
        await sum_rows(exchange, session, 4, 17, {"main": nothing})

    results = on_all(joined, step)
    assert all(isinstance(result, PeerError) for result in results)
    text = " / ".join(map(str, results[:2]))
    assert "stage train, batch 4: waited 10 s for node 2 to send gradient sums, step 17" in text
    assert "cluster.wait_seconds" in text
    # Both waited for node 2; whichever gave up first told the other, or the other gave up itself.
    assert all(session.error is not None for session in joined.sessions[:2])


@pytest.mark.parametrize("kind", WAITS)
def test_every_wait_for_a_peer_ends_and_names_node_stage_and_batch(kind: MessageKind) -> None:
    joined = Joined(2, wait_seconds=10)

    async def wait(session: Session) -> tuple[Exception, float]:
        with pytest.raises(PeerError) as raised:
            await session.receive(kind, 4, 1, step=3, table="main")
        return raised.value, asyncio.get_running_loop().time()

    ((error, seconds),) = on_all(joined, wait, ranks=[0])
    assert seconds == 10
    stage, what = WAITS[kind]
    assert f"node 0, stage {stage}, batch 4: waited 10 s for node 1 to send {what} of table 'main', step 3" in str(
        error
    )
    assert joined.sessions[0].error is error


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda numbers, widths, values: (numbers + np.int32(9), widths, values), ProtocolError),
        (lambda numbers, widths, values: (numbers - np.int32(9), widths, values), ProtocolError),
        (lambda numbers, widths, values: (numbers, widths + np.uint8(8), values), ProtocolError),
        (lambda numbers, widths, values: (numbers, widths * np.uint8(0), values), ProtocolError),
        (lambda numbers, widths, values: (numbers, widths, values[:-1]), ProtocolError),
        (lambda numbers, widths, values: (numbers, widths, np.append(values, values)), ProtocolError),
        (lambda numbers, widths, values: (numbers, widths[:-1], values), ProtocolError),
        (lambda numbers, widths, values: (numbers, np.full_like(widths, 8), np.full(48, 63, np.uint8)), NonFiniteError),
    ],
)
def test_sums_that_make_no_sense_are_refused(spoil: Callable[..., Any], error: type[Exception]) -> None:
    async def step(session: Session) -> None:
        exchange = await begun(session, 0, {"main": sharing([[1, 2, 3]] * 2, session.rank)})
        mine = {"main": Touched(np.arange(3, dtype=np.int32), np.full((3, 2), -5, np.int64))}
        packed = exchange.pack(mine)
        exchange.add(mine, {1 - session.rank: spoil(*packed[1 - session.rank])})

    assert [type(result) for result in on_all(Joined(2), step)] == [error] * 2


@pytest.mark.parametrize("numbers", [np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros(0, np.int32)], ids=repr)
def test_numbers_of_other_rows_than_are_held_together_are_refused(numbers: np.ndarray) -> None:
    async def step(session: Session) -> None:
        exchange = Exchange(session, 4, {"main": sharing([[1, 2, 3]] * 2, session.rank)}, Buffers(), ComputePool(1))
        session.send(1 - session.rank, MessageKind.POSITIONS, 4, table="main", arrays=(numbers,))
        await exchange.begin()

    for result in on_all(Joined(2), step):
        assert isinstance(result, ProtocolError)
        assert "batch 4" in str(result)


def test_sums_of_other_tables_are_refused() -> None:
    async def step(session: Session) -> None:
        exchange = await begun(session, 0, {"main": sharing([[1]] * 2, session.rank)})
        mine = {"main": Touched(np.zeros(1, np.int32), np.ones((1, 1), np.int64))}
        exchange.add(mine, {1 - session.rank: (*exchange.pack(mine)[1 - session.rank],) * 2})

    assert all("other tables" in str(result) for result in on_all(Joined(2), step))


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        (MessageKind.TOUCHED, ()),
        (
            MessageKind.TOUCHED,
            (np.zeros(1, np.uint8),),
        ),  # nine rows need two bytes; NumPy would take the rest for untouched
        (MessageKind.TOUCHED, (np.zeros(2, np.int8),)),
        (MessageKind.REPLICAS, (np.zeros((1, 2), np.float32),)),  # NumPy would take it for every row
        (MessageKind.REPLICAS, (np.zeros((9, 2), np.float64),)),
        (MessageKind.REPLICAS, (np.zeros((9, 2), np.float32),) * 2),
    ],
    ids=repr,
)
def test_rows_to_merge_that_do_not_fit_are_refused(kind: MessageKind, arrays: tuple[np.ndarray, ...]) -> None:
    held = [list(range(9))] * 2
    layout = RowLayout((Field("embedding", 2),))

    async def step(session: Session) -> None:
        exchange = await begun(session, 4, {"main": sharing(held, session.rank)})
        if session.rank == 1:
            session.send(
                0,
                MessageKind.TOUCHED,
                4,
                arrays=arrays if kind is MessageKind.TOUCHED else (np.full(2, 255, np.uint8),),
            )
            session.send(0, MessageKind.REPLICAS, 4, arrays=arrays)
            return
        await exchange.merge_rows(
            0, {"main": np.ones(9, np.bool_)}, {"main": layout}, lambda _, rows: np.zeros((len(rows), 2), np.float32)
        )

    result = on_all(Joined(2), step)[0]
    assert isinstance(result, ProtocolError)
    assert "node 0, batch 4: to be merged with node 1 are {'main'" in str(result)


@given(st.lists(st.integers(-(2**60), 2**60).flatmap(lambda n: st.integers(0, 60).map(lambda s: n >> s)), min_size=4))
def test_a_packed_sum_has_every_bit(values: list[int]) -> None:
    sums = np.array(values[: len(values) // 2 * 2], np.int64).reshape(-1, 2)
    keys = list(range(len(sums)))

    async def step(session: Session) -> Any:
        exchange = await begun(session, 0, {"main": sharing([keys] * 2, session.rank)})
        touched = np.arange(len(keys) if session.rank else 0, dtype=np.int32)
        _, fresh = (await sum_rows(exchange, session, 0, 0, {"main": Touched(touched, sums[: len(touched)].copy())}))[
            "main"
        ]
        return fresh.rows.tolist(), fresh.sums.tolist()

    received, nothing = on_all(Joined(2), step)
    assert received == (keys, sums.tolist())
    assert nothing == ([], [])


def test_one_failing_node_stops_those_who_wait_for_others_too() -> None:
    joined = Joined(3)

    async def step(session: Session) -> None:
        if session.rank == 0:
            session.fail(CapacityError("the table is full"))
            return
        await session.receive(MessageKind.SUMS, 1, 3 - session.rank)

    results = on_all(joined, step)
    for result in results[1:]:
        assert isinstance(result, PeerError)
        assert "node 0 stopped at batch 0: CapacityError: the table is full" in str(result)


def test_one_node_alone_stops_when_its_incarnation_has_ended() -> None:
    async def step(session: Session) -> None:
        exchange = await begun(session, 0, {"main": sharing([[1]], 0)})
        session.close()
        await sum_rows(exchange, session, 0, 0, {"main": Touched(np.zeros(1, np.int32), np.zeros((1, 1), np.int64))})

    (result,) = on_all(Joined(1), step)
    assert isinstance(result, PeerError)
    assert "has closed incarnation 1" in str(result)


@pytest.mark.parametrize(("run", "incarnation"), [("other", 1), ("run", 0), ("run", 2)])
def test_a_message_of_another_run_or_incarnation_raises(run: str, incarnation: int) -> None:
    session = Joined(2).sessions[0]
    with pytest.raises(
        StaleError, match=f"message sums of batch 5, step 0, from node 1, of run '{run}', incarnation {incarnation}: "
    ):
        session.deliver(Message(MessageKind.SUMS, run, incarnation, 1, 5))


def test_a_message_of_a_batch_that_is_over_or_that_comes_twice_raises() -> None:
    session = Joined(2).sessions[0]
    session.close_batch(3)
    with pytest.raises(StaleError, match="has ended batch 3, but got a message sums of batch 3, step 0, from node 1"):
        session.deliver(Message(MessageKind.SUMS, "run", 1, 1, 3))
    session.deliver(Message(MessageKind.SUMS, "run", 1, 1, 4))
    with pytest.raises(ProtocolError, match="node 0 got twice: message sums of batch 4"):
        session.deliver(Message(MessageKind.SUMS, "run", 1, 1, 4))
    with pytest.raises(ProtocolError, match="ends batch 4, but nothing has received: message sums of batch 4"):
        session.close_batch(4)


def test_rows_are_moved_without_a_look_past_the_end_of_their_positions() -> None:
    # The positions end where memory that nobody may read begins: a look past them is a segmentation fault.
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    positions = np.frombuffer(memory, np.int64, count=page // 8)[-20:]
    positions[:] = np.arange(20)[::-1]
    rows, out = np.arange(100, dtype=np.float32).reshape(20, 5), np.zeros((20, 5), np.float32)
    library().link_gather(rows=rows, width=5, positions=positions, n=20, out=out)
    np.testing.assert_array_equal(out, rows[::-1])
    library().link_scatter(rows=out, width=5, positions=positions, n=20, values=rows[::-1].copy())
    np.testing.assert_array_equal(out, rows)
