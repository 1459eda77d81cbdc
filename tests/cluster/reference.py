"""Training as plain dictionaries: what every simulated run must give, whatever happens to it.

A row is two 32-bit words: a value and a count of steps that touched it. Training is an integer function of examples,
rows and steps, so results are compared bit for bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Row = tuple[int, int]
MASK = 2**32 - 1


def mixed(*words: int) -> int:
    """64 bits that depend on all words."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = ((state ^ word) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state ^= state >> 29
    return state


def initial(seed: int, table: int, key: int) -> Row:
    return mixed(seed, table, key) & MASK, 0


def gradient(example: int, key: int, row: Row) -> int:
    """Of one occurrence; now and then zero, which still touches the row."""
    bits = mixed(example, key, row[0], row[1])
    return 0 if bits % 5 == 0 else bits % 2001 - 1000


def updated(row: Row, total: int) -> Row:
    return (row[0] * 5 + total) & MASK, row[1] + 1


@dataclass
class Data:
    """Steps of examples; example e has keys[e][table]."""

    seed: int
    steps: int
    step_examples: int
    keys: list[list[list[int]]]

    @classmethod
    def make(cls, rng: random.Random, tables: int, steps: int, step_examples: int, universe: int) -> Data:
        known = [[0, 2**64 - 1, *(rng.getrandbits(64) for _ in range(universe))][:universe] for _ in range(tables)]
        skew = [rng.random() ** 2 for _ in range(2)]
        keys = [
            [
                [pool[int(len(pool) * rng.random() ** (1 + 3 * skew[0]))] for _ in range(rng.randrange(3))]
                for pool in known
            ]
            for _ in range(steps * step_examples)
        ]
        return cls(rng.getrandbits(32), steps, step_examples, keys)

    def slice(self, step: int, rank: int, nodes: int) -> range:
        """The examples of a node in a step: contiguous, unequal, perhaps none."""
        start, count = step * self.step_examples, self.step_examples
        return range(start + rank * count // nodes, start + (rank + 1) * count // nodes)


@dataclass
class States:
    """The model before step s, for every s up to the end: rows by table, and the dense word."""

    rows: list[list[dict[int, Row]]]
    dense: list[int]

    @classmethod
    def of(cls, data: Data, tables: int) -> States:
        now: list[dict[int, Row]] = [{} for _ in range(tables)]
        dense = 1
        rows, denses = [[dict(table) for table in now]], [dense]
        for step in range(data.steps):
            all_sums = 0
            for table in range(tables):
                sums: dict[int, int] = {}
                for example in data.slice(step, 0, 1):
                    for key in data.keys[example][table]:
                        row = now[table].get(key) or initial(data.seed, table, key)
                        sums[key] = sums.get(key, 0) + gradient(example, key, row)
                for key, total in sums.items():
                    row = now[table].get(key) or initial(data.seed, table, key)
                    now[table][key] = updated(row, total)
                    all_sums += total
            dense = (dense * 3 + all_sums) & MASK
            rows.append([dict(table) for table in now])
            denses.append(dense)
        return cls(rows, denses)
