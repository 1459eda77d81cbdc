"""Load rows: requests sorted by place, grouped by file, neighbouring blocks in one read, every block checked.

In: requests (place and row of the answer, see read.cpp) and the pinned files. Out: rows, copied where they belong.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.ssd.checked import read_error
from daskps.ssd.files import Files
from daskps.ssd.format import Shape, chunk_names
from daskps.ssd.shelf import ParameterFile, Shelf
from daskps.types import Floats, Int64s

# One read; FORMAT.md ("Reading") has the measurement.
RANGE_BYTES = 1 << 20
# What one I/O thread takes at a time.
TASK_BYTES = 4 << 20
TASK_RANGES = 512
# Ranges announced to the kernel ahead of the one being read.
AHEAD = 32

_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class _Task:
    file: ParameterFile
    ranges: Int64s  # (n, 4): offset, bytes, first request, last request
    first: int
    last: int


def sort_requests(requests: npt.NDArray[np.uint64], places: int) -> None:
    """Sort in place by place, all of which are below `places`."""
    scratch = np.empty_like(requests)
    library().ssd_sort_requests(requests=requests, scratch=scratch, n=len(requests), bits=places.bit_length())


def by_file(requests: npt.NDArray[np.uint64], file_rows: int) -> list[tuple[int, int, int]]:
    """(file number, first request, last request) of each file that is wanted."""
    numbers = (requests >> np.uint64(32)).astype(np.int64) // file_rows
    cuts = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
    return [(int(numbers[first]), first, last) for first, last in pairwise(cuts)]


def read_rows(
    files: Files,
    shape: Shape,
    shelf: Shelf,
    io: Executor,
    requests: npt.NDArray[np.uint64],
    wanted: list[tuple[ParameterFile, Floats | None, int, int]],
    out: Floats,
) -> int:
    """Fill `out` from the wanted (file, its buffer if in memory, first request, last request); returns bytes read."""
    tasks: list[_Task] = []
    for file, buffer, first, last in wanted:
        if buffer is not None:
            library().ssd_copy_rows(
                requests=requests,
                first=first,
                last=last,
                base=file.number * shape.file_rows,
                row_bytes=shape.row_bytes,
                rows=buffer,
                out=out,
            )
        else:
            tasks += _plan(shape, files.gap_bytes, requests, file, first, last)
    futures = [io.submit(_run, files, shape, shelf, requests, task, out) for task in tasks]
    return sum(future.result() for future in futures)


def _plan(
    shape: Shape, gap_bytes: int, requests: npt.NDArray[np.uint64], file: ParameterFile, first: int, last: int
) -> list[_Task]:
    most = shape.row_blocks + shape.rows_bytes // RANGE_BYTES + 1  # each has a block of its own, or is a cut
    ranges = np.empty((min(last - first, most), 4), np.int64)
    count = library().ssd_plan(
        requests=requests,
        first=first,
        last=last,
        base=file.number * shape.file_rows,
        row_bytes=shape.row_bytes,
        block_bytes=shape.block_bytes,
        gap_bytes=gap_bytes,
        most_bytes=RANGE_BYTES,
        file_bytes=shape.rows_bytes,
        ranges=ranges,
    )
    ranges = ranges[:count]
    weight = np.cumsum(ranges[:, 1] * (TASK_RANGES / TASK_BYTES) + 1) // TASK_RANGES
    cuts = [0, *(np.flatnonzero(np.diff(weight)) + 1).tolist(), count]
    return [_Task(file, ranges, a, b) for a, b in pairwise(cuts)]


def _run(files: Files, shape: Shape, shelf: Shelf, requests: npt.NDArray[np.uint64], task: _Task, out: Floats) -> int:
    sums = shelf.sums(task.file)[shape.key_blocks :]
    name = chunk_names(task.file.number)[1]
    base = task.file.number * shape.file_rows
    ranges = task.ranges
    size = int(ranges[task.first : task.last, 1].max())
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _scratch.buffer = np.empty(min(2 * size, max(size, 2 * RANGE_BYTES)), np.uint8)
    fd = files.descriptor(name)
    if fd is None:
        for number in range(task.first, task.last):
            part = buffer[: ranges[number, 1]]
            files.read_into(name, int(ranges[number, 0]), [part])
            block = library().ssd_take_range(
                requests=requests,
                range=ranges[number],
                base=base,
                row_bytes=shape.row_bytes,
                block_bytes=shape.block_bytes,
                sums=sums,
                bytes=part,
                out=out,
            )
            if block >= 0:
                raise shelf.wrong(task.file, 1, block)
    else:
        what = np.zeros(2, np.int64)
        try:
            failed = library().ssd_read_ranges(
                fd=fd,
                requests=requests,
                ranges=ranges,
                first=task.first,
                last=task.last,
                ahead=AHEAD,
                base=base,
                row_bytes=shape.row_bytes,
                block_bytes=shape.block_bytes,
                sums=sums,
                buffer=buffer,
                out=out,
                what=what,
            )
        finally:
            os.close(fd)
        if failed >= 0:
            kind, value = what.tolist()
            raise shelf.wrong(task.file, 1, value) if kind == 3 else read_error(files, name, kind, value)
    return int(ranges[task.first : task.last, 1].sum())
