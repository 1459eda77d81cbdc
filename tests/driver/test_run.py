"""What a run does on its way: validates at a named batch, stops early, refuses what does not fit, names what broke."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Worker
from distributed.system import MEMORY_LIMIT
from threadpoolctl import threadpool_info

from daskps.build import synthetic
from daskps.config import make_job
from daskps.driver.driver import Outcome
from daskps.errors import CapacityError, ConfigError, NonFiniteError, TrainingError
from daskps.model import open_model
from daskps.node.memory import check_memory
from daskps.node.node import OpenNode
from daskps.node.stages import STAGES
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from daskps.types import BatchId
from tests.driver.helpers import GREEDY, SMALL, Settings, merged, model_bits

Trained = Callable[..., tuple[Outcome, Path]]
VALIDATED = {"data": {"validation_rows": 1_000}}


def test_validation_sees_exactly_the_state_after_a_batch(trained: Trained) -> None:
    often = trained(VALIDATED, {"train": {"validate_every_batches": 2, "batch_examples": 1_000}})[0].progress
    assert [(item.batch, item.position) for item in often.validations] == [(1, 2_000), (3, 4_000), (5, 6_000)]
    # In other batches and at another depth, the same rows were trained on at those points.
    again = trained(VALIDATED, {"train": {"validate_every_batches": 4, "batch_examples": 500, "depth": 1}})[0].progress
    assert [item.metrics for item in again.validations] == [item.metrics for item in often.validations]


def test_validation_changes_nothing(trained: Trained) -> None:
    plain = trained()[1]
    validated = trained(VALIDATED, {"train": {"validate_every_batches": 1}})[1]
    assert model_bits(validated) == model_bits(plain)


def test_a_run_that_gets_no_better_stops_early(trained: Trained) -> None:
    greedy = {
        "tables": {"main": {"optimizer": {"kind": "sgd", "learning_rate": 50.0}}},
        "train": {"epochs": 20, "validate_every_batches": 1, "early_stopping_patience": 2},
    }
    progress = trained(VALIDATED, greedy)[0].progress
    losses = [item.metrics["log_loss"] for item in progress.validations]
    assert progress.stopped_early
    assert progress.position < 20 * 6_000
    assert min(losses[:-2]) <= min(losses[-2:])


# Learns the first pass by heart: validation gets worse from the second one on.
@pytest.mark.parametrize("metric", ["log_loss", "auc", "normalised_entropy"])
def test_a_run_that_stops_early_leaves_its_best_model(trained: Trained, metric: str) -> None:
    outcome, path = trained(GREEDY, {"train": {"best_metric": metric}})
    values = [one.metrics[metric] for one in outcome.progress.validations]
    best = values.index(max(values) if metric == "auc" else min(values))
    assert outcome.progress.stopped_early
    assert len(values) == best + 3
    state = ModelDirectory(str(path)).state()
    assert outcome.snapshot == state.last
    with open_model(path) as model:
        assert model.snapshot.draft.batch == outcome.progress.validations[best].batch
        assert model.evaluate()["log_loss"] == pytest.approx(outcome.progress.validations[best].metrics["log_loss"])
    alone = trained(GREEDY, {"train": {"early_stopping_patience": 0, "epochs": best + 1}})[1]
    assert model_bits(path) == model_bits(alone)
    assert len(state.live) == 2, "the best one and the last state"


def test_a_run_that_stopped_early_has_ended_and_more_patience_goes_on_from_its_last_state(trained: Trained) -> None:
    first, path = trained(GREEDY)
    again = trained(GREEDY, out=path)[0]
    assert again.progress.stopped_early
    assert again.progress.examples == 0
    assert again.snapshot == first.snapshot
    patient: Settings = {"train": {"early_stopping_patience": 4}}
    further = trained(GREEDY, patient, out=path)[0]
    whole, other = trained(GREEDY, patient)
    assert further.progress.examples == whole.progress.examples - first.progress.examples > 0
    assert further.progress.validations == whole.progress.validations
    assert model_bits(path) == model_bits(other)
    assert last_state_bits(path) == last_state_bits(other)


def test_a_run_that_ends_with_its_data_leaves_its_best_model_too_and_more_passes_go_on(trained: Trained) -> None:
    short: Settings = {"train": {"epochs": 3, "early_stopping_patience": 4}}
    longer: Settings = {"train": {"epochs": 4, "early_stopping_patience": 4}}
    outcome, path = trained(GREEDY, short)
    assert not outcome.progress.stopped_early
    assert outcome.progress.best is not None
    assert outcome.progress.best.batch < outcome.progress.batch
    further = trained(GREEDY, longer, out=path)[0]
    assert further.progress.examples == 2_000
    other = trained(GREEDY, longer)[1]
    assert model_bits(path) == model_bits(other)
    assert last_state_bits(path) == last_state_bits(other)


def last_state_bits(path: Path) -> bytes:
    """Dense network and metrics of the state that a run would go on from."""
    directory = ModelDirectory(str(path))
    found = directory.resume_point()
    assert found is not None
    return b"".join(array.tobytes() for _, array in sorted(directory.load(found).items()))


def test_several_epochs_go_over_the_data_again(trained: Trained) -> None:
    progress = trained({"train": {"epochs": 3}})[0].progress
    assert progress.examples == progress.position == 18_000
    assert progress.metrics["examples"] == 6_000, "of the last pass alone"
    assert progress.metrics["pass"] == 3


def test_a_step_that_cannot_fit_the_devices_is_refused_with_figures(trained: Trained) -> None:
    words = r"alone needs [\d,]+ distinct rows of table 'main', but this node fits [\d,]+\n"
    table = r"hbm_bytes: [\d,]+ bytes projected, 1,300,000 allowed\n(  .*\n)*  rows of batches of main +[\d,]+  .*\n"
    with pytest.raises(CapacityError, match=rf"{words}{table}(  .*\n)*raise budget.hbm_bytes"):
        trained({"budget": {"hbm_bytes": 1_300_000}})


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (
            {"hbm_bytes": 300_000},
            r"take 256,000 bytes as they are read \(500 examples of 128 bytes here\), more than",
        ),
        (
            {"hbm_bytes": 900_000},
            r"needs at least [\d,]+ bytes .*500 examples with at least 10 keys.*hbm_bytes is 900,",
        ),
        ({"memory_bytes": 20_000}, r"memory_bytes=20,000 holds no row"),
    ],
)
def test_what_no_rows_could_make_fit_is_refused_before_the_first_batch(
    trained: Trained, tmp_path: Path, budget: dict[str, int], words: str
) -> None:
    begun: list[Progress] = []
    with pytest.raises(CapacityError, match=words):
        trained({"budget": budget}, out=tmp_path / "refused", on_progress=begun.append)
    assert not begun
    assert ModelDirectory(str(tmp_path / "refused")).snapshot() is None


def test_batches_as_large_as_the_memory_fit_although_the_index_grows_under_them(trained: Trained) -> None:
    """Every key is new, so the disk tier's index begins empty and takes its memory from the cache at every batch."""
    settings = {
        "data": {"synthetic": {"examples": 40_000, "keys_per_slot": 2**40, "zipf_exponent": 0.0}},
        "tables": {"main": {"dimension": 16, "optimizer": {"kind": "sgd", "learning_rate": 0.01}}},
        "train": {"batch_examples": 40_000},
        "budget": {"memory_bytes": "16MB"},
    }
    outcome = trained(settings)[0]
    assert outcome.progress.position == 40_000
    assert max(line["counts"]["distinct_keys"] for line in outcome.batches()) > 10_000


def test_budgets_above_the_memory_of_machine_or_worker_are_refused_with_figures(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError, match=r"1 node with budget.memory_bytes \(900,000,000,000\).*are allowed: lower"):
        trained({"budget": {"memory_bytes": "900GB"}})
    job = make_job(merged(SMALL, {"budget": {"memory_bytes": "60MB", "hbm_bytes": "60MB"}}))
    check_memory(job, on_cpu=True, limit_bytes=120_000_000)
    check_memory(job, on_cpu=False, limit_bytes=119_999_999)
    with pytest.raises(CapacityError, match=r"may use 120,000,000 bytes, but here 119,999,999 are allowed"):
        check_memory(job, on_cpu=True, limit_bytes=119_999_999)
    monkeypatch.setattr("daskps.node.memory.MACHINE_BYTES", 179_999_999)
    check_memory(job, on_cpu=False, nodes_here=2, limit_bytes=60_000_000)  # each within its worker's limit
    with pytest.raises(CapacityError, match=r"^3 nodes with .* may use 180,000,000 bytes, but here 179,999,999"):
        check_memory(job, on_cpu=False, nodes_here=3, limit_bytes=60_000_000)


def test_nodes_on_one_machine_share_its_memory(on_nodes: Trained) -> None:
    half = {"memory_bytes": MEMORY_LIMIT // 2, "hbm_bytes": 1_000_000}
    with pytest.raises(CapacityError, match=r"^2 nodes with"):
        on_nodes(2, {"budget": half})


def test_the_metrics_of_a_batch_hold_that_batch_and_none_after_it(trained: Trained) -> None:
    outcome, _ = trained({"train": {"batch_examples": 500, "depth": 4, "snapshot_every_batches": 1}})
    assert [line["metrics"]["examples"] for line in outcome.batches()] == [500.0 * (at + 1) for at in range(12)]


def test_a_batch_too_large_for_the_devices_is_cut(trained: Trained) -> None:
    whole = trained({"train": {"batch_examples": 6_000, "depth": 1}})
    cut = trained({"budget": {"hbm_bytes": 1_900_000}, "train": {"batch_examples": 6_000, "depth": 1}})
    assert cut[0].progress.batch > whole[0].progress.batch
    assert model_bits(cut[1]) == model_bits(whole[1])


def test_batches_that_have_to_be_cut_come_in_even_pieces_and_later_ones_are_not_read_whole(trained: Trained) -> None:
    tight = {"budget": {"hbm_bytes": 1_900_000}, "train": {"batch_examples": 3_000, "depth": 1}}
    by_batch: dict[int, list[int]] = {}
    for line in trained(tight)[0].batches():
        by_batch.setdefault(line["first_step"] // 6, []).append(line["stop_step"] - line["first_step"])
    assert len(by_batch) == 2
    for sizes in by_batch.values():
        assert len(sizes) > 1
        assert sum(sizes) == 6
        assert max(sizes) - min(sizes) <= 1


TWO_TABLES: Settings = {
    "slots": [{"name": f"s{at}", "table": "other" if at else "main"} for at in range(5)],
    "tables": {"other": {"dimension": 16}},
}


def test_what_a_table_fits_has_nothing_to_do_with_the_rows_of_another(trained: Trained) -> None:
    """The table of one slot gets a small part of the memory, in which no step of the other table would fit."""
    whole = trained(TWO_TABLES)[1]
    outcome, path = trained(TWO_TABLES, {"budget": {"memory_bytes": "2.5MB"}, "train": {"batch_examples": 500}})
    first = next(outcome.batches())
    assert first["counts"]["distinct_keys"] < first["levels"]["row_capacity"]  # a batch of this size is known to fit
    assert model_bits(path) == model_bits(whole)


def test_the_disk_budget_is_that_of_all_tables_together(trained: Trained) -> None:
    even = {"slots": [{"name": f"s{at}", "table": "other" if at else "main"} for at in range(2)]}
    even |= {"data": {"synthetic": {"slots": 2}}, "tables": {"other": SMALL["tables"]["main"]}}
    with open_model(trained(even)[1]) as model:
        used = sum(table["rows"] * (table["row_bytes"] + 8) for table in model.statistics()["tables"].values())
    with pytest.raises(
        CapacityError, match=r"(?s)the disk budget is.*raise budget\.disk_bytes.*snapshots drop.*compact"
    ):
        trained(even, {"budget": {"disk_bytes": int(used * 0.75)}})
    trained(even, {"budget": {"disk_bytes": int(used * 3)}})


def test_only_networks_with_hidden_layers_take_room_for_them(trained: Trained) -> None:
    lr = {"model": {"kind": "lr", "hidden": [100_000]}, "tables": {"main": {"dimension": 1}}}
    assert trained(lr, {"budget": {"hbm_bytes": "30MB"}})[0].progress.position == 6_000


def test_a_diverging_run_names_the_mini_batch_and_the_slot(trained: Trained) -> None:
    wild = {"tables": {"main": {"optimizer": {"kind": "sgd", "learning_rate": 1e9}}}, "model": {"kind": "dnn"}}
    with pytest.raises(NonFiniteError, match=r"batch \d+ \(steps \d+ to \d+\).*mini-batch \d+.*slot '\w+'"):
        trained(wild, {"tables": {"main": {"initialiser": {"scale": 10.0}}}})


@pytest.mark.parametrize("cores", [1, 3])
def test_a_run_computes_with_the_cores_it_is_given(trained: Trained, cores: int) -> None:
    """In as many threads, or in those of the stages if it is one; BLAS adds none."""
    threads: set[int] = set()
    blas: set[int] = set()
    others = set(threading.enumerate())

    def look(_: Progress) -> None:
        new = set(threading.enumerate()) - others
        threads.add(sum(thread.name.startswith("daskps-compute") for thread in new))
        blas.update(info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas")

    progress = trained({"cluster": {"cores": cores}}, on_progress=look)[0].progress
    assert threads - {0} == ({cores} if cores > 1 else set())
    assert blas == {1}
    stages = {stage for report in progress.reports for stage in (one.stage for one in report.stages)}
    assert stages == {"read", "dedup", "pull", "load", "train", "push"}


def test_dask_neither_spills_nor_pauses_nor_kills_a_node(trained: Trained, cluster: Client) -> None:
    def limits(dask_worker: Worker) -> list[object]:
        manager = dask_worker.memory_manager
        return [manager.memory_target_fraction, manager.memory_spill_fraction, manager.memory_pause_fraction]

    seen: list[list[object]] = []
    trained(on_progress=lambda _: seen.extend(cluster.run(limits).values()))
    assert seen
    assert all(found == [False, False, False] for found in seen)


def test_a_model_that_is_there_is_not_touched_unless_it_is_to_be_resumed(trained: Trained, tmp_path: Path) -> None:
    """Node 0 looks: the client may not see the directory."""
    trained(out=tmp_path / "m", resume=False)
    before = ModelDirectory(str(tmp_path / "m")).state()
    with pytest.raises(ConfigError, match=r"holds a model \(snapshot 000001-00000005\): --resume"):
        trained({"train": {"epochs": 2}}, out=tmp_path / "m", resume=False)
    assert ModelDirectory(str(tmp_path / "m")).state() == before


def test_devices_that_would_never_have_an_example_are_refused(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many: Settings = {"cluster": {"devices": 9}}  # 8 blocks of 64 examples are a step of 500
    with pytest.raises(ConfigError, match=r"1 nodes x 9 devices .* 8 blocks of 64 .* 1 of 9 .* 9,216 examples"):
        trained(many, out=tmp_path / "m")
    assert not (tmp_path / "m" / "log").exists()  # nothing was begun
    accepted = trained(many, {"cluster": {"idle_devices": "accept"}})[1]
    trained(out=tmp_path / "m", should_stop=iter([False, False, True, True, True]).__next__)
    caplog.clear()  # Dask logs what a task raises
    trained(many, out=tmp_path / "m")  # its block is what it is
    assert "1 of 9 devices would never have an example" in caplog.text
    assert model_bits(accepted) == model_bits(tmp_path / "m") == model_bits(trained()[1])


@pytest.mark.parametrize("stage", ["pull", "load"])
def test_what_fails_before_a_train_ends_it_and_is_what_the_run_reports(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A train waits for its load in the node, where Dask does not know of it."""
    real = STAGES[stage]

    def fail(node: OpenNode, token: BatchId) -> tuple[Any, float]:
        if token.batch == 2:
            raise MemoryError(f"no room to {stage} batch 2")
        return real(node, token)

    with monkeypatch.context() as patch:
        patch.setitem(STAGES, stage, fail)
        # Which of its stages the run hears of first is a matter of time; those of earlier batches have it in words.
        with pytest.raises((MemoryError, TrainingError), match=f"no room to {stage} batch 2"):
            trained()
    trained()  # the node was closed, and its threads are free


def test_learning_is_real(trained: Trained) -> None:
    """Small versions of the benchmark: a good part of the way from 0.5 to the best possible AUC."""
    job = {
        "data": {
            "synthetic": {
                "examples": 60_000,
                "slots": 6,
                "keys_per_bag": 1,
                "keys_per_slot": 40,
                "interaction_scale": 0,
            },
            "validation_rows": 20_000,
        },
        "tables": {"main": {"dimension": 1, "optimizer": {"kind": "adagrad", "learning_rate": 0.05}}},
        "model": {"kind": "lr"},
        "train": {"minibatch_examples": 250, "batch_examples": 10_000},
    }
    progress = trained(job)[0].progress
    best = synthetic(make_job(merged(SMALL, job))).best(60_000, 80_000).auc
    reached = progress.validations[-1].metrics["auc"]
    assert (reached - 0.5) / (best - 0.5) > 0.95
    assert np.isfinite(progress.validations[-1].metrics["log_loss"])


def test_a_network_learns_what_weights_of_keys_cannot_tell(trained: Trained) -> None:
    """Clicks depend on pairs of keys alone: a logistic regression would stay at an AUC of 0.5."""
    job = {
        "data": {
            "synthetic": {
                "examples": 50_000,
                "slots": 3,
                "keys_per_bag": 1,
                "keys_per_slot": 12,
                "weight_scale": 0,
                "interaction_scale": 2.0,
            },
            "validation_rows": 20_000,
        },
        "tables": {"main": {"dimension": 8, "optimizer": {"kind": "adagrad", "learning_rate": 0.05}}},
        "model": {"kind": "dnn", "hidden": [32, 16], "optimizer": {"kind": "adagrad", "learning_rate": 0.05}},
        "train": {"minibatch_examples": 250, "batch_examples": 20_000},
    }
    progress = trained(job)[0].progress
    best = synthetic(make_job(merged(SMALL, job))).best(50_000, 70_000).auc
    assert best > 0.7
    assert (progress.validations[-1].metrics["auc"] - 0.5) / (best - 0.5) > 0.9
