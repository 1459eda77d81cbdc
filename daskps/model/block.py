"""One block of examples, forward and backward: what a thread runs, in arrays it has kept from earlier blocks.

In: rows of each table's pooled slots and of the dense features. Out: logits; then, from the gradient of the logits, the
gradient of the pooled slots, and the parameters' gradients added to the thread's fixed-point sums.

A block always has the same examples whatever the number of threads, devices and nodes, and BLAS one thread, so each
matrix product has the same bits; sums over blocks are integers, so their order is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskps.model.architecture import Architecture
from daskps.model.engine import Engine


@dataclass(frozen=True, slots=True)
class Inputs:
    """The rows of one block, as views."""

    pooled: Sequence[Any]  # (n, S * D) of each table
    dense: Any | None  # (n, F)
    rows: int  # n


class Workspace:
    """One thread's arrays. `forward` and then `backward` run one block; `sums` and `flags` add up over blocks."""

    def __init__(self, architecture: Architecture, engine: Engine) -> None:
        xp, rows = engine.xp, architecture.block_examples
        self.architecture = architecture
        self.engine = engine

        def empty(*shape: int) -> Any:
            return xp.empty(shape, xp.float32)

        hidden = architecture.hidden
        self._gathered = empty(rows, architecture.inputs) if architecture.gathers else None
        self._active = [empty(rows, size) for size in hidden]  # outputs of each hidden layer
        self._slopes = [empty(rows, size) for size in hidden]  # gradients before each ReLU
        self._column = empty(rows)
        if architecture.factored:
            self._totals, self._squares = empty(rows, architecture.dim), empty(rows, architecture.dim)
        both = architecture.layered and architecture.factored
        self._through_layers = [empty(rows, width) if both else None for width in architecture.widths]
        self._weight_gradients = {p.name: empty(*p.shape) for p in architecture.parameters if p.name != "bias"}
        self.sums = xp.zeros(architecture.size, xp.int64)
        self._sums = {p.name: self.sums[p.place] for p in architecture.parameters}
        # what went wrong, one for each parameter and the last for the loss: kernels/dense.cuh names the values
        self.flags = xp.zeros(len(architecture.parameters) + 1, xp.int32)
        self._flags = {p.name: self.flags[i : i + 1] for i, p in enumerate(architecture.parameters)}
        self.loss_flag = self.flags[-1:]

    def begin(self) -> None:
        """Forget the sums and flags of an earlier step."""
        self.sums.fill(0)
        self.flags.fill(0)

    def forward(self, parameters: Mapping[str, Any], inputs: Inputs, logits: Any) -> None:
        """Write the logits (n,)."""
        logits[...] = parameters["bias"]
        if self.architecture.layered:
            self._forward_layers(parameters, inputs, logits)
        if self.architecture.factored:
            self._forward_factors(parameters, inputs, logits)

    def backward(self, parameters: Mapping[str, Any], inputs: Inputs, slope: Any, gradients: Sequence[Any]) -> bool:
        """From `slope` (n,), the gradient of the logits, add the parameters' gradients and write the pooled slots'.

        False, and `gradients` untouched, if something is not finite: they may share memory with the inputs, in which
        the caller will want to look for the cause. An engine that is not immediate leaves that to the step's end.
        """
        self.engine.launch("add_total_fixed", 1, gradients=slope, n=inputs.rows, **self._target("bias"))
        first_slope = self._backward_layers(parameters, inputs, slope) if self.architecture.layered else None
        if self.architecture.factored and inputs.dense is not None:
            self._add("linear.weight", slope, inputs.dense)
        if self.engine.immediate and self.flags.any():
            return False
        self._backward_pooled(parameters, inputs, slope, first_slope, gradients)
        return True

    def _target(self, name: str) -> dict[str, Any]:
        return {"sums": self._sums[name], "flag": self._flags[name]}

    def _add(self, name: str, left: Any, right: Any) -> None:
        """Add left @ right to the gradient of a parameter."""
        product = self._weight_gradients[name]
        self.engine.xp.matmul(left, right, out=product)
        self.engine.launch("add_fixed", product.size, gradients=product, n=product.size, **self._target(name))

    def _layer_inputs(self, inputs: Inputs) -> Any:
        """(n, I): all tables and the dense features side by side."""
        if self._gathered is None:
            return inputs.pooled[0] if inputs.pooled else inputs.dense
        gathered, start = self._gathered[: inputs.rows], 0
        for part in [*inputs.pooled, *([] if inputs.dense is None else [inputs.dense])]:
            gathered[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return gathered

    def _forward_layers(self, parameters: Mapping[str, Any], inputs: Inputs, logits: Any) -> None:
        xp, below = self.engine.xp, self._layer_inputs(inputs)
        for i, active in enumerate(self._active):
            active = active[: inputs.rows]
            xp.matmul(below, parameters[f"hidden{i}.weight"], out=active)
            active += parameters[f"hidden{i}.bias"]
            xp.maximum(active, xp.float32(0), out=active)
            below = active
        column = self._column[: inputs.rows]
        xp.matmul(below, parameters["output.weight"], out=column)
        logits += column

    def _forward_factors(self, parameters: Mapping[str, Any], inputs: Inputs, logits: Any) -> None:
        n, dim, launch = inputs.rows, self.architecture.dim, self.engine.launch
        if inputs.dense is not None:
            column = self._column[:n]
            self.engine.xp.matmul(inputs.dense, parameters["linear.weight"], out=column)
            logits += column
        totals, squares = self._totals[:n], self._squares[:n]
        totals.fill(0)
        squares.fill(0)
        for pooled, (slots, _) in zip(inputs.pooled, self.architecture.tables, strict=True):
            launch("fm_sums", n, pooled=pooled, n=n, slots=slots, dim=dim, totals=totals, squares=squares)
        launch("fm_logits", n, totals=totals, squares=squares, n=n, dim=dim, logits=logits)

    def _backward_layers(self, parameters: Mapping[str, Any], inputs: Inputs, slope: Any) -> Any:
        """The gradient before the first ReLU, (n, hidden[0])."""
        xp, n = self.engine.xp, inputs.rows
        active = [array[:n] for array in self._active]
        slopes = [array[:n] for array in self._slopes]
        self._add("output.weight", active[-1].T, slope)
        xp.multiply(slope[:, None], parameters["output.weight"], out=slopes[-1])
        for i in reversed(range(len(active))):
            columns = active[i].shape[1]
            self.engine.launch(
                "relu_backward",
                columns,
                activations=active[i],
                rows=n,
                columns=columns,
                gradients=slopes[i],
                **self._target(f"hidden{i}.bias"),
            )
            below = active[i - 1] if i else self._layer_inputs_again(inputs)
            self._add(f"hidden{i}.weight", below.T, slopes[i])
            if i:
                xp.matmul(slopes[i], parameters[f"hidden{i}.weight"].T, out=slopes[i - 1])
        return slopes[0]

    def _layer_inputs_again(self, inputs: Inputs) -> Any:
        """What `_layer_inputs` gave in this block's forward."""
        return self._layer_inputs(inputs) if self._gathered is None else self._gathered[: inputs.rows]

    def _backward_pooled(
        self, parameters: Mapping[str, Any], inputs: Inputs, slope: Any, first_slope: Any, gradients: Sequence[Any]
    ) -> None:
        start = 0
        for table, pooled in enumerate(inputs.pooled):
            slots, dim = self.architecture.tables[table]
            through = None
            if first_slope is not None:
                weight = parameters["hidden0.weight"][start : start + slots * dim]
                through = self._through_layers[table]
                through = gradients[table] if through is None else through[: inputs.rows]
                self.engine.xp.matmul(first_slope, weight.T, out=through)
                start += slots * dim
            if self.architecture.factored:
                self.engine.launch(
                    "fm_backward",
                    inputs.rows,
                    gradients=slope,
                    totals=self._totals[: inputs.rows],
                    pooled=pooled,
                    other=through,
                    n=inputs.rows,
                    slots=slots,
                    dim=dim,
                    pooled_gradients=gradients[table],
                )
