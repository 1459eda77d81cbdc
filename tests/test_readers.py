"""An open model stays what it was while training goes on, and what cannot be kept is said to be gone, not damaged."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskps
from daskps.config import make_job
from daskps.driver.dask import local_workers, run_job
from daskps.driver.driver import Outcome
from daskps.errors import CorruptionError, DaskpsError, LockedError, SnapshotError, StoreError
from daskps.model import compact, drop_snapshots
from daskps.reports import Progress
from daskps.ssd import recovery
from daskps.storage.files import LocalFiles
from daskps.storage.model_directory import ModelDirectory

JOB: dict[str, Any] = {
    "data": {"format": "synthetic", "synthetic": {"examples": 4_000, "slots": 4, "keys_per_slot": 500}},
    "tables": {"main": {"dimension": 4}},
    "model": {"hidden": [8]},
    "budget": {"memory_bytes": "16MB", "hbm_bytes": "64MB"},
    "cluster": {"partitions": 2, "cores": 1},
}


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """One cluster for all: making one takes longer than the runs."""
    with local_workers(1, processes=False) as client:
        yield client


@pytest.fixture
def train(client: Client) -> Train:
    """Go on with a model for so many passes, publishing after every batch and keeping one snapshot."""

    def run(path: Path, passes: int, **options: Any) -> Outcome:
        every = {"minibatch_examples": 500, "batch_examples": 500, "snapshot_every_batches": 1, "keep_snapshots": 1}
        job = make_job({**JOB, "out": str(path), "train": every | {"epochs": passes}})
        return run_job(job, client=client, **options)

    return run


def answers(model: daskps.Model) -> str:
    """All that an open model says of its rows and network, as a hash."""
    digest = hashlib.sha256()
    for keys, rows in model.scan():
        digest.update(keys.tobytes() + rows.tobytes())
        np.testing.assert_array_equal(model.pull(keys, field="row"), rows)
    for name, array in sorted(model.dense(state=True).items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def live(path: Path) -> tuple[str, ...]:
    return ModelDirectory(str(path)).state().live


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that may not lock."""

    def share(self: LocalFiles, path: str) -> Callable[[], None]:
        raise PermissionError(13, "no lock", path)

    monkeypatch.setattr(LocalFiles, "share", share)


def test_an_open_model_answers_the_same_while_training_goes_on(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    with daskps.open_model(tmp_path / "m") as model:
        before, first = answers(model), model.snapshot.id
        for passes in (2, 3, 4):  # each in an incarnation of its own, which collects what older ones left
            train(tmp_path / "m", passes)
            assert live(tmp_path / "m")[0] == first
            assert len(live(tmp_path / "m")) == 2
            assert answers(model) == before
        assert model.verify() > 0
    train(tmp_path / "m", 5)
    assert len(live(tmp_path / "m")) == 1
    assert not (tmp_path / "m" / "snapshots" / first).exists()


def test_refreshing_moves_to_the_newest_snapshot_and_lets_the_old_one_go(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    with daskps.open_model(tmp_path / "m") as model:
        before, first = answers(model), model.snapshot
        assert model.refresh() is first
        pieces = model.scan()
        kept = [next(pieces)]
        train(tmp_path / "m", 2)
        newest = model.refresh()
        assert newest == model.snapshot
        assert newest.id == live(tmp_path / "m")[-1] != first.id
        kept += pieces  # what had begun ends with the rows it began with
        assert sum(len(keys) for keys, _ in kept) > 0
        with daskps.open_model(tmp_path / "m") as fresh:
            assert answers(model) == answers(fresh) != before
        drop_snapshots(str(tmp_path / "m"), [first.id])
    assert live(tmp_path / "m") == (newest.id,)


def test_a_snapshot_that_is_read_is_neither_dropped_nor_compacted_away(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    with daskps.open_model(tmp_path / "m") as model:
        before, first = answers(model), model.snapshot.id
        train(tmp_path / "m", 2)
        with pytest.raises(LockedError, match=f"{first} of .* cannot be dropped: another process, or an open model"):
            drop_snapshots(str(tmp_path / "m"), [first])
        compact(str(tmp_path / "m"))
        assert live(tmp_path / "m")[0] == first
        assert answers(model) == before
        assert model.verify() > 0
    drop_snapshots(str(tmp_path / "m"), [first])
    compact(str(tmp_path / "m"))
    assert len(live(tmp_path / "m")) == 1


@pytest.mark.usefixtures("unlocked")
def test_a_reader_without_a_lock_is_told_to_refresh_and_never_of_damage(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    with daskps.open_model(tmp_path / "m") as model:
        before, keys = answers(model), next(model.scan())[0]
    with daskps.open_model(tmp_path / "m") as model:
        train(tmp_path / "m", 3)
        for call in (lambda: model.pull(keys), lambda: list(model.scan()), lambda: model.dense()):
            with pytest.raises(SnapshotError, match=r"was dropped while it was open .* model\.refresh\(\)"):
                call()
        assert model.verify() > 0  # of what is there
        model.refresh()
        assert answers(model) != before


@pytest.mark.usefixtures("unlocked")
def test_damage_of_a_snapshot_that_is_there_is_damage(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    with daskps.open_model(tmp_path / "m") as model:
        keys = next(model.scan())[0]
        for chunk in (tmp_path / "m" / "tables" / "main").glob("*/rows/c.*"):
            chunk.write_bytes(bytes(chunk.stat().st_size))
        with pytest.raises(CorruptionError, match="do not match their checksum"):
            model.pull(keys)


@pytest.mark.usefixtures("unlocked")
def test_a_snapshot_that_is_dropped_while_it_is_opened_without_a_lock_is_gone_and_not_damaged(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(tmp_path / "m", 1).snapshot
    open_snapshot, waiting = recovery.open_snapshot, [2]

    def late(*arguments: Any) -> None:
        if waiting:
            train(tmp_path / "m", waiting.pop())
        open_snapshot(*arguments)

    monkeypatch.setattr(recovery, "open_snapshot", late)
    with pytest.raises(SnapshotError, match=rf"{first} .* was dropped while it was open .* model\.refresh\(\)"):
        daskps.open_model(tmp_path / "m", snapshot=first)


def test_threads_that_refresh_at_once_leave_one_lock(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "m", 1)
    with daskps.open_model(tmp_path / "m") as model:
        second = train(tmp_path / "m", 2).snapshot
        both, open_at = threading.Barrier(2), daskps.Model._open_at

        def together(self: daskps.Model, lease: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            open_at(self, lease)

        monkeypatch.setattr(daskps.Model, "_open_at", together)
        threads = [threading.Thread(target=model.refresh) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert model.snapshot.id == second
        files, manifest = LocalFiles(tmp_path / "m"), f"snapshots/{model.snapshot.id}/manifest.json"
        assert files.seize(manifest) is None
    assert files.seize(manifest) is not None
    with pytest.raises(StoreError, match="was closed"):
        model.refresh()


def test_a_writer_that_may_not_write_a_manifest_sees_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").touch()
    files, name, open_file = LocalFiles(tmp_path), "manifest.json", os.open

    def only_read(path: str, flags: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "may not write", path)
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", only_read)
    release = files.share(name)
    assert files.seize(name) is None
    release()
    assert files.seize(name) is not None


# -- other processes ---------------------------------------------------------------------------------------------------


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_readers"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def lock_without_rights(path: str) -> None:
    """Lock the last snapshot as somebody who may only read; root may do anything, so it becomes somebody else."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(PermissionError):
        os.open(next(Path(path).glob("snapshots/*/manifest.json")), os.O_RDWR)
    lease = ModelDirectory(path).read()
    assert lease is not None
    assert lease.locked
    lease.close()


def test_a_reader_needs_no_right_to_write(train: Train) -> None:
    """A shared lock on a file that may only be read."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        train(Path(folder) / "m", 1)
        for path in Path(folder, "m", "snapshots").rglob("manifest.json"):
            path.chmod(0o444)
        process = start(lock_without_rights, f"{folder}/m")
        process.join()
        assert process.exitcode == 0


def hold(path: str, ready: str) -> None:
    """Open a model and wait to be killed."""
    with daskps.open_model(path) as model:
        Path(ready).write_text(model.snapshot.id)
        time.sleep(3600)


def wait_for(path: Path, process: BaseProcess) -> str:
    while not (path.exists() and path.read_text()):
        assert process.is_alive()
        time.sleep(0.02)
    return path.read_text()


def test_kill_9_of_a_reader_frees_its_snapshot(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    reader = start(hold, str(tmp_path / "m"), str(tmp_path / "ready"))
    first = wait_for(tmp_path / "ready", reader)
    train(tmp_path / "m", 2)
    assert first in live(tmp_path / "m")
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    train(tmp_path / "m", 3)
    assert len(live(tmp_path / "m")) == 1


def read_on(path: str, out: str, locked: bool) -> None:
    """Open, pull, scan, verify and refresh until told to stop; what was seen goes into a file."""
    seen: dict[str, Any] = {"rounds": 0, "snapshots": [], "dropped": 0, "errors": []}
    if not locked:

        def share(self: LocalFiles, name: str) -> Callable[[], None]:
            raise PermissionError(13, "no lock", name)

        LocalFiles.share = share  # type: ignore[method-assign]
    while not Path(f"{out}.stop").exists() or not seen["rounds"]:
        try:
            with daskps.open_model(path, cores=1) as model:
                before = answers(model)
                model.verify()
                if answers(model) != before:
                    seen["errors"].append("other answers")
                seen["snapshots"].append(model.snapshot.id)
                seen["snapshots"].append(model.refresh().id)
                answers(model)
                seen["rounds"] += 1
        except SnapshotError as error:
            seen["dropped"] += 1
            if locked:
                seen["errors"].append(repr(error))
        except DaskpsError as error:
            seen["errors"].append(repr(error))
    Path(out).write_text(json.dumps(seen))


@contextlib.contextmanager
def readers(path: Path, folder: Path, kinds: list[bool]) -> Iterator[list[Path]]:
    outs = [folder / f"reader{number}" for number in range(len(kinds))]
    running = [start(read_on, str(path), str(out), locked) for out, locked in zip(outs, kinds, strict=True)]
    try:
        yield outs
    finally:
        for out in outs:
            Path(f"{out}.stop").touch()
        for process in running:
            process.join()


def test_readers_and_verify_are_right_while_a_run_publishes_without_pause(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "m", 1)
    verify = [sys.executable, "-c", "from daskps.cli import main; main()", "verify", str(tmp_path / "m"), "--json"]
    checks: list[subprocess.CompletedProcess[str]] = []

    def check(progress: Progress) -> None:
        if progress.batch % 20 == 10:
            running.append(subprocess.Popen(verify, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    running: list[subprocess.Popen[str]] = []
    with readers(tmp_path / "m", tmp_path, [True, False]) as outs:
        passes = 4
        train(tmp_path / "m", passes, on_progress=check)
        for process in running:
            said, errors = process.communicate()
            checks.append(subprocess.CompletedProcess(verify, process.returncode, said, errors))
    assert checks
    for done in checks:
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["snapshots"] >= 1
    for out in outs:
        seen = json.loads(out.read_text())
        assert seen["errors"] == [], seen
        assert seen["rounds"] > 0
    train(tmp_path / "m", passes + 1)
    assert len(live(tmp_path / "m")) == 1
