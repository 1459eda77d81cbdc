"""The global order of the data and what each node takes of it: epochs, shuffled windows, steps, slices.

A position is one global row number: row p of epoch e has the number e * rows + p, so the order goes on through the
epochs and only the last step of a run may be short. Shuffling permutes fixed windows of rows by (seed, epoch, window).
Step s is the rows [origin + s * B, origin + (s + 1) * B); node r takes the r-th contiguous slice of it, device m the
m-th part of that. Slices are cut between blocks of examples counted from the step's start, so every block has the same
examples whatever the number of nodes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.backend.native import library
from daskps.errors import ConfigError, DataError
from daskps.types import Int64s

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Order:
    """How often the data is read, and how its rows are shuffled."""

    epochs: int = 1
    shuffle_rows: int = 0  # rows of a window; 0: the order of the files
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.shuffle_rows < 0:
            raise ConfigError(f"epochs must be at least 1 and shuffle_rows at least 0, got {self}")

    def permutation(self, epoch: int, window: int, rows: int) -> Int64s:
        """(rows,) which row of the window stands at each place."""
        seed = mix64(self.seed ^ mix64(epoch ^ mix64(window + 1)))
        order = np.empty(rows, np.int64)
        library().data_permutation(seed=seed, n=rows, order=order)
        return order


@dataclass(frozen=True, slots=True)
class Steps:
    """How rows become steps, and which part of each step is this node's."""

    minibatch_examples: int  # B, over all nodes and devices
    nodes: int = 1
    rank: int = 0
    devices: int = 1
    block_examples: int = 256
    origin_row: int = 0  # where step 0 begins

    def __post_init__(self) -> None:
        least = min(self.minibatch_examples, self.nodes, self.devices, self.block_examples)
        if least < 1 or not 0 <= self.rank < self.nodes or self.origin_row < 0:
            raise ConfigError(f"steps need positive sizes, a rank below nodes and an origin of at least 0; got {self}")

    def count(self, total_rows: int) -> int:
        """Steps from the origin to `total_rows`; the last may be short."""
        return -(-max(total_rows - self.origin_row, 0) // self.minibatch_examples)

    def rows(self, step: int, total_rows: int) -> tuple[int, int]:
        """The global rows [start, stop) of a step, over all nodes."""
        start = self.origin_row + step * self.minibatch_examples
        return min(start, total_rows), min(start + self.minibatch_examples, total_rows)

    def step_at(self, row: int, total_rows: int) -> int:
        """The step that begins at `row`; at the end of the data, the one after the last, which may have been short."""
        step, rest = divmod(row - self.origin_row, self.minibatch_examples)
        if rest and row < total_rows:
            raise DataError(
                f"row {row}, where the snapshot ends, does not begin a step of {self.minibatch_examples} examples; "
                "the data ended there, with a shorter step, which no more epochs or rows can follow: begin another "
                "model from this one (start_from)"
            )
        return step + bool(rest)

    def slice(self, step: int, total_rows: int) -> tuple[int, int]:
        """The global rows [start, stop) that this node takes of a step; it may be empty."""
        start, stop = self.rows(step, total_rows)
        cuts = cut_blocks(stop - start, self.nodes, self.block_examples)
        return start + cuts[self.rank], start + cuts[self.rank + 1]

    def device_starts(self, examples: int) -> list[int]:
        """(devices + 1) where each device's part of a slice of `examples` begins."""
        return cut_blocks(examples, self.devices, self.block_examples)


def cut_blocks(examples: int, parts: int, block_examples: int) -> list[int]:
    """(parts + 1) ends of nearly equal parts of `examples`, each but the last of whole blocks."""
    blocks = -(-examples // block_examples)
    return [min(blocks * part // parts * block_examples, examples) for part in range(parts + 1)]


def mix64(x: int) -> int:
    """The mix of the kernels' dialect, for single numbers."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
