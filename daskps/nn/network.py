"""The built-in dense networks: forward pass, log loss and backward pass of a step, optimizer step, and state.

`DenseNetwork` implements `DenseModel` (dense_model.py) for every kind of KINDS (architecture.py). A step goes through
its examples in blocks; each thread takes the next block, and adds the gradients to its own fixed-point sums.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from daskps.device.device import Device
from daskps.device.native import mix64, mix_keys
from daskps.errors import ArgumentError, ConfigError
from daskps.nn.architecture import MAX_BLOCKS, MAX_STEP_EXAMPLES, Architecture
from daskps.nn.blas import hold_to_one_thread
from daskps.nn.dense_model import StepResult
from daskps.nn.layers import BlockContext, Inputs
from daskps.nn.optimizer import DenseOptimizer, update
from daskps.types import Floats


def uniform(seed: int, name: str, count: int) -> Floats:
    """Return `count` pseudo-random values in [-1, 1), multiples of 2^-23; a function of the seed and the name."""
    stream = mix64(seed) ^ zlib.crc32(name.encode())
    counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mix_keys(counter + np.uint64(mix64(stream))) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-23) - np.float32(1)


def initial_parameters(architecture: Architecture, seed: int) -> Floats:
    """Return the initial values (P,) of all parameters; biases are 0."""
    flat = np.zeros(architecture.size, np.float32)
    for parameter in architecture.parameters:
        if parameter.limit:
            flat[parameter.place] = uniform(seed, parameter.name, parameter.size) * np.float32(parameter.limit)
    return flat


class Block:
    """The forward and backward pass of blocks of `rows` examples: bias and layers.

    Order of calls: `forward`, then a loss that writes `slope`, then `backward_parameters`, then `backward_pooled`.
    The gradients of the pooled slots come last, so they may be written into the memory of the pooled slots.
    """

    def __init__(self, architecture: Architecture, context: BlockContext) -> None:
        self.rows, self.slope = context.rows, context.slope
        self._bias = context.parameters["bias"]
        self._layers = [layer.bind(context) for layer in architecture.layers]
        self._add_slope = context.device.bind(
            "add_total", self.rows, gradients=self.slope, n=self.rows, sums=context.sums["bias"], flag=context.flag
        )
        # Layers through which gradients reach the pooled slots. Each but the last writes to an array of its own,
        # because the layers after it still need the pooled slots.
        used = [bound for bound, layer in zip(self._layers, architecture.layers, strict=True) if layer.uses_pooled]
        tables = range(len(architecture.tables))
        between = [[context.arrays[f"through{n}.{table}"] for table in tables] for n in range(len(used) - 1)]
        self._pooled_layers = list(zip(used, [*between, None], strict=True))

    def forward(self, inputs: Inputs, logits: Any) -> None:
        """Write the logits (n,)."""
        logits[...] = self._bias
        for layer in self._layers:
            layer.forward(inputs, logits)

    def backward_parameters(self, inputs: Inputs) -> None:
        """Write the gradient of each weight, computed from `slope`, and add the gradient of each bias to its sum."""
        self._add_slope()
        for layer in self._layers:
            layer.backward_parameters(inputs)

    def backward_pooled(self, inputs: Inputs, gradients: Sequence[Any]) -> None:
        """Write the gradient (n, S * D) of each table's pooled slots.

        `gradients` may be the memory of the pooled slots themselves.
        """
        for table, pooled in enumerate(inputs.pooled):
            before = None
            for layer, through in self._pooled_layers:
                out = gradients[table] if through is None else through[table]
                layer.backward_pooled(table, pooled, before, out)
                before = out


class ThreadWorkspace:
    """The arrays, gradient sums and error flags that one thread uses for its blocks."""

    def __init__(self, architecture: Architecture, device: Device, parameters: Mapping[str, Any]) -> None:
        xp, size = device.xp, architecture.size
        self._architecture, self._device, self._parameters = architecture, device, parameters
        self._arrays = {name: xp.empty(shape, xp.float32) for name, shape in architecture.array_shapes().items()}
        # Gradients of weights are matrix products of one block, added by `_add`; kernels add those of biases directly.
        weights = architecture.decayed
        flat = xp.zeros(weights, xp.float32)
        self.gradients = architecture.named(flat)  # of the weights, of the last block
        self.sums = xp.zeros(size, xp.int64)  # gradients of all parameters, of all blocks since `begin`
        self.flags = xp.zeros(2, xp.int32)  # 1 if a value could not be added: [0] a gradient, [1] a loss or a weight
        self.loss_flag = self.flags[1:]
        self._add = device.bind(
            "add_fixed", weights, gradients=flat, n=weights, sums=self.sums[:weights], flag=self.flags[:1]
        )
        self._full = self._cut(architecture.block_examples)
        self._rest = self._full  # the most recent block of another size: the last block of a step

    @staticmethod
    def size_bytes(architecture: Architecture) -> int:
        """Return the bytes of one workspace, for budgets."""
        floats = sum(math.prod(shape) for shape in architecture.array_shapes().values())
        return 4 * floats + 4 * architecture.decayed + 8 * architecture.size

    def begin(self) -> None:
        """Set sums and flags to 0 for a new step."""
        self.sums.fill(0)
        self.flags.fill(0)

    def block(self, rows: int) -> Block:
        """Return a block of `rows` examples that uses this workspace's arrays."""
        if rows == self._full.rows:
            return self._full
        if rows != self._rest.rows:
            self._rest = self._cut(rows)
        return self._rest

    def backward(self, block: Block, inputs: Inputs, gradients: Sequence[Any]) -> bool:
        """Add the parameters' gradients to the sums, then write the gradients of the pooled slots.

        Returns False and leaves `gradients` unchanged if a flag is set: the caller looks for the cause in the inputs,
        and `gradients` may be their memory. Asynchronous devices (GPU) are not checked here, because reading a flag
        would wait for the device.
        """
        block.backward_parameters(inputs)
        self._add()
        if self._device.immediate and (self.flags[0] or self.flags[1]):
            return False
        block.backward_pooled(inputs, gradients)
        return True

    def _cut(self, rows: int) -> Block:
        arrays = {name: array[:rows] for name, array in self._arrays.items()}
        context = BlockContext(
            device=self._device,
            inputs=self._architecture.inputs,
            rows=rows,
            parameters=self._parameters,
            gradients=self.gradients,
            sums=self._architecture.named(self.sums),
            flag=self.flags[:1],
            arrays=arrays,
            slope=arrays["slope"],
        )
        return Block(self._architecture, context)


GRADIENT_LIMIT = 2**15  # bound of one parameter's gradient, summed over one block (kernels/dense.cuh)
EXAMPLE_LIMIT = 2**13  # bound of one example's weight / scale, and of its loss * weight / scale (kernels/loss.cu)


def _first_bad(array: Any) -> tuple[int, int] | None:
    """Return (example, column) of the first value that is not finite, or None."""
    places = np.argwhere(~np.isfinite(array))
    return (int(places[0][0]), int(places[0][1])) if len(places) else None


def _bad_input(architecture: Architecture, pooled: Sequence[Any], dense: Any, first: int) -> str | None:
    for table, array in enumerate(pooled):
        place = _first_bad(array)
        if place:
            return _pooled_value(architecture, table, array, place, first)
    place = None if dense is None else _first_bad(dense)
    if place:
        return f"dense feature {place[1]} is {dense[place]} in example {first + place[0]}"
    return None


def _pooled_value(architecture: Architecture, table: int, array: Any, place: tuple[int, int], first: int) -> str:
    slot, at = divmod(place[1], architecture.tables[table][1])
    name = repr(architecture.slot_names[table][slot]) if architecture.slot_names else f"{slot} of table {table}"
    return f"slot {name} pools to {array[place]} at dimension {at} in example {first + place[0]}"


def _too_large(
    architecture: Architecture, parameters: Mapping[str, Any], pooled: Sequence[Any], dense: Any, first: int
) -> str:
    """Return a message that names the largest of all values; for inputs and parameters that are all finite."""
    arrays = {f"parameter {name}": array for name, array in parameters.items()} | {"dense": dense}
    arrays |= {str(table): array for table, array in enumerate(pooled)}
    sizes = {name: float(np.abs(array).max(initial=0.0)) for name, array in arrays.items() if array is not None}
    largest = max(sizes, key=lambda name: sizes[name])
    found = f"{largest} has a value of size {sizes[largest]:g}"
    if not largest.startswith("parameter"):
        array = arrays[largest]
        row, column = map(int, np.unravel_index(int(np.argmax(np.abs(array))), array.shape))
        if largest == "dense":
            found = f"dense feature {column} is {array[row, column]} in example {first + row}"
        else:
            found = _pooled_value(architecture, int(largest), array, (row, column), first)
    return f"all inputs and parameters are finite, but too large together: {found}"


def _bad_example(labels: Any, example_weights: Any, scale: float, first: int) -> str | None:
    label = ~np.isfinite(labels)
    if label.any():
        at = int(np.argmax(label))
        return f"the label of example {first + at} is {labels[at]}"
    weights = np.zeros(0) if example_weights is None else example_weights
    wrong = ~((weights >= 0) & (weights < EXAMPLE_LIMIT * scale))
    if wrong.any():
        at = int(np.argmax(wrong))
        return f"the weight of example {first + at} is {weights[at]}, not in [0, {EXAMPLE_LIMIT * scale:g})"
    return None


def explain(
    architecture: Architecture,
    parameters: Mapping[str, Any],
    *,
    gradients: Mapping[str, Any] | None,  # of the block that failed; None if a loss failed
    pooled: Sequence[Any] | None,  # None if gradients have overwritten them
    dense: Any,
    labels: Any,
    example_weights: Any,
    scale: float,
    first: int,
) -> str:
    """Return an error message that names the cause of a value that is not finite or too large.

    `first` is the number, within its step, of the first example of these arrays.
    """
    what = f"a loss is not finite or beyond {EXAMPLE_LIMIT}"
    if gradients is not None:
        names = [name for name, array in gradients.items() if not (np.abs(array) < GRADIENT_LIMIT).all()]
        what = f"the gradient of {' and '.join(names) or 'a parameter'} is not finite or beyond {GRADIENT_LIMIT}"
    bad = next((name for name, array in parameters.items() if not np.isfinite(array).all()), None)
    cause = (
        (f"parameter {bad} is not finite" if bad else None)
        or _bad_input(architecture, pooled or [], dense, first)
        or _bad_example(labels, example_weights, scale, first)
        or (_too_large(architecture, parameters, pooled, dense, first) if pooled is not None else None)
        or "perhaps a slot, but gradients were written over the pooled slots: give `gradients` arrays of their own"
    )
    return f"{what}: {cause}; lower the learning rate, clip gradients, or scale down dense features and weights"


P = ParamSpec("P")
T = TypeVar("T")


def _on_device(method: Callable[Concatenate[DenseNetwork, P], T]) -> Callable[Concatenate[DenseNetwork, P], T]:
    """Decorate a method of DenseNetwork so that it runs with the network's device as the current device."""

    @functools.wraps(method)
    def run(network: DenseNetwork, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with network.device.active():
            return method(network, *args, **kwargs)

    return run


def _renamed(name: str) -> str:
    """Return the current name of an exported array; before numerics 2, Adam's state had other names than in rows."""
    state, slash, parameter = name.partition("/")
    return {"first_moment": "momentum", "second_moment": "variance"}.get(state, state) + slash + parameter


class DenseNetwork:
    """A built-in network (`DenseModel`): parameters, optimizer, step count."""

    def __init__(self, architecture: Architecture, device: Device, flat: Any, optimizer: DenseOptimizer) -> None:
        hold_to_one_thread()
        self.architecture = architecture
        self.device = device
        self.optimizer = optimizer
        with device.active():
            self.flat = device.xp.asarray(flat)  # (P,) float32
        self.parameters = architecture.named(self.flat)
        self.state: dict[str, Any] = {}  # the optimizer's arrays, (P,) each; empty before the first step
        self.steps = 0
        self._spaces: deque[ThreadWorkspace] = deque()  # free workspaces

    @_on_device
    def step(
        self,
        *,
        pooled: Sequence[Any],
        labels: Any,
        dense: Any | None = None,
        example_weights: Any | None = None,
        scale: float = 1.0,
        first_block: int = 0,
        gradients: Sequence[Any] | None = None,
    ) -> StepResult:
        """Compute predictions and gradients of the examples of one part of a step (`DenseModel.step`)."""
        n = len(labels)
        self._check(n, pooled, dense, labels, example_weights, first_block)
        xp, size = self.device.xp, self.architecture.size
        gradients = [xp.empty_like(array) for array in pooled] if gradients is None else gradients
        logits, probabilities = xp.empty(n, xp.float32), xp.empty(n, xp.float32)
        losses, weights = xp.empty(n, xp.int64), xp.empty(n, xp.int64)
        stopped: list[tuple[ThreadWorkspace, slice]] = []  # blocks that failed before their inputs were overwritten

        def block(space: ThreadWorkspace, start: int, stop: int) -> bool:
            at = slice(start, stop)
            inputs = Inputs([array[at] for array in pooled], None if dense is None else dense[at])
            rows = space.block(stop - start)
            rows.forward(inputs, logits[at])
            self.device.launch_inline(
                "log_loss",
                rows.rows,
                logits=logits[at],
                labels=labels[at],
                weights=None if example_weights is None else example_weights[at],
                scale=1 / scale,
                n=rows.rows,
                probabilities=probabilities[at],
                gradients=rows.slope,
                losses=losses[at],
                example_weights=weights[at],
                flag=space.loss_flag,
            )
            if space.backward(rows, inputs, [array[at] for array in gradients]):
                return True
            stopped.append((space, at))
            return False

        spaces = self._run(n, block)
        sums, status = xp.zeros(size + 2, xp.int64), xp.zeros(2, xp.int32)
        for space in spaces:
            sums[:size] += space.sums
            status |= space.flags
        sums[size] = losses.sum()
        sums[size + 1] = weights.sum()

        def cause() -> str:
            return self._explain(stopped, spaces, pooled, gradients, dense, labels, example_weights, scale, first_block)

        if not stopped:  # `cause` needs the workspaces of a step that has stopped
            self._spaces.extend(spaces)  # from here on, another thread may use them
        return StepResult(self.device, logits, probabilities, gradients, sums, status, cause)

    @_on_device
    def _explain(
        self,
        stopped: list[tuple[ThreadWorkspace, slice]],
        spaces: Sequence[ThreadWorkspace],
        pooled: Sequence[Any],
        gradients: Sequence[Any],
        dense: Any,
        labels: Any,
        example_weights: Any,
        scale: float,
        first_block: int,
    ) -> str:
        """Return an error message for a step whose status is set."""
        host, xp = self.device.to_host, self.device.xp
        # An asynchronous device (GPU) has written gradients over the inputs before a flag is read.
        shared = any(xp.may_share_memory(own, other) for own, other in zip(gradients, pooled, strict=True))
        intact = bool(stopped) or not shared
        if stopped:
            failed, at = min(stopped, key=lambda pair: pair[1].start)
        else:
            failed, at = next(space for space in spaces if bool(space.flags.any())), slice(0, len(labels))
        return explain(
            self.architecture,
            {name: host(array) for name, array in self.parameters.items()},
            gradients=None if failed.loss_flag[0] else {k: host(v) for k, v in failed.gradients.items()},
            pooled=[host(array[at]) for array in pooled] if intact else None,
            dense=None if dense is None else host(dense[at]),
            labels=host(labels[at]),
            example_weights=None if example_weights is None else host(example_weights[at]),
            scale=scale,
            first=first_block * self.architecture.block_examples + at.start,
        )

    @_on_device
    def predict(self, *, pooled: Sequence[Any], dense: Any = None) -> Any:
        """Return the logits (n,). Blocks are the same as in `step`, so the bits are, too."""
        n = len(pooled[0] if pooled else dense)
        self._check(n, pooled, dense, None, None, 0)
        logits = self.device.xp.empty(n, self.device.xp.float32)

        def block(space: ThreadWorkspace, start: int, stop: int) -> bool:
            at = slice(start, stop)
            inputs = Inputs([array[at] for array in pooled], None if dense is None else dense[at])
            space.block(stop - start).forward(inputs, logits[at])
            return True

        self._spaces.extend(self._run(n, block))
        return logits

    @_on_device
    def probabilities(self, logits: Any) -> Any:
        """Return the sigmoid of logits (n,), bit-identical to the probabilities of `step`."""
        out = self.device.xp.empty_like(logits)
        self.device.launch_inline("sigmoid_of", len(logits), logits=logits, n=len(logits), probabilities=out)
        return out

    @_on_device
    def apply(self, sums: Any) -> None:
        """Do one optimizer step with the merged sums of a whole step. If the step's weight is 0, nothing changes."""
        if len(sums) != self.architecture.size + 2:
            raise ArgumentError(f"sums of length {self.architecture.size + 2} are wanted, got {len(sums)}")
        if not self.state and not self.steps:
            self.state = self.optimizer.initial_state(self.device, self.architecture.size)
        weight_sum = int(sums[-1])
        if weight_sum == 0:
            return
        self.steps += 1
        update(
            self.optimizer,
            self.device,
            sums=sums[:-2],
            weight_sum=weight_sum,
            decayed=self.architecture.decayed,
            steps=self.steps,
            parameters=self.flat,
            state=self.state,
        )

    def export(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return parameters, optimizer state and step count as NumPy arrays by name, for a snapshot or .npz file."""
        arrays = {"steps": np.array(self.steps, np.int64)}
        for prefix, flat in [("", self.flat), *((f"{name}/", array) for name, array in self.state.items())]:
            host = self.device.to_host(flat)
            for p in self.architecture.parameters:
                arrays[prefix + p.name] = host[p.place].reshape(p.shape).copy()
        return arrays

    @_on_device
    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace parameters, optimizer state and step count by arrays of `export`.

        Raises ConfigError if the names, shapes or types are not those of this network and optimizer.
        """
        arrays = {_renamed(name): array for name, array in arrays.items()}
        state_names = tuple(dict.fromkeys(name.split("/")[0] for name in arrays if "/" in name))
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
        steps, xp = int(arrays["steps"]), self.device.xp
        if (state_names or steps) and set(state_names) != set(self.optimizer.state_names):
            raise ConfigError(
                f"the network's optimizer state is {list(state_names)}, but {self.optimizer.kind} keeps "
                f"{list(self.optimizer.state_names)}: go on with the optimizer that trained it"
            )
        flats = [
            xp.asarray(np.concatenate([arrays[prefix + p.name].ravel() for p in self.architecture.parameters]))
            for prefix in prefixes
        ]
        self.flat[...] = flats[0]
        loaded = dict(zip(state_names, flats[1:], strict=True))
        self.state = {name: loaded[name] for name in self.optimizer.state_names} if loaded else {}
        self.steps = steps

    def pack(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the parameters and the optimizer's arrays as one host array (arrays, P), to compute means of nodes."""
        host = self.device.to_host
        return np.stack([host(flat) for flat in (self.flat, *self.state.values())])

    @_on_device
    def unpack(self, packed: np.ndarray[Any, np.dtype[np.float32]], steps: int) -> None:
        """Replace parameters and optimizer state by an array of `pack`, or a mean of several, and set the step count.

        The arrays must come from networks of the same architecture and optimizer.
        """
        for flat, values in zip((self.flat, *self.state.values()), packed, strict=True):
            flat[...] = self.device.xp.asarray(values)
        self.steps = steps

    def size_bytes(self, cores: int) -> int:
        """Return an upper bound of the bytes in use, for budgets, with one workspace per core.

        Counts the parameters, the optimizer's state, copies for a snapshot, sums (40 bytes per parameter), workspaces.
        """
        return 40 * self.architecture.size + cores * ThreadWorkspace.size_bytes(self.architecture)

    def _run(self, n: int, block: Callable[[ThreadWorkspace, int, int], bool]) -> list[ThreadWorkspace]:
        """Run `block` over all blocks of n examples, on all cores, and return the workspaces that were used."""
        rows = self.architecture.block_examples
        starts = iter(range(0, n, rows))  # shared: each thread takes the next block, so none waits for a slow one

        def share(index: int, count: int) -> ThreadWorkspace | None:
            space = None
            with np.errstate(all="ignore"):  # the flags report such errors, and `explain` names the cause
                for start in starts:
                    space = space or self._workspace()
                    if not block(space, start, min(start + rows, n)):
                        break
            return space

        return [space for space in self.device.run_shares(share) if space is not None]

    def _workspace(self) -> ThreadWorkspace:
        """Return a free workspace, or a new one, with all sums at 0."""
        try:
            space = self._spaces.pop()
        except IndexError:
            space = ThreadWorkspace(self.architecture, self.device, self.parameters)
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
        named = [(f"pooled[{i}]", array, (n, shape.inputs.widths[i])) for i, array in enumerate(pooled)]
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
            return  # a prediction has no sums that could overflow
        blocks = first_block - (-n // shape.block_examples)
        if blocks > MAX_BLOCKS or blocks * shape.block_examples > MAX_STEP_EXAMPLES:
            raise ArgumentError(
                f"a step of {blocks} blocks of {shape.block_examples} examples could overflow its sums; at most "
                f"{MAX_BLOCKS} blocks and {MAX_STEP_EXAMPLES} examples: use a smaller step or another block_examples"
            )


def build(
    kind: str,
    *,
    tables: Sequence[tuple[int, int]],
    dense_features: int = 0,
    hidden: Sequence[int] = (),
    seed: int = 0,
    device: Device,
    optimizer: DenseOptimizer | None = None,
    block_examples: int = 256,
    slot_names: Sequence[tuple[str, ...]] = (),
) -> DenseNetwork:
    """Return a new network. `tables` has (slots, dimension) of each table; `seed` determines the initial parameters."""
    architecture = Architecture(
        kind, tuple(tables), dense_features, tuple(hidden), block_examples, tuple(map(tuple, slot_names))
    )
    return DenseNetwork(architecture, device, initial_parameters(architecture, seed), optimizer or DenseOptimizer())
