"""The shape of a network: its kind, what it takes, and its parameters by name. Nothing here computes.

In: kind, slots and dimension of each table, number of dense features, hidden layers. Out: a checked `Architecture`,
whose parameters lie one after the other in one flat float32 array, weights first and biases last.

Shapes: tables g of S_g slots and dimension D_g, F dense features, I inputs of the first hidden layer.

======  =======================================================================================================
kind    logit
======  =======================================================================================================
lr      bias + sum over slots + dense . linear.weight; every D is 1
fm      an embedding is [linear weight, factors]: lr of the first values + products of all pairs of slots' factors
dnn     bias + fully connected ReLU layers over all slots' embeddings and the dense features, side by side
deepfm  fm + dnn over the same embeddings (the layers see the linear weight too)
======  =======================================================================================================
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from daskps.errors import ConfigError

Kind: TypeAlias = Literal["lr", "fm", "dnn", "deepfm"]

# Sums of a step are 64-bit fixed point: 2^12 blocks of less than 2^51 units each cannot overflow (kernels/dense.cuh).
MAX_BLOCKS = 4096
MAX_STEP_EXAMPLES = 1 << 20  # losses and weights: less than 2^43 units each


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named array inside the flat one."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        """Where it lies in the flat array."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Architecture:
    """A network's shape, checked when made."""

    kind: Kind
    tables: tuple[tuple[int, int], ...]  # (S, D) of each table
    dense_features: int = 0  # F
    hidden: tuple[int, ...] = ()  # outputs of each hidden layer
    block_examples: int = 256  # decides the bits: sums are rounded once a block
    slot_names: tuple[tuple[str, ...], ...] = field(default=(), compare=False)  # of each table, for messages

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"no network of kind {self.kind!r}; there are {', '.join(get_args(Kind))}")
        if any(slots < 1 or dim < 1 for slots, dim in self.tables):
            raise ConfigError(f"every table needs at least one slot and dimension 1, got (slots, dim) {self.tables}")
        if self.dense_features < 0 or not (self.tables or self.dense_features):
            raise ConfigError(f"a network needs a table or dense features, got {self.dense_features} dense features")
        if self.block_examples < 1:
            raise ConfigError(f"block_examples must be at least 1, got {self.block_examples}")
        self._check_dimensions()
        if self.layered and (not self.hidden or min(self.hidden) < 1):
            raise ConfigError(f"{self.kind} needs hidden layers of at least one output each, got hidden={self.hidden}")
        if not self.layered and self.hidden:
            raise ConfigError(f"{self.kind} has no hidden layers, got hidden={self.hidden}; use dnn or deepfm")

    def _check_dimensions(self) -> None:
        dims = [dim for _, dim in self.tables]
        if self.kind == "lr" and any(dim != 1 for dim in dims):
            raise ConfigError(f"lr has one weight a key, so every table has dimension 1, got {dims}")
        if self.kind in ("fm", "deepfm") and (len(set(dims)) > 1 or min(dims, default=2) < 2):
            raise ConfigError(
                f"{self.kind} multiplies factors across tables: all need one dimension 1 + factors, at least 2, "
                f"got {dims}"
            )

    @functools.cached_property
    def layered(self) -> bool:
        """Has hidden layers."""
        return self.kind in ("dnn", "deepfm")

    @functools.cached_property
    def factored(self) -> bool:
        """Has the linear part, and in fm and deepfm the products of pairs."""
        return self.kind != "dnn"

    @functools.cached_property
    def dim(self) -> int:
        """The one dimension of all tables of a factored network (1 without tables)."""
        return self.tables[0][1] if self.tables else 1

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Values an example has in each table: S * D."""
        return tuple(slots * dim for slots, dim in self.tables)

    @property
    def inputs(self) -> int:
        """I, inputs of the first hidden layer."""
        return sum(self.widths) + self.dense_features

    @property
    def gathers(self) -> bool:
        """The first layer's inputs come from several arrays and are copied side by side."""
        return self.layered and len(self.tables) + bool(self.dense_features) > 1

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter in its place: weights, then biases."""
        shapes: list[tuple[str, tuple[int, ...]]] = []
        if self.layered:
            sizes = (self.inputs, *self.hidden)
            shapes += [(f"hidden{i}.weight", sizes[i : i + 2]) for i in range(len(self.hidden))]
            shapes += [("output.weight", (self.hidden[-1],))]
        if self.factored and self.dense_features:
            shapes += [("linear.weight", (self.dense_features,))]
        shapes += [(f"hidden{i}.bias", (size,)) for i, size in enumerate(self.hidden)]
        shapes += [("bias", (1,))]
        starts = [0]
        for _, shape in shapes:
            starts.append(starts[-1] + math.prod(shape))
        return tuple(Parameter(name, shape, start) for (name, shape), start in zip(shapes, starts, strict=False))

    def named(self, flat: Any) -> dict[str, Any]:
        """Views of a flat array by parameter's name, in the parameters' shapes: all (P,), or the weights alone."""
        return {p.name: flat[p.place].reshape(p.shape) for p in self.parameters if p.start < len(flat)}

    @functools.cached_property
    def size(self) -> int:
        """P, the number of values of all parameters."""
        last = self.parameters[-1]
        return last.start + last.size

    @property
    def decayed(self) -> int:
        """How many leading values are weights, which L2 pulls on, and not biases."""
        return next(parameter.start for parameter in self.parameters if parameter.name.endswith("bias"))
