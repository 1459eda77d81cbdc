"""Machines that each have a directory of their own at the path `out`: refused, once, and no model is touched.

Real worker processes, each with its own view of that path (a mount namespace, as on another machine).
"""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from daskps.config import make_job
from daskps.driver.dask import run_job
from daskps.errors import ConfigError
from daskps.model import open_model
from daskps.storage.model_directory import ModelDirectory
from tests.driver.helpers import FEW, SMALL, Settings, Trained, merged, model_bits, started_by_hand, stopper

UNSHARE = ("unshare", "--map-root-user", "--mount")


def mounted(private: Path, shared: Path) -> Sequence[str]:
    """A command that runs what follows it where `shared` is `private`."""
    return (*UNSHARE, "sh", "-c", f"mount --bind '{private}' '{shared}' && exec \"$@\"", "sh")


def can_mount(folder: Path) -> bool:
    try:
        return subprocess.run([*mounted(folder, folder), "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path, list[Path]]]:
    """Two workers, the path that both know, and what is there for the worker of rank 0 and for that of rank 1."""
    folder = tmp_path_factory.mktemp("machines")
    if not can_mount(folder):
        pytest.skip("mount namespaces (unshare --map-root-user --mount) cannot be made here")
    shared, private = folder / "shared", [folder / "first", folder / "second"]
    for path in (shared, *private):
        path.mkdir()
        (path / "name").write_text(path.name)
    inside = [mounted(path, shared) for path in private]
    with (
        started_by_hand(folder, 2, inside=inside) as (address, _),
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(2)
        names = client.run(lambda: (shared / "name").read_text())
        assert set(names.values()) == {"first", "second"}
        yield client, shared, [folder / names[worker] for worker in sorted(names)]


def on_both(client: Client, path: Path, *changes: Settings, **options: Any) -> Any:
    nodes = {"cluster": {"nodes": 2, "wait_seconds": 60.0}}
    return run_job(make_job(merged(SMALL, FEW, *changes, nodes, {"out": str(path)})), client=client, **options)


def refused(machines: tuple[Client, Path, list[Path]], name: str, *changes: Settings) -> None:
    """Training on both is refused, at the first attempt."""
    client, shared, private = machines
    epochs = ModelDirectory(str(private[0] / name)).state().incarnation
    with pytest.raises(ConfigError, match=r"node 1 sees another directory .* a file system that all workers share"):
        on_both(client, shared / name, *changes)
    assert ModelDirectory(str(private[0] / name)).state().incarnation == epochs + 1
    client.wait_for_workers(2)


def test_a_published_model_is_not_cleared_by_a_new_one_of_the_same_incarnation(
    machines: tuple[Client, Path, list[Path]], trained: Trained
) -> None:
    """Both are in incarnation 1 then, and the new one has no snapshot."""
    there = machines[2][1] / "a"
    trained(FEW, {"seed": 1}, out=there)
    before = model_bits(there)
    refused(machines, "a", {"seed": 0})
    assert model_bits(there) == before
    with open_model(there) as model:
        assert model.verify() > 0


def test_models_of_equal_settings_and_data_and_another_past_are_not_mixed(
    machines: tuple[Client, Path, list[Path]], trained: Trained, tmp_path: Path
) -> None:
    """Both have the snapshot that node 0 goes on from, under one id, and node 1 the incarnation that node 0 begins."""
    _, _, (first, second) = machines
    bases = [trained(FEW, {"data": {"synthetic": {"seed": seed}}}, out=tmp_path / f"base{seed}")[1] for seed in (7, 8)]
    settings = [merged(FEW, {"start_from": str(base), "train": {"keep_snapshots": 9}}) for base in bases]
    trained(settings[0], out=first / "b", **stopper(1))
    trained(settings[1], out=second / "b", **stopper(1))
    trained(settings[1], out=second / "b", **stopper(1))
    logs = [ModelDirectory(str(path / "b")).state() for path in (first, second)]
    assert logs[0].last in logs[1].live
    assert (logs[0].incarnation, logs[1].incarnation) == (1, 2)
    before = [model_bits(path / "b") for path in (first, second)]
    refused(machines, "b", settings[0])
    assert [model_bits(path / "b") for path in (first, second)] == before
    for path in (first, second):
        with open_model(path / "b") as model:
            assert model.verify() > 0


def test_an_empty_directory_on_another_machine_is_refused_once(machines: tuple[Client, Path, list[Path]]) -> None:
    refused(machines, "c")
