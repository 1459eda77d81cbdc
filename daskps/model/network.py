"""The dense network of a model: forward, log loss and backward of a step, its optimizer step, and its state.

In: pooled slots of each table and dense features of a step's examples, or of a node's or device's part of them.
Out: logits; gradients of the pooled slots, not divided by anything; and the part's sums of the parameters' gradients,
of the loss and of the weight, in 64-bit fixed point. Sums of parts are added (`merge`); `apply` updates the parameters.

A part begins at a multiple of `block_examples` in its step. Then the bits of every result are the same for any number
of threads, devices and nodes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from daskps.errors import ArgumentError, ConfigError, NonFiniteError
from daskps.model.architecture import MAX_BLOCKS, MAX_STEP_EXAMPLES, Architecture, Kind
from daskps.model.blas import hold_to_one_thread
from daskps.model.block import Inputs
from daskps.model.diagnosis import explain
from daskps.model.engine import Engine
from daskps.model.initial import initial_parameters
from daskps.model.optimizer import EXAMPLE_ONE, DenseOptimizer, update
from daskps.model.workspace import Workspace, workspace_bytes

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one part of a step gives; arrays are on the engine's device."""

    logits: Any  # (n,) float32
    probabilities: Any  # (n,) float32
    gradients: Sequence[Any]  # (n, S * D) float32 of each table's pooled slots; of the weighted loss, not averaged
    sums: Any  # (P + 2,) int64 of the part: every parameter's gradient, the loss, the weight


def merge(parts: Sequence[Any]) -> Any:
    """The sums of a step from those of its parts; any order gives the same bits."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def step_loss(sums: Any) -> float:
    """The weighted loss of a step, summed over its examples."""
    return int(sums[-2]) / EXAMPLE_ONE


def step_weight(sums: Any) -> float:
    """The weight of a step: what sums over its examples are to be divided by."""
    return int(sums[-1]) / EXAMPLE_ONE


def _on_device(method: Callable[Concatenate[Network, P], T]) -> Callable[Concatenate[Network, P], T]:
    """The method, run where its network's arrays are."""

    @functools.wraps(method)
    def run(network: Network, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with network.engine.active():
            return method(network, *args, **kwargs)

    return run


class Network:
    """Parameters and optimizer state of one replica. `step` and `predict` may run in several threads at once."""

    def __init__(self, architecture: Architecture, engine: Engine, flat: Any) -> None:
        hold_to_one_thread()
        self.architecture = architecture
        self.engine = engine
        with engine.active():
            self.flat = engine.xp.asarray(flat)  # (P,) float32
        self.parameters = architecture.named(self.flat)
        self.state: dict[str, Any] = {}  # the optimizer's arrays, (P,) each
        self.steps = 0  # optimizer steps so far
        self._spaces: deque[Workspace] = deque()

    @_on_device
    def step(
        self,
        *,
        pooled: Sequence[Any],
        labels: Any,
        dense: Any | None = None,
        example_weights: Any | None = None,
        first_block: int = 0,
        gradients: Sequence[Any] | None = None,
    ) -> StepResult:
        """Predict, then differentiate, the examples of one part of a step. Parameters do not change.

        `first_block` counts the step's blocks before this part. `gradients` are written to where given, and may be
        `pooled` itself, which saves the memory and the time to map it.
        """
        n = len(labels)
        self._check(n, pooled, dense, labels, example_weights, first_block)
        xp, size = self.engine.xp, self.architecture.size
        gradients = [xp.empty_like(array) for array in pooled] if gradients is None else gradients
        logits, probabilities = xp.empty(n, xp.float32), xp.empty(n, xp.float32)
        losses, weights = xp.empty(n, xp.int64), xp.empty(n, xp.int64)

        def block(space: Workspace, start: int, stop: int) -> bool:
            at = slice(start, stop)
            inputs = Inputs([array[at] for array in pooled], None if dense is None else dense[at])
            rows = space.block(stop - start)
            rows.forward(inputs, logits[at])
            self.engine.launch(
                "log_loss",
                rows.rows,
                logits=logits[at],
                labels=labels[at],
                weights=None if example_weights is None else example_weights[at],
                n=rows.rows,
                probabilities=probabilities[at],
                gradients=rows.slope,
                losses=losses[at],
                example_weights=weights[at],
                flag=space.loss_flag,
            )
            return space.backward(rows, inputs, [array[at] for array in gradients])

        spaces = self._run(n, block)
        failed = next((space for space in spaces if bool(space.flags.any())), None)
        if failed is not None:
            host = self.engine.to_host
            # an engine that runs ahead has written gradients over the inputs before a flag is seen
            shared = any(xp.may_share_memory(own, other) for own, other in zip(gradients, pooled, strict=True))
            intact = self.engine.immediate or not shared
            message = explain(
                self.architecture,
                {name: host(array) for name, array in self.parameters.items()},
                gradients=None if failed.loss_flag[0] else {k: host(v) for k, v in failed.gradients.items()},
                pooled=[host(array) for array in pooled] if intact else None,
                dense=None if dense is None else host(dense),
                labels=host(labels),
                example_weights=None if example_weights is None else host(example_weights),
                first=first_block * self.architecture.block_examples,
            )
            raise NonFiniteError(message)
        sums = xp.zeros(size + 2, xp.int64)
        for space in spaces:
            sums[:size] += space.sums
        self._spaces.extend(spaces)  # from here on, another thread may take them
        sums[size] = losses.sum()
        sums[size + 1] = weights.sum()
        return StepResult(logits, probabilities, gradients, sums)

    @_on_device
    def predict(self, *, pooled: Sequence[Any], dense: Any = None) -> Any:
        """Logits (n,), by the same blocks and with the same bits as `step`."""
        n = len(pooled[0] if pooled else dense)
        self._check(n, pooled, dense, None, None, 0)
        logits = self.engine.xp.empty(n, self.engine.xp.float32)

        def block(space: Workspace, start: int, stop: int) -> bool:
            at = slice(start, stop)
            inputs = Inputs([array[at] for array in pooled], None if dense is None else dense[at])
            space.block(stop - start).forward(inputs, logits[at])
            return True

        self._spaces.extend(self._run(n, block))
        return logits

    @_on_device
    def probabilities(self, logits: Any) -> Any:
        """The sigmoid of logits (n,), with the same bits as in `step`."""
        out = self.engine.xp.empty_like(logits)
        self.engine.launch("sigmoid_of", len(logits), logits=logits, n=len(logits), probabilities=out)
        return out

    @_on_device
    def apply(self, sums: Any, optimizer: DenseOptimizer) -> None:
        """One optimizer step with the merged sums of a whole step; a step without weight changes nothing."""
        if len(sums) != self.architecture.size + 2:
            raise ArgumentError(f"sums of length {self.architecture.size + 2} are wanted, got {len(sums)}")
        if not self.state and not self.steps:
            self.state = optimizer.initial_state(self.engine, self.architecture.size)
        if tuple(self.state) != optimizer.state_names:
            raise ConfigError(
                f"the network's optimizer state is {list(self.state)}, but {optimizer.kind} keeps "
                f"{list(optimizer.state_names)}: go on with the optimizer that trained it, or call reset_optimizer()"
            )
        weight_sum = int(sums[-1])
        if weight_sum == 0:
            return
        self.steps += 1
        update(
            optimizer,
            self.engine,
            sums=sums[:-2],
            weight_sum=weight_sum,
            decayed=self.architecture.decayed,
            steps=self.steps,
            parameters=self.flat,
            state=self.state,
        )

    def reset_optimizer(self) -> None:
        """Forget the optimizer's state; the next `apply` starts anew, with any optimizer."""
        self.state, self.steps = {}, 0

    def export(self) -> dict[str, np.ndarray[Any, Any]]:
        """Parameters, optimizer state and step count as plain NumPy arrays by name, for a snapshot or an .npz file."""
        arrays = {"steps": np.array(self.steps, np.int64)}
        for prefix, flat in [("", self.flat), *((f"{name}/", array) for name, array in self.state.items())]:
            host = self.engine.to_host(flat)
            for p in self.architecture.parameters:
                arrays[prefix + p.name] = host[p.place].reshape(p.shape).copy()
        return arrays

    @_on_device
    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Take over what `export` gave; names and shapes must be this network's."""
        state_names = list(dict.fromkeys(name.split("/")[0] for name in arrays if "/" in name))
        prefixes = ["", *(f"{name}/" for name in state_names)]
        wanted = {f"{prefix}{p.name}": p.shape for prefix in prefixes for p in self.architecture.parameters}
        wrong = sorted({*wanted, "steps"} ^ set(arrays))
        wrong += [f"{name} {a.shape}" for name, a in arrays.items() if a.shape != wanted.get(name, ())]
        wrong += [f"{name} {arrays[name].dtype}" for name in wanted.keys() & arrays if arrays[name].dtype != np.float32]
        if wrong:
            shape = self.architecture
            raise ConfigError(
                f"these arrays are not of a {shape.kind} network with tables {shape.tables}, {shape.dense_features} "
                f"dense features and hidden layers {shape.hidden}; missing, unknown, of another shape or type: {wrong}"
            )
        xp = self.engine.xp
        flats = [
            xp.asarray(np.concatenate([arrays[prefix + p.name].ravel() for p in self.architecture.parameters]))
            for prefix in prefixes
        ]
        self.flat[...] = flats[0]
        self.state = dict(zip(state_names, flats[1:], strict=True))
        self.steps = int(arrays["steps"])

    def pack(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Parameters and the optimizer's arrays as one host array (arrays, P); for means over nodes."""
        host = self.engine.to_host
        return np.stack([host(flat) for flat in (self.flat, *self.state.values())])

    @_on_device
    def unpack(self, packed: np.ndarray[Any, np.dtype[np.float32]], steps: int) -> None:
        """Take over what `pack` of an equal network gave, or a mean of such, and so many optimizer steps."""
        for flat, values in zip((self.flat, *self.state.values()), packed, strict=True):
            flat[...] = self.engine.xp.asarray(values)
        self.steps = steps

    def size_bytes(self, cores: int) -> int:
        """What it takes, for budgets: parameters, optimizer state, a snapshot's copies, sums, and the arrays of so many
        threads."""
        return 40 * self.architecture.size + cores * workspace_bytes(self.architecture)

    def _run(self, n: int, block: Callable[[Workspace, int, int], bool]) -> list[Workspace]:
        """Run `block` over all blocks of n examples, on every core; the workspaces that took part."""
        rows = self.architecture.block_examples
        starts = iter(range(0, n, rows))  # shared: a thread takes the next block, so a slow one holds up nobody

        def share(index: int, count: int) -> Workspace | None:
            space = None
            with np.errstate(all="ignore"):  # the flags tell, and with a cause
                for start in starts:
                    space = space or self._workspace()
                    if not block(space, start, min(start + rows, n)):
                        break
            return space

        return [space for space in self.engine.shares(share) if space is not None]

    def _workspace(self) -> Workspace:
        """One that is free, or a new one, with sums at 0."""
        try:
            space = self._spaces.pop()
        except IndexError:
            space = Workspace(self.architecture, self.engine, self.parameters)
        space.begin()
        return space

    def _check(
        self, n: int, pooled: Sequence[Any], dense: Any, labels: Any, example_weights: Any, first_block: int
    ) -> None:
        shape = self.architecture
        if len(pooled) != len(shape.tables):
            raise ArgumentError(f"the network has {len(shape.tables)} tables, got {len(pooled)} pooled arrays")
        if (dense is not None) != bool(shape.dense_features):
            got = "none" if dense is None else dense.shape[-1]
            raise ArgumentError(f"the network has {shape.dense_features} dense features, got {got}")
        named: list[tuple[str, Any, tuple[int, ...]]]
        named = [(f"pooled[{i}]", array, (n, shape.widths[i])) for i, array in enumerate(pooled)]
        named += [("dense", dense, (n, shape.dense_features)), ("labels", labels, (n,))]
        for name, array, wanted in [*named, ("example_weights", example_weights, (n,))]:
            if array is None:
                continue
            if array.shape != wanted or array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ArgumentError(
                    f"{name} must be a C-contiguous float32 array of shape {wanted}, "
                    f"got {array.dtype} of shape {array.shape} with strides {array.strides}"
                )
        if labels is None:
            return  # a prediction has no sums
        blocks = first_block - (-n // shape.block_examples)
        if blocks > MAX_BLOCKS or blocks * shape.block_examples > MAX_STEP_EXAMPLES:
            raise ArgumentError(
                f"a step of {blocks} blocks of {shape.block_examples} examples could overflow its sums; at most "
                f"{MAX_BLOCKS} blocks and {MAX_STEP_EXAMPLES} examples: use a smaller step or another block_examples"
            )


def build(
    kind: Kind,
    *,
    tables: Sequence[tuple[int, int]],
    dense_features: int = 0,
    hidden: Sequence[int] = (),
    seed: int = 0,
    engine: Engine,
    block_examples: int = 256,
    slot_names: Sequence[tuple[str, ...]] = (),
) -> Network:
    """A new network: `tables` has (slots, dimension) of each; parameters are a function of the seed."""
    architecture = Architecture(
        kind, tuple(tables), dense_features, tuple(hidden), block_examples, tuple(map(tuple, slot_names))
    )
    return Network(architecture, engine, initial_parameters(architecture, seed))
