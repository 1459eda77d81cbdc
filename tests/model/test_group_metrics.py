"""Metrics by the value of a slot: those of the group alone, the same bits in any order, bounded and counted."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.errors import ArgumentError, CapacityError, NonFiniteError
from daskps.model.group_metrics import GroupMetrics
from daskps.model.metrics import Metrics
from daskps.types import Batch


def make_batch(bags: list[list[int]], labels: np.ndarray, weights: np.ndarray | None = None) -> Batch:
    """Two slots; slot 1 holds the bags, slot 0 other keys."""
    both = [keys for bag in bags for keys in ([2**64 - 1], bag)]
    return Batch(
        first_row=0,
        slots=2,
        labels=labels,
        keys=np.array([key for bag in both for key in bag], np.uint64),
        offsets=np.cumsum([0, *map(len, both)], dtype=np.int64),
        example_weights=weights,
    )


def sample(n: int, groups: int, seed: int = 0) -> tuple[Batch, np.ndarray]:
    random = np.random.default_rng(seed)
    bags = [random.integers(0, groups, random.integers(0, 4)).tolist() for _ in range(n)]
    logits = random.normal(-1, 1.5, n).astype(np.float32)
    labels = (random.random(n) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return make_batch(bags, labels, random.exponential(size=n).astype(np.float32)), logits


def counted(batch: Batch, logits: np.ndarray, **settings: int) -> GroupMetrics:
    metrics = GroupMetrics(1, **settings)  # type: ignore[arg-type]
    metrics.update(batch, logits)
    return metrics


def assert_same(one: GroupMetrics, other: GroupMetrics) -> None:
    for (name, left), right in zip(one.state().items(), other.state().values(), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name, strict=True)


def mixed(keys: np.ndarray) -> np.ndarray:
    x = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def test_a_group_has_the_metrics_of_its_examples_alone() -> None:
    batch, logits = sample(3000, groups=20)
    values = counted(batch, logits).values()
    assert values.keys.tolist() == list(range(20))
    assert (values.groups_seen, values.overflow_weight) == (20, 0)
    assert batch.example_weights is not None
    weighted = 0.0
    for number, key in enumerate(values.keys):
        rows = [
            i for i in range(3000) for k in batch.keys[batch.offsets[2 * i + 1] : batch.offsets[2 * i + 2]] if k == key
        ]
        alone = Metrics(buckets=1000)
        alone.update(batch.labels[rows], logits[rows], batch.example_weights[rows])
        expected = alone.values()
        assert values.weight[number] == expected.weight
        assert values.mean_label[number] == pytest.approx(expected.mean_label, rel=1e-15)
        assert values.auc[number] == pytest.approx(expected.auc, rel=1e-15)
        for name in ("log_loss", "mean_prediction", "calibration"):
            assert getattr(values, name)[number] == pytest.approx(getattr(expected, name), rel=1e-6)
        weighted += expected.auc * expected.weight
    assert values.gauc == pytest.approx(weighted / values.weight.sum(), rel=1e-12)


def test_gauc_sees_only_the_order_within_groups() -> None:
    labels = np.array([0, 1, 0, 1, 1], np.float32)
    bags = [[7], [7], [8], [8], [9]]  # 9 has clicks alone
    right = counted(make_batch(bags, labels), np.array([-3, -2, 1, 2, 0], np.float32)).values()
    assert right.auc.tolist()[:2] == [1.0, 1.0]
    assert math.isnan(right.auc[2])
    assert right.gauc == 1.0
    wrong = counted(make_batch(bags, labels), np.array([-3, -4, 1, 2, 0], np.float32)).values()
    assert wrong.gauc == 0.5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.sampled_from([1, 3, 40, 1000]),
    kept=st.sampled_from([1, 2, 10, 100]),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)
def test_batches_order_and_nodes_do_not_change_a_bit(seed: int, groups: int, kept: int, cuts: list[int]) -> None:
    batch, logits = sample(300, groups, seed)
    whole = counted(batch, logits, groups=kept, buckets=50)
    edges = [0, *sorted(cuts), 300]
    parts = [counted(batch.slice(a, b), logits[a:b], groups=kept, buckets=50) for a, b in itertools.pairwise(edges)]
    merged, stepped = GroupMetrics(1, groups=kept, buckets=50), GroupMetrics(1, groups=kept, buckets=50)
    for part in reversed(parts):
        merged.merge(part)
    for a, b in reversed(list(itertools.pairwise(edges))):
        stepped.update(batch.slice(a, b), logits[a:b])
        stepped.values()  # looking does not change anything
    assert_same(merged, whole)
    assert_same(stepped, whole)


def test_the_groups_that_stay_are_the_smallest_mixed_keys_and_complete() -> None:
    batch, logits = sample(20_000, groups=5000, seed=3)
    everything = counted(batch, logits, groups=10**6).values()
    some = counted(batch, logits, groups=100).values()
    smallest = everything.keys[np.argsort(mixed(everything.keys))[:100]]
    assert some.keys.tolist() == sorted(smallest.tolist())
    stays = np.isin(everything.keys, some.keys)
    np.testing.assert_array_equal(some.weight, everything.weight[stays])
    np.testing.assert_array_equal(some.auc, everything.auc[stays])
    assert some.overflow_weight == pytest.approx(everything.weight[~stays].sum(), rel=1e-12)
    assert everything.overflow_weight == 0
    assert everything.groups_seen == len(everything.keys)
    assert some.groups_seen == pytest.approx(len(everything.keys), rel=0.4)  # 4 standard deviations of 100 groups


def test_more_updates_than_room_lose_nothing() -> None:
    metrics = GroupMetrics(1, groups=10**6)
    total = 0.0
    for seed in range(20):
        batch, logits = sample(2000, groups=10**6, seed=seed)
        metrics.update(batch, logits)
        assert batch.example_weights is not None
        counts = batch.offsets[2::2] - batch.offsets[1:-1:2]
        total += (np.floor(batch.example_weights.astype(np.float64) * 2**20 + 0.5) * counts).sum() / 2**20
    assert metrics.values().weight.sum() == pytest.approx(total, rel=1e-12)
    assert metrics.values().overflow_weight == 0


def test_one_bag_larger_than_the_table_fits() -> None:
    batch = make_batch([list(range(10_000))], np.ones(1, np.float32))
    assert len(counted(batch, np.zeros(1, np.float32), groups=20_000).values().keys) == 10_000


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, 12345678901234567])
def test_every_key_is_a_group_and_named_as_it_was(key: int) -> None:
    batch = make_batch([[key]], np.ones(1, np.float32))
    assert counted(batch, np.zeros(1, np.float32)).values().keys.tolist() == [key]


def test_state_goes_through_arrays_and_json() -> None:
    batch, logits = sample(500, groups=300, seed=1)
    metrics = counted(batch, logits, groups=50)
    for state in (
        metrics.state(),
        json.loads(json.dumps({name: array.tolist() for name, array in metrics.state().items()})),
    ):
        restored = GroupMetrics(0)
        restored.load(state)
        assert_same(restored, metrics)
        restored.update(*sample(500, groups=300, seed=2))
        twice = counted(batch, logits, groups=50)
        twice.update(*sample(500, groups=300, seed=2))
        assert_same(restored, twice)


def test_without_examples_there_are_no_groups() -> None:
    for metrics in (GroupMetrics(1), counted(make_batch([[], []], np.ones(2, np.float32)), np.zeros(2, np.float32))):
        values = metrics.values()
        assert len(values.keys) == len(values.auc) == values.groups_seen == values.overflow_weight == 0
        assert math.isnan(values.gauc)
        restored = GroupMetrics(0)
        restored.load(metrics.state())
        assert_same(restored, metrics)


def test_a_group_of_weight_zero_has_no_means() -> None:
    values = counted(
        make_batch([[5]], np.ones(1, np.float32), np.zeros(1, np.float32)), np.zeros(1, np.float32)
    ).values()
    assert values.weight.tolist() == [0]
    assert math.isnan(values.log_loss[0])
    assert math.isnan(values.gauc)


def test_what_cannot_be_counted_is_refused() -> None:
    batch, logits = sample(50, groups=5)
    with pytest.raises(ArgumentError, match="slot 2 cannot count a batch of 2 slots"):
        GroupMetrics(2).update(batch, logits)
    logits[7] = np.nan
    metrics = GroupMetrics(1)
    with pytest.raises(NonFiniteError, match="logit of example 7 is nan"):
        metrics.update(batch, logits)
    assert_same(metrics, GroupMetrics(1))
    with pytest.raises(ArgumentError, match="do not merge"):
        metrics.merge(GroupMetrics(1, groups=7))
    with pytest.raises(ArgumentError, match="at least one group"):
        GroupMetrics(1, groups=0)


def test_a_weight_too_large_for_the_sums_is_refused() -> None:
    batch, logits = sample(50, groups=5)
    metrics = counted(batch, logits)
    state = metrics.state()
    state["totals"][0] = 2**62 - 1
    metrics.load(state)
    with pytest.raises(CapacityError, match=r"hold less than 4.398e\+12"):
        metrics.update(batch, logits)
