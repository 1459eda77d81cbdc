"""A few sessions and a network with random delays, for tests of one exchange."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from daskps.wire.collective import HostCollective, Tag, swap
from daskps.wire.exchange import Exchange, Touched
from daskps.wire.message import Message, MessageKind
from daskps.wire.session import Member, Session
from tests.simulation.simloop import SimLoop


class Joined:
    """`nodes` connected sessions. `lose(rank)` disconnects a node."""

    def __init__(self, nodes: int, seed: int = 0, wait_seconds: float = 60.0) -> None:
        self.rng = random.Random(seed)
        self.lost: set[int] = set()
        self.sessions = [
            Session(Member("run", 1, rank, nodes, wait_seconds), _Link(self, rank)) for rank in range(nodes)
        ]

    def lose(self, rank: int) -> None:
        self.lost.add(rank)

    def carry(self, sender: int, receiver: int, message: Message) -> None:
        if not {sender, receiver} & self.lost:
            loop = asyncio.get_running_loop()
            loop.call_later(self.rng.random(), self.sessions[receiver].deliver, message)


class _Link:
    def __init__(self, joined: Joined, rank: int) -> None:
        self._joined, self._rank = joined, rank

    def send(self, rank: int, message: Message) -> None:
        self._joined.carry(self._rank, rank, message)


def on_all(joined: Joined, call: Callable[[Session], Awaitable[Any]], ranks: list[int] | None = None) -> list[Any]:
    """Run `call` on every node at once; return results, or errors, by rank."""

    async def main() -> list[Any]:
        chosen = range(len(joined.sessions)) if ranks is None else ranks
        return await asyncio.gather(*(call(joined.sessions[rank]) for rank in chosen), return_exceptions=True)

    return SimLoop().run(main())  # type: ignore[no-any-return]


async def sum_rows(
    exchange: Exchange, session: Session, batch: int, step: int, touched: Mapping[str, Touched]
) -> dict[str, tuple[Touched, Touched]]:
    """The sums over all nodes of one step, as `BatchExchange` gets them in two halves."""
    return exchange.add(touched, await swap(session, Tag(MessageKind.SUMS, batch, step), exchange.pack(touched)))


@dataclass(frozen=True)
class SimHandle:
    """A call that is under way on a simulated loop. `wait` lets time pass until it is done."""

    loop: SimLoop
    task: asyncio.Task[Any]

    def wait(self) -> Any:
        async def done() -> Any:
            return await self.task

        return self.loop.run(done())


def collectives(joined: Joined) -> list[HostCollective]:
    """The collective of every node over the simulated network. All share one thread: start on all, then wait."""
    loop = SimLoop()

    def start(coroutine: Coroutine[Any, Any, Any]) -> SimHandle:
        return SimHandle(loop, loop.create_task(coroutine))

    return [HostCollective(session, start) for session in joined.sessions]
