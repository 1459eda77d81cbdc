"""The dense optimizers do what their papers say, on the mean gradient, clipped by norm, then with L2 on weights."""

import numpy as np
import pytest

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError
from daskps.nn.dense_model import GRADIENT_ONE, step_weight
from daskps.nn.network import DenseNetwork
from daskps.nn.optimizer import SPREAD_FROM, DenseOptimizer, update
from tests.nn.dense_reference import examples, make

KINDS = ["sgd", "adagrad", "adam"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def plain(optimizer: DenseOptimizer, parameters: np.ndarray, gradients: list[np.ndarray], decayed: int) -> np.ndarray:
    """Several steps of the optimizer in float64, from its definition."""
    x = parameters.astype(np.float64)
    a, m, v = np.full_like(x, optimizer.initial_accumulator), np.zeros_like(x), np.zeros_like(x)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.copy()
        norm = np.sqrt((g * g).sum())
        if optimizer.clip_norm is not None and norm > optimizer.clip_norm:
            g *= optimizer.clip_norm / norm
        g[:decayed] += optimizer.l2 * x[:decayed]
        if optimizer.kind == "sgd":
            x -= optimizer.learning_rate * g
        elif optimizer.kind == "adagrad":
            a += g * g
            x -= optimizer.learning_rate * g / (np.sqrt(a) + optimizer.epsilon)
        else:
            m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
            v = optimizer.beta2 * v + (1 - optimizer.beta2) * g * g
            m_hat, v_hat = m / (1 - optimizer.beta1**t), v / (1 - optimizer.beta2**t)
            x -= optimizer.learning_rate * m_hat / (np.sqrt(v_hat) + optimizer.epsilon)
    return x


@every_kind
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"l2": 0.3},
        {"clip_norm": 0.05},
        {"l2": 0.3, "clip_norm": 0.05},
        {"clip_norm": 1e9},
        {"initial_accumulator": 0.1},
    ],
    ids=str,
)
def test_an_optimizer_follows_its_definition(kind: str, settings: dict, pool: ComputePool) -> None:
    optimizer = DenseOptimizer(kind, learning_rate=0.05, **settings)
    network = make("deepfm", pool, optimizer=optimizer)
    start, gradients = network.flat.copy(), []
    for step in range(6):
        sums = network.step(**examples(network.architecture, 40, seed=step).all).sums
        gradients.append(sums[:-2] / (GRADIENT_ONE * step_weight(sums)))
        network.apply(sums)
    wanted = plain(optimizer, start, gradients, network.architecture.decayed)
    np.testing.assert_allclose(network.flat, wanted, rtol=2e-5, atol=2e-6)


def test_l2_pulls_on_weights_and_leaves_biases(pool: ComputePool) -> None:
    network = make("deepfm", pool, optimizer=DenseOptimizer("sgd", 0.1, l2=0.5))
    before = {name: array.copy() for name, array in network.parameters.items()}
    sums = np.zeros(network.architecture.size + 2, np.int64)
    sums[-1] = 1 << 30  # weight 1, no gradient
    network.apply(sums)
    for name, array in network.parameters.items():
        factor = 1 if name.endswith("bias") else 0.95
        np.testing.assert_allclose(array, factor * before[name], rtol=1e-6, err_msg=name)


def test_a_tight_clip_does_not_weaken_l2(pool: ComputePool) -> None:
    network = make("deepfm", pool, optimizer=DenseOptimizer("sgd", 1.0, l2=0.5, clip_norm=1e-9))
    before = network.parameters["output.weight"].copy()
    sums = network.step(**examples(network.architecture, 40).all).sums
    network.apply(sums)
    np.testing.assert_allclose(network.parameters["output.weight"], 0.5 * before, rtol=1e-5, atol=1e-8)


@every_kind
def test_many_parameters_are_spread_over_the_cores_with_the_same_bits(kind: str, pool: ComputePool) -> None:
    n = SPREAD_FROM + 5
    random = np.random.default_rng(0)
    sums, start = random.integers(-(2**40), 2**40, n), random.normal(size=n).astype(np.float32)
    optimizer = DenseOptimizer(kind)
    spread, alone = CpuDevice(0, pool), CpuDevice(1, pool)
    alone.launch = alone.launch_inline
    results = []
    for each in (spread, alone):
        parameters, state = start.copy(), optimizer.initial_state(each, n)
        update(optimizer, each, sums=sums, weight_sum=1 << 40, decayed=0, steps=1, parameters=parameters, state=state)
        results.append([parameters, *state.values()])
    for own, other in zip(*results, strict=True):
        np.testing.assert_array_equal(own, other)
    assert (results[0][0] != start).mean() > 0.9


def test_the_gradient_is_the_mean_by_weight(pool: ComputePool) -> None:
    def trained(weight: float) -> DenseNetwork:
        network = make("dnn", pool, optimizer=DenseOptimizer("sgd", 0.5))
        data = examples(network.architecture, 40)
        data.example_weights = np.full(40, weight, np.float32)
        network.apply(network.step(**data.all).sums)
        return network

    np.testing.assert_allclose(trained(1).flat, trained(8).flat, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "lion"}, "no dense optimizer 'lion'; there are sgd, adagrad, adam"),
        ({"learning_rate": 0.0, "beta2": 1.0}, r"adagrad: out of range: learning_rate=0\.0, beta2=1\.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"clip_norm": 0.0}, r"clip_norm=0\.0"),
        ({"l2": -1.0}, r"l2=-1\.0"),
        ({"epsilon": 0.0}, r"epsilon=0\.0"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DenseOptimizer(**settings)
