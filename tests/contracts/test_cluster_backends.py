"""The contract of `ClusterBackend`. A new implementation subclasses `BackendContract` and says how it is made."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from distributed.utils import sync

from daskps.driver.dask import DaskBackend, local_workers, run_blocking
from daskps.driver.tasks import ClusterBackend, Task
from daskps.errors import StaleError
from daskps.node.stages import Request
from daskps.types import BatchId, Stage
from tests.simulation.process import Process
from tests.simulation.simloop import SimLoop
from tests.simulation.simulated_cluster import SimCluster
from tests.simulation.simulator import World

Lose = Callable[[str], None]  # end the process of a worker
Scenario = Callable[[ClusterBackend, Lose], Awaitable[None]]
MODEL = "/no/such/model"
TOKEN = BatchId("run", 1, 0, 0, 1)  # of an incarnation that no worker has open


async def ended(backend: ClusterBackend, task: Task) -> Task:
    """Wait for a task as a driver does."""
    backend.watch(task)
    while not task.done():
        await backend.pause(1.0)
    return task


def claimed(backend: ClusterBackend, nodes: int = 2) -> list[str]:
    """Claim workers and prepare them."""
    workers = list(backend.claim("run", nodes, MODEL, [*backend.present()]).workers)
    backend.prepare("run", workers)
    return workers


class BackendContract:
    """What a driver relies on, on two workers that no run has."""

    def run(self, scenario: Scenario) -> None:
        """Run a scenario with a new backend of two workers."""
        raise NotImplementedError

    def test_workers_are_present_in_order_and_were_just_heard_of(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            begun = backend.time()
            present = backend.present()
            assert len(present) == 2
            assert [*present] == sorted(present)
            assert all(0 <= seconds <= backend.time() - begun for seconds in present.values())
            assert backend.unfit([*present]) == {}

        self.run(scenario)

    def test_a_claim_takes_all_workers_that_it_wants_or_none(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            first, second = backend.present()
            assert backend.claim("run", 3, MODEL, [first, second]).workers == ()
            assert backend.claim("run", 2, MODEL, [second]).workers == ()
            assert backend.claim("run", 1, MODEL, [second]).workers == (second,)
            assert backend.claim("run", 2, MODEL, [first, second]).workers == (first, second)
            assert backend.held("run") == {}  # its own do not count

        self.run(scenario)

    def test_a_task_ends_with_its_answer(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            workers = claimed(backend)
            tasks = [backend.submit(worker, Request.HOLDING, "run", 0, MODEL) for worker in workers]
            assert len({task.key for task in tasks}) == 2
            for task in tasks:
                await ended(backend, task)
                assert (task.status, backend.error(task)) == ("finished", None)
                assert await backend.fetch(task, 5.0) is None  # no model is open there

        self.run(scenario)

    @pytest.mark.parametrize("stage", Stage)
    def test_a_task_ends_with_its_error(self, stage: Stage) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            worker, _ = claimed(backend)
            task = await ended(backend, backend.submit(worker, stage, "run", TOKEN))
            assert task.status == "error"
            assert isinstance(backend.error(task), StaleError)
            with pytest.raises(StaleError, match=f"cannot {stage}: incarnation 1 of run run has ended on this node"):
                await backend.fetch(task, 5.0)

        self.run(scenario)

    def test_a_task_after_a_failed_one_fails_with_its_error_and_does_not_run(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            first, second = claimed(backend)
            failing = backend.submit(first, Stage.READ, "run", TOKEN)
            after = backend.submit(second, Stage.DEDUP, "run", TOKEN, failing)
            await ended(backend, after)
            assert (failing.done(), failing.status) == (True, "error")
            with pytest.raises(StaleError, match="cannot read"):
                await backend.fetch(after, 5.0)

        self.run(scenario)

    def test_a_task_starts_after_those_that_it_names(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            first, second = claimed(backend)
            before = backend.submit(first, Request.RELEASE, "run", 1, MODEL, True)
            last = await ended(backend, backend.submit(second, Stage.READ, "run", TOKEN, before))
            assert before.done()
            assert isinstance(backend.error(last), StaleError)

        self.run(scenario)

    def test_a_pause_ends_with_a_watched_task_or_with_its_time(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            worker, _ = claimed(backend)
            started = backend.time()
            assert await backend.pause(0.2) is False
            assert backend.time() - started >= 0.19
            task = backend.submit(worker, Request.HOLDING, "run", 0, MODEL)
            backend.watch(task)
            while not task.done():
                await backend.sleep(0.1)
            assert await backend.pause(1e4) is True  # it has ended before
            assert await backend.pause(0.1) is False  # and is told of once

        self.run(scenario)

    def test_time_goes_on_while_a_driver_sleeps(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            started = backend.time()
            await backend.sleep(0.3)
            assert 0.29 <= backend.time() - started < 30

        self.run(scenario)

    def test_a_lost_worker_is_not_present_any_more_and_its_tasks_do_not_end_well(self) -> None:
        async def scenario(backend: ClusterBackend, lose: Lose) -> None:
            first, second = claimed(backend)
            lose(second)
            until = backend.time() + 300
            while second in backend.present() and backend.time() < until:
                await backend.sleep(0.1)
            assert [*backend.present()] == [first]
            task = backend.submit(second, Request.HOLDING, "run", 0, MODEL)
            backend.watch(task)
            assert await backend.pause(0.5) is False
            assert task.status != "finished"
            still = await ended(backend, backend.submit(first, Request.HOLDING, "run", 0, MODEL))
            assert still.status == "finished"

        self.run(scenario)


class TestDask(BackendContract):
    """Dask, with its workers in this process."""

    def run(self, scenario: Scenario) -> None:
        with local_workers(2, processes=False) as client:
            backend = DaskBackend(client, 30.0)
            by_address: dict[str, Any] = {worker.address: worker for worker in client.cluster.workers.values()}
            try:
                run_blocking(scenario(backend, lambda worker: sync(client.loop, by_address[worker].close)))  # type: ignore[arg-type]
            finally:
                backend.release("run")


class TestSimulated(BackendContract):
    """The simulator's cluster, on its own clock."""

    def run(self, scenario: Scenario) -> None:
        for seed in range(5):
            SimLoop().run(self._main(scenario, seed))

    async def _main(self, scenario: Scenario, seed: int) -> None:
        world = World(seed, lambda *event: None, None)
        world.start_workers(2)
        try:
            await scenario(SimCluster(world, Process(world, "driver")), lambda worker: world.by_name[worker].kill())
        finally:
            for process in world.processes:
                process.kill()
            for task in world.running:
                task.cancel()
        assert world.failure is None
