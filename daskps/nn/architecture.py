"""The architecture of a dense network, and the forward and backward pass of one block of examples.

In: the kind of network, its inputs and hidden layers. Out: the parameters by name; the gradients of one block, in
arrays that belong to one thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from daskps.errors import ConfigError
from daskps.nn.engine import ArrayBackend

Kind: TypeAlias = Literal["lr", "fm", "dnn", "deepfm"]

# Limits of one step. Its sums are 64-bit fixed point and must not overflow (kernels/dense.cuh).
MAX_BLOCKS = 4096  # blocks: 2^12 gradients of less than 2^51 units each
MAX_STEP_EXAMPLES = 1 << 20  # examples: 2^20 losses, or weights, of less than 2^43 units each


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named parameter array; a slice of the flat array of all parameters."""

    name: str
    shape: tuple[int, ...]
    start: int  # first index in the flat array

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

    kind: Kind
    tables: tuple[tuple[int, int], ...]  # (slots S, dimension D) of each table
    dense_features: int = 0  # F
    hidden: tuple[int, ...] = ()  # number of outputs of each hidden layer
    block_examples: int = 256  # affects the bits of the result: sums are rounded once per block
    slot_names: tuple[tuple[str, ...], ...] = field(default=(), compare=False)  # per table, for error messages

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
        """Return True if the network has hidden layers."""
        return self.kind in ("dnn", "deepfm")

    @functools.cached_property
    def factored(self) -> bool:
        """Return True if the network has a linear part (lr, fm, deepfm); fm and deepfm add products of pairs."""
        return self.kind != "dnn"

    @functools.cached_property
    def dim(self) -> int:
        """Return the dimension that all tables of a factored network share (1 if there are no tables)."""
        return self.tables[0][1] if self.tables else 1

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Return the number of pooled values that one example has in each table: S * D."""
        return tuple(slots * dim for slots, dim in self.tables)

    @property
    def inputs(self) -> int:
        """Return I, the number of inputs of the first hidden layer."""
        return sum(self.widths) + self.dense_features

    @property
    def gathers(self) -> bool:
        """Return True if the first layer's inputs come from several arrays, which must be copied side by side."""
        return self.layered and len(self.tables) + bool(self.dense_features) > 1

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters in the order of the flat array: first the weights, then the biases."""
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


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one block of n examples, as views of the step's arrays."""

    pooled: Sequence[Any]  # (n, S * D) of each table
    dense: Any | None  # (n, F)


def array_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each float32 array that a block of `architecture.block_examples` examples needs."""
    rows, hidden = architecture.block_examples, architecture.hidden
    shapes: dict[str, tuple[int, ...]] = {"slope": (rows,), "column": (rows,)}
    shapes |= {f"active{i}": (rows, size) for i, size in enumerate(hidden)}
    shapes |= {f"slope{i}": (rows, size) for i, size in enumerate(hidden)}
    if architecture.gathers:
        shapes["gathered"] = (rows, architecture.inputs)
    if architecture.factored:
        shapes |= {"totals": (rows, architecture.dim), "squares": (rows, architecture.dim)}
        if architecture.layered:
            shapes |= {f"through{table}": (rows, width) for table, width in enumerate(architecture.widths)}
    return shapes


class Block:
    """The forward and backward pass of `rows` examples.

    Order of calls: `forward`, then a loss that writes `slope`, then `backward_parameters`, then `backward_pooled`.
    The gradients of the pooled slots come last, so they may be written into the memory of the pooled slots.
    Kernel launches whose arguments are the same for every block are bound once, in the constructor.
    """

    def __init__(
        self,
        architecture: Architecture,
        engine: ArrayBackend,
        parameters: Mapping[str, Any],
        gradients: Mapping[str, Any],  # output: gradients of the weights
        sums: Mapping[str, Any],  # int64, per parameter; this class adds to the sums of the biases
        flag: Any,  # set to 1 if a bias gradient could not be added
        arrays: Mapping[str, Any],  # by the names of array_shapes(), cut to `rows` examples
        rows: int,
    ) -> None:
        self.rows = rows
        self.slope = arrays["slope"]  # (n,) gradient of the loss by the logits
        self._shape, self._engine, self._xp = architecture, engine, engine.xp
        self._parameters, self._gradients, self._arrays = parameters, gradients, arrays
        layers = range(len(architecture.hidden))
        self._active = [arrays[f"active{i}"] for i in layers]  # (n, hidden[i]) after each ReLU
        self._slopes = [arrays[f"slope{i}"] for i in layers]  # (n, hidden[i]) gradient before each ReLU
        self._relu = [self._bind_relu(i) for i in layers]
        self._relu_backward = [self._bind_relu_backward(i, sums[f"hidden{i}.bias"], flag) for i in layers]
        self._add_slope = engine.bind("add_total", rows, gradients=self.slope, n=rows, sums=sums["bias"], flag=flag)

    def _bind_relu(self, i: int) -> Callable[[], None]:
        columns, values = self._shape.hidden[i], self._active[i]
        bias = self._parameters[f"hidden{i}.bias"]
        return self._engine.bind("bias_relu", values.size, bias=bias, rows=self.rows, columns=columns, values=values)

    def _bind_relu_backward(self, i: int, sums: Any, flag: Any) -> Callable[[], None]:
        return self._engine.bind(
            "relu_backward",
            self._active[i].size,
            activations=self._active[i],
            rows=self.rows,
            columns=self._shape.hidden[i],
            gradients=self._slopes[i],
            sums=sums,
            flag=flag,
        )

    def forward(self, inputs: Inputs, logits: Any) -> None:
        """Write the logits (n,)."""
        logits[...] = self._parameters["bias"]
        if self._shape.layered:
            self._forward_layers(inputs, logits)
        if self._shape.factored:
            self._forward_factors(inputs, logits)

    def backward_parameters(self, inputs: Inputs) -> None:
        """Write the gradient of each weight, computed from `slope`, and add the gradient of each bias to its sum."""
        self._add_slope()
        if self._shape.layered:
            self._backward_layers(inputs)
        if self._shape.factored and inputs.dense is not None:
            self._xp.matmul(self.slope, inputs.dense, out=self._gradients["linear.weight"])

    def backward_pooled(self, inputs: Inputs, gradients: Sequence[Any]) -> None:
        """Write the gradient (n, S * D) of each table's pooled slots.

        `gradients` may be the memory of the pooled slots themselves.
        """
        first_row = 0  # this table's first row in the weight matrix of the first layer
        for table, pooled in enumerate(inputs.pooled):
            slots, dim = self._shape.tables[table]
            through = None  # the part of the gradient that comes back through the hidden layers
            if self._shape.layered:
                weight = self._parameters["hidden0.weight"][first_row : first_row + slots * dim]
                through = self._arrays.get(f"through{table}", gradients[table])
                self._xp.matmul(self._slopes[0], weight.T, out=through)
                first_row += slots * dim
            if self._shape.factored:
                self._engine.launch(
                    "fm_backward",
                    self.rows,
                    gradients=self.slope,
                    totals=self._arrays["totals"],
                    pooled=pooled,
                    other=through,
                    n=self.rows,
                    slots=slots,
                    width=dim,
                    pooled_gradients=gradients[table],
                )

    def _gather(self, inputs: Inputs) -> Any:
        """Return (n, I): all tables and the dense features side by side; copied only if there are several arrays."""
        parts = [*inputs.pooled, *([] if inputs.dense is None else [inputs.dense])]
        if len(parts) == 1:
            return parts[0]
        gathered, start = self._arrays["gathered"], 0
        for part in parts:
            gathered[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return gathered

    def _forward_layers(self, inputs: Inputs, logits: Any) -> None:
        below = self._gather(inputs)
        for i, active in enumerate(self._active):
            self._xp.matmul(below, self._parameters[f"hidden{i}.weight"], out=active)
            self._relu[i]()
            below = active
        self._xp.matmul(below, self._parameters["output.weight"], out=self._arrays["column"])
        logits += self._arrays["column"]

    def _forward_factors(self, inputs: Inputs, logits: Any) -> None:
        n, width, launch = self.rows, self._shape.dim, self._engine.launch
        if inputs.dense is not None:
            self._xp.matmul(inputs.dense, self._parameters["linear.weight"], out=self._arrays["column"])
            logits += self._arrays["column"]
        totals, squares = self._arrays["totals"], self._arrays["squares"]
        totals.fill(0)
        squares.fill(0)
        for pooled, (slots, _) in zip(inputs.pooled, self._shape.tables, strict=True):
            launch("fm_sums", n, pooled=pooled, n=n, slots=slots, width=width, totals=totals, squares=squares)
        launch("fm_logits", n, totals=totals, squares=squares, n=n, width=width, logits=logits)

    def _backward_layers(self, inputs: Inputs) -> None:
        xp, active, slopes = self._xp, self._active, self._slopes
        xp.matmul(active[-1].T, self.slope, out=self._gradients["output.weight"])
        xp.multiply(self.slope[:, None], self._parameters["output.weight"], out=slopes[-1])
        for i in reversed(range(len(active))):
            self._relu_backward[i]()
            below = active[i - 1] if i else self._arrays.get("gathered")
            below = self._gather(inputs) if below is None else below
            xp.matmul(below.T, slopes[i], out=self._gradients[f"hidden{i}.weight"])
            if i:
                xp.matmul(slopes[i], self._parameters[f"hidden{i}.weight"].T, out=slopes[i - 1])
