"""The default eviction policy keeps up with plain LRU and plain LFU on a Zipf trace, and with LRU when tastes change.

The trace has 10 million accesses to 1 million keys; the cache holds a tenth of them. Both plain policies are simulated
access by access. MEM-PS takes the same accesses as batches: a batch loads each missing key once, so one access to it
misses and all others of the batch hit, as they would in the plain caches too.
"""

from collections import deque

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.mem import MemPS
from tests.mem.memory_store import EmptyStore, bytes_for, layout

BATCH_ACCESSES = 5_000


class Forgetful(EmptyStore):
    """A store that has every row, and keeps none."""

    def load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        out[positions] = 0
        return np.ones(len(keys), np.bool_)


def zipf(accesses: int, keys: int, random: np.random.Generator, exponent: float = 1.0) -> np.ndarray:
    """Keys 0..keys-1, the i-th with probability proportional to 1 / (i + 1) ** exponent."""
    weights = np.cumsum(np.arange(1, keys + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(weights, random.random(accesses) * weights[-1]).clip(max=keys - 1)


def lru_hits(trace: np.ndarray, rows: int) -> int:
    """Plain LRU: the key that was not used for the longest time leaves."""
    accesses = trace.tolist()
    last = [-1] * (max(accesses) + 1)  # of each cached key: its last access
    oldest = cached = misses = 0  # accesses before `oldest` were not the last ones of a cached key
    for now, key in enumerate(accesses):
        if last[key] < 0:
            misses += 1
            if cached == rows:
                while last[accesses[oldest]] != oldest:
                    oldest += 1
                last[accesses[oldest]] = -1
            else:
                cached += 1
        last[key] = now
    return len(accesses) - misses


def lfu_hits(trace: np.ndarray, rows: int) -> int:
    """Plain LFU: a cached key with the fewest accesses since it came leaves, the one that came to that number first."""
    accesses = trace.tolist()
    counts = [0] * (max(accesses) + 1)  # of each cached key: its accesses
    queues = [deque[int](), deque[int]()]  # a key waits where its count was when it was last looked at
    cached, misses, least = 0, 0, 1
    for key in accesses:
        counts[key] += 1
        if counts[key] > 1:
            continue
        misses += 1
        if cached < rows:
            cached += 1
        else:
            while True:
                while not queues[least]:
                    least += 1
                victim = queues[least].popleft()
                if counts[victim] == least:
                    break
                while len(queues) <= counts[victim]:
                    queues.append(deque())
                queues[counts[victim]].append(victim)
            counts[victim] = 0
        queues[1].append(key)
        least = 1
    return len(accesses) - misses


def our_hits(trace: np.ndarray, rows: int, pool: ComputePool) -> int:
    """MEM-PS: one batch after the other."""
    ps = MemPS(
        layout=layout(1),
        store=Forgetful(),
        initial=lambda keys, out: None,
        memory_bytes=bytes_for(1, cache_rows=rows),
        pool=pool,
    )
    misses = 0
    for batch, start in enumerate(range(0, len(trace), BATCH_ACCESSES)):
        keys = np.unique(trace[start : start + BATCH_ACCESSES]).astype(np.uint64)
        (delivery,) = ps.pull(keys, batch)
        ps.push(keys, delivery.rows, batch)
        misses += ps.statistics[-1].misses
    return len(trace) - misses


def shares(trace: np.ndarray, rows: int, pool: ComputePool) -> tuple[float, float, float]:
    """Hit rates in percent: ours, plain LRU's, plain LFU's."""
    hits = our_hits(trace, rows, pool), lru_hits(trace, rows), lfu_hits(trace, rows)
    ours, lru, lfu = (100 * one / len(trace) for one in hits)
    return ours, lru, lfu


def test_on_a_zipf_trace_the_hit_rate_is_within_a_point_of_plain_lru_and_plain_lfu(
    pool: ComputePool, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(1)
    trace = random.permutation(1_000_000)[zipf(10_000_000, 1_000_000, random)]
    ours, lru, lfu = shares(trace, 100_000, pool)
    with capsys.disabled():
        print(f"\nZipf trace, 10 M accesses to 1 M keys, cache 10%: MEM-PS {ours:.2f}%, LRU {lru:.2f}%, LFU {lfu:.2f}%")
    assert ours >= max(lru, lfu) - 1
    assert ours >= 80.55  # the hit rate of the LRU list in front of an LFU set that was here before


def test_when_tastes_change_old_favourites_leave(pool: ComputePool, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(2)
    parts = [random.permutation(100_000)[zipf(250_000, 100_000, random)] for _ in range(6)]
    ours, lru, lfu = shares(np.concatenate(parts), 10_000, pool)
    with capsys.disabled():
        print(f"\nZipf trace that changes 5 times: MEM-PS {ours:.2f}%, LRU {lru:.2f}%, LFU {lfu:.2f}%")
    assert ours >= max(lru, lfu) - 1
