"""Several nodes, one Dask worker process each: the same bits as one node."""

from pathlib import Path

import pytest

from daskps.errors import DataError, NonFiniteError
from tests.driver.helpers import Alone, Settings, Trained, model_bits, stopper


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
    few: Settings = {
        "data": {"synthetic": {"examples": 220, "dense_features": 1}},
        "cluster": {"idle_devices": "accept"},
    }
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


def bad_lines(folder: Path, share: float, **data: object) -> Settings:
    """A job on 3,000 lines, a twentieth of them bad."""
    lines = [f"{'bad' if row % 20 == 7 else row % 2},{row % 90},{row % 7}" for row in range(3_000)]
    (folder / "rows.csv").write_text("\n".join(["label,a,b", *lines]))
    paths = {"format": "csv", "paths": [str(folder / "rows.csv")], "synthetic": None}
    return {
        "data": {**paths, "bad_lines": "lenient", "bad_share": share, **data},
        "slots": [{"name": "a"}, {"name": "b"}],
        "train": {"minibatch_examples": 256, "batch_examples": 512},
    }


def test_a_bad_row_counts_once_also_if_several_nodes_read_its_window(on_nodes: Trained, tmp_path: Path) -> None:
    outcome, _ = on_nodes(3, bad_lines(tmp_path, 0.05, shuffle_window_rows=700))
    assert [count for count, _ in outcome.progress.bad_rows.values()] == [150]


def test_nodes_together_skip_no_more_rows_than_one_may(on_nodes: Trained, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of \d+ examples read are bad, .* 0.04 \(of 3000\).* or raise data.bad_share"):
        on_nodes(3, bad_lines(tmp_path, 0.04))


def test_the_cause_is_raised_not_its_echo(on_nodes: Trained) -> None:
    wild: Settings = {"tables": {"main": {"optimizer": {"kind": "sgd", "learning_rate": 1e30}}}}
    with pytest.raises(NonFiniteError):
        on_nodes(2, wild)
