"""The in-memory parameter server learns, and learns what daskps learns: it is there to be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskps.build import features, table_specs
from daskps.config import make_job
from daskps.device.pool import ComputePool
from daskps.driver.dask import local_workers, run_job
from daskps.errors import CapacityError
from pipelines.baseline import Shard, train_in_memory

JOB: dict[str, Any] = {
    "data": {
        "format": "synthetic",
        "synthetic": {"examples": 20_300, "slots": 6, "keys_per_bag": 2, "keys_per_slot": 3_000, "seed": 2},
    },
    "tables": {
        "main": {"dimension": 4, "optimizer": {"kind": "rowwise_adagrad", "learning_rate": 0.05}},
        "other": {"dimension": 3, "optimizer": {"kind": "adam", "learning_rate": 0.01}},
    },
    "slots": [{"name": f"s{i}", "kind": "multi", "table": "main" if i < 4 else "other"} for i in range(6)],
    "model": {"hidden": [16]},
    "train": {"minibatch_examples": 500, "block_examples": 64},
    "cluster": {"cores": 1},
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers in this process."""
    with local_workers(2, processes=False) as client:
        yield client


def test_one_and_two_workers_learn_what_daskps_learns(client: Client, tmp_path: Path) -> None:
    found = [train_in_memory(make_job(JOB | {"cluster": {"cores": 1, "nodes": nodes}}), client) for nodes in (1, 2)]
    expected = run_job(make_job(JOB | {"out": str(tmp_path)}), client=client).metrics
    del expected["pass"]  # the baseline makes one
    assert expected["auc"] > 0.6
    assert [one.metrics for one in found] == [expected] * 2  # sums are integers: the same model to the bit
    assert len(found[1].step_ends) == 41
    assert found[0].bytes_sent == 0 < found[1].bytes_sent


def test_what_does_not_fit_memory_is_refused() -> None:
    job = make_job(JOB | {"budget": {"memory_bytes": 100_000}})
    with ComputePool(1) as pool:
        shard = Shard(job, table_specs(job, features(job))[0], pool)
        with pytest.raises(CapacityError, match="there is no disk"):
            shard.pull(np.arange(5_000, dtype=np.uint64))
