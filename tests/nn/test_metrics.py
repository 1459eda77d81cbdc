"""Streaming metrics equal the textbook ones, and are the same bits however the examples arrive."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import daskps.nn.metrics as metrics_module
from daskps.device.compile import LIBRARY_FOLDER, variants
from daskps.device.native import _NEEDS, Library, _cpu_flags
from daskps.errors import ArgumentError, NonFiniteError
from daskps.nn.metrics import Metrics


def exact_auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """By definition: every pair of a click and a non-click, ties half."""
    clicks, others = labels == 1, labels == 0
    order = np.sign(scores[clicks][:, None] - scores[others][None, :]) / 2 + 0.5
    pairs = weights[clicks][:, None] * weights[others][None, :]
    return float((order * pairs).sum() / pairs.sum()) if pairs.sum() else math.nan


def sample(n: int, seed: int, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, logits and weights of a model that is about right."""
    random = np.random.default_rng(seed)
    logits = random.normal(-2, spread, n).astype(np.float32)
    labels = (random.random(n) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return labels, logits, random.exponential(size=n).astype(np.float32)


def counted(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None, **settings: float) -> Metrics:
    metrics = Metrics(**settings)  # type: ignore[arg-type]
    metrics.update(labels, logits, weights)
    return metrics


def assert_same(one: Metrics, other: Metrics) -> None:
    for (name, left), right in zip(one.state().items(), other.state().values(), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name, strict=True)


@st.composite
def examples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = draw(st.integers(0, 60))
    logit = st.floats(-8191, 8191, width=32) | st.floats(-20, 20, width=32) | st.sampled_from([0.0, -0.0, 16.0, -16.0])
    weight = st.floats(0, 8191, width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, 1e-30, 1e30, 3e38])
    return (
        np.array(draw(st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n)), np.float32),
        np.array(draw(st.lists(logit, min_size=n, max_size=n)), np.float32),
        np.array(draw(st.lists(weight, min_size=n, max_size=n)), np.float32),
    )


@settings(max_examples=200, deadline=None)
@given(data=examples(), buckets=st.sampled_from([1, 2, 1000, 100_000]))
def test_the_exact_auc_is_within_the_stated_error(
    data: tuple[np.ndarray, np.ndarray, np.ndarray], buckets: int
) -> None:
    labels, logits, weights = data
    values = counted(labels, logits, weights, buckets=buckets).values()
    expected = exact_auc(labels, logits.astype(np.float64), weights.astype(np.float64))
    if math.isnan(expected):
        assert math.isnan(values.auc)
        assert math.isnan(values.auc_error)
    else:
        assert abs(values.auc - expected) <= values.auc_error + 1e-12


@pytest.mark.parametrize("spread", [0.1, 1.5, 5.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_auc_of_a_model_is_exact_to_five_digits(weighted: bool, spread: float) -> None:
    labels, logits, weights = sample(6000, seed=1, spread=spread)
    values = counted(labels, logits, weights if weighted else None).values()
    expected = exact_auc(labels, logits.astype(np.float64), weights if weighted else np.ones(6000))
    assert values.auc == pytest.approx(expected, abs=5e-6)
    assert values.auc_error < 1e-4


@settings(max_examples=100, deadline=None)
@given(data=examples())
def test_loss_and_calibration_are_the_textbook_ones(data: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    labels, logits, weights = data
    values = counted(labels, logits, weights, buckets=1000).values()
    w, z, y = weights.astype(np.float64), logits.astype(np.float64), labels.astype(np.float64)
    assert values.examples == len(labels)
    assert values.weight == math.fsum(w)
    if not w.sum():
        return
    rounding = {"rel": 1e-12, "abs": 2**-31}  # each product is rounded to 2**-32 of a weight's mantissa
    loss = (w * (np.logaddexp(0, z) - y * z)).sum() / w.sum()
    with np.errstate(over="ignore"):
        prediction = (w / (1 + np.exp(-z))).sum() / w.sum()
    mean = (w * y).sum() / w.sum()
    assert values.mean_label == pytest.approx(mean, rel=1e-15)
    assert values.log_loss == pytest.approx(loss, **rounding)
    assert values.mean_prediction == pytest.approx(prediction, **rounding)
    if 0.01 < mean < 0.99:
        entropy = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
        assert values.normalised_entropy == pytest.approx(values.log_loss / entropy, rel=1e-12)
        assert values.calibration == pytest.approx(values.mean_prediction / mean, rel=1e-12)


def test_a_calibrated_model_has_calibration_one_and_beats_the_mean() -> None:
    labels, logits, _ = sample(200_000, seed=2)
    values = counted(labels, logits).values()
    assert values.calibration == pytest.approx(1, abs=0.02)
    assert 0.5 < values.normalised_entropy < 0.95
    shifted = counted(labels, logits + np.float32(1)).values()
    assert shifted.calibration > 1.5
    assert shifted.auc == pytest.approx(values.auc, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=examples(), cuts=st.lists(st.integers(0, 60), max_size=4), order=st.randoms())
def test_batches_order_and_nodes_do_not_change_a_bit(
    data: tuple[np.ndarray, np.ndarray, np.ndarray], cuts: list[int], order: object
) -> None:
    labels, logits, weights = data
    whole = counted(labels, logits, weights, buckets=1000)
    parts = [
        counted(*(np.ascontiguousarray(part[::-1]) for part in parts), buckets=1000)
        for parts in zip(*(np.split(array, sorted(cuts)) for array in data), strict=True)
    ]
    order.shuffle(parts)  # type: ignore[attr-defined]
    left = Metrics(buckets=1000)
    for part in parts:
        left.merge(part)
    right = Metrics(buckets=1000)
    for part in reversed(parts):
        part.merge(right)
        right = part
    assert_same(left, whole)
    assert_same(right, whole)


def test_blocks_inside_an_update_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sample(5000, seed=3)
    whole = counted(*data)
    monkeypatch.setattr(metrics_module, "_BLOCK_EXAMPLES", 700)
    assert_same(counted(*data), whole)


@pytest.mark.parametrize("variant", variants())
def test_every_cpu_variant_gives_the_same_bits(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := _NEEDS.get(variant, set()) - _cpu_flags():
        pytest.skip(f"this CPU lacks {sorted(missing)} for {variant}")
    data = sample(5000, seed=4, spread=6.0)
    expected = counted(*data)
    built = Library(LIBRARY_FOLDER / f"daskps-{variant}.so")
    monkeypatch.setattr(metrics_module, "library", lambda: built)
    assert_same(counted(*data), expected)


def test_golden_values_hold_for_ever() -> None:
    labels = np.array([1, 0, 1, 0, 0, 1], np.float32)
    logits = np.array([0.5, -0.25, -3, 2, -100, 20], np.float32)
    state = counted(labels, logits, np.array([1, 0.125, 2, 0.5, 1, 2.0**-30], np.float32)).state()
    totals = state.pop("totals")
    assert [int(total[0]) + (int(total[1]) << 64) + (int(total[2]) << 128) for total in totals] == GOLDEN_TOTALS
    assert {name: array.tolist() for name, array in state.items()} == {
        "settings": [1_000_000.0, 16.0],
        "counts": [6],
        "limbs": [4, 5],
        "filled": [0, 406250, 492187, 515625, 562500, 999999],
        "positives": [0, 0, 0, 0, 0, 2**22, 0, 2**21, 0, 2**20, 0, 0],
        "negatives": [0, 0, 0, 0, 0, 0, 2**20, 0, 2**17, 0, 2**19, 0],
    }


# In units of 2**-149 (weights) and 2**-158.
GOLDEN_TOTALS = [
    0x94000000800000000000000000000000000000,
    0x60000000800000000000000000000000000000,
    0x1ED3AB4B228000009000000000000000000000000,
    0x4D9893AF8FFFFFF7000000000000000000000000,
]

# Of examples without weights and of weight 1, as numerics 1 counted them.
ONES = {
    "weight": "0x1.3880000000000p+13",
    "mean_label": "0x1.8f27bb2fec56dp-3",
    "mean_prediction": "0x1.94657703a92a3p-3",
    "calibration": "0x1.035c86e985d85p+0",
    "log_loss": "0x1.56e32d7d049bap-2",
    "normalised_entropy": "0x1.5b9451fc249fdp-1",
    "auc": "0x1.a930a08ba54fap-1",
    "auc_error": "0x1.300da187655f6p-14",
}


def test_weights_of_one_have_the_values_they_always_had() -> None:
    metrics = counted(*sample(5000, seed=7, spread=3.0)[:2])
    metrics.update(*sample(5000, seed=8, spread=0.01)[:2], np.ones(5000, np.float32))
    assert {name: float(getattr(metrics.values(), name)).hex() for name in ONES} == ONES


def test_a_state_of_numerics_1_is_taken_over() -> None:
    """As the test of golden values had it before weights were exact."""
    metrics = Metrics()
    metrics.load(
        {
            "settings": [1_000_000.0, 16.0],
            "counts": [6, 7969178, 6291456],
            "sums": [[0, 33038219283], [0, 18045271281]],
            "filled": [0, 406250, 492187, 515625, 562500, 999999],
            "positives": [0, 2097152, 0, 1048576, 0, 3145728],
            "negatives": [1048576, 0, 104858, 0, 524288, 0],
        }
    )
    values = metrics.values()
    assert (values.examples, values.weight) == (6, 7969178 / 2**20)
    assert values.mean_label == 6291456 / 7969178
    assert values.log_loss == 33038219283 / 2**32 / (7969178 / 2**20)
    labels = np.array([1, 0, 1, 0, 0, 1], np.float32)
    logits = np.array([0.5, -0.25, -3, 2, -100, 20], np.float32)
    weights = np.array([1, 104858 / 2**20, 2, 0.5, 1, 3], np.float32)
    again = counted(labels, logits, weights).values()
    assert (values.auc, values.weight) == (again.auc, again.weight)
    assert values.log_loss == pytest.approx(again.log_loss, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(data=examples(), power=st.integers(-20, 20))
def test_a_power_of_two_times_all_weights_changes_no_bit(
    data: tuple[np.ndarray, np.ndarray, np.ndarray], power: int
) -> None:
    labels, logits, weights = data
    weights = np.where((weights > 1e-20) & (weights < 1e20), weights, np.float32(0))  # where float32 can hold both
    one = counted(labels, logits, weights, buckets=1000).values()
    other = counted(labels, logits, np.ldexp(weights, power), buckets=1000).values()
    assert math.ldexp(one.weight, power) == other.weight
    for field in dataclasses.fields(one):
        if field.name != "weight":
            assert repr(getattr(one, field.name)) == repr(getattr(other, field.name)), field.name


@pytest.mark.parametrize("factor", [1e-12, 3e-7, 0.1, 7.0, 1e5, 1e12])
def test_any_factor_of_all_weights_changes_metrics_by_less_than_a_millionth(factor: float) -> None:
    labels, logits, weights = sample(20_000, seed=11)
    one = counted(labels, logits, weights).values()
    other = counted(labels, logits, (weights * np.float64(factor)).astype(np.float32)).values()
    assert other.weight == pytest.approx(one.weight * factor, rel=1e-6)
    for field in dataclasses.fields(one):
        if field.name != "weight":
            assert getattr(other, field.name) == pytest.approx(getattr(one, field.name), abs=1e-6), field.name


def test_full_limbs_carry_and_change_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sample(5000, seed=3, spread=0.001)
    whole = counted(*data, buckets=100)
    monkeypatch.setattr(metrics_module, "_LIMB_LIMIT", 2**30)
    small = Metrics(buckets=100)
    for start in range(0, 5000, 500):
        small.update(*(array[start : start + 500] for array in data))
    assert len(small.state()["limbs"]) > len(whole.state()["limbs"])
    assert small.values() == whole.values()


def test_state_goes_through_arrays_and_json() -> None:
    metrics = counted(*sample(2000, seed=5), buckets=5000)
    restored = Metrics()
    restored.load(metrics.state())
    assert_same(restored, metrics)
    text = json.dumps({name: array.tolist() for name, array in metrics.state().items()})
    restored.load(json.loads(text))
    assert_same(restored, metrics)
    assert restored.values() == metrics.values()
    more = sample(100, seed=6)
    restored.update(*more)
    metrics.update(*more)
    assert_same(restored, metrics)


def test_sums_beyond_64_bits_are_kept() -> None:
    metrics = counted(*sample(10, seed=5))
    for _ in range(38):
        metrics.merge(metrics)
    restored = Metrics()
    restored.load(metrics.state())
    assert_same(restored, metrics)
    assert metrics.state()["totals"][2, 3:].any()
    assert restored.values().log_loss == counted(*sample(10, seed=5)).values().log_loss


def test_a_step_may_lose_more_than_64_bits_hold() -> None:
    labels, logits = np.zeros(200, np.float32), np.full(200, 8000, np.float32)
    values = counted(labels, logits, np.full(200, 8000, np.float32)).values()
    assert (values.log_loss, values.mean_prediction) == (8000, 1)


def test_without_examples_there_are_no_values_but_no_error() -> None:
    values = Metrics().values()
    assert (values.examples, values.weight) == (0, 0)
    assert math.isnan(values.auc)
    assert math.isnan(values.log_loss)
    restored = Metrics()
    restored.load(Metrics().state())
    assert_same(restored, Metrics())


def test_one_label_alone_has_a_loss_but_no_auc() -> None:
    values = counted(np.zeros(3, np.float32), np.zeros(3, np.float32)).values()
    assert values.log_loss == pytest.approx(math.log(2), abs=1e-9)
    assert values.mean_prediction == 0.5
    assert math.isnan(values.auc)
    assert math.isnan(values.calibration)
    assert math.isnan(values.normalised_entropy)


def test_the_summary_is_the_values_by_name() -> None:
    metrics = counted(*sample(100, seed=1))
    assert metrics.summary()["log_loss"] == metrics.values().log_loss
    assert metrics.summary()["examples"] == 100.0


@pytest.mark.parametrize(
    ("label", "logit", "weight", "error", "message"),
    [
        (0.5, 0.0, 1.0, ArgumentError, "label of example 700 is 0.5"),
        (math.nan, 0.0, 1.0, ArgumentError, "label of example 700 is nan"),
        (1.0, math.nan, 1.0, NonFiniteError, "logit of example 700 is nan"),
        (1.0, math.inf, 1.0, NonFiniteError, "the model has diverged"),
        (1.0, -8192.0, 1.0, NonFiniteError, "is -8192.0, over 8192 in size"),
        (1.0, 0.0, -0.5, ArgumentError, "weight of example 700 is -0.5"),
        (1.0, 0.0, math.nan, ArgumentError, "weights are finite numbers from 0 on"),
        (1.0, 0.0, math.inf, ArgumentError, "weight of example 700 is inf"),
    ],
)
def test_what_cannot_be_counted_is_named_and_nothing_is_counted(
    label: float, logit: float, weight: float, error: type[Exception], message: str
) -> None:
    metrics = Metrics()
    labels, logits, weights = sample(1000, seed=1)
    labels[700], logits[700], weights[700] = label, logit, weight
    with pytest.raises(error, match=message):
        metrics.update(labels, logits, weights)
    assert_same(metrics, Metrics())


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"logits of shape \(2,\) do not fit labels of shape \(3,\)"):
        Metrics().update(np.zeros(3, np.float32), np.zeros(2, np.float32))


def test_metrics_of_other_buckets_do_not_merge() -> None:
    with pytest.raises(ArgumentError, match="10 buckets"):
        Metrics().merge(Metrics(buckets=10))


@pytest.mark.parametrize("settings", [{"buckets": 0}, {"logit_limit": 0.0}, {"logit_limit": math.inf}])
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="buckets and a limit over 0"):
        Metrics(**settings)  # type: ignore[arg-type]
