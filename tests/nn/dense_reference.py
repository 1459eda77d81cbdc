"""The networks in plain float64 NumPy: the reference for tests of daskps.nn."""

from dataclasses import dataclass

import numpy as np

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.nn.architecture import Architecture
from daskps.nn.network import DenseNetwork, build
from daskps.nn.optimizer import DenseOptimizer

SHAPES = {
    "lr": {"tables": [(3, 1), (2, 1)], "dense_features": 4},
    "lr, no dense": {"tables": [(5, 1)]},
    "fm": {"tables": [(3, 4), (2, 4)], "dense_features": 3},
    "fm, D=9": {"tables": [(6, 9)]},
    "dnn": {"tables": [(3, 4), (2, 7)], "dense_features": 3, "hidden": [9, 5]},
    "dnn, one table": {"tables": [(4, 4)], "hidden": [17]},
    "dnn, no table": {"tables": [], "dense_features": 6, "hidden": [5, 4, 3]},
    "deepfm": {"tables": [(3, 4), (2, 4)], "dense_features": 3, "hidden": [8, 6]},
    "deepfm, one table": {"tables": [(4, 5)], "hidden": [18, 6]},
}


@dataclass
class Examples:
    pooled: list[np.ndarray]
    dense: np.ndarray | None
    labels: np.ndarray
    example_weights: np.ndarray | None

    def part(self, start: int, stop: int) -> dict:
        at = slice(start, stop)
        return {
            "pooled": [array[at] for array in self.pooled],
            "dense": None if self.dense is None else self.dense[at],
            "labels": self.labels[at],
            "example_weights": None if self.example_weights is None else self.example_weights[at],
        }

    @property
    def all(self) -> dict:
        return self.part(0, len(self.labels))


def make(
    name: str,
    pool: ComputePool,
    seed: int = 3,
    block_examples: int = 16,
    optimizer: DenseOptimizer | None = None,
) -> DenseNetwork:
    """Return a network of SHAPES whose biases and linear weights are not zero."""
    network = build(
        name.split(",")[0],
        seed=seed,
        device=CpuDevice(0, pool),
        optimizer=optimizer,
        block_examples=block_examples,
        **SHAPES[name],
    )
    random = np.random.default_rng(seed)
    network.flat += random.normal(0, 0.1, network.flat.shape).astype(np.float32)
    return network


def examples(architecture: Architecture, n: int, seed: int = 0, weighted: bool = True) -> Examples:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 0.5, shape).astype(np.float32)

    return Examples(
        pooled=[normal(n, width) for width in architecture.inputs.widths],
        dense=normal(n, architecture.dense_features) if architecture.dense_features else None,
        labels=random.integers(0, 2, n).astype(np.float32),
        example_weights=random.uniform(0.5, 3, n).astype(np.float32) if weighted else None,
    )


def logits(architecture: Architecture, parameters: dict, pooled: list, dense: np.ndarray | None) -> np.ndarray:
    """Return the logit of every example, by the definitions in architecture.py."""
    parameters = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
    pooled = [np.asarray(array, np.float64) for array in pooled]
    n = len(pooled[0] if pooled else dense)
    out = np.full(n, parameters["bias"][0])
    if architecture.kind != "dnn":
        slots = [a.reshape(n, s, d) for a, (s, d) in zip(pooled, architecture.tables, strict=True)]
        every = np.concatenate(slots, axis=1)  # (n, S, D)
        out += every[:, :, 0].sum(axis=1)
        for a in range(every.shape[1]):
            for b in range(a):
                out += (every[:, a, 1:] * every[:, b, 1:]).sum(axis=1)
        if dense is not None:
            out += np.asarray(dense, np.float64) @ parameters["linear.weight"]
    if architecture.kind in ("dnn", "deepfm"):
        below = np.concatenate([*pooled, *([] if dense is None else [np.asarray(dense, np.float64)])], axis=1)
        for i in range(len(architecture.hidden)):
            below = np.maximum(below @ parameters[f"hidden{i}.weight"] + parameters[f"hidden{i}.bias"], 0)
        out += below @ parameters["output.weight"]
    return out


def loss(architecture: Architecture, parameters: dict, data: Examples) -> float:
    """Return the weighted log loss, summed."""
    z = logits(architecture, parameters, data.pooled, data.dense)
    each = np.logaddexp(0, z) - data.labels * z
    return float(np.sum(each if data.example_weights is None else each * data.example_weights.astype(np.float64)))
