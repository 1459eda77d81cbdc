"""Initial dense parameters: a function of (seed, parameter's name, index) alone, in integer arithmetic and one product.

In: an `Architecture` and a seed. Out: the flat float32 parameters, the same bits on every machine and NumPy release.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from daskps.model.architecture import Architecture, Parameter
from daskps.types import Floats, Keys


def _mix64(x: Keys) -> Keys:
    """The twin of mix64 in kernels/dialect.cuh."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, name: str, count: int) -> Floats:
    """`count` values in [-1, 1), multiples of 2^-23."""
    stream = _mix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(zlib.crc32(name.encode()))
    counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = _mix64(counter + _mix64(stream)) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-23) - np.float32(1)


def _limit(parameter: Parameter) -> float:
    """Half the width of the initial values: He for layers that a ReLU follows, Glorot for the output, else 0."""
    if parameter.name.startswith("hidden") and parameter.name.endswith("weight"):
        return math.sqrt(6 / parameter.shape[0])
    if parameter.name == "output.weight":
        return math.sqrt(6 / (parameter.shape[0] + 1))
    return 0.0  # biases, and the weights of dense features in lr, fm and deepfm, as rows of lr begin


def initial_parameters(architecture: Architecture, seed: int) -> Floats:
    """The flat parameters to start from."""
    flat = np.zeros(architecture.size, np.float32)
    for parameter in architecture.parameters:
        limit = _limit(parameter)
        if limit:
            flat[parameter.place] = uniform(seed, parameter.name, parameter.size) * np.float32(limit)
    return flat
