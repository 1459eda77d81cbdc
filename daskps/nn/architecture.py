"""The kinds of built-in networks, each a list of layers, and the architecture of one network.

In: the kind of network, its inputs and hidden layers. Out: the parameters by name, and their places in a flat array.

To add a kind: a name in NetworkKind and a record in KINDS here; a new kind of layer goes to layers.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from daskps.errors import ConfigError
from daskps.nn.layers import FactorizationMachine, InputShape, Layer, Linear, Mlp, ParameterSpec

# Limits of one step. Its sums are 64-bit fixed point and must not overflow (kernels/dense.cuh).
MAX_BLOCKS = 4096  # blocks: 2^12 gradients of less than 2^51 units each
MAX_STEP_EXAMPLES = 1 << 20  # examples: 2^20 losses, or weights, of less than 2^43 units each

NetworkKind: TypeAlias = Literal["lr", "fm", "dnn", "deepfm"]


@dataclass(frozen=True, slots=True)
class NetworkRecord:
    """A kind of network: the logit is a bias and the sum of its layers."""

    meaning: str  # for the description of the setting
    layers: Callable[[tuple[int, ...]], tuple[Layer, ...]]  # of the sizes of the hidden layers
    has_hidden: bool = False  # uses the sizes of hidden layers


KINDS: dict[str, NetworkRecord] = {
    "lr": NetworkRecord("logistic regression", lambda hidden: (Linear(), FactorizationMachine(order=1))),
    "fm": NetworkRecord("factorization machine", lambda hidden: (Linear(), FactorizationMachine(order=2))),
    "dnn": NetworkRecord("hidden layers", lambda hidden: (Mlp(hidden),), has_hidden=True),
    "deepfm": NetworkRecord(
        "fm and dnn added",
        lambda hidden: (Mlp(hidden), Linear(), FactorizationMachine(order=2)),
        has_hidden=True,
    ),
}


def wrong_dimensions(kind: str, dims: Sequence[int]) -> str:
    """Return what is wrong with a network of this kind over tables of these dimensions; empty if nothing is."""
    problems = (layer.problem(dims) for layer in KINDS[kind].layers((1,)))
    return next((f"{kind} {problem}" for problem in problems if problem), "")


def network_title(model: dict[str, Any], separator: str) -> str:
    """Return kind and hidden layers of the settings `model` of a job, such as ``dnn 128-64``."""
    record = KINDS.get(model["kind"])
    sizes = separator.join(map(str, model["hidden"])) if record is not None and record.has_hidden else ""
    return f"{model['kind']} {sizes}".rstrip()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named parameter array; a slice of the flat array of all parameters."""

    name: str
    shape: tuple[int, ...]
    start: int  # first index in the flat array
    limit: float  # initial values are uniform in [-limit, limit)

    @property
    def size(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        """Return its slice of the flat array."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Architecture:
    """The architecture of a network; the constructor raises ConfigError if the settings do not fit together."""

    kind: str
    tables: tuple[tuple[int, int], ...]  # (slots S, dimension D) of each table
    dense_features: int = 0  # F
    hidden: tuple[int, ...] = ()  # number of outputs of each hidden layer
    block_examples: int = 256  # affects the bits of the result: sums are rounded once per block
    slot_names: tuple[tuple[str, ...], ...] = field(default=(), compare=False)  # per table, for error messages

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"no network of kind {self.kind!r}; there are {', '.join(KINDS)}")
        if any(slots < 1 or dim < 1 for slots, dim in self.tables):
            raise ConfigError(f"every table needs at least one slot and dimension 1, got (slots, dim) {self.tables}")
        if self.dense_features < 0 or not (self.tables or self.dense_features):
            raise ConfigError(f"a network needs a table or dense features, got {self.dense_features} dense features")
        if self.block_examples < 1:
            raise ConfigError(f"block_examples must be at least 1, got {self.block_examples}")
        for layer in self.layers:
            if problem := layer.problem([dim for _, dim in self.tables]):
                raise ConfigError(f"{self.kind} {problem}")
        if self.hidden and not KINDS[self.kind].has_hidden:
            others = " or ".join(name for name, record in KINDS.items() if record.has_hidden)
            raise ConfigError(f"{self.kind} has no hidden layers, got hidden={self.hidden}; use {others}")

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers, in the order in which they are added to the logit."""
        return KINDS[self.kind].layers(self.hidden)

    @functools.cached_property
    def inputs(self) -> InputShape:
        """Return the shape of the inputs."""
        return InputShape(self.tables, self.dense_features)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters in the order of the flat array: first the weights, then the biases."""
        specs = [spec for layer in self.layers for spec in layer.parameters(self.inputs)]
        specs.append(ParameterSpec("bias", (1,)))
        specs.sort(key=lambda spec: spec.name.endswith("bias"))  # stable
        found, start = [], 0
        for spec in specs:
            found.append(Parameter(spec.name, spec.shape, start, spec.limit))
            start += found[-1].size
        return tuple(found)

    def named(self, flat: Any) -> dict[str, Any]:
        """Return views of a flat array by parameter name, in the parameters' shapes.

        `flat` has the values of all parameters (P,), or only those of the weights.
        """
        return {p.name: flat[p.place].reshape(p.shape) for p in self.parameters if p.start < len(flat)}

    @functools.cached_property
    def size(self) -> int:
        """Return P, the number of values of all parameters."""
        last = self.parameters[-1]
        return last.start + last.size

    @property
    def decayed(self) -> int:
        """Return the number of leading values that are weights: L2 applies to them, but not to the biases."""
        return next(parameter.start for parameter in self.parameters if parameter.name.endswith("bias"))

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each float32 array that a block of `block_examples` examples needs."""
        rows = self.block_examples
        shapes: dict[str, tuple[int, ...]] = {"slope": (rows,), "column": (rows,)}
        for layer in self.layers:
            shapes |= layer.arrays(self.inputs, rows)
        for number in range(sum(layer.uses_pooled for layer in self.layers) - 1):
            shapes |= {f"through{number}.{table}": (rows, width) for table, width in enumerate(self.inputs.widths)}
        return shapes
