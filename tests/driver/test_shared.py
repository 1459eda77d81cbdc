"""Several runs on one cluster: a worker belongs to one run as long as its driver lives, and nobody takes it away."""

from __future__ import annotations

import fcntl
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster, Scheduler, SpecCluster, Worker

import daskps
from daskps.api import preferred_workers
from daskps.config import make_job
from daskps.driver.dask import NAME as CLAIMS
from daskps.driver.dask import DaskBackend, build_here, run_job
from daskps.driver.driver import Outcome
from daskps.errors import BackendError, LockedError, PeerError
from daskps.node.dask import FRACTIONS, NAME, THREADS, leave
from daskps.reports import Progress
from daskps.view.dask import collect_on
from tests.clusters import cluster_in_process
from tests.driver.helpers import FEW, SMALL, Alone, Settings, merged, model_bits, started_by_hand

SMALL_BATCHES: Settings = {"train": {"batch_examples": 500}}


@pytest.fixture(scope="module")
def three() -> Iterator[Client]:
    """Three workers in this process, with Dask's memory management on."""
    with (
        LocalCluster(
            n_workers=3,
            processes=False,
            threads_per_worker=THREADS,
            dashboard_address=None,
            worker_dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def settings_of(path: Path, nodes: int, *changes: Settings) -> Settings:
    return merged(SMALL, FEW, SMALL_BATCHES, {"cluster": {"nodes": nodes, "restarts": 0}}, *changes, {"out": str(path)})


class Held:
    """A run in a thread that stops after its first batch until it is told to go on."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.reached, self._go_on = threading.Event(), threading.Event()
        self.outcome: Outcome | BaseException | None = None
        self._arguments = client, settings
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, settings = self._arguments
        try:
            self.outcome = run_job(make_job(settings), client=client, on_progress=self._stop)
        except BaseException as error:
            self.outcome = error
        self.reached.set()

    def _stop(self, progress: Progress) -> None:
        self.reached.set()
        self._go_on.wait()

    def end(self) -> Outcome:
        self._go_on.set()
        self._thread.join()
        assert isinstance(self.outcome, Outcome), self.outcome
        return self.outcome


@pytest.fixture
def at_work(three: Client) -> Iterator[Callable[[Settings], Held]]:
    """Start a run that has workers and waits."""
    started: list[Held] = []

    def start(settings: Settings) -> Held:
        started.append(Held(three, settings))
        started[-1].reached.wait()
        assert started[-1].outcome is None, started[-1].outcome
        return started[-1]

    yield start
    for run in started:
        run._go_on.set()
        run._thread.join()


def state(client: Client) -> dict[str, tuple[bool, list[Any], list[str]]]:
    """Of every worker, what a run changes there: its plugin, Dask's memory management, its executors."""
    name, fractions = NAME, FRACTIONS

    def look(dask_worker: Any) -> tuple[bool, list[Any], list[str]]:
        memory = [getattr(dask_worker.memory_manager, fraction) for fraction in fractions]
        return name in dask_worker.plugins, memory, sorted(name for name in dask_worker.executors if "daskps" in name)

    return client.run(look)  # type: ignore[no-any-return]


def claims(dask_scheduler: Any) -> bool:
    return CLAIMS in dask_scheduler.plugins


def test_a_second_run_is_refused_in_words_and_the_first_goes_on(
    three: Client, at_work: Callable[[Settings], Held], alone: Alone, tmp_path: Path
) -> None:
    first = at_work(settings_of(tmp_path / "a", 2))
    with pytest.raises(BackendError, match=rf"wants 2 nodes, .* 3 workers; held: .*run \w+ \({tmp_path}/a\).*--wait"):
        run_job(make_job(settings_of(tmp_path / "b", 2)), client=three, worker_seconds=0.0)
    outcome = first.end()
    assert outcome.progress.restarts == 0
    assert model_bits(tmp_path / "a") == alone()[1]


def test_a_second_run_takes_idle_workers(
    three: Client, at_work: Callable[[Settings], Held], alone: Alone, tmp_path: Path
) -> None:
    first = at_work(settings_of(tmp_path / "a", 2))
    run_job(make_job(settings_of(tmp_path / "b", 1)), client=three, worker_seconds=0.0)
    assert first.end().progress.restarts == 0
    assert model_bits(tmp_path / "a") == model_bits(tmp_path / "b") == alone()[1]


def test_a_second_run_that_may_wait_begins_when_the_first_has_ended(
    three: Client, at_work: Callable[[Settings], Held], alone: Alone, tmp_path: Path
) -> None:
    first = at_work(settings_of(tmp_path / "a", 2))
    threading.Timer(2.0, first._go_on.set).start()
    run_job(make_job(settings_of(tmp_path / "b", 2)), client=three, worker_seconds=600.0)
    assert first.end().progress.restarts == 0
    assert model_bits(tmp_path / "a") == model_bits(tmp_path / "b") == alone()[1]


def test_a_submitted_run_takes_no_worker_from_one_at_work(
    three: Client, at_work: Callable[[Settings], Held], alone: Alone, tmp_path: Path
) -> None:
    first = at_work(settings_of(tmp_path / "a", 2))
    refused = daskps.submit(settings_of(tmp_path / "b", 2), three, name="refused", worker_seconds=0.0)
    with pytest.raises(BackendError, match=f"held: .*{tmp_path}/a"):
        refused.result()
    waits = daskps.submit(settings_of(tmp_path / "b", 2), three, name="waits", worker_seconds=600.0)
    assert first.end().progress.restarts == 0
    assert waits.result()["position"] == 4_000
    assert model_bits(tmp_path / "a") == model_bits(tmp_path / "b") == alone()[1]


def test_no_run_takes_workers_from_a_submitted_one(three: Client, tmp_path: Path) -> None:
    endless: Settings = {"data": {"synthetic": {"examples": 100_000_000}}}
    long = daskps.submit(settings_of(tmp_path / "a", 2, endless), three, name="long")
    while long.status()["position"] == 0:
        time.sleep(0.1)
    other = daskps.submit(settings_of(tmp_path / "b", 2), three, name="other", worker_seconds=0.0)
    with pytest.raises(BackendError, match=f"{tmp_path}/a, submitted as 'long'"):
        other.result()
    with pytest.raises(BackendError, match=f"{tmp_path}/a, submitted as 'long'"):
        run_job(make_job(settings_of(tmp_path / "b", 2)), client=three, worker_seconds=0.0)
    long.stop()
    assert long.result()["snapshot"].startswith("000001-")  # of its first incarnation: nobody disturbed it


def test_a_model_that_is_being_trained_is_trained_by_nobody_else(
    three: Client, at_work: Callable[[Settings], Held], alone: Alone, tmp_path: Path
) -> None:
    first = at_work(settings_of(tmp_path / "a", 2))
    with pytest.raises(BackendError, match=rf"{tmp_path}/a is being trained by run \w+"):
        run_job(make_job(settings_of(tmp_path / "a", 1)), client=three, worker_seconds=0.0)
    assert first.end().progress.restarts == 0
    assert model_bits(tmp_path / "a") == alone()[1]


def test_of_two_runs_that_start_at_once_one_gets_the_workers(three: Client, alone: Alone, tmp_path: Path) -> None:
    for attempt in range(3):
        together, results = threading.Barrier(2), {}

        def start(name: str, together: Any = together, results: Any = results, attempt: int = attempt) -> None:
            job = make_job(settings_of(tmp_path / f"{name}{attempt}", 2))
            together.wait()
            try:
                results[name] = run_job(job, client=three, worker_seconds=0.0)
            except BackendError as error:
                results[name] = error

        threads = [threading.Thread(target=start, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trained = [name for name, result in results.items() if isinstance(result, Outcome)]
        assert len(trained) == 1, results
        assert results[trained[0]].progress.restarts == 0
        assert model_bits(tmp_path / f"{trained[0]}{attempt}") == alone()[1]


def test_a_run_changes_only_its_own_workers_and_leaves_them_as_they_were(
    three: Client, at_work: Callable[[Settings], Held], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = state(three)
    assert all(fraction for _, memory, _ in before.values() for fraction in memory)
    first = at_work(settings_of(tmp_path / "a", 2))
    during = state(three)
    changed = [worker for worker in before if during[worker] != before[worker]]
    assert len(changed) == 2
    assert all(during[worker][:2] == (True, [False] * 3) for worker in changed)
    first.end()
    assert state(three) == before
    assert not three.run_on_scheduler(claims)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def driver_process(address: str, out: Path, folder: Path) -> subprocess.Popen[bytes]:
    """The command line on a cluster, with a job that does not end."""
    job = folder / "job.toml"
    job.write_text(
        "[data]\nformat = 'synthetic'\n[data.synthetic]\nexamples = 100_000_000\nslots = 5\nkeys_per_slot = 2000\n"
        "[train]\nminibatch_examples = 500\nbatch_examples = 500\n[budget]\nmemory_bytes = '512MB'\n"
        "hbm_bytes = '512MB'\n[cluster]\nnodes = 2\ncores = 1\n"
    )
    main = [sys.executable, "-c", "from daskps.cli import main; main()"]
    with (folder / "driver.log").open("w") as log:
        return subprocess.Popen([*main, "train", str(job), "--out", str(out), "--scheduler", address], stderr=log)


def test_workers_of_a_driver_that_was_killed_are_idle(alone: Alone, tmp_path: Path) -> None:
    with started_by_hand(tmp_path, 2) as (address, _), Client(address, set_as_default=False) as client:
        client.wait_for_workers(2)
        before = state(client)
        driver = driver_process(address, tmp_path / "a", tmp_path)
        while "batch 2" not in (text := (tmp_path / "driver.log").read_text()):
            assert driver.poll() is None, text
            time.sleep(0.1)
        with pytest.raises(BackendError, match=f"{tmp_path}/a"):
            run_job(make_job(settings_of(tmp_path / "b", 2)), client=client, worker_seconds=0.0)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        run_job(make_job(settings_of(tmp_path / "b", 2)), client=client, worker_seconds=600.0)
        assert model_bits(tmp_path / "b") == alone()[1]
        assert state(client) == before
        driver = driver_process(address, tmp_path / "a", tmp_path)  # nobody comes after it
        while "batch 2" not in (text := (tmp_path / "driver.log").read_text()):
            assert driver.poll() is None, text
            time.sleep(0.1)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        while state(client) != before:
            time.sleep(0.1)


def test_relative_paths_are_those_of_the_client(
    workers: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run in folders of their own; there, these paths lead nowhere."""
    client_folder = tmp_path / "client"
    (client_folder / "logs").mkdir(parents=True)
    lines = [f"{row % 2},{row % 90},{row % 7}" for row in range(1_000)]
    for name in ("day1.csv", "day2.csv"):
        (client_folder / "logs" / name).write_text("\n".join(["label,a,b", *lines]))
    monkeypatch.chdir(client_folder)
    csv: Settings = {
        "data": {"format": "csv", "paths": ["logs/day1*.csv"], "validation_paths": ["logs/day2.csv"]},
        "slots": [{"name": "a"}, {"name": "b"}],
        "train": {"minibatch_examples": 256, "batch_examples": 512},
        "budget": FEW["budget"],
        "cluster": FEW["cluster"],
    }
    assert daskps.submit({**csv, "out": "runs/one"}, workers, name="relative").result()["position"] == 1_000
    run_job(make_job({**csv, "out": "runs/two", "start_from": "runs/one"}), client=workers)
    assert (client_folder / "runs" / "two" / "log").is_dir()
    with daskps.open_model(client_folder / "runs" / "one") as model:
        assert model.snapshot.draft.position == 1_000
    missing = {**csv, "data": {"format": "csv", "paths": ["logs/day3.csv"]}, "out": "runs/three"}
    with pytest.raises(daskps.DaskpsError, match=rf"on the worker tcp://.*no file at '{client_folder}/logs/day3.csv'"):
        run_job(make_job(missing), client=workers)


OTHERS = {"few": "2 threads", "version": "version 0.0.1", "numerics": "numerics 1", "kernels": "kernels 0123"}
"""Workers that no node can live on, by name, and what is said of each."""


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Workers of other builds, one with too few threads, and one that fits, which comes last."""
    mine, told = build_here(), {name: words.split()[1] for name, words in OTHERS.items()}

    def build(dask_worker: Any = None) -> dict[str, str]:
        name = "" if dask_worker is None else dask_worker.name
        return {**mine, name: told[name]} if name in mine else mine

    monkeypatch.setattr("daskps.driver.dask.build_here", build)
    names = [*OTHERS, "fits"]
    workers = {
        name: {"cls": Worker, "options": {"nthreads": 2 if name == "few" else THREADS, "name": name}} for name in names
    }
    options = {"protocol": "inproc://", "dashboard": False, "dashboard_address": ":0"}
    with (
        SpecCluster(workers, scheduler={"cls": Scheduler, "options": options}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(len(names))
        yield client


def test_workers_that_do_not_fit_are_not_chosen_and_are_named(
    mixed: Client, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = mixed.scheduler_info(n_workers=-1)["workers"]
    name_of = {address: about["name"] for address, about in workers.items()}
    chosen: set[str] = set()

    def look(_: Progress) -> None:
        chosen.update(name_of[worker] for worker, (has_plugin, _, _) in state(mixed).items() if has_plugin)

    with caplog.at_level(logging.WARNING, "daskps.driver"):
        run_job(make_job(settings_of(tmp_path / "m", 1)), client=mixed, on_progress=look, worker_seconds=0.0)
    assert chosen == {"fits"}
    assert model_bits(tmp_path / "m") == alone()[1]
    with pytest.raises(BackendError, match="wants 2 nodes, the cluster has 5 workers; not chosen: ") as raised:
        run_job(make_job(settings_of(tmp_path / "other", 2)), client=mixed, worker_seconds=0.0)
    for words in (caplog.text, str(raised.value)):
        for address, name in name_of.items():
            assert (address in words) == (name in OTHERS)
        assert all(why in words for why in OTHERS.values())


def test_workers_without_this_daskps_get_no_task(
    mixed: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose function a worker cannot import ends that worker, and whatever others have there."""
    workers = mixed.scheduler_info(n_workers=-1)["workers"]
    name_of, asked, submit = {address: about["name"] for address, about in workers.items()}, set(), DaskBackend.submit

    def note(self: DaskBackend, worker: str, *values: Any) -> Any:
        asked.add(name_of[worker])
        return submit(self, worker, *values)

    monkeypatch.setattr(DaskBackend, "submit", note)
    run_job(make_job(settings_of(tmp_path / "m", 1)), client=mixed, worker_seconds=0.0)
    lock = tmp_path / "m" / "tables" / "main" / "partition-00000" / "lock"
    with lock.open("r+") as file:  # whoever meets it asks who has the model open
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError):
            run_job(make_job(settings_of(tmp_path / "m", 1, {"cluster": {"wait_seconds": 0.1}})), client=mixed)
    assert asked == {"fits"}


def test_a_driver_is_not_submitted_where_no_worker_has_this_daskps(
    mixed: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = preferred_workers(mixed, make_job(settings_of(tmp_path, 1)))["workers"]
    workers = mixed.scheduler_info(n_workers=-1)["workers"]
    assert {workers[address]["name"] for address in where} == {"few", "fits"}  # a driver needs no thread per stage

    def build(dask_worker: Any = None) -> dict[str, str]:
        return {"version": "9" if dask_worker is None else "8"}

    monkeypatch.setattr("daskps.driver.dask.build_here", build)
    with pytest.raises(BackendError, match=r"no worker can run the driver: .*version 8 \(the driver's is 9\)"):
        daskps.submit(settings_of(tmp_path, 1), mixed, name="nowhere")


def test_a_scheduler_without_daskps_is_told_so(three: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plugin: Any) -> None:
        raise ModuleNotFoundError("No module named 'daskps'")

    monkeypatch.setattr(three, "register_plugin", fail)
    with pytest.raises(BackendError, match=r"scheduler cannot import this daskps.*install"):
        collect_on(three)


def test_a_worker_that_goes_when_it_is_claimed_is_a_lost_one(three: Client) -> None:
    gone = "inproc://127.0.0.1/0/0"  # of such a one Dask's scheduler knows no nanny, and says so with a KeyError
    with pytest.raises(PeerError, match="a worker was lost while the run began"):
        DaskBackend(Gone(three, gone), 5.0).prepare("run", [*state(three)][:1])  # type: ignore[arg-type]
    three.run(leave, "run")


class Gone:
    """A client one of whose workers goes after its first request."""

    def __init__(self, client: Client, gone: str) -> None:
        self.id, self._client, self._gone = client.id, client, gone

    def run(self, function: Any, *values: Any, nanny: bool = False, **options: Any) -> Any:
        if nanny:
            options["workers"] = [self._gone]
        return self._client.run(function, *values, nanny=nanny, **options)


def test_a_cluster_that_adapts_grows_from_nothing_for_a_run_and_keeps_its_workers(alone: Alone, tmp_path: Path) -> None:
    def dawdle(progress: Progress) -> None:
        if progress.batch == 3:
            time.sleep(2)  # twenty times as long as Dask needs to close workers without tasks

    with (
        cluster_in_process(0) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.adapt(minimum=0, maximum=2, interval="50ms", wait_count=2)
        outcome = run_job(
            make_job(settings_of(tmp_path / "m", 2)), client=client, on_progress=dawdle, worker_seconds=600.0
        )
        assert outcome.progress.restarts == 0
        while client.scheduler_info(n_workers=-1)["workers"]:  # nobody needs them any more
            time.sleep(0.1)
    assert model_bits(tmp_path / "m") == alone()[1]
