"""With `sync_every` above 1 nodes step alone for a while; then rows, moments and dense network are means again."""

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from distributed import Client

from daskps.config import make_job
from daskps.data.order import Steps
from daskps.errors import ConfigError
from daskps.node.begin import begin
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from tests.driver.helpers import SMALL, Settings, Trained, merged, model_bits, model_rows, stopper

STEP, STEPS, BLOCK = 128, 3, 32
ROWS = STEP * STEPS


def job_on(path: Path, rows: pd.DataFrame, step: int) -> Settings:
    rows.to_parquet(path)
    return {
        "data": {"format": "parquet", "paths": [str(path)], "synthetic": None},
        "slots": [{"name": "user"}, {"name": "ad"}],
        "model": {"hidden": [4], "optimizer": {"kind": "adam"}},
        "train": {"minibatch_examples": step, "batch_examples": step * STEPS, "block_examples": BLOCK},
        "cluster": {"partitions": 8, "check_replicas": True},
    }


def dense_of(path: Path) -> dict[str, np.ndarray]:
    directory = ModelDirectory(str(path))
    snapshot = directory.snapshot()
    assert snapshot is not None
    return {name: array for name, array in directory.load(snapshot).items() if name.startswith("dense/")}


def test_a_merge_is_the_mean_of_what_nodes_learned_alone(on_nodes: Trained, trained: Trained, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame(
        {"label": rng.integers(0, 2, ROWS), "user": rng.integers(0, 300, ROWS), "ad": rng.integers(0, 20, ROWS)}
    )
    whole = job_on(tmp_path / "all.parquet", frame, STEP)
    together = on_nodes(2, whole, {"train": {"sync_every": STEPS}})[1]
    on_devices = on_nodes(2, whole, {"train": {"sync_every": STEPS}, "cluster": {"devices": 2}})[1]
    assert model_bits(on_devices) == model_bits(together)
    alone, dense = [], []
    for rank in range(2):
        steps = Steps(STEP, 2, rank, block_examples=BLOCK)
        mine = pd.concat([frame.iloc[slice(*steps.slice(step, ROWS))] for step in range(STEPS)])
        path = trained(job_on(tmp_path / f"{rank}.parquet", mine, STEP // 2))[1]
        alone.append(dict(zip(model_rows(path)[0].tolist(), model_rows(path)[1], strict=True)))
        dense.append(dense_of(path))
    for name, array in dense_of(together).items():
        mean = np.mean([part[name].astype(np.float64) for part in dense], axis=0)
        np.testing.assert_array_equal(array, mean.astype(array.dtype), err_msg=name)
    keys, rows = model_rows(together)
    assert set(keys.tolist()) == set(alone[0]) | set(alone[1])
    assert len(set(alone[0]) & set(alone[1])) > 20
    for key, row in zip(keys.tolist(), rows, strict=True):
        held = [part[key] for part in alone if key in part]
        values, counts = np.array(held)[:, :-1], np.array(held).view(np.uint32)[:, -1]
        np.testing.assert_array_equal(row[:-1], values.astype(np.float64).mean(axis=0).astype(np.float32))
        assert row.view(np.uint32)[-1] == counts.max()


def test_a_run_with_merges_is_repeated_and_resumed_bit_for_bit(on_nodes: Trained, tmp_path: Path) -> None:
    every_second: Settings = {"train": {"sync_every": 2, "minibatch_examples": 300, "batch_examples": 900}}
    path = on_nodes(3, every_second)[1]
    on_nodes(3, every_second, out=tmp_path / "stopped", **stopper(2))
    unnamed = make_job(merged(SMALL, every_second, {"out": str(tmp_path / "stopped")}))
    with pytest.raises(ConfigError, match=r"trained by 3 nodes with .*sync_every = 2.* cluster\.nodes = 3"):
        begin(unnamed, "another")
    on_nodes(3, every_second, out=tmp_path / "stopped")
    assert model_bits(tmp_path / "stopped") == model_bits(path)


def test_a_node_killed_between_the_pieces_of_a_cut_batch_leaves_no_trace(
    on_nodes: Trained, workers: Client, tmp_path: Path
) -> None:
    """Pieces of one step and of two take turns. A run that went on inside a batch would cut the rest otherwise."""
    settings: Settings = {
        "data": {"synthetic": {"examples": 6_000}},
        "train": {"sync_every": 5, "minibatch_examples": 250, "batch_examples": 3_000, "depth": 1},
        "budget": {"hbm_bytes": 1_060_000},
    }
    often: Settings = {"train": {"snapshot_every_batches": 1, "keep_snapshots": 20}}
    outcome, path = on_nodes(2, settings)
    assert len({line["batch"] for line in outcome.batches() if line["stop_step"] < 12}) > 4
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        stop_step = progress.reports[-1].token.stop_step
        if stop_step == 16 and not killed:
            processes = workers.run(os.getpid)
            killed.append(processes[sorted(processes)[0]])  # the first workers are the nodes
            os.kill(killed[0], signal.SIGKILL)

    out = tmp_path / "killed"
    again, _ = on_nodes(2, settings, often, out=out, on_progress=kill)
    assert killed
    assert again.progress.restarts == 1
    positions = [snapshot.draft.position for snapshot in ModelDirectory(str(out)).snapshots()]
    assert positions == [3_000, 6_000]
    assert model_bits(out) == model_bits(path)


def test_merging_at_batch_ends_needs_a_batch_of_known_size() -> None:
    settings = merged(SMALL, {"train": {"sync_every": 2, "batch_examples": None}, "cluster": {"nodes": 2}})
    with pytest.raises(ConfigError, match=r"set train\.batch_examples"):
        make_job(settings)
