"""FTRL with its defaults learns as well as Adagrad at the mini-batches that people use."""

import pytest

from daskps.driver.driver import Outcome
from tests.driver.helpers import Trained


@pytest.mark.parametrize("minibatch", [256, 4096])
def test_ftrl_with_its_defaults_is_as_good_as_adagrad(minibatch: int, trained: Trained) -> None:
    def run(kind: str) -> Outcome:
        return trained(
            {
                "data": {
                    "synthetic": {"examples": 120_000, "slots": 8, "keys_per_bag": 1, "keys_per_slot": 3_000},
                    "validation_rows": 20_000,
                },
                "model": {"kind": "lr"},
                "tables": {"main": {"dimension": 1, "optimizer": {"kind": kind, "learning_rate": 0.05}}},
                "train": {"minibatch_examples": minibatch, "batch_examples": 16_384},
            }
        )[0]

    adagrad, ftrl = (run(kind).progress.validations[-1].metrics["auc"] for kind in ("adagrad", "ftrl"))
    assert adagrad > 0.6
    assert ftrl > adagrad - 0.003
