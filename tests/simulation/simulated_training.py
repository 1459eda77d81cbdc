"""The train stage of a simulated node over the real exchange: nodes step together, or alone with merges.

In: a batch in flight whose rows are there. Out: its rows and the node's dense word, trained. What they must be is in
`tests.simulation.reference`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from daskps.types import BatchId
from daskps.wire.collective import mean_dense, sum_dense
from daskps.wire.exchange import Exchange, Touched
from tests.simulation import reference
from tests.simulation.net import sum_rows
from tests.simulation.reference import Row

if TYPE_CHECKING:
    from tests.simulation.simulated_node import SimFlight, SimNode


async def train_together(node: SimNode, flight: SimFlight, exchange: Exchange, token: BatchId) -> None:
    """Train every step with the sums of all nodes."""
    for step in range(token.first_step, token.stop_step):
        peers, touched, total, examples = node.joined, {}, 0, node.slice(step)
        for table in flight.rows:
            sums = own_sums(node, flight, table, examples)
            places, values = np.array([*sums], np.int32), np.array([*sums.values()], np.int64)
            touched[table] = Touched(places, values.reshape(-1, 1))
            total += sum(sums.values())
        summed, dense = await asyncio.gather(
            sum_rows(exchange, peers.session, token.batch, step, touched),
            sum_dense(peers.session, token.batch, step, np.array([total, len(examples)], np.int64)),
        )
        assert dense[1] == node.world.data.step_examples
        node.dense = (node.dense[0] * 3 + int(dense[0])) & reference.MASK, 0
        for table in flight.rows:
            for some in summed[table]:
                update(flight, table, dict(zip(some.rows.tolist(), some.sums[:, 0].tolist(), strict=True)))
        await node.dawdle()


async def train_apart(node: SimNode, flight: SimFlight, exchange: Exchange, token: BatchId, every: int) -> None:
    """Train every step with this node's examples alone; merge every `sync_every` steps and after the last one."""
    touched = {table: np.zeros(len(rows), np.bool_) for table, rows in flight.rows.items()}
    for step in range(token.first_step, token.stop_step):
        total, examples = 0, node.slice(step)
        for table in flight.rows:
            sums = own_sums(node, flight, table, examples)
            update(flight, table, sums, apart=True)
            touched[table][[*sums]] = True
            total += sum(sums.values())
        if examples:
            node.dense = reference.updated(node.dense, total, apart=True)
        if node.nodes > 1 and ((step + 1) % every == 0 or step + 1 == token.stop_step):
            await merge(node, flight, exchange, token.batch, step, touched)
        await node.dawdle()


async def merge(
    node: SimNode, flight: SimFlight, exchange: Exchange, batch: int, step: int, touched: dict[str, np.ndarray]
) -> None:
    """Replace rows by their mean over the holders, and the dense word by its mean over all nodes."""
    peers, (value, count), layouts = node.joined, node.dense, dict.fromkeys(flight.rows, node.world.layout)
    rows, (mean, most) = await asyncio.gather(
        exchange.merge_rows(step, touched, layouts, lambda table, places: flight.rows[table][places]),
        mean_dense(peers.session, batch, step, np.array([value], np.uint32).view(np.float32), count),
    )
    for table, (places, values) in rows.items():
        flight.rows[table][places] = values
        touched[table][:] = False
    node.dense = int(mean.view(np.uint32)[0]), most
    node.world.merges += 1


def own_sums(node: SimNode, flight: SimFlight, table: str, examples: range) -> dict[int, int]:
    """Return the sums of all rows that this node's examples of a step touch, by position."""
    keys, places, bits = node.world.data.keys, flight.places[table], flight.rows[table].view(np.uint32)
    rows: dict[int, Row] = {}
    sums: dict[int, int] = {}
    for example in examples:
        for key in keys[example][int(table)]:
            place = places[key]
            if place not in rows:
                rows[place] = tuple(bits[place].tolist())
            sums[place] = sums.get(place, 0) + reference.gradient(example, key, rows[place])
    return sums


def update(flight: SimFlight, table: str, sums: dict[int, int], apart: bool = False) -> None:
    bits = flight.rows[table].view(np.uint32)
    for place, total in sums.items():
        bits[place] = reference.updated(tuple(bits[place].tolist()), total, apart)
