"""Each network computes what it is defined to, its gradients are those of its loss, and its bits depend on no split."""

import itertools

import numpy as np
import pytest

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, ConfigError, NonFiniteError
from daskps.nn.dense_model import EXAMPLE_ONE, GRADIENT_ONE, merge, step_weight, weight_scale
from daskps.nn.network import DenseNetwork, build
from daskps.nn.optimizer import DenseOptimizer
from tests.nn import dense_reference as reference
from tests.nn.dense_reference import SHAPES, examples, make

every_shape = pytest.mark.parametrize("name", SHAPES)


def sums_of(network: DenseNetwork, sums: np.ndarray) -> dict[str, np.ndarray]:
    """Gradient sums by parameter, in float64."""
    return {p.name: sums[p.place].reshape(p.shape) / GRADIENT_ONE for p in network.architecture.parameters}


@every_shape
def test_logits_and_loss_are_those_of_the_definition(name: str, pool: ComputePool) -> None:
    network = make(name, pool)
    data = examples(network.architecture, 37)
    result = network.step(**data.all)
    wanted = reference.logits(network.architecture, network.parameters, data.pooled, data.dense)
    np.testing.assert_allclose(result.logits, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.probabilities, 1 / (1 + np.exp(-wanted)), rtol=1e-5)
    assert int(result.loss[0]) / EXAMPLE_ONE == pytest.approx(
        reference.loss(network.architecture, network.parameters, data), rel=1e-6
    )
    assert step_weight(result.sums) == pytest.approx(data.example_weights.astype(np.float64).sum(), rel=1e-9)


@every_shape
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_are_those_of_finite_differences(name: str, weighted: bool, pool: ComputePool) -> None:
    network = make(name, pool)
    data = examples(network.architecture, 21, weighted=weighted)
    result = network.step(**data.all)
    gradients = sums_of(network, result.sums)
    parameters = {key: np.asarray(array, np.float64) for key, array in network.parameters.items()}
    data.pooled = [array.astype(np.float64) for array in data.pooled]
    random = np.random.default_rng(1)
    targets = [(parameters[key], gradients[key]) for key in parameters]
    targets += list(zip(data.pooled, result.gradients, strict=True))
    for array, gradient in targets:
        for _ in range(12):
            at = tuple(random.integers(0, size) for size in array.shape)
            kept, h = array[at], 1e-6
            array[at] = kept + h
            above = reference.loss(network.architecture, parameters, data)
            array[at] = kept - h
            below = reference.loss(network.architecture, parameters, data)
            array[at] = kept
            assert gradient[at] == pytest.approx((above - below) / (2 * h), rel=2e-4, abs=2e-5)


def results_equal(one: dict, other: dict) -> None:
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key, strict=True)


def outcome(network: DenseNetwork, parts: list) -> dict[str, np.ndarray]:
    """Everything that training a step in these parts gives."""
    network.apply(merge([part.sums for part in parts]))
    tables = zip(*(part.gradients for part in parts), strict=True)
    found = {f"gradient {table}": np.concatenate(list(arrays)) for table, arrays in enumerate(tables)}
    found["logits"] = np.concatenate([part.logits for part in parts])
    found["sums"] = merge([part.sums for part in parts])
    return found | network.export()


@every_shape
def test_bits_do_not_depend_on_threads(name: str, pool: ComputePool) -> None:
    wanted = None
    for cores in (1, 2, 3, 4):
        with ComputePool(cores) as threads:
            network = make(name, threads)
            data = examples(network.architecture, 16 * 9 + 5)
            found = outcome(network, [network.step(**data.all)])
        wanted = wanted or found
        results_equal(found, wanted)


@every_shape
@pytest.mark.parametrize("cuts", [[3], [1, 4], [0, 2, 2, 7], [9], [10]], ids=str)
def test_bits_do_not_depend_on_where_a_step_is_cut_between_nodes(name: str, cuts: list[int], pool: ComputePool) -> None:
    n = 16 * 9 + 5
    whole = make(name, pool)
    data = examples(whole.architecture, n)
    wanted = outcome(whole, [whole.step(**data.all)])
    network = make(name, pool)
    edges = [0, *(min(16 * cut, n) for cut in cuts), n]
    parts = [
        network.step(**data.part(start, stop), first_block=-(-start // 16)) for start, stop in itertools.pairwise(edges)
    ]
    results_equal(outcome(network, parts), wanted)


@every_shape
def test_gradients_may_be_written_over_the_pooled_slots(name: str, pool: ComputePool) -> None:
    network = make(name, pool)
    data = examples(network.architecture, 83)
    wanted = network.step(**data.all)
    found = network.step(**data.all, gradients=data.pooled)
    for own, other, place in zip(found.gradients, wanted.gradients, data.pooled, strict=True):
        assert own is place
        np.testing.assert_array_equal(own, other)
    np.testing.assert_array_equal(found.sums, wanted.sums)


@every_shape
def test_predict_gives_the_bits_of_the_step(name: str, pool: ComputePool) -> None:
    network = make(name, pool)
    data = examples(network.architecture, 83)
    result = network.step(**data.all)
    found = network.predict(pooled=data.pooled, dense=data.dense)
    np.testing.assert_array_equal(found, result.logits)
    np.testing.assert_array_equal(network.probabilities(found), result.probabilities)


def test_any_number_of_examples_can_be_predicted(pool: ComputePool) -> None:
    network = build("lr", tables=[(1, 1)], device=CpuDevice(0, pool), block_examples=1 << 16)
    pooled = np.linspace(-1, 1, (1 << 20) + 1, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(network.predict(pooled=[pooled]), pooled[:, 0])


@every_shape
def test_an_empty_part_adds_nothing_and_an_empty_step_changes_nothing(name: str, pool: ComputePool) -> None:
    network = make(name, pool, optimizer=DenseOptimizer("adam"))
    before = network.flat.copy()
    result = network.step(**examples(network.architecture, 0).all)
    assert result.logits.shape == (0,)
    assert not result.sums.any()
    network.apply(result.sums)
    np.testing.assert_array_equal(network.flat, before)
    assert network.steps == 0


@every_shape
def test_an_example_of_weight_two_counts_as_two(name: str, pool: ComputePool) -> None:
    network = make(name, pool)
    data = examples(network.architecture, 16)
    data.example_weights = np.full(16, 2, np.float32)
    doubled = network.step(**data.all)
    data.example_weights = None
    single = network.step(**data.all)
    twice = merge([single.sums, single.sums])
    np.testing.assert_array_equal(doubled.sums[-1], twice[-1])
    np.testing.assert_allclose(doubled.sums, twice, atol=16)  # units of 2^-36, rounded before or after doubling
    for own, other in zip(doubled.gradients, single.gradients, strict=True):
        np.testing.assert_array_equal(own, 2 * other)


def test_steps_that_run_at_once_in_several_threads_do_not_disturb_each_other(pool: ComputePool) -> None:
    network = make("deepfm", pool)
    data = [examples(network.architecture, 16 * 12, seed=seed) for seed in range(4)]
    wanted = [network.step(**each.all).sums for each in data]
    with ComputePool(4) as outer:  # four stages that share one compute pool
        found = outer.map(lambda each: [network.step(**each.all).sums for _ in range(10)], data)
    for own, other in zip(found, wanted, strict=True):
        for sums in own:
            np.testing.assert_array_equal(sums, other)


def test_the_seed_decides_the_parameters(pool: ComputePool) -> None:
    def flat(seed: int) -> np.ndarray:
        return build("dnn", tables=[(4, 8)], hidden=[16, 8], seed=seed, device=CpuDevice(0, pool)).flat

    np.testing.assert_array_equal(flat(5), flat(5))
    assert (flat(5) != flat(6)).mean() > 0.9
    weights = flat(5)[: 32 * 16]
    limit = np.sqrt(6 / 32)
    assert abs(weights.mean()) < 0.1 * limit
    assert 0.9 * limit < np.abs(weights).max() <= limit
    # these bits are a promise: models are resumed and compared across machines and releases
    assert flat(5)[:4].tobytes().hex() == "2f0dcf3e4338ba3ee1059b3e23ea613e"


def test_learns_a_tiny_logistic_problem(pool: ComputePool) -> None:
    random = np.random.default_rng(0)
    truth = np.array([1.5, -2, 0.5], np.float32)
    dense = random.normal(size=(4000, 3)).astype(np.float32)
    labels = (random.random(4000) < 1 / (1 + np.exp(-(dense @ truth - 0.7)))).astype(np.float32)
    optimizer = DenseOptimizer("adagrad", 0.3)
    network = build("lr", tables=[], dense_features=3, device=CpuDevice(0, pool), optimizer=optimizer)
    for _ in range(300):
        network.apply(network.step(pooled=[], dense=dense, labels=labels).sums)
    np.testing.assert_allclose(network.parameters["linear.weight"], truth, atol=0.25)
    assert network.parameters["bias"][0] == pytest.approx(-0.7, abs=0.15)


def test_a_dnn_learns_what_no_linear_model_can(pool: ComputePool) -> None:
    random = np.random.default_rng(0)
    pooled = random.choice(np.array([-1, 1], np.float32), (2048, 2))
    labels = (pooled[:, 0] * pooled[:, 1] > 0).astype(np.float32)
    device, optimizer = CpuDevice(0, pool), DenseOptimizer("adam", 0.01)
    network = build("dnn", tables=[(2, 1)], hidden=[16, 8], seed=1, device=device, optimizer=optimizer)
    for _ in range(200):
        result = network.step(pooled=[pooled], labels=labels)
        network.apply(result.sums)
    assert result.loss[0] / result.weight[0] < 0.05


@every_shape
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_an_exported_network_goes_on_with_the_same_bits(name: str, kind: str, pool: ComputePool) -> None:
    optimizer = DenseOptimizer(kind, 0.05)
    network = make(name, pool, optimizer=optimizer)
    data = examples(network.architecture, 40)
    network.apply(network.step(**data.all).sums)
    other = make(name, pool, seed=99, optimizer=optimizer)
    other.load(network.export())
    assert other.steps == 1
    for each in (network, other):
        each.apply(each.step(**data.all).sums)
    results_equal(network.export(), other.export())


def test_arrays_of_another_network_are_refused_by_name(pool: ComputePool) -> None:
    network = make("dnn", pool)
    with pytest.raises(ConfigError, match=r"not of a dnn network .*hidden1\.bias"):
        network.load({key: value for key, value in network.export().items() if key != "hidden1.bias"})
    with pytest.raises(ConfigError, match=r"another shape or type: \['bias \(2,\)'\]"):
        network.load(network.export() | {"bias": np.zeros(2, np.float32)})
    with pytest.raises(ConfigError, match=r"another shape or type: \['bias float64'\]"):
        network.load(network.export() | {"bias": np.zeros(1)})


def test_adam_state_of_a_snapshot_of_numerics_1_is_taken_over(pool: ComputePool) -> None:
    network, other = (make("dnn", pool, optimizer=DenseOptimizer("adam")) for _ in range(2))
    network.apply(network.step(**examples(network.architecture, 8).all).sums)
    old = {"momentum": "first_moment", "variance": "second_moment"}
    exported = {"/".join(old.get(part, part) for part in name.split("/")): a for name, a in network.export().items()}
    assert any(name.startswith("first_moment/") for name in exported)
    other.load(exported)
    for name, array in network.export().items():
        np.testing.assert_array_equal(other.export()[name], array, err_msg=name)


def test_a_scale_is_the_smallest_power_of_two_not_below_the_largest_weight() -> None:
    assert [weight_scale(w) for w in (0.0, 1.0, 0.5, 0.51, 1.0001, 8.0, 9.0)] == [1.0, 1.0, 0.5, 1.0, 2.0, 8.0, 16.0]
    assert weight_scale(2.0**-149) == 2.0**-149
    assert weight_scale(float(np.finfo(np.float32).max)) == 2.0**128


def test_state_of_another_optimizer_is_refused(pool: ComputePool) -> None:
    network, other = make("lr", pool), make("lr", pool, optimizer=DenseOptimizer("adam"))
    other.load(network.export())  # before the first step there is no state
    network.apply(network.step(**examples(network.architecture, 8).all).sums)
    with pytest.raises(
        ConfigError, match=r"state is \['accumulator'\], but adam keeps \['momentum', 'variance'\]: go on"
    ):
        other.load(network.export())
    stateless = {name: array for name, array in network.export().items() if "/" not in name}
    with pytest.raises(ConfigError, match=r"state is \[\], but adam keeps"):
        other.load(stateless)


@pytest.mark.parametrize("gradients_over_pooled", [True, False])
@every_shape
def test_a_slot_that_is_not_finite_is_named(name: str, gradients_over_pooled: bool, pool: ComputePool) -> None:
    network = make(name, pool)
    if not network.architecture.tables:
        return
    table = len(network.architecture.tables) - 1
    slots, dim = network.architecture.tables[table]
    for value in (np.nan, np.inf, -np.inf):
        data = examples(network.architecture, 16 * 5)
        data.pooled[table][50, (slots - 1) * dim] = value
        with pytest.raises(NonFiniteError, match=rf"slot {slots - 1} of table {table} pools to .*example {50 + 32};"):
            network.step(**data.all, first_block=2, gradients=data.pooled if gradients_over_pooled else None).check()
    network.step(**examples(network.architecture, 16).all).check()  # and the network is fit for use


def test_a_device_that_runs_ahead_names_no_slot_whose_values_are_gone(pool: ComputePool) -> None:
    ahead = CpuDevice(0, pool)
    ahead.immediate = False
    network = build("deepfm", device=ahead, block_examples=16, **SHAPES["deepfm"])
    for shared, message in (
        (True, "perhaps a slot, but gradients were written over"),
        (False, "slot 1 of table 1 pools"),
    ):
        data = examples(network.architecture, 40)
        data.pooled[1][20, 5] = np.nan
        with pytest.raises(NonFiniteError, match=message):
            network.step(**data.all, gradients=data.pooled if shared else None).check()


def test_a_cause_is_not_sought_where_gradients_have_been_written(pool: ComputePool) -> None:
    network = make("lr", pool)
    data = examples(network.architecture, 16 * 4)
    weights = np.full(16 * 4, 100, np.float32)  # gradients that are larger than any input
    weights[50] = 9000
    with pytest.raises(NonFiniteError, match=r"the weight of example 50 is 9000.0, not in"):
        network.step(**data.all | {"example_weights": weights}, gradients=data.pooled).check()
    data = examples(network.architecture, 16 * 4)
    data.pooled[0][50], data.labels[50] = 9000, 0  # so that it is a loss
    weights[50] = 100
    with pytest.raises(NonFiniteError, match=r"pools to 9000.0 at dimension 0 in example 50"):
        network.step(**data.all | {"example_weights": weights}, gradients=data.pooled).check()


def test_causes_other_than_slots_are_named(pool: ComputePool) -> None:
    network = make("deepfm", pool)

    def message(**changes: np.ndarray) -> str:
        with pytest.raises(NonFiniteError) as caught:
            network.step(**examples(network.architecture, 40).all | changes).check()
        return str(caught.value)

    dense = examples(network.architecture, 40).dense
    dense[7, 2] = np.inf
    assert "dense feature 2 is inf in example 7" in message(dense=dense)
    weights = np.ones(40, np.float32)
    weights[33] = -1
    assert "the weight of example 33 is -1.0, not in [0, 8192)" in message(example_weights=weights)
    weights[33] = np.inf
    assert "the weight of example 33 is inf" in message(example_weights=weights)
    weights[33] = 1e12
    assert "the weight of example 33 is 999999995904.0, not in [0, 8192)" in message(example_weights=weights)
    network.step(**examples(network.architecture, 40).all | {"example_weights": weights}, scale=weight_scale(1e12))
    labels = np.ones(40, np.float32)
    labels[3] = np.nan
    assert "the label of example 3 is nan" in message(labels=labels)
    dense[:] = 1e4  # the linear weights are too small for it to show in the loss
    network.parameters["hidden0.weight"][-3:] = 0
    network.parameters["linear.weight"][:] = 0
    found = message(dense=dense, labels=np.ones(40, np.float32))
    assert "linear.weight is not finite or beyond 32768: all inputs and parameters are finite" in found
    assert "too large together: dense feature 0 is 10000.0 in example 0" in found
    network.parameters["bias"][:] = 1e5
    assert "too large together: parameter bias has a value of size 100000" in message()
    network.parameters["bias"][:] = 0
    network.parameters["linear.weight"][:] = 1
    assert "a loss is not finite or beyond 8192: all inputs and parameters are finite, but too" in message(dense=dense)
    network.parameters["hidden1.weight"][1, 1] = np.nan
    assert "parameter hidden1.weight is not finite" in message()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "svm", "tables": [(2, 1)]}, "no network of kind 'svm'; there are lr, fm, dnn, deepfm"),
        ({"kind": "lr", "tables": [(2, 1), (3, 4)]}, r"every table has dimension 1, got \[1, 4\]"),
        ({"kind": "fm", "tables": [(2, 4), (3, 8)]}, r"all need one dimension .* got \[4, 8\]"),
        ({"kind": "fm", "tables": [(2, 1)]}, r"at least 2, got \[1\]"),
        ({"kind": "deepfm", "tables": [(2, 4)]}, r"deepfm needs hidden layers .* got hidden=\(\)"),
        ({"kind": "dnn", "tables": [(2, 4)], "hidden": [8, 0]}, r"at least one output each, got hidden=\(8, 0\)"),
        ({"kind": "lr", "tables": [(2, 1)], "hidden": [8]}, "lr has no hidden layers"),
        ({"kind": "lr", "tables": []}, "needs a table or dense features"),
        ({"kind": "lr", "tables": [(0, 1)]}, "at least one slot"),
        ({"kind": "lr", "tables": [(1, 1)], "block_examples": 0}, "block_examples must be at least 1"),
    ],
)
def test_shapes_that_do_not_hold_together_are_refused(settings: dict, message: str, pool: ComputePool) -> None:
    with pytest.raises(ConfigError, match=message):
        build(device=CpuDevice(0, pool), **settings)


def test_inputs_of_the_wrong_shape_are_named(pool: ComputePool) -> None:
    network = make("dnn", pool)
    good = examples(network.architecture, 8).all
    wrong = {
        r"2 tables, got 1 pooled": {"pooled": good["pooled"][:1]},
        r"pooled\[1\] must be .* shape \(8, 14\), got float32 of shape \(8, 7\)": {
            "pooled": [good["pooled"][0], good["pooled"][1][:, :7].copy()]
        },
        r"dense must be .* float32 .* got float64": {"dense": good["dense"].astype(np.float64)},
        r"3 dense features, got none": {"dense": None},
        r"example_weights must be .* shape \(8,\)": {"example_weights": np.ones(7, np.float32)},
        r"could overflow its sums": {"first_block": 4096},
    }
    for message, change in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            network.step(**good | change)
    with pytest.raises(ArgumentError, match="sums of length"):
        network.apply(np.zeros(3, np.int64))
