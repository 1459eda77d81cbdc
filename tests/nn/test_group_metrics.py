"""Metrics by the value of a slot: those of the group alone, the same bits in any order, bounded and counted."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.errors import ArgumentError, NonFiniteError
from daskps.nn import group_metrics
from daskps.nn.group_metrics import GroupMetrics
from daskps.nn.metrics import Metrics
from daskps.types import Batch


def make_batch(bags: list[list[int]], labels: np.ndarray, weights: np.ndarray | None = None) -> Batch:
    """Two slots; slot 1 holds the bags, slot 0 other keys."""
    both = [keys for bag in bags for keys in ([2**64 - 1], bag)]
    return Batch(
        first_example=0,
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
    for (name, left), right in zip(
        dataclasses.asdict(one.values()).items(), dataclasses.asdict(other.values()).values(), strict=True
    ):
        np.testing.assert_array_equal(left, right, err_msg=name)


def exact_auc(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> float:
    """As scikit-learn's roc_auc_score: equal logits count half."""
    _, place = np.unique(logits, return_inverse=True)
    positives, negatives = (np.bincount(place, weights * (labels == label)) for label in (1, 0))
    return float((positives * (np.cumsum(negatives) - negatives / 2)).sum() / (positives.sum() * negatives.sum()))


def narrow(
    span: float, n: int, groups: int, weighted: bool, seed: int = 0
) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """Logits that span little, labels that follow them all the same; keys and weights."""
    random = np.random.default_rng(seed)
    order = random.normal(size=n)
    logits = (-1 + span * order / 8).astype(np.float32)
    labels = (random.random(n) < 1 / (1 + np.exp(1 - order))).astype(np.float32)
    keys = random.integers(0, groups, n).astype(np.uint64)
    weights = random.exponential(size=n).astype(np.float32)
    offsets = np.arange(n + 1, dtype=np.int64)
    batch = Batch(0, 1, labels, keys, offsets, example_weights=weights if weighted else None)
    return batch, logits, keys, weights if weighted else np.ones(n)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("span", [1e-6, 0.017, 0.16, 1.37, 30.0])
def test_the_auc_of_a_group_is_exact_whatever_the_logits_span(span: float, weighted: bool) -> None:
    batch, logits, keys, weights = narrow(span, 20_000, 7, weighted)
    metrics = GroupMetrics(0)
    metrics.update(batch, logits)
    values = metrics.values()
    for group in range(7):
        at = keys == group
        assert values.auc[group] == pytest.approx(exact_auc(batch.labels[at], logits[at], weights[at]), abs=1e-12)
    assert values.gauc == pytest.approx((values.auc * values.weight).sum() / values.weight.sum(), abs=1e-12)


def test_a_dense_cluster_among_logits_that_are_far_apart_is_told_apart() -> None:
    """What a histogram of any fixed width merges: most examples within 1e-5, some over the whole range."""
    batch, logits, _, weights = narrow(1e-5, 300_000, 1, weighted=True)
    logits[::3] = np.random.default_rng(1).uniform(-30, 30, len(logits[::3]))
    metrics = GroupMetrics(0)
    metrics.update(batch, logits)
    assert metrics.values().auc[0] == pytest.approx(exact_auc(batch.labels, logits, weights), abs=1e-12)


def test_minus_zero_is_zero() -> None:
    batch = make_batch([[1], [1]], np.array([0, 1], np.float32))
    assert counted(batch, np.array([0.0, -0.0], np.float32)).values().auc.tolist() == [0.5]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 400), span=st.floats(1e-7, 100), entries=st.sampled_from([1, 30, 10**6]))
def test_any_data_has_the_exact_auc(data: st.DataObject, n: int, span: float, entries: int) -> None:
    weighted, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    batch, logits, keys, weights = narrow(span, n, 2, weighted=weighted, seed=seed)
    metrics = GroupMetrics(0, entries=entries)
    metrics.update(batch, logits)
    values = metrics.values()
    for number, group in enumerate(values.keys):
        at = keys == group
        if math.isnan(values.auc[number]):
            assert len(set(batch.labels[at])) == 1
            continue
        assert values.auc[number] == pytest.approx(exact_auc(batch.labels[at], logits[at], weights[at]), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(power=st.integers(-60, 60), seed=st.integers(0, 50))
def test_a_power_of_two_times_all_weights_changes_no_bit(power: int, seed: int) -> None:
    batch, logits = sample(600, groups=3, seed=seed)
    one = counted(batch, logits).values()
    scaled = dataclasses.replace(batch, example_weights=np.ldexp(batch.example_weights, power))
    other = counted(scaled, logits).values()
    for name, value in dataclasses.asdict(one).items():
        expected = np.ldexp(value, power) if "weight" in name else value
        np.testing.assert_array_equal(getattr(other, name), expected, err_msg=name)


@pytest.mark.parametrize("factor", [1e-12, 3e-7, 7.0, 1e12])
def test_any_factor_of_all_weights_changes_metrics_by_less_than_a_millionth(factor: float) -> None:
    batch, logits = sample(3000, groups=3)
    one = counted(batch, logits).values()
    weights = (batch.example_weights * np.float64(factor)).astype(np.float32)
    other = counted(dataclasses.replace(batch, example_weights=weights), logits).values()
    for name in ("mean_label", "mean_prediction", "calibration", "log_loss", "auc", "gauc"):
        np.testing.assert_allclose(getattr(other, name), getattr(one, name), atol=1e-6, err_msg=name)


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
        alone = Metrics()
        alone.update(batch.labels[rows], logits[rows], batch.example_weights[rows])
        expected = alone.values()
        assert values.weight[number] == expected.weight
        assert values.mean_label[number] == pytest.approx(expected.mean_label, rel=1e-15)
        assert values.auc[number] == pytest.approx(expected.auc, abs=expected.auc_error + 1e-12)
        for name in ("log_loss", "mean_prediction", "calibration"):
            assert getattr(values, name)[number] == pytest.approx(getattr(expected, name), rel=1e-6)
        weighted += values.auc[number] * expected.weight
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
    entries=st.sampled_from([16, 100, 10**6]),
)
def test_batches_and_order_do_not_change_a_bit(
    seed: int, groups: int, kept: int, cuts: list[int], entries: int
) -> None:
    batch, logits = sample(300, groups, seed)
    whole, stepped = counted(batch, logits, groups=kept), GroupMetrics(1, groups=kept, entries=entries)
    for a, b in reversed(list(itertools.pairwise([0, *sorted(cuts), 300]))):
        stepped.update(batch.slice(a, b), logits[a:b])
        stepped.values()  # looking does not change anything
    assert_same(stepped, whole)


@pytest.mark.parametrize("kept", [5, 4096])
def test_weights_of_one_count_as_no_weights_and_batches_may_have_either(kept: int) -> None:
    batch, logits = sample(600, 40)
    ones = dataclasses.replace(batch, example_weights=np.ones(600, np.float32))
    none = dataclasses.replace(batch, example_weights=None)
    either = GroupMetrics(1, groups=kept)
    for part, start in ((ones, 0), (none, 200), (ones, 400)):
        either.update(part.slice(start, start + 200), logits[start : start + 200])
    assert_same(counted(none, logits, groups=kept), counted(ones, logits, groups=kept))
    assert_same(either, counted(none, logits, groups=kept))


def test_what_memory_does_not_hold_is_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_metrics, "_WAITING", 256)
    batch, logits = sample(20_000, groups=50, seed=3)
    metrics = GroupMetrics(1, entries=1_000)
    for first in range(0, 20_000, 100):
        metrics.update(batch.slice(first, first + 100), logits[first : first + 100])
    assert len(metrics._entries._spilled) > 5
    assert sum(len(codes) for codes, _ in metrics._entries._runs) <= 1_000
    assert_same(metrics, counted(batch, logits))
    assert max(len(codes) for codes, _ in metrics._entries.groups()) < 5_000  # the groups come a few at a time


def test_the_groups_that_stay_are_a_sample_by_mixed_key_and_complete() -> None:
    batch, logits = sample(20_000, groups=5000, seed=3)
    everything = counted(batch, logits, groups=10**6).values()
    some = counted(batch, logits, groups=100).values()
    order = mixed(everything.keys)
    bound = max(2**power for power in range(64) if (order < np.uint64(2**power)).sum() <= 100)
    assert some.keys.tolist() == everything.keys[order < np.uint64(bound)].tolist()
    assert 30 < len(some.keys) <= 100
    stays = np.isin(everything.keys, some.keys)
    np.testing.assert_array_equal(some.weight, everything.weight[stays])
    np.testing.assert_array_equal(some.auc, everything.auc[stays])
    assert some.overflow_weight == pytest.approx(everything.weight[~stays].sum(), rel=1e-12)
    assert everything.overflow_weight == 0
    assert everything.groups_seen == len(everything.keys)
    assert some.groups_seen == pytest.approx(len(everything.keys), rel=0.5)


def test_more_updates_than_room_lose_nothing() -> None:
    metrics = GroupMetrics(1, groups=10**6)
    total = 0.0
    for seed in range(20):
        batch, logits = sample(2000, groups=10**6, seed=seed)
        metrics.update(batch, logits)
        assert batch.example_weights is not None
        counts = batch.offsets[2::2] - batch.offsets[1:-1:2]
        total += (batch.example_weights.astype(np.float64) * counts).sum()
    assert metrics.values().weight.sum() == pytest.approx(total, rel=1e-12)
    assert metrics.values().overflow_weight == 0


def test_one_bag_larger_than_the_table_fits() -> None:
    batch = make_batch([list(range(10_000))], np.ones(1, np.float32))
    assert len(counted(batch, np.zeros(1, np.float32), groups=20_000).values().keys) == 10_000


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, 12345678901234567])
def test_every_key_is_a_group_and_named_as_it_was(key: int) -> None:
    batch = make_batch([[key]], np.ones(1, np.float32))
    assert counted(batch, np.zeros(1, np.float32)).values().keys.tolist() == [key]


def test_without_examples_there_are_no_groups() -> None:
    for metrics in (GroupMetrics(1), counted(make_batch([[], []], np.ones(2, np.float32)), np.zeros(2, np.float32))):
        values = metrics.values()
        assert len(values.keys) == len(values.auc) == values.groups_seen == values.overflow_weight == 0
        assert math.isnan(values.gauc)


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
    with pytest.raises(ArgumentError, match="at least one group"):
        GroupMetrics(1, groups=0)
