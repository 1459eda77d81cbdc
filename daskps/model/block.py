"""One block of examples, forward and backward: what a thread runs, in arrays that its workspace keeps.

In: rows of each table's pooled slots and of the dense features. Out: logits; then, from the gradient of the logits, the
gradients of the parameters, summed over the block, and of the pooled slots.

A block has the same examples whatever the number of threads, devices and nodes, and BLAS one thread, so each matrix
product has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskps.model.architecture import Architecture
from daskps.model.engine import Engine


@dataclass(frozen=True, slots=True)
class Inputs:
    """The rows of one block, as views of a step's arrays."""

    pooled: Sequence[Any]  # (n, S * D) of each table
    dense: Any | None  # (n, F)


def array_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every array that a block of `architecture.block_examples` needs, all float32."""
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
    """`rows` examples. Launches whose arguments do not change from block to block are made ready here.

    `forward`, then a loss that fills `slope`, then the two backward calls. The pooled slots' gradients come last, so
    that they may take the place of the pooled slots.
    """

    def __init__(
        self,
        architecture: Architecture,
        engine: Engine,
        parameters: Mapping[str, Any],
        gradients: Mapping[str, Any],  # of the weights; written
        sums: Mapping[str, Any],  # of the parameters, int64; the biases' are added to
        flag: Any,  # raised where that failed
        arrays: Mapping[str, Any],  # of array_shapes(), cut to `rows`
        rows: int,
    ) -> None:
        self.rows = rows
        self.slope = arrays["slope"]  # (n,) gradient of the logits
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
        """Write every weight's gradient, from `slope`, and add every bias' to its sum."""
        self._add_slope()
        if self._shape.layered:
            self._backward_layers(inputs)
        if self._shape.factored and inputs.dense is not None:
            self._xp.matmul(self.slope, inputs.dense, out=self._gradients["linear.weight"])

    def backward_pooled(self, inputs: Inputs, gradients: Sequence[Any]) -> None:
        """Write the gradient (n, S * D) of each table's pooled slots, which may be the pooled slots' own memory."""
        first_row = 0  # of the first layer's weights
        for table, pooled in enumerate(inputs.pooled):
            slots, dim = self._shape.tables[table]
            through = None  # the part that comes through the layers
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
        """(n, I): all tables and the dense features side by side, copied where they are several."""
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
