"""Dask as the cluster of a driver: suitable workers, claims on them, tasks pinned to one worker and one stage.

Input: a job, and a Dask client or none. Output: `DaskBackend`, the `ClusterBackend` of a real run, and `run_job`, which
drives a job on it. Without a client, a local cluster is made: one node runs in this process, several in processes of
their own. All claims of workers are in one table on the scheduler, so no two runs ever have the same worker. No other
module of this folder imports Dask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import multiprocessing
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any, TypeVar, cast

import dask.config
from dask.base import annotate
from distributed import Client, Future, LocalCluster, Scheduler, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import KilledWorker
from distributed.utils import LoopRunner, sync

from daskps.config import Job, make_job
from daskps.driver.driver import Outcome, drive
from daskps.driver.tasks import Task, WorkerClaim
from daskps.errors import BackendError, PeerError, TrainingError
from daskps.node.dask import CONTROL, THREADS, enter, leave, spare, unspare
from daskps.node.stages import Request, run_request, run_stage
from daskps.reports import Progress
from daskps.types import Stage
from daskps.version import NUMERICS, __version__

Build = dict[str, str]  # identifies the code of a process, as far as results depend on it


@functools.cache
def build_here() -> Build:
    """Return this process's build: daskps's version, its numerics, and a digest of all kernels."""
    from daskps.device.compile import kernel_digest  # not at the top: see daskps.device.native

    return {"version": __version__, "numerics": str(NUMERICS), "kernels": kernel_digest()[:16]}


def unfit_because(threads: int, build: Build | Exception | None, mine: Build) -> str:
    """Return why a worker with this number of threads and this build cannot run a node; empty if it can."""
    if threads < THREADS:
        return f"{threads} threads, a node needs {THREADS}: one per stage and two to spare"
    return stranger_because(build, mine)


def stranger_because(build: Build | Exception | None, mine: Build) -> str:
    """Return why a worker with this build must not get any task of this driver; empty if it may.

    The process of a Dask worker ends, with all its data, when it gets a task whose function it cannot import.
    """
    if build is None:
        return "it does not answer"
    if isinstance(build, Exception):
        return f"it cannot import this daskps: {build!r}"
    other = [
        f"{name} {build.get(name)} (the driver's is {mine[name]})" for name in mine if build.get(name) != mine[name]
    ]
    return f"another daskps: {', '.join(other)}" if other else ""


logger = logging.getLogger("daskps.wire")

NAME = "daskps-claims"  # of the scheduler plugin
ENDED = frozenset({"memory", "erred", "forgotten"})  # Dask's states of a task that has ended


@dataclass(frozen=True, slots=True)
class Holder:
    """Run that wants or has workers, with the ids by which the scheduler knows that its driver is alive."""

    run: str
    model: str  # path of the model that it trains
    client: str  # id of the driver's Dask client
    task: Any = None  # key of the driver's own Dask task, if it is one; Dask runs it again if its worker is lost

    @property
    def key(self) -> Any:
        """Identity of the holder. A driver task that Dask runs again is a new run, but the same holder."""
        return self.run if self.task is None else self.task

    def __str__(self) -> str:
        submitted = f", submitted as {self.task[1]!r}" if isinstance(self.task, tuple) and len(self.task) > 1 else ""
        return f"run {self.run} ({self.model}{submitted})"


@dataclass(slots=True)
class Claim:
    """Workers that one holder has or waits for."""

    holder: Holder
    workers: tuple[str, ...] = ()
    lacking: int = 0  # number of idle workers that it still waits for
    nannies: dict[str, str | None] = field(default_factory=dict)  # by worker: its nanny, for all workers it ever had


class Claims(SchedulerPlugin):
    """Table of all claims: a plugin of the scheduler, installed as long as there is a claim."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._claims: dict[Any, Claim] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._adaptive_target = scheduler.adaptive_target

    @classmethod
    def of(cls, scheduler: Scheduler) -> Claims | None:
        """Return the scheduler's table; None if there are no claims."""
        found = scheduler.plugins.get(NAME)
        return found if isinstance(found, cls) else None

    @classmethod
    def begin(cls, scheduler: Scheduler) -> Claims:
        """Install a table on a scheduler that has none."""
        claims = cls(scheduler)
        scheduler.add_plugin(claims, name=NAME)
        claims._replace_target(claims.adaptive_target)
        return claims

    # -- requests of drivers -----------------------------------------------------------------------------------------

    def claim(self, holder: Holder, nodes: int, fit: Sequence[str]) -> WorkerClaim:
        """Give `holder` `nodes` of the `fit` workers that no other run has, or none at all.

        They replace the workers that it had before.
        """
        claim = self._claims.setdefault(holder.key, Claim(holder))
        claim.holder = holder
        self.drop_dead()
        others = {key: other for key, other in self._claims.items() if other is not claim and other.workers}
        held = {worker: str(other.holder) for other in others.values() for worker in other.workers}
        same = next((str(other.holder) for other in others.values() if other.holder.model == holder.model), "")
        idle = [worker for worker in fit if worker in self._scheduler.workers and worker not in held]
        claim.lacking = 0 if same else max(0, nodes - len(idle))
        if same or claim.lacking:
            claim.workers = ()
            return WorkerClaim((), {worker: held[worker] for worker in fit if worker in held}, same)
        claim.workers = tuple(idle[:nodes])
        claim.nannies |= {worker: self._scheduler.workers[worker].nanny for worker in claim.workers}
        return WorkerClaim(claim.workers)

    def held(self, run: str) -> dict[str, str]:
        """Return the workers that other runs have, and which run."""
        self.drop_dead()
        claims = [claim for claim in self._claims.values() if claim.holder.run != run]
        return {worker: str(claim.holder) for claim in claims for worker in claim.workers}

    async def release(self, run: str) -> None:
        """End the run's claim, and wait until all changes on its workers are undone."""
        ended = [key for key, claim in self._claims.items() if claim.holder.run == run]
        await asyncio.gather(*(self._end(key) for key in ended))

    # -- events of the scheduler -------------------------------------------------------------------------------------

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the claims of a client that is gone: its runs have no driver any more."""
        self.drop_dead()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """End the claim of a driver whose own task has ended."""
        if finish in ENDED and key in self._claims:
            asyncio.get_running_loop().call_soon(self.drop_dead)  # after the scheduler has stored the new state

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return the workers that an adaptive cluster may close: those that no run has."""
        mine = {worker for claim in self._claims.values() for worker in claim.workers}
        return [worker for worker in workers if worker.address not in mine]

    def adaptive_target(self, target_duration: float | None = None) -> int:
        """Return the number of workers for an adaptive cluster, including those that runs wait for.

        Dask itself counts only tasks.
        """
        self.drop_dead()
        lacking = sum(claim.lacking for claim in self._claims.values())
        target: int = self._adaptive_target(target_duration=target_duration)
        return max(target, len(self._scheduler.workers) + lacking if lacking else 0)

    async def close(self) -> None:
        """Cancel all clean-up: the scheduler is closing."""
        for task in self._cleaning:
            task.cancel()

    # -- ending claims -----------------------------------------------------------------------------------------------

    def drop_dead(self) -> None:
        """End the claims of drivers that are gone."""
        for key in [key for key, claim in self._claims.items() if not self._lives(claim.holder)]:
            logger.warning("%s has no driver any more: its workers are idle", self._claims[key].holder)
            self._end(key)

    def _lives(self, holder: Holder) -> bool:
        """Return True if the holder's client is connected, or its driver task has not ended."""
        if holder.client in self._scheduler.clients:
            return True
        task = self._scheduler.tasks.get(holder.task) if holder.task is not None else None
        return task is not None and task.state not in ENDED

    def _end(self, key: Any) -> asyncio.Task[None]:
        """Remove a claim and start to clean its workers.

        A run that claims them meanwhile waits for the clean-up on the worker itself (`node.dask.enter`).
        """
        cleaning = asyncio.get_running_loop().create_task(self._clean(self._claims.pop(key)))
        self._cleaning.add(cleaning)
        cleaning.add_done_callback(self._cleaning.discard)
        if not self._claims:
            self._replace_target(self._adaptive_target)
            with contextlib.suppress(ValueError):
                self._scheduler.remove_plugin(NAME)
        return cleaning

    async def _clean(self, claim: Claim) -> None:
        """Undo all changes of a claim's run on its workers and their nannies."""
        owner = dumps({"owner": claim.holder.key})
        there = [worker for worker in claim.nannies if worker in self._scheduler.workers]
        await self._scheduler.broadcast(
            msg={"op": "run", "function": dumps(leave), "kwargs": owner}, workers=there, on_error="ignore"
        )
        for nanny in {nanny for nanny in claim.nannies.values() if nanny is not None}:
            with contextlib.suppress(OSError):  # the nanny is gone
                await self._scheduler.rpc(nanny).run(function=dumps(unspare), kwargs=owner)

    def _replace_target(self, target: Any) -> None:
        """Replace the function that an adaptive cluster calls for its target size.

        It is called through a connection, or (Kubernetes, Gateway) on the scheduler object itself.
        """
        scheduler: Any = self._scheduler
        scheduler.adaptive_target = scheduler.handlers["adaptive_target"] = target


def claim_workers(holder: Holder, nodes: int, fit: Collection[str], dask_scheduler: Scheduler) -> WorkerClaim:
    """Call `Claims.claim`. Runs on the scheduler."""
    claims = Claims.of(dask_scheduler) or Claims.begin(dask_scheduler)
    return claims.claim(holder, nodes, list(fit))


def held_workers(run: str, dask_scheduler: Scheduler) -> dict[str, str]:
    """Call `Claims.held`. Runs on the scheduler."""
    claims = Claims.of(dask_scheduler)
    return {} if claims is None else claims.held(run)


async def release_workers(run: str, dask_scheduler: Scheduler) -> None:
    """Call `Claims.release`. Runs on the scheduler."""
    claims = Claims.of(dask_scheduler)
    if claims is not None:
        await claims.release(run)


T = TypeVar("T")


class DaskBackend:
    """Workers of a Dask client, as a `ClusterBackend`. The scheduler may take up to `wait_seconds` to answer."""

    def __init__(self, client: Client, wait_seconds: float) -> None:
        self._client, self._wait_seconds = client, wait_seconds
        self._count = 0
        self._ended = threading.Event()
        self._heard: dict[str, tuple[float, float]] = {}  # by worker: last heartbeat, and when we saw it
        self._threads: dict[str, int] = {}  # by worker
        self._builds: dict[str, Build | Exception] = {}  # by worker, as it answered
        self._task = _own_task()
        self._prepared: set[str] = set()  # workers that have an executor per stage
        self._fetching: dict[Any, concurrent.futures.Future[Any]] = {}  # by task: results that did not come in time

    def unfit(self, workers: Collection[str]) -> dict[str, str]:
        """Return those of these workers that cannot run a node, and why; each worker is asked only once."""
        mine, found = build_here(), {}
        builds = self._ask(workers)
        for worker in workers:
            if why := unfit_because(self._threads.get(worker, 0), builds.get(worker), mine):
                found[worker] = why
        return found

    def strangers(self, workers: Collection[str]) -> dict[str, str]:
        """Return those of these workers that must not get a task of this driver, and why."""
        mine, builds = build_here(), self._ask(workers)
        return {worker: why for worker in workers if (why := stranger_because(builds.get(worker), mine))}

    def _ask(self, workers: Collection[str]) -> dict[str, Build | Exception]:
        """Return the builds of the workers. `Client.run` is safe for every worker, unlike a task."""
        new = [worker for worker in workers if worker not in self._builds]
        if new:
            with contextlib.suppress(OSError):  # a worker that does not answer is asked again later
                told = self._client.run(build_here, workers=new, on_error="return", callback_timeout=self._wait_seconds)
                self._builds |= {worker: build for worker, build in told.items() if not isinstance(build, OSError)}
        return self._builds

    def claim(self, run: str, nodes: int, model: str, fit: Sequence[str]) -> WorkerClaim:
        """Claim workers at the scheduler, the only place that knows all claims."""
        try:
            answer: WorkerClaim = self._client.run_on_scheduler(
                claim_workers, self._holder(run, model), nodes, list(fit), callback_timeout=self._wait_seconds
            )
        except (ImportError, AttributeError) as error:
            raise BackendError(
                f"Dask's scheduler cannot say which workers are free: {error!r}; install this version of daskps where "
                "it runs, too"
            ) from None
        return answer

    def held(self, run: str) -> dict[str, str]:
        """Return the workers that other runs have, and which run; the scheduler knows."""
        found: dict[str, str] = self._client.run_on_scheduler(held_workers, run, callback_timeout=self._wait_seconds)
        return found

    def prepare(self, run: str, workers: Sequence[str]) -> None:
        """Set up each worker, and its nanny, for a node."""
        owner = self._holder(run).key
        options: dict[str, Any] = {"workers": list(workers), "callback_timeout": self._wait_seconds}
        try:
            self._client.run(enter, owner, **options)
            self._client.run(spare, owner, nanny=True, **options)
        except (OSError, KeyError) as error:  # KeyError: the scheduler has no nanny of a lost worker
            raise PeerError(f"a worker was lost while the run began: {error!r}") from None
        self._prepared = set(workers)

    def _holder(self, run: str, model: str = "") -> Holder:
        return Holder(run, model, self._client.id, self._task)

    def release(self, run: str) -> None:
        """Release the run's workers and undo all changes on them; do nothing if the scheduler is gone."""
        with contextlib.suppress(OSError):
            self._client.run_on_scheduler(release_workers, run, callback_timeout=self._wait_seconds)

    def present(self) -> dict[str, float]:
        """Return the seconds since each worker's last heartbeat, by our own clock: clocks of machines differ."""
        try:
            if (scheduler := self._client.scheduler) is None:
                raise OSError("the client is closed")
            # Not Client.scheduler_info: it may return an old answer, or only five workers.
            answer = self._client.sync(scheduler.identity, n_workers=-1, callback_timeout=self._wait_seconds)
            found = answer["workers"]
            self._threads = {worker: about["nthreads"] for worker, about in found.items()}
            now = time.monotonic()
        except OSError as error:
            raise TrainingError(
                f"Dask's scheduler is gone, or stuck: {error!r}; nothing is lost: start it again with its workers, "
                "then train again, which goes on from the last snapshot"
            ) from None
        self._heard = {
            worker: known
            if (known := self._heard.get(worker)) and known[0] == about["last_seen"]
            else (about["last_seen"], now)
            for worker, about in sorted(found.items())
        }
        return {worker: now - since for worker, (_, since) in self._heard.items()}

    def submit(self, worker: str, task: Stage | Request, run: str, *values: Any) -> Task:
        """Start a task on one worker, in the executor of its stage."""
        self._count += 1
        name = f"daskps-{task if isinstance(task, Stage) else CONTROL}"
        # HOLDING is answered whatever else the worker is doing.
        executor = "default" if task is Request.HOLDING or worker not in self._prepared else name
        # Dask groups tasks by `name`. The time is text, because Bokeh cannot draw large integers.
        key = (name, run, f"{time.time_ns():x}", self._count)
        call = (run_stage, task, *values) if isinstance(task, Stage) else (run_request, task, run, *values)
        with annotate(executor=executor):
            future: Future[Any] = self._client.submit(*call, key=key, pure=False, workers=[worker], retries=0)
        return cast(Task, future)

    def watch(self, task: Task) -> None:
        """Make `pause` end when this task ends."""
        cast("Future[Any]", task).add_done_callback(lambda _: self._ended.set())

    async def pause(self, seconds: float) -> bool:
        """Wait until a watched task ends, or has ended since the last pause; return False after `seconds`."""
        ended = self._ended.wait(seconds)
        self._ended.clear()  # a task that ends later sets it again; the caller sees those that ended before
        return ended

    async def fetch(self, task: Task, seconds: float) -> Any:
        """Return the result of an ended task, or raise its error; TimeoutError if it does not come in `seconds`.

        A fetch that runs out of time is not cancelled; the next fetch of the task waits for it. Dask's client combines
        requests for results, and after one was cancelled all later ones may fail (dask/distributed#8514).
        """
        fetching = self._fetching.pop(task.key, None)
        if fetching is None:
            loop: Any = self._client.loop
            fetching = asyncio.run_coroutine_threadsafe(cast("Future[Any]", task)._result(), loop.asyncio_loop)
        try:
            return fetching.result(seconds)
        except KilledWorker as error:
            raise PeerError(str(error)) from None
        except OSError:
            if task.status == "error":
                raise
            if not fetching.done():
                self._fetching[task.key] = fetching
            raise TimeoutError from None  # the scheduler, or the worker with the result, does not answer

    def error(self, task: Task) -> BaseException | None:
        """Return the error of a task that has ended with one; None for any other task."""
        found = cast("Future[Any]", task).exception() if task.status == "error" else None
        return PeerError(str(found)) if isinstance(found, KilledWorker) else found

    async def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        time.sleep(seconds)

    def time(self) -> float:
        """Return the machine's monotonic time in seconds."""
        return time.monotonic()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never awaits an event loop, only blocking calls."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    coroutine.close()
    raise AssertionError("the coroutine waits for an event loop")


def variable_names(client: Client) -> list[str]:
    """Return the names of all Dask variables on the scheduler of `client`."""
    names: list[str] = client.run_on_scheduler(_variable_names)
    return names


def _variable_names(dask_scheduler: Scheduler) -> list[str]:
    """Return the names of all Dask variables. Runs on the scheduler."""
    return list(dask_scheduler.extensions["variables"].variables)


def _own_task() -> Any:
    """Return the key of the Dask task that runs this code (the driver of a submitted run); None outside a task."""
    with contextlib.suppress(ValueError, KeyError):
        return get_worker().get_current_task()
    return None


# Dask's configuration for local clusters.
LOCAL_SETTINGS = {
    # After this time a LocalCluster removes a lost worker for good. Its nanny restarts it, so do not remove it.
    "distributed.deploy.lost-worker-timeout": "1 day",
    # Dask samples stacks every 10 ms and ticks every 20 ms, holding the GIL: a tenth of a small run's time.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
}

REST_SECONDS = 0.05  # wait before an event loop ends; longer than the 10 ms after which a Dask connection sends again


@contextlib.contextmanager
def client_for(nodes: int, given: Client | str | None = None, dashboard_address: str | None = None) -> Iterator[Client]:
    """Yield the given client, or one of a new local cluster that is closed afterwards.

    The local cluster has a dashboard if `dashboard_address` is given.
    """
    if isinstance(given, Client):
        yield given
    elif given is not None:
        with event_loop() as loop:
            try:
                client = Client(given, loop=loop, set_as_default=False)
            except OSError as error:
                words = f"no Dask scheduler answers at {given}: {error}; check the address, or start one"
                raise PeerError(words) from None
            with client:
                yield client
    else:
        quiet = {"silence_logs": logging.CRITICAL}  # errors of tasks are raised to the caller; do not log them too
        if nodes > 1 and getattr(multiprocessing.current_process(), "_inheriting", False):
            # This is a worker process that imports the script it was started from, and the script trains on import. A
            # process in this state cannot start processes; its parent reports the error.
            raise SystemExit(1)
        with contextlib.ExitStack() as stack:
            try:
                workers = local_workers(nodes, processes=nodes > 1, dashboard_address=dashboard_address, **quiet)
                client = stack.enter_context(workers)
            except RuntimeError as error:
                if "failed to start" not in str(error):
                    raise
                raise PeerError(
                    f"the processes of {nodes} nodes did not start; a script that trains on more than one node must do "
                    'so under `if __name__ == "__main__":`, because every process imports it'
                ) from None
            yield client


@contextlib.contextmanager
def local_workers(
    count: int, *, processes: bool, dashboard_address: str | None = None, **options: Any
) -> Iterator[Client]:
    """Yield a client of `count` local workers, in this process or each in its own; close them afterwards."""
    with dask.config.set(LOCAL_SETTINGS), event_loop() as loop:
        if processes:
            sync(loop, _block_ctrl_c)
        with (
            LocalCluster(
                n_workers=count,
                processes=processes,
                threads_per_worker=THREADS,
                memory_limit=0,
                loop=loop,
                dashboard_address=dashboard_address,
                worker_dashboard_address=None,
                scheduler_kwargs={"dashboard_address": dashboard_address or ":0"},  # 8787 may be in use
                **options,
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            yield client
            if not processes:
                sync(loop, _close_worker_clients, cluster)


async def _close_worker_clients(cluster: LocalCluster) -> None:
    """Close the clients that tasks on these workers have asked for, such as the reader of a persisted DataFrame.

    Dask leaves them open while another worker lives in this process. They would ask a scheduler that is gone, every two
    seconds, and log an error each time.
    """
    for worker in cluster.workers.values():
        if worker._client is not None:
            await worker._client.close()


@contextlib.contextmanager
def event_loop() -> Iterator[Any]:
    """Yield an event loop in its own thread; close clients and clusters before leaving the context.

    Some of Dask's connections still wait to send again when they are closed. If the loop ended at that moment, asyncio
    would print to stderr that a TimeoutError was never retrieved. So the loop ends REST_SECONDS later.
    """
    runner = LoopRunner()
    runner.start()
    try:
        yield runner.loop
    finally:
        sync(runner.loop, asyncio.sleep, REST_SECONDS)
        runner.stop()


async def _block_ctrl_c() -> None:
    """Block Ctrl-C in all processes started from this event loop, from their first instruction on.

    A terminal sends SIGINT to the whole process group. The driver decides what to do with it, and needs its nodes for
    a last snapshot; workers end when their parent process does. A thread's signal mask is inherited by the threads and
    processes that it starts. This process still gets the signal in its main thread.
    """
    resource_tracker.ensure_running()  # otherwise multiprocessing starts it later, and clears the mask when it does
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


WORKER_SECONDS = 60.0  # wait for workers at the start: a cluster may still be starting them


def _nothing(progress: Progress) -> None:
    """Ignore progress."""


def run_job(
    job: Job | Mapping[str, Any],
    *,
    client: Client | str | None = None,
    on_progress: Callable[[Progress], None] = _nothing,
    should_stop: Callable[[], bool] = lambda: False,
    frame: Any = None,
    worker_seconds: float = WORKER_SECONDS,
    accept_changed_data: bool = False,
    resume: bool = True,
    trace: str = "",
) -> Outcome:
    """Drive `job` to its end; `daskps.train` adds log, live pages and report, and explains the parameters.

    When a worker is lost, the run goes back to its last snapshot by itself, at most `cluster.restarts` times without a
    new snapshot. `trace` is a folder into which each node writes its trace (`daskps.trace`).
    """
    job = job if isinstance(job, Job) else make_job(dict(job))
    if client is not None:
        job = job.with_whole_paths()
    with client_for(job.cluster.nodes, client) as connected:
        backend, run = DaskBackend(connected, job.cluster.wait_seconds), uuid.uuid4().hex[:12]
        try:
            return run_blocking(
                drive(
                    backend,
                    job,
                    run,
                    on_progress=on_progress,
                    should_stop=should_stop,
                    frame=frame,
                    seconds=worker_seconds,
                    accept_changed_data=accept_changed_data,
                    resume=resume,
                    trace=trace,
                )
            )
        finally:
            backend.release(run)
