"""The examples in the docstrings of public functions are run."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from distributed import Client, LocalCluster

import daskps
from daskps import budget, trace
from daskps.node.dask import THREADS

JOB = {
    "data": {
        "format": "synthetic",
        "synthetic": {"examples": 4096, "slots": 4, "keys_per_slot": 500},
        "validation_rows": 1024,
    },
    "train": {"minibatch_examples": 512},
    "budget": {"memory_bytes": "16MB"},
    "cluster": {"partitions": 2},
}


@pytest.mark.parametrize("module", [budget, trace])
def test_the_example_of_the_module(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("name", ["train", "evaluate", "open_model", "read_record", "submit"])
def test_the_example_of(name: str, tmp_path: Path) -> None:
    with (
        LocalCluster(
            n_workers=1, processes=False, threads_per_worker=THREADS, memory_limit=0, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        job = {**JOB, "out": str(tmp_path / "submitted")}
        model = daskps.train({**JOB, "out": str(tmp_path / "demo")}, client=client).directory
        known = vars(daskps) | {"demo_model": model, "demo_job": job, "client": client}
        function = getattr(daskps, name)
        (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs=known)
        assert test.examples, name
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        said: list[str] = []
        runner.run(test, out=said.append)
        assert runner.failures == 0, "".join(said)


def test_every_public_name_is_documented() -> None:
    for name in daskps.__all__:
        item = getattr(daskps, name)
        if not name.startswith("__"):
            assert inspect.getdoc(item), name
