"""MEM-PS beside NumPy with ready indices, a dictionary, cachetools and Redis: ``python pipelines/bench.py mem``.

The work is one batch: pull a working set of 1 million rows of width 10 that are all in memory, push it back. Rows, keys
and order are the same for all. NumPy is given the places of the rows, which MEM-PS has to find; it also pins, counts
visits, keeps its lists and checks every push. At each number of cached rows the ratio to NumPy must hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness import Result, alternate, compare, missing
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.mem import MemPS
from daskps.types import Field, RowLayout

NUMPY, DICTIONARY, CACHETOOLS, REDIS = "NumPy take + put", "dict of rows", "cachetools LRUCache", "Redis MGET + MSET"
CHUNK = 10_000  # keys a Redis command


class Nowhere:
    """A store without rows: everything the benchmark asks for is in memory."""

    memory_bytes = buffer_bytes = disk_bytes = file_bytes = 0

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        raise AssertionError(f"{len(keys)} rows were evicted: the benchmark's budget is too small")

    def start_load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> Nowhere:
        self._found = np.zeros(len(keys), np.bool_)
        return self

    def wait(self) -> np.ndarray:
        return self._found

    def delete(self, keys: np.ndarray) -> np.ndarray:
        return np.zeros(len(keys), np.bool_)

    def reading_order(self, keys: np.ndarray) -> np.ndarray:
        return np.arange(len(keys))

    def prepare(self, snapshot_id: str) -> None:
        raise AssertionError("the benchmark takes no snapshot")


def _ones(keys: np.ndarray, out: np.ndarray) -> None:
    out[:] = 1.0


def _keys(first: int, last: int) -> np.ndarray:
    """Distinct keys without a pattern."""
    numbers = np.arange(first, last, dtype=np.uint64)
    mixed = np.empty_like(numbers)
    library().mix_keys(keys=numbers, n=len(numbers), seed=1, mixed=mixed)
    return mixed


def _filled(rows: int, width: int, pool: ComputePool) -> MemPS:
    """A MEM-PS with exactly these rows in memory."""
    layout = RowLayout((Field("values", width),))
    ps = MemPS(
        layout=layout,
        store=Nowhere(),
        initial=_ones,
        memory_bytes=rows * (layout.row_bytes + 64) + (1 << 20),
        pool=pool,
    )
    batch_rows = 1 << 20
    for batch, first in enumerate(range(0, rows, batch_rows)):
        keys = _keys(first, min(first + batch_rows, rows))
        (delivery,) = ps.pull(keys, batch)
        ps.push(keys, delivery.rows, batch)
    return ps


def _numpy_curve(sizes: list[int], working_set: int, width: int, rounds: int, pool: ComputePool) -> list[Result]:
    results = []
    for size in sizes:
        ps = _filled(size, width, pool)
        chosen = np.random.default_rng(size).choice(size, min(working_set, size), replace=False)
        keys = _keys(0, size)[chosen]
        slots = ps._rows.cache.find(keys).astype(np.int64)
        out = np.ones((len(keys), width), np.float32)
        stored = ps._rows.cache.rows
        batch = [ps._next_answer]

        def ours(ps: MemPS = ps, keys: np.ndarray = keys, out: np.ndarray = out, batch: list[int] = batch) -> None:
            ps.pull(keys, batch[0], out=out)
            ps.push(keys, out, batch[0])
            batch[0] += 1

        def numpy(stored: np.ndarray = stored, slots: np.ndarray = slots, out: np.ndarray = out) -> None:
            np.take(stored, slots, axis=0, out=out, mode="clip")
            stored[slots] = out

        seconds = alternate({"ours": ours, NUMPY: numpy}, rounds)
        name = f"pull + push {len(keys):,} of {size:,} rows"
        results += compare(name, seconds, items=len(keys), unit="rows/s", targets={NUMPY: 0.4})
        ps.close()
    return results


def _dictionary(keys: np.ndarray, rows: np.ndarray, make: Callable[[], Any]) -> Callable[[], object]:
    names = keys.tolist()
    held = make()
    for key, row in zip(names, rows, strict=True):
        held[key] = row.copy()

    def work() -> None:
        pulled = np.stack([held[key] for key in names])
        for key, row in zip(names, pulled, strict=True):
            held[key] = row

    return work


def _redis_work(client: Any, keys: np.ndarray, rows: np.ndarray) -> Callable[[], object]:
    """Keys and rows as raw bytes, 10,000 a command, one pipeline each way."""
    width, row_bytes = rows.shape[1], rows.itemsize * rows.shape[1]
    names = [keys[i : i + 1].tobytes() for i in range(len(keys))]
    chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]

    def push(values: np.ndarray) -> None:
        raw = memoryview(values.tobytes())
        pipeline = client.pipeline(transaction=False)
        at = 0
        for chunk in chunks:
            pipeline.mset(
                {name: bytes(raw[at + i * row_bytes : at + (i + 1) * row_bytes]) for i, name in enumerate(chunk)}
            )
            at += len(chunk) * row_bytes
        pipeline.execute()

    def work() -> None:
        pipeline = client.pipeline(transaction=False)
        for chunk in chunks:
            pipeline.mget(chunk)
        answers = pipeline.execute()
        pulled = np.frombuffer(b"".join(b"".join(answer) for answer in answers), np.float32).reshape(-1, width)
        push(pulled)

    push(rows)
    return work


@contextmanager
def _redis_server() -> Iterator[Any]:
    """A Redis of our own on a free loopback port, without persistence; stopped at the end."""
    import redis

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        server = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port)
            for _ in range(100):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            yield client
            client.close()
        finally:
            server.terminate()
            server.wait()


def _peers(rows: int, width: int, rounds: int, pool: ComputePool) -> list[Result]:
    """Peers that find rows by key themselves. All of them hold exactly the working set."""
    ps = _filled(rows, width, pool)
    keys = _keys(0, rows)
    np.random.default_rng(0).shuffle(keys)
    out = np.ones((rows, width), np.float32)
    batch = [ps._next_answer]

    def ours() -> None:
        ps.pull(keys, batch[0], out=out)
        ps.push(keys, out, batch[0])
        batch[0] += 1

    name = f"pull + push {rows:,} rows by key"
    absent: list[Result] = []
    contenders: dict[str, Callable[[], object]] = {"ours": ours, DICTIONARY: _dictionary(keys, out, dict)}
    targets: dict[str, float | None] = {DICTIONARY: None}
    if importlib.util.find_spec("cachetools") is None:
        absent.append(missing(name, CACHETOOLS, "pip install '.[bench]'"))
    else:
        from cachetools import LRUCache

        contenders[CACHETOOLS] = _dictionary(keys, out, lambda: LRUCache(rows))
        targets[CACHETOOLS] = None
    if importlib.util.find_spec("redis") is None:
        absent.append(missing(name, REDIS, "pip install '.[bench]'"))
    elif shutil.which("redis-server") is None:
        absent.append(missing(name, REDIS, "apt install redis-server"))
    else:
        with _redis_server() as client:
            contenders[REDIS] = _redis_work(client, keys, out)
            targets[REDIS] = 20.0
            seconds = alternate(contenders, rounds)
        return [*compare(name, seconds, items=rows, unit="rows/s", targets=targets), *absent]
    return [*compare(name, alternate(contenders, rounds), items=rows, unit="rows/s", targets=targets), *absent]


def run(arguments: list[str]) -> list[Result]:
    """The curve over cached rows against NumPy, then the peers that find by key."""
    parser = argparse.ArgumentParser(prog="bench.py mem", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000, 50_000_000], help="cached rows")
    parser.add_argument("--working-set", type=int, default=1_000_000, help="rows a batch")
    parser.add_argument("--width", type=int, default=10, help="values a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-peers", action="store_true", help="only the curve against NumPy")
    options = parser.parse_args(arguments)
    with ComputePool(options.cores) as pool:
        results = _numpy_curve(options.rows, options.working_set, options.width, options.rounds, pool)
        if not options.no_peers:
            results += _peers(options.working_set, options.width, 3, pool)
    return results
