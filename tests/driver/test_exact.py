"""Promises 1 and 2: tiers, batches, depth, threads and devices never change a bit of the trained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from daskps.driver.driver import Outcome
from daskps.mem.eviction import POLICIES
from tests.driver.helpers import model_bits

Trained = Callable[..., tuple[Outcome, Path]]


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """Bits of the plain run, made by whichever test comes first."""
    return {}


def expected(reference: dict[str, str], trained: Trained, *changes: dict[str, Any]) -> str:
    name = repr(changes)
    if name not in reference:
        reference[name] = model_bits(trained(*changes, {"train": {"depth": 1}, "cluster": {"cores": 1}})[1])
    return reference[name]


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"depth": 2}},
        {"train": {"depth": 3}},
        {"train": {"depth": 4, "batch_examples": 500}},
        {"train": {"batch_examples": 6_000}},
        {"train": {"batch_examples": None}},
        {"cluster": {"cores": 2}},
        {"cluster": {"cores": 3}},
        {"cluster": {"cores": 4}},
        {"cluster": {"devices": 2}},
        {"cluster": {"devices": 3}},
        {"cluster": {"devices": 4, "cores": 2}, "train": {"depth": 4, "batch_examples": 500}},
        {"budget": {"memory_bytes": 2_000_000}, "train": {"batch_examples": 500, "depth": 2}},
        {"budget": {"memory_bytes": 2_400_000}, "train": {"depth": 4, "batch_examples": 500}},
        {"budget": {"hbm_bytes": 2_800_000}, "train": {"depth": 3, "batch_examples": 6_000}},
        {"cluster": {"partitions": 1}},
        {"train": {"snapshot_every_batches": 2}},
    ],
    ids=repr,
)
def test_only_the_speed_changes(change: dict[str, Any], trained: Trained, reference: dict[str, str]) -> None:
    assert model_bits(trained({"cluster": {"cores": 2}}, change)[1]) == expected(reference, trained)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "ftrl"])
@pytest.mark.parametrize("kind", ["lr", "fm", "dnn", "deepfm"])
def test_every_model_and_optimizer_is_exact(
    kind: str, optimizer: str, trained: Trained, reference: dict[str, str]
) -> None:
    dimension = 1 if kind == "lr" else 4
    job = {
        "model": {"kind": kind},
        "tables": {"main": {"dimension": dimension, "optimizer": {"kind": optimizer}}},
        "data": {"synthetic": {"examples": 3_000, "dense_features": 2}},
    }
    fast = {"cluster": {"cores": 2, "devices": 2}, "train": {"depth": 4, "batch_examples": 500}}
    assert model_bits(trained(job, fast)[1]) == expected(reference, trained, job)


@pytest.mark.parametrize("eviction", POLICIES)
@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    memory_bytes=st.integers(1_600_000, 2_200_000),
    train=st.fixed_dictionaries({"depth": st.integers(1, 3), "snapshot_every_batches": st.sampled_from([0, 2])}),
)
def test_no_eviction_policy_changes_a_bit_with_a_tiny_cache(
    eviction: str, memory_bytes: int, train: dict[str, Any], trained: Trained, reference: dict[str, str]
) -> None:
    job = {"tables": {"main": {"dimension": 32}}, "data": {"synthetic": {"examples": 3_000}}}
    change = {
        "cluster": {"eviction": eviction, "cores": 2},
        "budget": {"memory_bytes": memory_bytes},
        "train": {**train, "batch_examples": 500},
    }
    outcome, path = trained(job, change)
    assert outcome.progress.counts["evicted"] > 500
    assert outcome.progress.counts["misses"] > 0
    assert model_bits(path) == expected(reference, trained, job)


def test_what_decides_the_result_changes_it(trained: Trained, reference: dict[str, str]) -> None:
    plain = expected(reference, trained)
    assert model_bits(trained({"seed": 1})[1]) != plain
    assert model_bits(trained({"train": {"minibatch_examples": 250}})[1]) != plain
