"""The kernels of the dense network against plain float64 NumPy, and against themselves compiled for other CPUs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.device.compile import LIBRARY_FOLDER, variants
from daskps.device.native import _NEEDS, Library, _cpu_flags, library

ONE, GRADIENT_ONE = 2**30, 2**36


def log_loss(
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None,
    native: Library | None = None,
    scale: float = 1.0,
) -> dict:
    n = len(logits)
    out = {
        "probabilities": np.empty(n, np.float32),
        "gradients": np.empty(n, np.float32),
        "losses": np.empty(n, np.int64),
        "example_weights": np.empty(n, np.int64),
        "flag": np.zeros(1, np.int32),
    }
    (native or library()).log_loss(logits=logits, labels=labels, weights=weights, scale=scale, n=n, **out)
    return out


@pytest.mark.parametrize("power", [-149, -60, -20, 0, 3, 100, 127])
def test_weights_and_their_scale_cancel_out_to_the_bit(power: int) -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(0, 4, 100).astype(np.float32), random.integers(0, 2, 100).astype(np.float32)
    weights = (1 - random.random(100)).astype(np.float32) if power > -120 else np.ones(100, np.float32)
    wanted = log_loss(logits, labels, weights)
    found = log_loss(logits, labels, np.ldexp(weights, power), scale=2.0**-power)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    ones = log_loss(logits, labels, np.full(100, 0.125, np.float32))
    for name, array in log_loss(logits, labels, None, scale=0.125).items():
        np.testing.assert_array_equal(ones[name], array, err_msg=name)


LOGITS = np.concatenate(
    [
        np.linspace(-90, 90, 4001),
        np.geomspace(1e-30, 1e4, 500),
        -np.geomspace(1e-30, 1e4, 500),
        [0.0, -0.0, 79.99, 80.01],
    ]
).astype(np.float32)


@pytest.mark.parametrize("label", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("weight", [None, 0.0, 0.7, 900.0])
def test_log_loss_is_that_of_float64(label: float, weight: float | None) -> None:
    logits = LOGITS[np.abs(LOGITS) < (8000 if weight is None else 8)]
    labels = np.full_like(logits, label)
    found = log_loss(logits, labels, None if weight is None else np.full_like(logits, weight))
    z, y, w = logits.astype(np.float64), labels.astype(np.float64), 1.0 if weight is None else float(np.float32(weight))
    p = np.exp(-np.logaddexp(0, -z))
    within = np.abs(z) < 80
    np.testing.assert_allclose(found["probabilities"][within], p[within], rtol=1e-7)
    np.testing.assert_allclose(found["probabilities"], p, rtol=1e-7, atol=1e-34)
    np.testing.assert_allclose(found["gradients"], w * (p - y), rtol=1e-7, atol=1e-15 * w)
    np.testing.assert_allclose(found["losses"] / ONE, w * (np.logaddexp(0, z) - y * z), rtol=1e-12, atol=0.51 / ONE)
    np.testing.assert_array_equal(found["example_weights"] / ONE, np.round(w * ONE) / ONE)
    assert not found["flag"].any()


@pytest.mark.parametrize(
    ("logit", "label", "weight"),
    [
        (np.nan, 0, 1),
        (np.inf, 1, 1),
        (-np.inf, 0, 1),
        (9000, 0, 1),
        (0, np.nan, 1),
        (0, 0, -1),
        (0, 0, 9000),
        (0, 0, np.nan),
    ],
)
def test_what_cannot_be_counted_raises_the_flag(logit: float, label: float, weight: float) -> None:
    def flag(**values: float) -> int:
        at = {"logit": 0.5, "label": 1.0, "weight": 1.0} | values
        arrays = [np.full(33, 0.5, np.float32), np.ones(33, np.float32), np.ones(33, np.float32)]
        for array, value in zip(arrays, at.values(), strict=True):
            array[20] = value
        with np.errstate(all="ignore"):
            return int(log_loss(*arrays)["flag"][0])

    assert flag(logit=logit, label=label, weight=weight) == 1
    assert flag() == 0


def test_sigmoid_has_the_bits_of_the_loss_and_keeps_nan() -> None:
    found = np.empty_like(LOGITS)
    library().sigmoid_of(logits=LOGITS, n=len(LOGITS), probabilities=found)
    wanted = log_loss(LOGITS, np.zeros_like(LOGITS), None)["probabilities"]
    np.testing.assert_array_equal(found, wanted)
    assert (np.diff(found[:4001]) >= 0).all()
    bad = np.array([np.nan], np.float32)
    library().sigmoid_of(logits=bad, n=1, probabilities=bad)
    assert np.isnan(bad[0])


@settings(deadline=None)
@given(st.lists(st.floats(-32767, 32767, width=32), min_size=1, max_size=50), st.randoms())
def test_fixed_sums_are_exact_to_half_a_unit_each_and_free_of_order(values: list[float], random: object) -> None:
    def add(order: list[float]) -> np.ndarray:
        total, flag = np.zeros(1, np.int64), np.zeros(1, np.int32)
        for value in order:
            library().add_fixed(gradients=np.array([value], np.float32), n=1, sums=total, flag=flag)
        assert not flag[0]
        return total

    total = add(values)
    np.testing.assert_array_equal(add(random.sample(values, len(values))), total)
    exact = sum(round(value * GRADIENT_ONE) for value in values)  # Python's integers, and round half to even
    assert int(total[0]) == exact


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 32768.0, -32768.0, 1e30])
def test_a_gradient_that_does_not_fit_raises_the_flag(value: float) -> None:
    flag = np.zeros(1, np.int32)
    gradients = np.zeros(100, np.float32)
    gradients[77] = value
    library().add_fixed(gradients=gradients, n=100, sums=np.zeros(100, np.int64), flag=flag)
    assert flag[0] == 1


@pytest.mark.parametrize("columns", [1, 5, 63, 64, 65, 128, 200])
def test_relu_and_its_gradient(columns: int) -> None:
    random = np.random.default_rng(columns)
    values, slopes = random.normal(size=(2, 75, columns)).astype(np.float32)
    bias = random.normal(size=columns).astype(np.float32)
    values[3, 0] = np.nan
    wanted = np.maximum(values + bias, 0)
    library().bias_relu(bias=bias, rows=75, columns=columns, values=values)
    np.testing.assert_array_equal(values, wanted)
    kept = np.where(wanted > 0, slopes, 0)
    sums, flag = np.full(columns, 1000), np.zeros(1, np.int32)
    library().relu_backward(activations=values, rows=75, columns=columns, gradients=slopes, sums=sums, flag=flag)
    np.testing.assert_array_equal(slopes, kept)
    exact = kept.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose((sums - 1000) / GRADIENT_ONE, exact, rtol=1e-5, atol=1e-6)
    assert not flag[0]


def test_a_bias_gradient_is_the_total_and_flags_what_does_not_fit() -> None:
    gradients = np.random.default_rng(0).normal(size=131).astype(np.float32)
    sums, flag = np.full(1, 7), np.zeros(1, np.int32)
    library().add_total(gradients=gradients, n=131, sums=sums, flag=flag)
    assert (sums[0] - 7) / GRADIENT_ONE == pytest.approx(gradients.astype(np.float64).sum(), rel=1e-6)
    assert not flag[0]
    for value in (np.nan, np.inf, 2048.0, -1e20):
        flag[0] = 0
        library().add_total(gradients=np.array([0, value], np.float32), n=2, sums=sums, flag=flag)
        assert flag[0] == 1
        flag[0] = 0
        slopes, active = np.array([[value]], np.float32), np.ones((1, 1), np.float32)
        library().relu_backward(activations=active, rows=1, columns=1, gradients=slopes, sums=sums, flag=flag)
        assert flag[0] == 1


def test_every_cpu_variant_gives_equal_bits() -> None:
    flags = _cpu_flags()
    usable = [name for name in variants() if _NEEDS.get(name, set()) <= flags]
    natives = [Library(LIBRARY_FOLDER / f"daskps-{name}.so") for name in usable]
    random = np.random.default_rng(0)
    n, size = 1003, 70_003
    logits, labels = random.normal(0, 4, n).astype(np.float32), random.integers(0, 2, n).astype(np.float32)
    weights = random.uniform(0, 5, n).astype(np.float32)
    sums = random.integers(-(2**40), 2**40, size)
    parameters = random.normal(0, 0.1, size).astype(np.float32)
    results = []
    for native in natives:
        found = log_loss(logits, labels, weights, native)
        common = {"sums": sums, "n": size, "scale": 1e-9, "l2": 0.01, "decayed": size - 7}
        squares = np.empty(-(-size // 1024))
        native.dense_squares(sums=sums, n=size, scale=1e-9, squares=squares)
        found["squares"] = squares
        for kind, extra in OPTIMIZERS.items():
            state = {name: np.full(size, 0.1, np.float32) for name in extra["state"]}
            changed = parameters.copy()
            function = getattr(native, f"dense_{kind}")
            function(**common, clip=0.5, parameters=changed, **state, **extra["settings"])
            found |= {kind: changed, **{f"{kind} {name}": array for name, array in state.items()}}
        pooled = random.normal(size=(40, 6 * 9)).astype(np.float32) if not results else results[0]["pooled"]
        found |= {"pooled": pooled, "totals": np.zeros((40, 9), np.float32), "squared": np.zeros((40, 9), np.float32)}
        native.fm_sums(pooled=pooled, n=40, slots=6, width=9, totals=found["totals"], squares=found["squared"])
        results.append(found)
    for found in results[1:]:
        for key, wanted in results[0].items():
            np.testing.assert_array_equal(found[key], wanted, err_msg=f"{key} of {usable}")


OPTIMIZERS = {
    "sgd": {"state": [], "settings": {"learning_rate": 0.1}},
    "adagrad": {"state": ["accumulator"], "settings": {"learning_rate": 0.1, "epsilon": 1e-8}},
    "adam": {
        "state": ["momentum", "variance"],
        "settings": {
            "step_size": 0.1,
            "correction": 1.5,
            "beta1": 0.9,
            "rest1": 0.1,
            "beta2": 0.99,
            "rest2": 0.01,
            "epsilon": 1e-8,
        },
    },
}


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 9, 16, 17, 33])
def test_fm_sums_run_over_the_slots_in_order(dim: int) -> None:
    pooled = np.random.default_rng(dim).normal(size=(11, 7, dim)).astype(np.float32)
    totals, squares = np.ones((11, dim), np.float32), np.ones((11, dim), np.float32)
    wanted_totals, wanted_squares = totals.copy(), squares.copy()
    for slot in range(7):
        wanted_totals += pooled[:, slot]
        wanted_squares += pooled[:, slot] * pooled[:, slot]
    library().fm_sums(pooled=pooled, n=11, slots=7, width=dim, totals=totals, squares=squares)
    np.testing.assert_array_equal(totals, wanted_totals)
    np.testing.assert_array_equal(squares, wanted_squares)
