"""Training as plain dictionaries: what every simulated run must give, whatever happens to it.

A row is two 32-bit words: a value and a count of steps that touched it. Training is an integer function of examples,
rows and steps, so results are compared bit for bit. Where nodes step alone and are merged (`ReplicaMerger`), the
value's bits are those of a small float32, and merging is Python's own arithmetic.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

Row = tuple[int, int]
Model = tuple[list[dict[int, Row]], Row]  # rows by table, and the dense word
MASK = 2**32 - 1


def mixed(*words: int) -> int:
    """64 bits that depend on all words."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = ((state ^ word) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state ^= state >> 29
    return state


def as_float(word: int) -> int:
    """The bits of a float32 between -512 and 512 that 20 bits of a word decide."""
    return int(struct.unpack("<I", struct.pack("<f", (word & 0xFFFFF) / 1024 - 512))[0])


def mean(words: Iterable[int]) -> int:
    """The bits of the mean of float32 values: sums of a few of these are exact in a double."""
    values = [struct.unpack("<f", struct.pack("<I", word))[0] for word in words]
    return int(struct.unpack("<I", struct.pack("<f", sum(values) / len(values)))[0])


def initial(seed: int, table: int, key: int, apart: bool = False) -> Row:
    word = mixed(seed, table, key) & MASK
    return as_float(word) if apart else word, 0


def gradient(example: int, key: int, row: Row) -> int:
    """Of one occurrence; now and then zero, which still touches the row."""
    bits = mixed(example, key, row[0], row[1])
    return 0 if bits % 5 == 0 else bits % 2001 - 1000


def updated(row: Row, total: int, apart: bool = False) -> Row:
    word = (row[0] * 5 + total) & MASK
    return as_float(word) if apart else word, row[1] + 1


def merged(rows: Iterable[Row]) -> Row:
    """Of all holders: the mean of the values, the largest count."""
    values, counts = zip(*rows, strict=True)
    return mean(values), max(counts)


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


@dataclass
class ReplicaMerger:
    """The model where nodes step alone and merge after some steps and at batch ends: after a batch of an incarnation.

    Nodes and batches decide the result, so it is made from those that there were.
    """

    data: Data
    tables: int
    every: int
    after: dict[tuple[int, int], Model] = field(default_factory=dict)  # by incarnation and batch
    made: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)  # nodes, first and last step

    def begin(self, incarnation: int, snapshot: str | None) -> None:
        """An incarnation goes on where a snapshot of an earlier one was taken, or at the beginning."""
        if snapshot is None:
            self.after[incarnation, -1] = ([{} for _ in self.all], (as_float(1), 0))
        else:
            before, batch = map(int, snapshot.split("-"))
            self.after[incarnation, batch] = self.after[before, batch]

    def train(self, incarnation: int, batch: int, nodes: int, first: int, stop: int) -> None:
        """All nodes say which batch they have trained, and must say the same."""
        assert self.made.setdefault((incarnation, batch), (nodes, first, stop)) == (nodes, first, stop)
        if (incarnation, batch) in self.after:
            return
        rows, dense = self.after[incarnation, batch - 1]
        replicas = [[self._held(rows, table, rank, nodes, first, stop) for rank in range(nodes)] for table in self.all]
        words = [dense] * nodes
        for step in range(first, stop):
            for rank in range(nodes):
                if examples := self.data.slice(step, rank, nodes):
                    total = sum(self._step(replicas[table][rank], table, examples) for table in self.all)
                    words[rank] = updated(words[rank], total, apart=True)
            if (step + 1) % self.every == 0 or step + 1 == stop:
                words = [merged(words)] * nodes
                for replica in replicas:
                    _merge(replica)
        known = [
            {**table, **{key: row for held in replicas[at] for key, row in held.items()}}
            for at, table in enumerate(rows)
        ]
        self.after[incarnation, batch] = (known, words[0])

    @property
    def all(self) -> range:
        return range(self.tables)

    def _held(
        self, rows: list[dict[int, Row]], table: int, rank: int, nodes: int, first: int, stop: int
    ) -> dict[int, Row]:
        slices = (self.data.slice(step, rank, nodes) for step in range(first, stop))
        keys = {key for examples in slices for example in examples for key in self.data.keys[example][table]}
        return {key: rows[table].get(key) or initial(self.data.seed, table, key, apart=True) for key in keys}

    def _step(self, held: dict[int, Row], table: int, examples: range) -> int:
        sums: dict[int, int] = {}
        for example in examples:
            for key in self.data.keys[example][table]:
                sums[key] = sums.get(key, 0) + gradient(example, key, held[key])
        for key, total in sums.items():
            held[key] = updated(held[key], total, apart=True)
        return sum(sums.values())


def _merge(replica: list[dict[int, Row]]) -> None:
    for key in {key for held in replica for key in held}:
        holders = [held for held in replica if key in held]
        row = merged(held[key] for held in holders)
        for held in holders:
            held[key] = row
