"""Contract of DenseModel: what every implementation promises to the trainer, to snapshots and to predictions.

A new implementation makes a subclass with a `make` of its own. Every kind of built-in network runs under it.
"""

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

from daskps.device.device import Device, devices
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, NonFiniteError
from daskps.nn.architecture import KINDS, NetworkKind, NetworkRecord
from daskps.nn.dense_model import EXAMPLE_ONE, DenseModel, StepResult, merge
from daskps.nn.layers import FactorizationMachine, Linear, Mlp
from daskps.nn.network import build
from daskps.nn.optimizer import DenseOptimizer
from tests.contracts.backends import needs_gpu, run_on_ptx
from tests.processes import needs_ptxrun

BLOCK = 8
Arrays = dict[str, Any]


class DenseModelContract:
    """Tests of one model on one device; a subclass makes both."""

    backend = "cpu"
    tables = ((3, 4), (2, 4))  # (slots, dimension)
    dense_features = 3

    def make(self, device: Device, seed: int, optimizer: str) -> DenseModel:
        """Return a model with blocks of BLOCK examples; `seed` decides its initial parameters."""
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with ComputePool(2) as pool:
            yield devices(self.backend, 1, pool=pool)[0]

    def examples(self, device: Device, n: int, first: int = 0, seed: int = 0) -> Arrays:
        """Return the inputs of examples [first, n) of a step."""
        random = np.random.default_rng(seed)

        def on_device(array: np.ndarray) -> Any:
            return device.from_host(array[first:].astype(np.float32))

        return {
            "pooled": [on_device(random.normal(0, 0.5, (n, slots * dim))) for slots, dim in self.tables],
            "dense": on_device(random.normal(0, 0.5, (n, self.dense_features))),
            "labels": on_device(random.integers(0, 2, n)),
            "example_weights": on_device(random.uniform(0.25, 1, n)),
        }

    def train(self, device: Device, model: DenseModel, steps: int = 2) -> None:
        for seed in range(steps):
            model.apply(model.step(**self.examples(device, 20, seed=seed)).sums)

    def same(self, one: Arrays, other: Arrays) -> None:
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name, strict=True)

    def test_a_step_gives_arrays_of_the_device(self, device: Device) -> None:
        model, data = self.make(device, 1, "adagrad"), self.examples(device, 20)
        result = model.step(**data)
        assert isinstance(result, StepResult)
        size = sum(array.size for array in model.parameters.values())
        for array, dtype, shape in (
            (result.logits, np.float32, (20,)),
            (result.probabilities, np.float32, (20,)),
            (result.sums, np.int64, (size + 2,)),
            (result.loss, np.int64, (1,)),
            (result.weight, np.int64, (1,)),
            *zip(result.gradients, [np.float32] * 2, [array.shape for array in data["pooled"]], strict=True),
        ):
            assert device.holds(array)
            assert (array.dtype, array.shape) == (dtype, shape)
        assert device.holds(result.status)
        assert result.status.dtype == np.int32
        assert not device.to_host(result.status).any()
        result.check()

    def test_loss_and_weight_are_sums_over_the_examples(self, device: Device) -> None:
        data = self.examples(device, 20)
        result = self.make(device, 1, "sgd").step(**data)
        labels, weights = (device.to_host(data[name]).astype(np.float64) for name in ("labels", "example_weights"))
        logits = device.to_host(result.logits).astype(np.float64)
        losses = np.logaddexp(0, logits) - labels * logits
        assert device.to_host(result.loss)[0] / EXAMPLE_ONE == pytest.approx((losses * weights).sum(), rel=1e-6)
        assert device.to_host(result.weight)[0] / EXAMPLE_ONE == pytest.approx(weights.sum(), rel=1e-6)
        np.testing.assert_allclose(device.to_host(result.probabilities), 1 / (1 + np.exp(-logits)), rtol=1e-5)

    def test_gradients_lower_the_loss(self, device: Device) -> None:
        model, data = self.make(device, 1, "sgd"), self.examples(device, 20)
        losses = []
        for _ in range(6):
            result = model.step(**data)
            model.apply(result.sums)
            with device.active():
                data["pooled"] = [
                    array - np.float32(0.01) * slope
                    for array, slope in zip(data["pooled"], result.gradients, strict=True)
                ]
            losses.append(int(device.to_host(result.loss)[0]))
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == len(losses)

    def test_a_step_changes_no_parameter_and_apply_counts_steps(self, device: Device) -> None:
        model = self.make(device, 1, "adam")
        before = model.export()
        result = model.step(**self.examples(device, 20))
        self.same(model.export(), before)
        model.apply(result.sums)
        assert model.steps == 1
        assert int(model.export()["steps"]) == 1
        assert any((model.export()[name] != before[name]).any() for name in model.parameters)

    def test_bits_do_not_depend_on_where_a_step_is_cut(self, device: Device) -> None:
        whole, cut, data = self.make(device, 1, "adagrad"), self.make(device, 1, "adagrad"), self.examples(device, 21)
        wanted = device.to_host(whole.step(**data).sums)
        parts = []
        for start, stop in itertools.pairwise((0, BLOCK, 2 * BLOCK, 21)):
            part = {name: self.part(array, start, stop) for name, array in data.items()}
            parts.append(device.to_host(cut.step(**part, first_block=start // BLOCK).sums))
        np.testing.assert_array_equal(merge(parts), wanted)
        np.testing.assert_array_equal(merge(parts[::-1]), wanted)

    def part(self, value: Any, start: int, stop: int) -> Any:
        return [array[start:stop] for array in value] if isinstance(value, list) else value[start:stop]

    def test_replicas_that_apply_equal_sums_stay_equal(self, device: Device) -> None:
        one, other = (self.make(device, 1, "adam") for _ in range(2))
        for seed in range(3):
            sums = one.step(**self.examples(device, 20, seed=seed)).sums
            one.apply(sums)
            other.apply(sums)
        self.same(one.export(), other.export())

    def test_predictions_have_the_bits_of_a_step(self, device: Device) -> None:
        model, data = self.make(device, 1, "sgd"), self.examples(device, 21)
        result = model.step(**data)
        logits = model.predict(pooled=data["pooled"], dense=data["dense"])
        np.testing.assert_array_equal(device.to_host(logits), device.to_host(result.logits))
        found = device.to_host(model.probabilities(logits))
        np.testing.assert_array_equal(found, device.to_host(result.probabilities))

    def test_gradients_may_be_written_over_the_pooled_slots(self, device: Device) -> None:
        model, data = self.make(device, 1, "sgd"), self.examples(device, 21)
        wanted = model.step(**data)
        arrays = [device.to_host(array).copy() for array in wanted.gradients]
        found = model.step(**data, gradients=data["pooled"])
        for own, other, place in zip(found.gradients, arrays, data["pooled"], strict=True):
            assert own is place
            np.testing.assert_array_equal(device.to_host(own), other)
        np.testing.assert_array_equal(device.to_host(found.sums), device.to_host(wanted.sums))

    @pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
    def test_a_loaded_model_goes_on_with_the_same_bits(self, device: Device, optimizer: str) -> None:
        model, other = self.make(device, 1, optimizer), self.make(device, 2, optimizer)
        self.train(device, model)
        other.load(model.export())
        assert other.steps == model.steps == 2
        self.train(device, model)
        self.train(device, other)
        self.same(model.export(), other.export())

    def test_arrays_of_another_model_or_optimizer_are_refused(self, device: Device) -> None:
        model = self.make(device, 1, "adagrad")
        self.train(device, model)
        arrays = model.export()
        name = next(iter(model.parameters))
        with pytest.raises(ConfigError):
            model.load({key: value for key, value in arrays.items() if key != name})
        with pytest.raises(ConfigError):
            model.load(arrays | {name: np.zeros(7777, np.float32)})
        with pytest.raises(ConfigError):
            self.make(device, 1, "adam").load(arrays)
        self.same(model.export(), arrays)

    def test_a_packed_model_is_unpacked_with_its_step_count(self, device: Device) -> None:
        model, other = self.make(device, 1, "adam"), self.make(device, 2, "adam")
        self.train(device, model)
        self.train(device, other, steps=1)
        packed = model.pack()
        assert isinstance(packed, np.ndarray)
        assert packed.dtype == np.float32
        other.unpack(packed, model.steps)
        self.same(other.export(), model.export())

    def test_a_step_without_weight_changes_nothing(self, device: Device) -> None:
        model = self.make(device, 1, "adam")
        before = model.export()
        result = model.step(**self.examples(device, 0))
        assert result.logits.shape == (0,)
        assert not device.to_host(result.sums).any()
        model.apply(result.sums)
        assert model.steps == 0
        self.same({name: model.export()[name] for name in before}, before)

    @pytest.mark.parametrize("where", ["pooled", "dense", "labels"])
    def test_a_bad_value_sets_the_status_and_is_explained_when_asked(self, device: Device, where: str) -> None:
        model, data = self.make(device, 1, "sgd"), self.examples(device, 20)
        before = model.export()
        target = data[where][1] if where == "pooled" else data[where]
        host = device.to_host(target).copy()
        host.reshape(20, -1)[13, 0] = np.nan
        moved = device.from_host(host)
        data[where] = [data[where][0], moved] if where == "pooled" else moved
        result = model.step(**data)  # does not raise: the caller decides when to read the status
        assert device.to_host(result.status).any()
        with pytest.raises(NonFiniteError, match="13"):
            result.check()
        self.same(model.export(), before)
        model.step(**self.examples(device, 20)).check()  # the model can go on

    def test_its_size_counts_parameters_state_and_threads(self, device: Device) -> None:
        model = self.make(device, 1, "adam")
        size = sum(array.size for array in model.parameters.values())
        assert model.size_bytes(1) > 4 * 3 * size
        assert model.size_bytes(4) > model.size_bytes(1)


class BuiltinContract(DenseModelContract):
    """A kind of built-in network."""

    kind: str

    def make(self, device: Device, seed: int, optimizer: str) -> DenseModel:
        return build(
            self.kind,
            tables=self.tables,
            dense_features=self.dense_features,
            hidden=(6, 5) if KINDS[self.kind].has_hidden else (),
            seed=seed,
            device=device,
            optimizer=DenseOptimizer(optimizer, 0.05),  # type: ignore[arg-type]
            block_examples=BLOCK,
        )


class TestLr(BuiltinContract):
    kind = "lr"
    tables = ((3, 1), (2, 1))


class TestFm(BuiltinContract):
    kind = "fm"


class TestDnn(BuiltinContract):
    kind = "dnn"


class TestDeepFm(BuiltinContract):
    kind = "deepfm"


class TestAnotherKind(BuiltinContract):
    """A new kind is a list of layers: here the gradient reaches the pooled slots through fm first, then the layers."""

    kind = "fmdeep"

    @pytest.fixture(autouse=True)
    def _known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def layers(hidden: tuple[int, ...]) -> tuple[Any, ...]:
            return FactorizationMachine(order=2), Mlp(hidden), Linear()

        monkeypatch.setitem(KINDS, "fmdeep", NetworkRecord("deepfm in another order", layers, has_hidden=True))

    def test_it_is_deepfm_up_to_rounding(self, device: Device) -> None:
        other, data = TestDeepFm(), self.examples(device, 20)
        mine, theirs = (each.make(device, 1, "sgd").step(**data) for each in (self, other))
        np.testing.assert_allclose(mine.logits, theirs.logits, rtol=1e-5, atol=1e-6)
        for own, their in zip(mine.gradients, theirs.gradients, strict=True):
            np.testing.assert_allclose(own, their, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mine.sums, theirs.sums, rtol=1e-4, atol=2**17)


@needs_gpu
class TestLrOnCuda(TestLr):
    backend = "cuda"


@needs_gpu
class TestDeepFmOnCuda(TestDeepFm):
    """Has the layers of all kinds."""

    backend = "cuda"


@needs_ptxrun
def test_networks_keep_the_contract_on_interpreted_ptx() -> None:
    run_on_ptx(__file__)


def test_every_kind_of_network_runs_under_the_contract() -> None:
    assert {TestLr.kind, TestFm.kind, TestDnn.kind, TestDeepFm.kind} == set(KINDS) == set(get_args(NetworkKind))
