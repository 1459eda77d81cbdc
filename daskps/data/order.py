"""Global order of the examples, and the part of it that each node reads: passes, shuffled windows, steps, slices.

A position is a global example number: in data of n examples, example i of pass p has the number p * n + i, both counted
from 0. So numbers continue from one pass to the next, and only the last step of a run may be short. Shuffling permutes
the examples within fixed windows, by (seed, pass, window).

Step s is the examples [origin + s * B, origin + (s + 1) * B). Node r takes the r-th contiguous slice of a step, and
device m the m-th part of that slice. Slices are cut only between blocks of examples, counted from the step's start. So
every block has the same examples for any number of nodes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.device.native import library, mix64
from daskps.errors import ConfigError, DataError
from daskps.types import Int64s


@dataclass(frozen=True, slots=True)
class Order:
    """Settings of the global order: the number of passes over the data, and how examples are shuffled."""

    passes: int = 1  # over the data
    window_examples: int = 0  # examples per shuffled window; 0: no shuffling, the order of the files
    seed: int = 0

    def __post_init__(self) -> None:
        if self.passes < 1 or self.window_examples < 0:
            raise ConfigError(f"passes must be at least 1 and window_examples at least 0, got {self}")

    def permutation(self, pass_number: int, window: int, examples: int) -> Int64s:
        """Return the shuffled order (examples,) of a window: entry i is the example of it that is read as number i.

        `window` is its number in the pass, `examples` its size.
        """
        seed = mix64(self.seed ^ mix64(pass_number ^ mix64(window + 1)))
        order = np.empty(examples, np.int64)
        library().data_permutation(seed=seed, n=examples, order=order)
        return order


@dataclass(frozen=True, slots=True)
class Steps:
    """Division of the examples into steps, and of each step into the slices of nodes and devices."""

    minibatch_examples: int  # B, over all nodes and devices
    nodes: int = 1
    rank: int = 0
    devices: int = 1
    block_examples: int = 256  # slices are cut between blocks of this many examples
    origin: int = 0  # global number of the first example of step 0

    def __post_init__(self) -> None:
        least = min(self.minibatch_examples, self.nodes, self.devices, self.block_examples)
        if least < 1 or not 0 <= self.rank < self.nodes or self.origin < 0:
            raise ConfigError(f"steps need positive sizes, a rank below nodes and an origin of at least 0; got {self}")

    def count(self, total_examples: int) -> int:
        """Return the number of steps from the origin to example `total_examples`; the last step may be short."""
        return -(-max(total_examples - self.origin, 0) // self.minibatch_examples)

    def examples(self, step: int, total_examples: int) -> tuple[int, int]:
        """Return the global examples [start, stop) of a step, of all nodes together."""
        start = self.origin + step * self.minibatch_examples
        return min(start, total_examples), min(start + self.minibatch_examples, total_examples)

    def step_at(self, position: int, total_examples: int) -> int:
        """Return the step that begins at example `position`. At the end of the data, return the number after the last
        step, which may have been short. Raise DataError if no step begins there."""
        step, rest = divmod(position - self.origin, self.minibatch_examples)
        if rest and position < total_examples:
            raise DataError(
                f"the snapshot ends at example {position}, where no step of {self.minibatch_examples} examples begins: "
                "the data ended there with a shorter step. Training cannot go on after one, not even with more passes "
                "or examples; begin another model from this one (start_from)"
            )
        return step + bool(rest)

    def slice(self, step: int, total_examples: int) -> tuple[int, int]:
        """Return this node's slice of a step as global examples [start, stop); it may be empty."""
        start, stop = self.examples(step, total_examples)
        cuts = cut_blocks(stop - start, self.nodes, self.block_examples)
        return start + cuts[self.rank], start + cuts[self.rank + 1]

    def device_starts(self, examples: int) -> list[int]:
        """Return where each device's part begins in a slice of `examples` examples: (devices + 1) numbers."""
        return cut_blocks(examples, self.devices, self.block_examples)


def cut_blocks(examples: int, parts: int, block_examples: int) -> list[int]:
    """Return the (parts + 1) bounds of nearly equal parts of `examples`; each part but the last has whole blocks."""
    blocks = -(-examples // block_examples)
    return [min(blocks * part // parts * block_examples, examples) for part in range(parts + 1)]
