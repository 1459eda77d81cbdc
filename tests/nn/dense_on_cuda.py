"""The CuPy path of the networks against the CPU: `compare()` on the devices that CuPy sees.

``python -m tests.nn.dense_on_cuda`` takes CuPy from ptxrun, whose folder must be on PYTHONPATH.
"""

import numpy as np
import pytest

from daskps.device.device import Device, devices
from daskps.device.pool import ComputePool
from daskps.errors import NonFiniteError
from daskps.nn.dense_model import merge
from daskps.nn.network import build
from daskps.nn.optimizer import DenseOptimizer
from tests.nn.dense_reference import SHAPES, examples, make


def moved(device: Device, values: dict) -> dict:
    """Return the inputs of a step, copied to the device."""

    def move(value: object) -> object:
        if isinstance(value, list):
            return [move(each) for each in value]
        return value if value is None else device.from_host(value)

    return {name: move(value) for name, value in values.items()}


def compare(count: int) -> None:
    """Compare two steps of every network and optimizer on the CPU with the same steps on `count` GPUs."""
    with ComputePool(2) as pool:
        gpus = devices("cuda", count, pool=pool)
        for name in SHAPES:
            for kind in ("sgd", "adagrad", "adam"):
                _compare(name, DenseOptimizer(kind, 0.05, l2=0.01, clip_norm=0.5), gpus, pool)
        _names_the_slot(gpus[-1])


def _compare(name: str, optimizer: DenseOptimizer, gpus: list[Device], pool: ComputePool) -> None:
    network = make(name, pool, optimizer=optimizer)
    replicas = [
        build(name.split(",")[0], device=gpu, optimizer=optimizer, block_examples=16, **SHAPES[name]) for gpu in gpus
    ]
    for replica in replicas:
        replica.load(network.export())
    cuts = [0, *(16 * m for m in range(1, len(gpus))), 37]
    for seed in range(2):
        data = examples(network.architecture, 37, seed=seed)
        wanted = network.step(**data.all)
        parts = []
        for m, (gpu, replica) in enumerate(zip(gpus, replicas, strict=True)):
            inputs = moved(gpu, data.part(cuts[m], cuts[m + 1]))
            found = replica.step(**inputs, first_block=cuts[m] // 16, gradients=inputs["pooled"])
            at = slice(cuts[m], cuts[m + 1])
            np.testing.assert_allclose(gpu.to_host(found.logits), wanted.logits[at], rtol=1e-5, atol=1e-6)
            for own, other in zip(found.gradients, wanted.gradients, strict=True):
                np.testing.assert_allclose(gpu.to_host(own), other[at], rtol=1e-4, atol=1e-6)
            parts.append(gpu.to_host(found.sums))
        sums = merge(parts)
        np.testing.assert_allclose(sums, wanted.sums, rtol=1e-4, atol=2**17)
        network.apply(wanted.sums)
        for gpu, replica in zip(gpus, replicas, strict=True):
            replica.apply(gpu.from_host(sums))
    exported = [replica.export() for replica in replicas]
    for key, wanted_array in network.export().items():
        np.testing.assert_allclose(exported[0][key], wanted_array, rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}")
        for other in exported[1:]:
            np.testing.assert_array_equal(other[key], exported[0][key], err_msg=f"replicas differ: {name} {key}")


def _names_the_slot(gpu: Device) -> None:
    network = build("deepfm", device=gpu, block_examples=16, **SHAPES["deepfm"])
    data = examples(network.architecture, 37)
    data.pooled[1][20, 5] = np.nan
    with pytest.raises(NonFiniteError, match="slot 1 of table 1 pools to nan"):
        network.step(**moved(gpu, data.all)).check()
    inputs = moved(gpu, data.all)
    with pytest.raises(NonFiniteError, match="perhaps a slot, but gradients were written over"):
        network.step(**inputs, gradients=inputs["pooled"]).check()


if __name__ == "__main__":
    import fakecudf
    import fakecupy

    fakecudf.install(devices=3, streams="async", seed=1, racecheck=True)
    for count in (1, 2, 3):
        compare(count)
    print("launches:", len(fakecupy.launches))
