"""What one thread needs to run blocks: arrays that are kept, and the fixed-point sums and flags of its blocks.

In: an architecture, an engine and the parameters. Out: blocks cut to a number of rows, and int64 sums over all blocks
since `begin`. Sums are integers, so the order in which blocks and threads add to them is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from daskps.model.architecture import Architecture
from daskps.model.block import Block, Inputs, array_shapes
from daskps.model.engine import Engine


def workspace_bytes(architecture: Architecture) -> int:
    """Bytes of one thread's arrays, for budgets."""
    floats = sum(math.prod(shape) for shape in array_shapes(architecture).values())
    return 4 * floats + 4 * architecture.decayed + 8 * architecture.size


class Workspace:
    """One thread's arrays, sums and flags."""

    def __init__(self, architecture: Architecture, engine: Engine, parameters: Mapping[str, Any]) -> None:
        xp, size = engine.xp, architecture.size
        self._shape, self._engine, self._parameters = architecture, engine, parameters
        self._arrays = {name: xp.empty(shape, xp.float32) for name, shape in array_shapes(architecture).items()}
        weights = architecture.decayed  # their gradients are products of a block; biases are summed by the kernels
        flat = xp.zeros(weights, xp.float32)
        self.gradients = architecture.named(flat)  # of the last block
        self.sums = xp.zeros(size, xp.int64)  # of all blocks since `begin`
        self.flags = xp.zeros(2, xp.int32)  # 1 where something could not be summed: a gradient; a loss or a weight
        self.loss_flag = self.flags[1:]
        self._add = engine.bind(
            "add_fixed", weights, gradients=flat, n=weights, sums=self.sums[:weights], flag=self.flags[:1]
        )
        self._full = self._cut(architecture.block_examples)
        self._rest = self._full  # the last one of another size: a step's last block

    def begin(self) -> None:
        """Forget the sums of an earlier step. A workspace with a flag up is not used again."""
        self.sums.fill(0)

    def block(self, rows: int) -> Block:
        """A block of `rows` examples in this workspace's arrays."""
        if rows == self._full.rows:
            return self._full
        if rows != self._rest.rows:
            self._rest = self._cut(rows)
        return self._rest

    def backward(self, block: Block, inputs: Inputs, gradients: Sequence[Any]) -> bool:
        """Add the gradients of the parameters to the sums and write those of the pooled slots.

        False, and `gradients` untouched, if a flag is up: the caller will look for the cause in the inputs, whose
        memory `gradients` may be. An engine that runs ahead is not made to wait for its flags here.
        """
        block.backward_parameters(inputs)
        self._add()
        if self._engine.immediate and (self.flags[0] or self.flags[1]):
            return False
        block.backward_pooled(inputs, gradients)
        return True

    def _cut(self, rows: int) -> Block:
        arrays = {name: array[:rows] for name, array in self._arrays.items()}
        sums = self._shape.named(self.sums)
        return Block(self._shape, self._engine, self._parameters, self.gradients, sums, self.flags[:1], arrays, rows)
