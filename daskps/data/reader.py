"""Reader: returns any range of the global order of examples as one `Batch`. Any order works; reading forward is fast.

Input: a `Source` (files, format, schema). Output: batches. The next blocks are fetched and decoded in the background.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

import fsspec
import numpy as np
import xxhash

from daskps.data.bad import BadExamplePolicy, BadExamples, Origin
from daskps.data.batches import Piece, allocate, as_batch, concatenate, gather, join, scale_logs
from daskps.data.files import DataFile
from daskps.data.format import BlockFile, ExampleIndex, FileBlocks, Format, Parser, Part
from daskps.data.order import Order, Steps
from daskps.data.schema import Schema
from daskps.device.memory import BufferPool
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, DataError
from daskps.types import Batch, Int64s

Name = TypeVar("Name")
Payload = TypeVar("Payload")


class ReadAhead(Generic[Name, Payload]):
    """Prefetcher of blocks: at most `depth` payloads are in progress or waiting. The payload taken last is kept,
    because the next range often starts inside it."""

    def __init__(self, fetch: Callable[[Name], Payload], depth: int, threads: int) -> None:
        self._fetch = fetch
        self._depth = depth
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="daskps-fetch")
        self._waiting: dict[Name, Future[Payload]] = {}
        self._last: tuple[Name, Payload] | None = None

    def take(self, wanted: Sequence[Name], next_wanted: Sequence[Name] = ()) -> Iterator[Payload]:
        """Yield the payload of every name in `wanted`, then start to fetch the names in `next_wanted`."""
        names = [*wanted, *next_wanted]
        for name in self._waiting.keys() - set(names):
            self._waiting.pop(name).cancel()
        for number, name in enumerate(wanted):
            if self._last is None or self._last[0] != name:
                self._begin(names[number : number + self._depth])
                self._last = (name, self._waiting.pop(name).result())
            yield self._last[1]
        self._begin([name for name in next_wanted[: self._depth] if self._last is None or name != self._last[0]])

    def _begin(self, names: Sequence[Name]) -> None:
        for name in names:
            if name not in self._waiting:
                # Copy the caller's context, so that the fetch finds a Dask client that is current only there.
                self._waiting[name] = self._threads.submit(copy_context().run, self._fetch, name)

    def close(self) -> None:
        """Stop fetching."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        self._last = None


RECYCLED_BYTES = 1 << 30  # limit of the free memory kept for later batches
TASKS_PER_CORE = 4  # blocks per core that are parsed together
ANY_BYTES = 1 << 62  # no limit

Range = tuple[int, int]  # global examples [start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Window of examples in memory: `batch` in the order of the files, and `order`, the shuffled order."""

    pass_number: int
    number: int  # of the window in the pass
    batch: Batch
    order: Int64s
    bad: dict[int, int]  # status by example; several nodes read the same window, and each counts only what it takes


class Reader:
    """Reader of indexed data. `examples` is the number of examples of all passes together."""

    def __init__(
        self,
        index: ExampleIndex,
        format: Format,
        parser: Parser,
        columns: Sequence[str],
        pool: ComputePool,
        order: Order,
        steps: Steps | None,
        policy: BadExamplePolicy,
        blocks_bytes: int = ANY_BYTES,
    ) -> None:
        self.index, self.order, self.steps = index, order, steps
        self.examples = index.examples * order.passes
        self.bad_examples = BadExamples(policy, index.examples)
        self._format, self._parser, self._columns, self._pool = format, parser, columns, pool
        self._files: dict[int, BlockFile] = {}
        self._opening = threading.Lock()
        threads = format.fetch_threads([blocks.file for blocks in index.files])
        self._block_bytes = max((format.most_block_bytes(blocks, columns) for blocks in index.files), default=0)
        most = max(2, blocks_bytes // max(1, self._block_bytes))  # blocks in memory: being parsed, and prefetched
        self._blocks_ahead = min(format.blocks_ahead, max(1, most // 3))
        self._parsed_blocks = min(pool.cores * TASKS_PER_CORE, most - self._blocks_ahead)
        self._ahead = ReadAhead[tuple[int, int], Any](
            partial(pool.trace.call, "fetch block", "input", self._fetch), self._blocks_ahead, threads
        )
        self._window: _Window | None = None
        self._digested: tuple[int, BlockFile] | None = None  # number and open file of the last digest
        self._recycler = BufferPool(RECYCLED_BYTES)

    @property
    def held_bytes(self) -> int:
        """Return an upper bound of the bytes that fetched blocks take at the same time."""
        there = sum(len(blocks.first_examples) - 1 for blocks in self.index.files)
        return min(there, self._parsed_blocks + self._blocks_ahead) * self._block_bytes

    def bound(self, batches_bytes: int) -> None:
        """Limit the memory of batches, in use and kept for later ones, to `batches_bytes`: memory beyond it is not kept
        for reuse."""
        self._recycler.total_bytes = batches_bytes

    def read(self, start: int, stop: int) -> Batch:
        """Return the global examples [start, stop) as one batch."""
        return self._read_ranges([(start, stop)], [(stop, 2 * stop - start)])

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        """Return this node's slices of steps [first_step, last_step) as one batch, and where each slice begins in it
        (steps + 1 numbers).

        `first_example` of the batch is the global number of its first example. The numbers of later slices have gaps,
        where the slices of other nodes are.
        """
        steps = self.steps
        if steps is None:
            raise ArgumentError("this reader was opened without steps; pass `steps` to Source.open")
        if not 0 <= first_step <= last_step <= steps.count(self.examples):
            raise DataError(
                f"steps [{first_step}, {last_step}) were asked for, but the data has {steps.count(self.examples)} "
                f"steps of {steps.minibatch_examples} examples, from example {steps.origin} on"
            )
        ranges = [steps.slice(step, self.examples) for step in range(first_step, last_step)]
        following = range(last_step, min(2 * last_step - first_step, steps.count(self.examples)))
        batch = self._read_ranges(ranges, [steps.slice(step, self.examples) for step in following])
        starts = np.cumsum([0, *(stop - start for start, stop in ranges)])
        return batch, starts.astype(np.int64)

    def data_before(self, position: int) -> str:
        """Return a digest of the data before example `position` of a pass. One thread at a time may call it, also while
        another thread reads.

        It needs the block with that example; a compressed file is decoded up to there, unless an earlier call did so.
        """
        digest = xxhash.xxh3_128()
        for number, blocks in enumerate(self.index.files):
            examples = min(position - int(self.index.file_starts[number]), blocks.examples)
            if examples > 0:
                found = self._format.digest(blocks, examples, partial(self._fetch_for_digest, number))
                digest.update(f"{examples} {found:x}\n".encode())
        return digest.hexdigest()

    def _fetch_for_digest(self, number: int, block: int) -> Any:
        if self._digested is None or self._digested[0] != number:
            if self._digested is not None:
                self._digested[1].close()
            self._digested = number, self._format.open(self.index.files[number], self._columns)
        return self._digested[1].fetch(block)

    def batches(self, examples: int, start: int = 0) -> Iterator[Batch]:
        """Yield all examples from number `start` on, in batches of `examples`."""
        for example in range(start, self.examples, examples):
            yield self.read(example, min(example + examples, self.examples))

    def _read_ranges(self, ranges: Sequence[Range], following: Sequence[Range]) -> Batch:
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.examples:
                raise DataError(
                    f"examples [{start}, {stop}) were asked for, but the data has examples [0, {self.examples})"
                )
        first_example = ranges[0][0] if ranges else 0
        if self.order.window_examples:
            return self._read_shuffled(ranges, first_example)
        parts = [part for piece in ranges for part in self._parts(*piece)]
        later = (part for start, stop in following for part in self._parts(start, min(stop, self.examples)))
        return self._read_parts(parts, list(itertools.islice(later, self._blocks_ahead)), first_example)

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the global examples [start, stop) as parts of blocks, pass by pass."""
        size = self.index.examples
        while start < stop:
            pass_number = start // size
            end = min(stop, (pass_number + 1) * size)
            yield from self.index.parts(start - pass_number * size, end - pass_number * size)
            start = end

    def _read_shuffled(self, ranges: Sequence[Range], first_example: int) -> Batch:
        """Read every window that the ranges touch as a whole, once, and gather the wanted examples from it."""
        size, window_examples = self.index.examples, self.order.window_examples
        gathered: list[Batch] = []
        for start, stop in ranges:
            while start < stop:
                pass_number = start // size
                number = (start - pass_number * size) // window_examples
                begin = pass_number * size + number * window_examples
                end = min(begin + window_examples, (pass_number + 1) * size, stop)
                window = self._load_window(pass_number, number)
                taken = window.order[start - begin : end - begin]
                self._count(window, taken)
                gathered.append(gather(window.batch, taken, start, self._pool))
                start = end
        if not gathered:
            return self._read_parts([], [], first_example)
        return concatenate(gathered, first_example, self._pool.buffers.empty)

    def _load_window(self, pass_number: int, number: int) -> _Window:
        if self._window is None or (self._window.pass_number, self._window.number) != (pass_number, number):
            self._window = None  # free it first: two windows would take twice the memory
            start = number * self.order.window_examples
            stop = min(start + self.order.window_examples, self.index.examples)
            after = self.index.parts(stop, min(stop + self.order.window_examples, self.index.examples))
            lenient, bad = self.bad_examples.policy.mode == "lenient", dict[int, int]()
            parts = self.index.parts(start, stop)
            batch = self._read_parts(parts, after[: self._blocks_ahead], start, bad if lenient else None)
            self._window = _Window(
                pass_number, number, batch, self.order.permutation(pass_number, number, stop - start), bad
            )
        return self._window

    def _count(self, window: _Window, taken: Int64s) -> None:
        """Count the examples `taken` from a window, and the bad ones among them."""
        self.bad_examples.examples += len(taken)
        first = window.number * self.order.window_examples
        for example in np.intersect1d(taken, np.fromiter(window.bad, np.int64)).tolist() if window.bad else ():
            (part,) = self.index.parts(first + example, first + example + 1)
            self.bad_examples.examples -= 1  # `examine` counts it
            self.bad_examples.examine(np.array([window.bad[example]], np.int32), self._origin(part))

    def _read_parts(
        self, parts: Sequence[Part], following: Sequence[Part], first_example: int, bad: dict[int, int] | None = None
    ) -> Batch:
        """Read parts in the order of the files as one batch. If `bad` is given, the status of bad examples is stored
        there and counted later."""
        shape, examples = self._parser.shape, sum(part.examples for part in parts)
        whole = allocate(examples, examples * shape.slots if shape.fixed else 0, shape, self._recycler.empty)
        pieces: list[Piece] = []
        payloads = self._ahead.take(_blocks(parts), _blocks(following))
        fetched = ((group, payload) for (_, group), payload in zip(_by_block(parts), payloads, strict=True))
        at = examined = 0
        while blocks := list(itertools.islice(fetched, self._parsed_blocks)):
            tasks: list[tuple[Part, Any, Piece | None]] = []
            for part, payload in ((part, payload) for group, payload in blocks for part in group):
                for piece_part in _split(part, self._parser.task_examples):
                    view = whole.view(at, at + piece_part.examples, shape) if shape.fixed else None
                    tasks.append((piece_part, payload, view))
                    at += piece_part.examples
            pieces += self._pool.map(lambda task: self._parse(*task), tasks)
            for (part, _, _), piece in zip(tasks, pieces[-len(tasks) :], strict=True):
                if bad is None:
                    self.bad_examples.examine(piece.status, self._origin(part))
                else:
                    bad |= {
                        examined + int(example): int(piece.status[example]) for example in np.flatnonzero(piece.status)
                    }
                examined += part.examples
        used = sum(piece.used for piece in pieces)
        if shape.fixed and used == examples * shape.slots:
            whole.used = used
            return as_batch(whole, shape, first_example)
        return join(pieces, shape, first_example, self._pool, self._recycler.empty)

    def _parse(self, part: Part, payload: Any, out: Piece | None) -> Piece:
        shape = self._parser.shape
        out = out or allocate(part.examples, self._parser.most_keys(payload, part), shape)
        out.used = self._parser.parse(payload, part, out)
        scale_logs(out.dense, shape.log_columns)
        return out

    def _origin(self, part: Part) -> Origin:
        blocks = self.index.files[part.file]
        return self._parser.origin(blocks.file, int(blocks.first_examples[part.block]) + part.first)

    def _fetch(self, name: tuple[int, int]) -> Any:
        """Fetch and prepare a block; runs in the background. Only this file and its neighbours stay open."""
        file, block = name
        with self._opening:
            opened = self._files.get(file)
            if opened is None:
                for old in [number for number in self._files if abs(number - file) > 1]:
                    self._files.pop(old).close()
                opened = self._files[file] = self._format.open(self.index.files[file], self._columns)
        return self._parser.prepare(opened.fetch(block))

    def close(self) -> None:
        """Stop fetching and close the files."""
        self._ahead.close()
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._digested is not None:
            self._digested[1].close()
            self._digested = None
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


def _split(part: Part, most_examples: int) -> Iterator[Part]:
    for first in range(part.first, part.last, most_examples):
        yield Part(part.file, part.block, first, min(first + most_examples, part.last))


IN_ORDER = Order()
STRICT = BadExamplePolicy()


@dataclass(frozen=True, slots=True)
class Source:
    """Description of a data set: files, format and schema."""

    urls: Sequence[str]  # files, globs or directories, on any file system of fsspec
    format: Format
    schema: Schema
    hash_seed: int = 0  # of the job; another seed gives other keys
    bad_examples: BadExamplePolicy = STRICT

    def index(self, threads: int = 1, cache_url: str = "") -> ExampleIndex:
        """Count the examples of every block and return the index. It is stored at `cache_url` if given; files that did
        not change since are not read again."""
        files = self.format.list([self.urls] if isinstance(self.urls, str) else self.urls)
        self.format.parser(self.schema, self.hash_seed, files)  # report a wrong schema before reading all files
        known = _cached(cache_url)
        with ThreadPoolExecutor(threads, thread_name_prefix="daskps-index") as pool:
            # Copy the caller's context, so that a data frame finds a Dask client that is current only there.
            futures = [pool.submit(copy_context().run, self._blocks, file, known) for file in files]
            index = ExampleIndex([future.result() for future in futures])
        if cache_url:
            with fsspec.open(cache_url, "w") as out:
                out.write(index.to_json())
        return index

    def _blocks(self, file: DataFile, known: dict[DataFile, FileBlocks]) -> FileBlocks:
        return known.get(file) or self.format.index(file)

    def open(
        self,
        index: ExampleIndex,
        pool: ComputePool,
        order: Order = IN_ORDER,
        steps: Steps | None = None,
        blocks_bytes: int = ANY_BYTES,
    ) -> Reader:
        """Open a reader of the global order. `steps` is needed only for `read_steps`. Fetched blocks take at most
        `blocks_bytes`, but at least two blocks are always allowed."""
        files = sorted(index.files, key=lambda blocks: blocks.examples == 0)[:1]  # `index` has checked them all
        parser = self.format.parser(self.schema, self.hash_seed, [blocks.file for blocks in files])
        columns = self.schema.columns
        return Reader(index, self.format, parser, columns, pool, order, steps, self.bad_examples, blocks_bytes)


def _cached(cache_url: str) -> dict[DataFile, FileBlocks]:
    """Return the blocks of every file in the cached index. A `DataFile` includes size and version, so a file that
    changed is not found in it."""
    if not cache_url:
        return {}
    fs, path = fsspec.core.url_to_fs(cache_url)
    if not fs.exists(path):
        return {}
    return {blocks.file: blocks for blocks in ExampleIndex.from_json(fs.cat_file(path).decode()).files}
