"""Contract of Device: what arrays, kernels and other devices may rely on, on the CPU and on CUDA."""

from collections.abc import Iterator

import numpy as np
import pytest

from daskps.device.device import Device, devices
from daskps.device.native import make_struct, mix_keys
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError
from tests.contracts.backends import needs_gpu, run_on_ptx
from tests.processes import needs_ptxrun

KEYS = np.random.default_rng(3).integers(0, 2**64, 5_003, np.uint64)  # more than one share on the CPU


class DeviceContract:
    """Tests of the devices of one backend; a subclass names it."""

    backend: str

    @pytest.fixture
    def node(self) -> Iterator[list[Device]]:
        """Two devices of one node."""
        with ComputePool(3) as pool:
            yield devices(self.backend, 2, pool=pool)

    @pytest.fixture
    def device(self, node: list[Device]) -> Device:
        return node[0]

    def test_devices_have_numbers_and_names(self, node: list[Device]) -> None:
        assert [device.index for device in node] == [0, 1]
        assert [device.name for device in node] == [f"{self.backend}:0", f"{self.backend}:1"]
        assert {device.kind for device in node} == {self.backend}

    @pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, np.uint64, np.uint8])
    def test_arrays_go_to_the_device_and_back(self, device: Device, dtype: type) -> None:
        array = (np.arange(12).reshape(3, 4) % 251).astype(dtype)
        there = device.from_host(array)
        assert device.holds(there)
        back = device.to_host(there)
        assert isinstance(back, np.ndarray)
        np.testing.assert_array_equal(back, array, strict=True)

    def test_a_strided_array_arrives_as_it_reads(self, device: Device) -> None:
        array = np.arange(40, dtype=np.float32).reshape(4, 10)[:, ::3]
        np.testing.assert_array_equal(device.to_host(device.from_host(array)), array)

    def test_new_arrays_have_their_shape_and_type_and_lie_on_a_line(self, device: Device) -> None:
        for shape in (0, 7, (3, 5), (1 << 17,)):
            for make in (device.empty, device.zeros):
                array = make(shape, np.float32)
                assert array.shape == ((shape,) if isinstance(shape, int) else shape)
                assert array.dtype == np.float32
                assert array.flags.c_contiguous
                assert device.holds(array)
                assert not array.size or device.pointer(array) % 64 == 0
            assert not device.to_host(device.zeros(shape, np.float32)).any()

    def test_only_arrays_of_the_device_are_held(self, node: list[Device]) -> None:
        assert not node[0].holds([1.0])
        assert not node[0].holds(None)
        if self.backend == "cuda":
            assert not node[0].holds(np.zeros(3))
            assert not node[0].holds(node[1].zeros(3, np.float32))

    def test_the_array_module_works_within_active(self, node: list[Device]) -> None:
        for device in node:
            with device.active():
                array = device.xp.arange(5, dtype=np.float32) * 2
            assert device.holds(array)
            assert device.to_host(array).tolist() == [0, 2, 4, 6, 8]

    def test_every_way_of_launching_runs_the_kernel_over_all_items(self, device: Device) -> None:
        keys, wanted = device.from_host(KEYS), mix_keys(KEYS)
        for way in ("launch", "launch_inline", "bind"):
            mixed = device.zeros(len(KEYS), np.uint64)
            values = {"keys": keys, "n": len(KEYS), "seed": 0, "mixed": mixed}
            if way == "bind":
                bound = device.bind("mix_keys", len(KEYS), **values)
                device.synchronize()
                assert not device.to_host(mixed).any(), "bind does not launch"
                bound()
            else:
                getattr(device, way)("mix_keys", len(KEYS), **values)
            np.testing.assert_array_equal(device.to_host(mixed), wanted, err_msg=way)

    def test_a_bound_launch_sees_what_its_arrays_hold_then_and_keeps_them_alive(self, device: Device) -> None:
        keys, mixed = device.zeros(100, np.uint64), device.zeros(100, np.uint64)
        bound = device.bind("mix_keys", 100, keys=keys, n=100, seed=0, mixed=mixed)
        with device.active():
            keys[...] = device.from_host(KEYS[:100])
        del keys
        bound()
        np.testing.assert_array_equal(device.to_host(mixed), mix_keys(KEYS[:100]))

    def test_a_launch_over_no_items_does_nothing(self, device: Device) -> None:
        mixed = device.zeros(3, np.uint64)
        device.launch("mix_keys", 0, keys=device.empty(0, np.uint64), n=0, seed=0, mixed=mixed)
        assert not device.to_host(mixed).any()

    def test_an_immediate_device_has_done_its_work_when_a_launch_returns(self, device: Device) -> None:
        mixed = device.zeros(len(KEYS), np.uint64)
        device.launch("mix_keys", len(KEYS), keys=device.from_host(KEYS), n=len(KEYS), seed=0, mixed=mixed)
        if not device.immediate:
            device.synchronize()
        np.testing.assert_array_equal(device.to_host(mixed), mix_keys(KEYS))

    def test_shares_cover_everything_once(self, device: Device) -> None:
        def share(index: int, count: int) -> tuple[int, int]:
            return index, count

        found = device.run_shares(share)
        assert found == [(index, len(found)) for index in range(len(found))]

    def test_wrong_arguments_are_refused_with_the_name_of_the_kernel(self, device: Device) -> None:
        keys, mixed = device.from_host(KEYS[:4]), device.zeros(4, np.uint64)
        good = {"keys": keys, "n": 4, "seed": 0, "mixed": mixed}
        for change, message in (
            ({"more": 1}, "mix_keys: missing arguments .* unknown arguments .'more'."),
            ({"n": 2**63}, "mix_keys: n wants a int64"),
            ({"keys": device.zeros(4, np.int64)}, "mix_keys: keys wants dtype uint64, got int64"),
            ({"keys": device.from_host(KEYS[:8])[::2]}, "mix_keys: keys wants a C-contiguous array"),
            ({"keys": [1, 2]}, "mix_keys: keys wants"),
        ):
            with pytest.raises(ArgumentError, match=message):
                device.launch("mix_keys", 4, **good | change)
        device.launch("mix_keys", 4, **good)

    def test_a_struct_is_passed_by_value(self, device: Device) -> None:
        names = ("learning_rate", "epsilon", "beta1", "beta2", "beta", "l1", "l2", "clip_norm")
        values = dict.fromkeys(names, 0.0) | {"learning_rate": 0.5, "kind": 0, "factor": 2.0**-36}
        rows, status = device.zeros((2, 4), np.float32), device.zeros(1, np.int32)
        arguments = {
            "sums": device.from_host(np.full((1, 4), 3 << 36, np.int64)),
            "touched": device.from_host(np.ones(1, np.int32)),
            "touched_count": 1,
            "width": 4,
            "rows": rows,
            "status": status,
        }
        for optimizer in (None, 0.5, np.zeros(3)):
            with pytest.raises(ArgumentError, match="gradient_apply: optimizer wants a struct Optimizer"):
                device.launch("gradient_apply", 1, tiles=True, dim=4, optimizer=optimizer, **arguments)
        struct = make_struct("Optimizer", **values)
        device.launch("gradient_apply", 1, tiles=True, dim=4, optimizer=struct, **arguments)
        assert device.to_host(rows).tolist() == [[0, 0, 0, 0], [-1.5] * 4]  # sgd: -0.5 * 3

    def test_devices_read_each_others_memory_after_a_wait(self, node: list[Device]) -> None:
        first, second = node
        second.enable_peers(node)
        keys = first.empty(len(KEYS), np.uint64)
        first.launch("mix_keys", len(KEYS), keys=first.from_host(KEYS), n=len(KEYS), seed=0, mixed=keys)
        second.wait_for(node)
        descriptor = second.from_host(np.array([[0, 0, first.pointer(keys), 0, len(KEYS)]], np.uint64))
        rows = second.zeros((len(KEYS), 2), np.float32)
        numbers = second.from_host(np.arange(len(KEYS), dtype=np.int32))
        second.launch(
            "rows_copy",
            len(KEYS),
            tiles=True,
            shards=descriptor,
            shard_count=1,
            **{"from": numbers, "to": numbers},
            n=len(KEYS),
            width=2,
            rows=rows,
        )
        found = second.to_host(rows).view(np.uint64)[:, 0]
        np.testing.assert_array_equal(found, mix_keys(KEYS))
        first.wait_for(node)  # before `keys` is freed


class TestCpuDevice(DeviceContract):
    backend = "cpu"


@needs_gpu
class TestCudaDevice(DeviceContract):
    backend = "cuda"


@needs_ptxrun
def test_cuda_devices_keep_the_contract_on_interpreted_ptx() -> None:
    run_on_ptx(__file__)
