"""The reader: any range of the global order as one `Batch`, fast in order and exact anywhere.

In: the row index, a format with its parser, the compute pool. Out: batches. Blocks are fetched (and decompressed) ahead
in the background; parsing runs in the pool, a block a task. A reader belongs to one thread at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.backend.recycle import Recycler
from daskps.data.ahead import ReadAhead
from daskps.data.bad import BadRowPolicy, BadRows, Origin
from daskps.data.batches import concatenate, gather
from daskps.data.format import BlockFile, Format, Parser
from daskps.data.index import Part, RowIndex
from daskps.data.order import Order, Steps
from daskps.data.piece import Piece, allocate, as_batch, join, scale_logs
from daskps.errors import ArgumentError, DataError
from daskps.types import Batch, Int64s

RECYCLED_BYTES = 1 << 30  # kept at most while no batch uses them
TASKS_PER_CORE = 4  # parsed between two looks at the fetched blocks
ANY_BYTES = 1 << 62

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """A shuffled window in memory, in the order of the files."""

    epoch: int
    number: int
    batch: Batch
    order: Int64s
    bad: dict[int, int]  # status of rows that are to be skipped: nodes share a window, and each counts those it takes


class Reader:
    """Open data. `rows` counts the rows of all epochs."""

    def __init__(
        self,
        index: RowIndex,
        format: Format,
        parser: Parser,
        columns: Sequence[str],
        pool: ComputePool,
        order: Order,
        steps: Steps | None,
        policy: BadRowPolicy,
        blocks_bytes: int = ANY_BYTES,
    ) -> None:
        self.index, self.order, self.steps = index, order, steps
        self.rows = index.rows * order.epochs
        self.bad_rows = BadRows(policy, index.rows)
        self._format, self._parser, self._columns, self._pool = format, parser, columns, pool
        self._files: dict[int, BlockFile] = {}
        self._opening = threading.Lock()
        threads = format.fetch_threads([blocks.file for blocks in index.files])
        self._block_bytes = max((format.most_block_bytes(blocks, columns) for blocks in index.files), default=0)
        most = max(2, blocks_bytes // max(1, self._block_bytes))  # blocks in memory: those parsed now, those ahead
        self._blocks_ahead = min(format.blocks_ahead, max(1, most // 3))
        self._parsed_blocks = min(pool.cores * TASKS_PER_CORE, most - self._blocks_ahead)
        self._ahead = ReadAhead[tuple[int, int], Any](self._fetch, self._blocks_ahead, threads)
        self._window: _Window | None = None
        self._recycler = Recycler(RECYCLED_BYTES)

    @property
    def held_bytes(self) -> int:
        """The most that blocks take at once."""
        there = sum(len(blocks.first_rows) - 1 for blocks in self.index.files)
        return min(there, self._parsed_blocks + self._blocks_ahead) * self._block_bytes

    def bound(self, batches_bytes: int) -> None:
        """Keep no memory for later batches that with those in use would be more than `batches_bytes`."""
        self._recycler.total_bytes = batches_bytes

    def read(self, start: int, stop: int) -> Batch:
        """Global rows [start, stop)."""
        return self._read_ranges([(start, stop)], [(stop, 2 * stop - start)])

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        """This node's slices of steps [first, last) as one batch, and where each begins in it (steps + 1 numbers).

        `first_row` of the batch is the global row of its first example; later slices follow with gaps where other
        nodes' slices are.
        """
        steps = self.steps
        if steps is None:
            raise ArgumentError("this reader was opened without steps; pass `steps` to Source.open")
        if not 0 <= first_step <= last_step <= steps.count(self.rows):
            raise DataError(
                f"steps [{first_step}, {last_step}) were asked for, but the data has {steps.count(self.rows)} steps of "
                f"{steps.minibatch_examples} examples from row {steps.origin_row}"
            )
        ranges = [steps.slice(step, self.rows) for step in range(first_step, last_step)]
        following = range(last_step, min(2 * last_step - first_step, steps.count(self.rows)))
        batch = self._read_ranges(ranges, [steps.slice(step, self.rows) for step in following])
        starts = np.cumsum([0, *(stop - start for start, stop in ranges)])
        return batch, starts.astype(np.int64)

    def batches(self, examples: int, start: int = 0) -> Iterator[Batch]:
        """The global order from row `start` in batches of `examples`."""
        for row in range(start, self.rows, examples):
            yield self.read(row, min(row + examples, self.rows))

    def _read_ranges(self, ranges: Sequence[Range], following: Sequence[Range]) -> Batch:
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.rows:
                raise DataError(f"rows [{start}, {stop}) were asked for, but the data has rows [0, {self.rows})")
        first_row = ranges[0][0] if ranges else 0
        if self.order.shuffle_rows:
            return self._read_shuffled(ranges, first_row)
        parts = [part for piece in ranges for part in self._parts(*piece)]
        later = (part for start, stop in following for part in self._parts(start, min(stop, self.rows)))
        return self._read_parts(parts, list(itertools.islice(later, self._blocks_ahead)), first_row)

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        """Parts of blocks for global rows, epoch by epoch."""
        size = self.index.rows
        while start < stop:
            epoch = start // size
            end = min(stop, (epoch + 1) * size)
            yield from self.index.parts(start - epoch * size, end - epoch * size)
            start = end

    def _read_shuffled(self, ranges: Sequence[Range], first_row: int) -> Batch:
        """Every window that the ranges touch is read whole, once while it is needed, and its examples gathered."""
        size, window_rows = self.index.rows, self.order.shuffle_rows
        gathered: list[Batch] = []
        for start, stop in ranges:
            while start < stop:
                epoch = start // size
                number = (start - epoch * size) // window_rows
                begin = epoch * size + number * window_rows
                end = min(begin + window_rows, (epoch + 1) * size, stop)
                window = self._load_window(epoch, number)
                taken = window.order[start - begin : end - begin]
                self._count(window, taken)
                gathered.append(gather(window.batch, taken, start, self._pool))
                start = end
        return concatenate(gathered, first_row) if gathered else self._read_parts([], [], first_row)

    def _load_window(self, epoch: int, number: int) -> _Window:
        if self._window is None or (self._window.epoch, self._window.number) != (epoch, number):
            self._window = None  # two windows at once would double what they take
            start = number * self.order.shuffle_rows
            stop = min(start + self.order.shuffle_rows, self.index.rows)
            after = self.index.parts(stop, min(stop + self.order.shuffle_rows, self.index.rows))
            lenient, bad = self.bad_rows.policy.mode == "lenient", dict[int, int]()
            parts = self.index.parts(start, stop)
            batch = self._read_parts(parts, after[: self._blocks_ahead], start, bad if lenient else None)
            self._window = _Window(epoch, number, batch, self.order.permutation(epoch, number, stop - start), bad)
        return self._window

    def _count(self, window: _Window, taken: Int64s) -> None:
        """Rows of a window, of which some may be bad."""
        self.bad_rows.rows += len(taken)
        first = window.number * self.order.shuffle_rows
        for row in np.intersect1d(taken, np.fromiter(window.bad, np.int64)).tolist() if window.bad else ():
            (part,) = self.index.parts(first + row, first + row + 1)
            self.bad_rows.rows -= 1  # it is counted there
            self.bad_rows.examine(np.array([window.bad[row]], np.int32), self._origin(part))

    def _read_parts(
        self, parts: Sequence[Part], following: Sequence[Part], first_row: int, bad: dict[int, int] | None = None
    ) -> Batch:
        """Rows in the order of the files. With `bad`, the status of bad ones goes there, to be counted later."""
        shape, rows = self._parser.shape, sum(part.rows for part in parts)
        whole = allocate(rows, rows * shape.slots if shape.fixed else 0, shape, self._recycler.empty)
        pieces: list[Piece] = []
        payloads = self._ahead.take(_blocks(parts), _blocks(following))
        fetched = ((group, payload) for (_, group), payload in zip(_by_block(parts), payloads, strict=True))
        at = examined = 0
        while blocks := list(itertools.islice(fetched, self._parsed_blocks)):
            tasks: list[tuple[Part, Any, Piece | None]] = []
            for part, payload in ((part, payload) for group, payload in blocks for part in group):
                for piece_part in _split(part, self._parser.task_rows):
                    view = whole.view(at, at + piece_part.rows, shape) if shape.fixed else None
                    tasks.append((piece_part, payload, view))
                    at += piece_part.rows
            pieces += self._pool.map(lambda task: self._parse(*task), tasks)
            for (part, _, _), piece in zip(tasks, pieces[-len(tasks) :], strict=True):
                if bad is None:
                    self.bad_rows.examine(piece.status, self._origin(part))
                else:
                    bad |= {examined + int(row): int(piece.status[row]) for row in np.flatnonzero(piece.status)}
                examined += part.rows
        used = sum(piece.used for piece in pieces)
        if shape.fixed and used == rows * shape.slots:
            whole.used = used
            return as_batch(whole, shape, first_row)
        return join(pieces, shape, first_row, self._pool, self._recycler.empty)

    def _parse(self, part: Part, payload: Any, out: Piece | None) -> Piece:
        shape = self._parser.shape
        out = out or allocate(part.rows, self._parser.most_keys(payload, part), shape)
        out.used = self._parser.parse(payload, part, out)
        scale_logs(out.dense, shape.log_columns)
        return out

    def _origin(self, part: Part) -> Origin:
        blocks = self.index.files[part.file]
        return self._parser.origin(blocks.file, int(blocks.first_rows[part.block]) + part.first)

    def _fetch(self, name: tuple[int, int]) -> Any:
        """Runs in the background. Only the files at hand stay open."""
        file, block = name
        with self._opening:
            opened = self._files.get(file)
            if opened is None:
                for old in [number for number in self._files if abs(number - file) > 1]:
                    self._files.pop(old).close()
                opened = self._files[file] = self._format.open(self.index.files[file], self._columns)
        return self._parser.prepare(opened.fetch(block))

    def close(self) -> None:
        """Stop fetching and let go of the files."""
        self._ahead.close()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._window = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _by_block(parts: Sequence[Part]) -> Iterator[tuple[tuple[int, int], list[Part]]]:
    for name, group in itertools.groupby(parts, lambda part: (part.file, part.block)):
        yield name, list(group)


def _blocks(parts: Sequence[Part]) -> list[tuple[int, int]]:
    return [name for name, _ in _by_block(parts)]


def _split(part: Part, most_rows: int) -> Iterator[Part]:
    for first in range(part.first, part.last, most_rows):
        yield Part(part.file, part.block, first, min(first + most_rows, part.last))
