"""Several nodes, one Dask worker process each: the same bits as one node."""

from pathlib import Path

import pytest

from daskps.errors import NonFiniteError
from tests.flow.conftest import Alone, Settings, Trained, model_bits
from tests.flow.test_snapshots import stopper


@pytest.mark.parametrize(
    ("nodes", "change"),
    [
        (1, {}),
        (2, {}),
        (2, {"cluster": {"devices": 2}, "train": {"depth": 3, "batch_examples": 500}}),
        (3, {"train": {"snapshot_every_batches": 2, "depth": 4, "batch_examples": 500}}),
        (3, {"train": {"batch_examples": 4_000}, "budget": {"hbm_bytes": 1_500_000}}),
        (4, {}),
    ],
    ids=repr,
)
def test_any_number_of_nodes_gives_the_same_bits(nodes: int, change: Settings, on_nodes: Trained, alone: Alone) -> None:
    outcome, path = on_nodes(nodes, change)
    expected, bits = alone()
    assert model_bits(path) == bits
    assert outcome.metrics == expected.metrics
    assert outcome.progress.restarts == 0
    assert outcome.progress.examples == 4_000


def test_nodes_without_examples_take_part_in_every_step(on_nodes: Trained, alone: Alone) -> None:
    small_steps: Settings = {"train": {"minibatch_examples": 50, "batch_examples": 100}}
    few: Settings = {"data": {"synthetic": {"examples": 220, "dense_features": 1}}}
    assert model_bits(on_nodes(3, small_steps, few)[1]) == alone(small_steps, few)[1]


def test_several_tables_and_modulo_partitions(on_nodes: Trained, alone: Alone) -> None:
    tables: Settings = {
        "tables": {"other": {"dimension": 2, "optimizer": {"kind": "ftrl"}}},
        "slots": [{"name": f"s{i}", "kind": "multi", "table": "main" if i < 2 else "other"} for i in range(5)],
        "cluster": {"partition_by": "modulo"},
    }
    assert model_bits(on_nodes(2, tables)[1]) == alone(tables)[1]


def test_a_model_goes_on_with_any_number_of_nodes(on_nodes: Trained, alone: Alone, tmp_path: Path) -> None:
    path = tmp_path / "moving"
    for nodes, batches in ((2, 1), (1, 1), (3, 1), (2, 100)):
        outcome = on_nodes(nodes, out=path, **stopper(batches))[0]
    assert outcome.progress.position == 4_000
    assert model_bits(path) == alone()[1]


def test_validation_is_of_all_nodes(on_nodes: Trained, alone: Alone) -> None:
    validated: Settings = {"data": {"validation_rows": 1_100}, "train": {"validate_every_batches": 2}}
    expected, together = alone(validated)[0].progress, on_nodes(3, validated)[0].progress
    assert len(together.validations) == 2
    assert [one.metrics for one in together.validations] == [one.metrics for one in expected.validations]


def test_the_cause_is_raised_not_its_echo(on_nodes: Trained) -> None:
    wild: Settings = {"tables": {"main": {"optimizer": {"kind": "sgd", "learning_rate": 1e30}}}}
    with pytest.raises(NonFiniteError):
        on_nodes(2, wild)
