"""Layers of the dense networks. Each maps the inputs of an example to one number; the logit is their sum and a bias.

A layer is a value: it names its parameters and the arrays it needs, and `bind` gives its computation for blocks of a
fixed number of examples. `daskps.nn.architecture.KINDS` lists the layers of each kind of network.

In: the inputs of one block of examples, as views of the step's arrays. Out: logits; then the gradients of the layer's
parameters and of the pooled slots.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from daskps.device.device import Device


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one block of n examples, as views of the step's arrays."""

    pooled: Sequence[Any]  # (n, S * D) of each table
    dense: Any | None  # (n, F)


@dataclass(frozen=True)
class InputShape:
    """The inputs of a network: tables and dense features."""

    tables: tuple[tuple[int, int], ...]  # (slots S, dimension D) of each table
    dense_features: int = 0  # F

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Return the number of pooled values that one example has in each table: S * D."""
        return tuple(slots * dim for slots, dim in self.tables)

    @property
    def width(self) -> int:
        """Return the number of all input values of one example."""
        return sum(self.widths) + self.dense_features


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter of a layer. Names that end in ``bias`` are biases, which L2 leaves alone and which begin at 0."""

    name: str
    shape: tuple[int, ...]
    limit: float = 0.0  # initial values are uniform in [-limit, limit)


@dataclass(frozen=True, slots=True)
class BlockContext:
    """The arrays of one thread for blocks of `rows` examples, which a layer's computation is bound to."""

    device: Device
    inputs: InputShape
    rows: int
    parameters: Mapping[str, Any]
    gradients: Mapping[str, Any]  # output: gradients of the weights, of one block
    sums: Mapping[str, Any]  # int64, per parameter; a layer adds the gradients of its biases here
    flag: Any  # set to 1 if a bias gradient could not be added
    arrays: Mapping[str, Any]  # by the names of Layer.arrays, and `column` (n,), which any layer may overwrite
    slope: Any  # (n,) gradient of the loss by the logits; written between forward and backward


class BoundLayer(Protocol):
    """The computation of a layer for blocks of a fixed size. Calls come in the order of the methods."""

    def forward(self, inputs: Inputs, logits: Any) -> None:
        """Add the layer's output to the logits (n,)."""

    def backward_parameters(self, inputs: Inputs) -> None:
        """Write the gradients of the weights, computed from the slope, and add those of the biases to their sums."""

    def backward_pooled(self, table: int, pooled: Any, before: Any | None, out: Any) -> None:
        """Write the gradient (n, S * D) of a table's pooled slots, plus `before`, that of other layers, to `out`.

        `out` may be the memory of `pooled`. Called only if the layer `uses_pooled`.
        """


class Layer(Protocol):
    """A layer of a network, as a value."""

    @property
    def uses_pooled(self) -> bool:
        """Return True if the output depends on the pooled slots."""

    def problem(self, dims: Sequence[int]) -> str:
        """Return what is wrong with the layer over tables of these dimensions; empty if nothing is."""

    def parameters(self, inputs: InputShape) -> list[ParameterSpec]:
        """Return the layer's parameters."""

    def arrays(self, inputs: InputShape, rows: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the float32 arrays that a block of `rows` examples needs."""

    def bind(self, context: BlockContext) -> BoundLayer:
        """Return the computation on the arrays of `context`. Launches with fixed arguments are bound once, here."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Hidden layers with ReLU over all inputs, and an output weight: ``relu(relu(x W0 + b0) W1 + b1) w``."""

    hidden: tuple[int, ...]  # number of outputs of each hidden layer

    uses_pooled = True

    def problem(self, dims: Sequence[int]) -> str:
        if not self.hidden or min(self.hidden) < 1:
            return f"needs hidden layers of at least one output each, got hidden={self.hidden}"
        return ""

    def parameters(self, inputs: InputShape) -> list[ParameterSpec]:
        sizes = (inputs.width, *self.hidden)
        weights = [  # He: a ReLU follows
            ParameterSpec(f"hidden{i}.weight", sizes[i : i + 2], math.sqrt(6 / sizes[i]))
            for i in range(len(self.hidden))
        ]
        output = ParameterSpec("output.weight", (sizes[-1],), math.sqrt(6 / (sizes[-1] + 1)))  # Glorot
        return [*weights, output, *(ParameterSpec(f"hidden{i}.bias", (n,)) for i, n in enumerate(self.hidden))]

    def arrays(self, inputs: InputShape, rows: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"active{i}": (rows, size) for i, size in enumerate(self.hidden)}
        shapes |= {f"slope{i}": (rows, size) for i, size in enumerate(self.hidden)}
        if len(inputs.tables) + bool(inputs.dense_features) > 1:  # several arrays must be copied side by side
            shapes["gathered"] = (rows, inputs.width)
        return shapes

    def bind(self, context: BlockContext) -> BoundLayer:
        return _BoundMlp(self, context)


class _BoundMlp:
    def __init__(self, layer: Mlp, context: BlockContext) -> None:
        self._context, self._matmul = context, context.device.xp.matmul
        self._multiply = context.device.xp.multiply
        parameters, gradients, arrays = context.parameters, context.gradients, context.arrays
        self._layers = range(len(layer.hidden))
        self._weights = [parameters[f"hidden{i}.weight"] for i in self._layers]
        self._weight_gradients = [gradients[f"hidden{i}.weight"] for i in self._layers]
        self._output, self._output_gradient = parameters["output.weight"], gradients["output.weight"]
        self._active = [arrays[f"active{i}"] for i in self._layers]  # (n, hidden[i]) after each ReLU
        self._slopes = [arrays[f"slope{i}"] for i in self._layers]  # (n, hidden[i]) gradient before each ReLU
        self._gathered, self._column = arrays.get("gathered"), arrays["column"]
        ends = itertools.accumulate(context.inputs.widths)
        self._input_rows = [slice(end - n, end) for n, end in zip(context.inputs.widths, ends, strict=True)]  # of W0
        self._relu = [self._bind_relu(i) for i in self._layers]
        self._relu_backward = [self._bind_relu_backward(i) for i in self._layers]

    def _bind_relu(self, i: int) -> Callable[[], None]:
        values, bias = self._active[i], self._context.parameters[f"hidden{i}.bias"]
        rows, columns = values.shape
        return self._context.device.bind("bias_relu", values.size, bias=bias, rows=rows, columns=columns, values=values)

    def _bind_relu_backward(self, i: int) -> Callable[[], None]:
        rows, columns = self._active[i].shape
        return self._context.device.bind(
            "relu_backward",
            self._active[i].size,
            activations=self._active[i],
            rows=rows,
            columns=columns,
            gradients=self._slopes[i],
            sums=self._context.sums[f"hidden{i}.bias"],
            flag=self._context.flag,
        )

    def _inputs(self, inputs: Inputs) -> list[Any]:
        return [*inputs.pooled, *([] if inputs.dense is None else [inputs.dense])]

    def forward(self, inputs: Inputs, logits: Any) -> None:
        parts, start = self._inputs(inputs), 0
        below = parts[0] if self._gathered is None else self._gathered
        if self._gathered is not None:
            for part in parts:
                self._gathered[:, start : start + part.shape[1]] = part
                start += part.shape[1]
        for i, active in enumerate(self._active):
            self._matmul(below, self._weights[i], out=active)
            self._relu[i]()
            below = active
        self._matmul(below, self._output, out=self._column)
        logits += self._column

    def backward_parameters(self, inputs: Inputs) -> None:
        active, slopes, slope = self._active, self._slopes, self._context.slope
        self._matmul(active[-1].T, slope, out=self._output_gradient)
        self._multiply(slope[:, None], self._output, out=slopes[-1])
        for i in reversed(self._layers):
            self._relu_backward[i]()
            below = active[i - 1] if i else self._gathered if self._gathered is not None else self._inputs(inputs)[0]
            self._matmul(below.T, slopes[i], out=self._weight_gradients[i])
            if i:
                self._matmul(slopes[i], self._weights[i].T, out=slopes[i - 1])

    def backward_pooled(self, table: int, pooled: Any, before: Any | None, out: Any) -> None:
        self._matmul(self._slopes[0], self._weights[0][self._input_rows[table]].T, out=out)
        if before is not None:
            out += before


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear weights of the dense features; nothing if there are none."""

    uses_pooled = False

    def problem(self, dims: Sequence[int]) -> str:
        return ""

    def parameters(self, inputs: InputShape) -> list[ParameterSpec]:  # they begin at 0, as rows of lr do
        return [ParameterSpec("linear.weight", (inputs.dense_features,))] if inputs.dense_features else []

    def arrays(self, inputs: InputShape, rows: int) -> dict[str, tuple[int, ...]]:
        return {}

    def bind(self, context: BlockContext) -> BoundLayer:
        return _BoundLinear(context)


class _BoundLinear:
    def __init__(self, context: BlockContext) -> None:
        self._weight = context.parameters.get("linear.weight")
        self._gradient = context.gradients.get("linear.weight")
        self._slope, self._column, self._matmul = context.slope, context.arrays["column"], context.device.xp.matmul

    def forward(self, inputs: Inputs, logits: Any) -> None:
        if inputs.dense is not None:
            self._matmul(inputs.dense, self._weight, out=self._column)
            logits += self._column

    def backward_parameters(self, inputs: Inputs) -> None:
        if inputs.dense is not None:
            self._matmul(self._slope, inputs.dense, out=self._gradient)

    def backward_pooled(self, table: int, pooled: Any, before: Any | None, out: Any) -> None:
        raise AssertionError("the output does not depend on the pooled slots")


@dataclass(frozen=True, slots=True)
class FactorizationMachine:
    """Sum over the slots of their linear weights; with `order` 2 also of the products of all pairs of their factors.

    A pooled slot is one linear weight, and with `order` 2 the factors behind it (kernels/factor.cu).
    """

    order: int

    uses_pooled = True

    def problem(self, dims: Sequence[int]) -> str:
        if self.order == 1 and any(dim != 1 for dim in dims):
            return f"has one weight a key, so every table has dimension 1, got {list(dims)}: set dimension = 1"
        if self.order == 2 and (len(set(dims)) > 1 or min(dims, default=2) < 2):
            return (
                "multiplies factors across tables: all need one dimension (1 linear weight + factors), at least 2, "
                f"got {list(dims)}"
            )
        return ""

    def parameters(self, inputs: InputShape) -> list[ParameterSpec]:
        return []

    def arrays(self, inputs: InputShape, rows: int) -> dict[str, tuple[int, ...]]:
        dim = inputs.tables[0][1] if inputs.tables else 1
        return {"totals": (rows, dim), "squares": (rows, dim)}

    def bind(self, context: BlockContext) -> BoundLayer:
        return _BoundFactorizationMachine(context)


class _BoundFactorizationMachine:
    def __init__(self, context: BlockContext) -> None:
        self._rows, self._slope, self._launch = context.rows, context.slope, context.device.launch_inline
        self._totals, self._squares = context.arrays["totals"], context.arrays["squares"]  # (n, D) sums over the slots
        self._slots, self._dim = [slots for slots, _ in context.inputs.tables], int(self._totals.shape[1])

    def forward(self, inputs: Inputs, logits: Any) -> None:
        n, dim, totals, squares = self._rows, self._dim, self._totals, self._squares
        totals.fill(0)
        squares.fill(0)
        for pooled, slots in zip(inputs.pooled, self._slots, strict=True):
            self._launch("fm_sums", n, pooled=pooled, n=n, slots=slots, width=dim, totals=totals, squares=squares)
        self._launch("fm_logits", n, totals=totals, squares=squares, n=n, width=dim, logits=logits)

    def backward_parameters(self, inputs: Inputs) -> None:
        pass

    def backward_pooled(self, table: int, pooled: Any, before: Any | None, out: Any) -> None:
        self._launch(
            "fm_backward",
            self._rows,
            gradients=self._slope,
            totals=self._totals,
            pooled=pooled,
            other=before,
            n=self._rows,
            slots=self._slots[table],
            width=self._dim,
            pooled_gradients=out,
        )
