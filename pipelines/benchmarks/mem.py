"""MEM-PS beside NumPy with ready indices, a dictionary, cachetools and Redis: ``python pipelines/bench.py mem``.

The work is one batch: pull a working set of 1 million rows of width 10 that are all in memory, push it back. Rows, keys
and order are the same for all. NumPy is given the places of the rows, which MEM-PS has to find; it also pins, counts
visits and checks every push. At each number of cached rows the ratio to NumPy must hold.

``--only traces`` compares hit rates instead of times: the cache with its default policy against LRU, LFU, Belady and
the two lists that daskps had before (`now`), all on the same traces in one run. Seed and order are fixed, so the
figures are the same on every machine.
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
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import Result, alternate, compare, missing
from daskps.budget import cache_of
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.mem import MemPS
from daskps.types import Field, RowLayout

NUMPY, DICTIONARY, CACHETOOLS, REDIS = "NumPy take + put", "dict of rows", "cachetools LRUCache", "Redis MGET + MSET"
NOW = "now (commit c861977)"
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


# ---------------------------------------------------------------- hit rates

TRACE_KEYS = 400_000
TRACE_BATCHES, FIRST_COUNTED = 80, 10
DRAWS = 40_000  # key occurrences of a batch: 13 thousand distinct keys with Zipf 1.05
NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Trace:
    """A stream of batches. Keys are drawn by rank, rank r with probability proportional to r ** -exponent.

    With `drift`, that share of the ranks gets new keys after each batch. The hottest keys go out of use and all others
    move up, so the new ones begin at the cold end; with `scattered`, ranks anywhere get new keys and no key moves.
    """

    exponent: float
    cache_share: float
    drift: float = 0.0
    scattered: bool = False

    def __str__(self) -> str:
        drift = f", drift {self.drift:.2%}{' scattered' * self.scattered}" if self.drift else ""
        return f"Zipf {self.exponent:g}, cache {self.cache_share:.0%}{drift}"

    @property
    def cache_rows(self) -> int:
        return int(self.cache_share * TRACE_KEYS)

    def batches(self) -> list[np.ndarray]:
        """The distinct keys of every batch; keys are numbered from 0."""
        random = np.random.default_rng(1)
        weights = np.cumsum(np.arange(1, TRACE_KEYS + 1, dtype=np.float64) ** -self.exponent)
        key_of_rank, new = random.permutation(TRACE_KEYS), round(self.drift * TRACE_KEYS)
        batches, known = [], TRACE_KEYS
        for _ in range(TRACE_BATCHES):
            ranks = np.searchsorted(weights, random.random(DRAWS) * weights[-1]).clip(max=TRACE_KEYS - 1)
            batches.append(np.unique(key_of_rank[ranks]))
            if self.scattered:
                changed = random.choice(TRACE_KEYS, new, replace=False)
            else:
                key_of_rank, changed = np.roll(key_of_rank, -new), np.arange(TRACE_KEYS - new, TRACE_KEYS)
            key_of_rank[changed] = np.arange(known, known + new)
            known += new
        return batches


STANDING = [Trace(1.05, 0.1), Trace(1.05, 0.05), Trace(0.8, 0.1)]
DRIFTING = [Trace(1.05, 0.1, drift, scattered) for scattered in (False, True) for drift in (0.0005, 0.002)]


def _rate(hits: list[int], batches: list[np.ndarray]) -> float:
    return sum(hits[FIRST_COUNTED:]) / sum(len(keys) for keys in batches[FIRST_COUNTED:])


def _replay(batches: list[np.ndarray], rows: int) -> dict[str, float]:
    """Hit rates of ideal policies: of the keys that a batch does not use, those with the smallest scores leave.

    LRU goes by the last batch, LFU by the pulls since the key came into the cache, Belady by the next use.
    """
    size = max(int(keys[-1]) for keys in batches) + 1
    next_uses, next_use = [], np.full(size, NEVER)
    for batch in reversed(range(len(batches))):
        next_uses.insert(0, next_use[batches[batch]])
        next_use[batches[batch]] = batch
    rates = {}
    for name in ("LRU", "LFU", "Belady"):
        cached, score, hits = np.zeros(size, np.bool_), np.zeros(size), []
        for batch, keys in enumerate(batches):
            hits.append(int(cached[keys].sum()))
            excess = int(cached.sum()) + len(keys) - hits[-1] - rows
            came = keys[~cached[keys]]
            cached[keys] = False
            if excess > 0:
                others = np.flatnonzero(cached)
                cached[others[np.argpartition(score[others], excess - 1)[:excess]]] = False
            cached[keys] = True
            if name == "LFU":
                score[came] = 0
                score[keys] = np.floor(score[keys]) + 1 + batch / len(batches)  # of equals, the oldest leaves
            else:
                score[keys] = batch if name == "LRU" else -next_uses[batch]
        rates[name] = _rate(hits, batches)
    return rates


def _replay_now(batches: list[np.ndarray], rows: int) -> float:
    """Hit rate of the policy of commit c861977: an LRU list of half the rows in front of an LFU set.

    A pull moves a row to the head of the LRU list. The list is bounded by rows and, as a ring, by visits: a pull takes
    a cell for each key and another one for each missing key. What falls out belongs to the LFU set, from which the
    least visited rows are evicted, in pieces. Visits are halved after 10 visits per row of the cache.
    """
    limit, piece = rows // 2, rows // 16
    size = max(int(keys[-1]) for keys in batches) + 1
    cached, recent = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    cell, visits = np.zeros(size, np.int64), np.zeros(size, np.int64)
    head = visited = 0
    hits = []

    def pull(keys: np.ndarray, cells: np.ndarray) -> None:
        """Put keys at the head of the LRU list; move the oldest rows to the LFU set."""
        cell[keys], recent[keys] = cells, True
        recent[recent & (cell < head - 2 * limit)] = False
        listed = np.flatnonzero(recent)
        if len(listed) > limit:
            recent[listed[np.argsort(cell[listed])[: len(listed) - limit]]] = False

    for keys in batches:
        found = cached[keys]
        hits.append(int(found.sum()))
        visits[keys] = np.minimum(255, np.where(found, visits[keys], 0) + 1)
        head += len(keys)
        pull(keys[found], head - len(keys) + np.flatnonzero(found))
        pinned = np.zeros(size, np.bool_)
        pinned[keys[found]] = True
        missing = keys[~found]
        for start in range(0, len(missing), piece):
            some = missing[start : start + piece]
            short = int(cached.sum()) + len(some) - rows
            if short > 0:
                wanted = min(max(short, rows >> 6), piece)
                while len(leaving := np.flatnonzero(cached & ~recent & ~pinned)) < wanted:
                    listed = np.flatnonzero(recent)
                    recent[listed[np.argsort(cell[listed])[: wanted - len(leaving)]]] = False
                cached[leaving[np.argpartition(visits[leaving], wanted - 1)[:wanted]]] = False
            cached[some] = pinned[some] = True
            head += len(some)
            pull(some, head - len(some) + np.arange(len(some)))
        visited += len(keys)
        if visited >= 10 * rows:
            visited = 0
            visits //= 2
    return _rate(hits, batches)


class Everything(Nowhere):
    """A store that has every row."""

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        pass

    def start_load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> Everything:
        out[positions] = 0
        self._found = np.ones(len(keys), np.bool_)
        return self


def _measure(batches: list[np.ndarray], rows: int, pool: ComputePool) -> float:
    """Hit rate of MEM-PS with its default policy."""
    layout = RowLayout((Field("values", 1),))
    ps = MemPS(
        layout=layout,
        store=Everything(),
        initial=_ones,
        memory_bytes=cache_of(rows, 0, 0, layout.row_bytes, 1).used_bytes,
        pool=pool,
    )
    assert ps.cache_rows == rows, f"the cache has {ps.cache_rows} rows, not {rows}"
    hits = []
    for batch, numbers in enumerate(batches):
        keys = numbers.astype(np.uint64)
        (reply,) = ps.pull(keys, batch)
        ps.push(keys, reply.rows, batch)
        hits.append(ps.statistics[-1].hits)
    ps.close()
    return _rate(hits, batches)


def _traces(pool: ComputePool) -> list[Result]:
    """Hit rates side by side. The ratio to LRU allows half a point, that to `now` on standing traces one point."""
    results = []
    for trace in (*STANDING, *DRIFTING):
        batches = trace.batches()
        ours = _measure(batches, trace.cache_rows, pool)
        peers = _replay(batches, trace.cache_rows) | {NOW: _replay_now(batches, trace.cache_rows)}
        allowed = {"LRU": 0.005} | ({NOW: 0.01} if trace in STANDING else {})
        for peer, rate in peers.items():
            allowance, target = (allowed[peer], 1.0) if peer in allowed else (0.0, None)
            unit = f"hit rate, {allowance} allowed" if allowance else "hit rate"
            results.append(Result(str(trace), ours, peer, rate, (ours + allowance) / rate, target, unit))
    return results


def run(arguments: list[str]) -> list[Result]:
    """The curve over cached rows against NumPy, the peers that find by key, the hit rates."""
    parser = argparse.ArgumentParser(prog="bench.py mem", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000, 50_000_000], help="cached rows")
    parser.add_argument("--working-set", type=int, default=1_000_000, help="rows a batch")
    parser.add_argument("--width", type=int, default=10, help="values a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=["rows", "peers", "traces"], help="one part of the benchmark")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    with ComputePool(options.cores) as pool:
        if options.only in {None, "rows"}:
            results += _numpy_curve(options.rows, options.working_set, options.width, options.rounds, pool)
        if options.only in {None, "peers"}:
            results += _peers(options.working_set, options.width, 3, pool)
        if options.only in {None, "traces"}:
            results += _traces(pool)
    return results
