"""Eviction: every policy of POLICIES, in what order rows leave, and what the cache measures for it."""

import re
from pathlib import Path

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.mem import MemPS, eviction
from daskps.mem.eviction import LEVEL_AGES, LEVEL_VISITS, POLICIES, Eviction, Measured, lfu, lru_lfu
from tests.mem.memory_store import MemoryStore, bytes_for, initial, keys_of, layout

ROWS = 12


def opened(pool: ComputePool, policy: str, rows: int = ROWS, first_batch: int = 0) -> MemPS:
    """A partition whose cache holds exactly `rows` rows."""
    return MemPS(
        layout=layout(1),
        store=MemoryStore(1),
        initial=initial,
        memory_bytes=bytes_for(1, cache_rows=rows),
        pool=pool,
        eviction=policy,
        first_batch=first_batch,
    )


def pull(ps: MemPS, keys: np.ndarray) -> None:
    """Pull and push the next batch."""
    batch = ps._next_answer
    (reply,) = ps.pull(keys, batch)
    ps.push(keys, reply.rows, batch)


def cached(ps: MemPS, keys: np.ndarray) -> list[int]:
    """Those of the keys that are in memory."""
    return keys[ps._rows.cache.find(keys) != 0xFFFFFFFF].tolist()


@pytest.mark.parametrize("first_batch", [0, 65_530], ids=["from 0", "past 65,536"])
@pytest.mark.parametrize("gap", [1, 20], ids=["young rows", "old rows"])
def test_lru_evicts_the_row_of_the_oldest_batch(pool: ComputePool, gap: int, first_batch: int) -> None:
    ps = opened(pool, "lru", rows=ROWS, first_batch=first_batch)
    keys = np.arange(ROWS - 1, dtype=np.uint64)
    for key in np.random.default_rng(1).permutation(keys[1:]).tolist():
        for _ in range(gap):
            pull(ps, keys_of(0))
        pull(ps, keys_of(key))
    oldest_first = [key for key in ps._rows.cache.entries["key"][:ROWS].tolist() if key]
    for evicted in range(len(oldest_first)):
        pull(ps, keys_of(0, 100 + evicted))  # the first one fits, each later one takes the place of one row
        assert cached(ps, np.array(oldest_first, np.uint64)) == oldest_first[evicted:]
    assert cached(ps, keys_of(0)) == [0]


def test_lfu_keeps_a_frequent_row_that_lru_evicts(pool: ComputePool) -> None:
    def left(policy: str) -> list[int]:
        ps = opened(pool, policy)
        for _ in range(6):
            pull(ps, keys_of(1))
        for key in range(10, 10 + 2 * ROWS):
            pull(ps, keys_of(key))
        return cached(ps, keys_of(1))

    assert left("lfu") == [1]
    assert left("lru") == []


def test_the_default_is_lfu_until_overdue_rows_fail_to_return() -> None:
    age, visits = (axis.ravel() for axis in np.meshgrid(LEVEL_AGES, LEVEL_VISITS))
    standing, drifting = Measured(turnover=3.0, returning=1.0), Measured(turnover=3.0, returning=0.1)
    np.testing.assert_array_equal(lru_lfu(age, visits, standing), lfu(age, visits, standing))
    overdue = age * visits > drifting.overdue
    scores = lru_lfu(age, visits, drifting)
    np.testing.assert_array_equal(scores[~overdue], lfu(age, visits, drifting)[~overdue])
    assert (scores[overdue] <= 0.1 * lfu(age, visits, drifting)[overdue]).all()
    once_a_batch, once = 12.0, 1.0
    old_favourite, young = lru_lfu(np.array([10.0, 1.0]), np.array([once_a_batch, once]), drifting)
    assert old_favourite < young


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_with_a_known_next_use_stays_longest(pool: ComputePool, policy: str) -> None:
    ps = opened(pool, policy)
    pull(ps, keys_of(1, 2, 3))
    for key in range(10, 10 + ROWS - 3):
        pull(ps, keys_of(key))
    entries, ids = ps._rows.cache.entries, ps._rows.cache.find(keys_of(1, 2, 3))
    entries["next_use"][ids[:2]] = [ps._next_answer + 100, ps._next_answer + 60]  # key 3: unknown
    kept = []
    for batch in range(ROWS):
        pull(ps, keys_of(*range(1000 + 5 * batch, 1005 + 5 * batch)))
        kept.append(cached(ps, keys_of(1, 2, 3)))
    assert kept[-1] == [1, 2]
    pull(ps, np.arange(2000, 2000 + ROWS - 1, dtype=np.uint64))
    assert cached(ps, keys_of(1, 2, 3)) == [2]
    pull(ps, keys_of(2))
    assert entries["next_use"][ids[1]] == ps._next_answer - 1  # the use is over


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_evicts_exactly_as_many_rows_as_needed(pool: ComputePool, policy: str) -> None:
    ps = opened(pool, policy, rows=200)
    random = np.random.default_rng(3)
    for _ in range(60):
        pull(ps, np.unique(random.zipf(1.2, 60).clip(max=1000)).astype(np.uint64))
        assert ps.cached_rows <= ps.cache_rows
    assert ps.cached_rows >= ps.cache_rows - (ps.cache_rows >> 6) - 1
    assert sum(one.evicted for one in ps.statistics) > 100


def test_the_cache_measures_how_many_overdue_rows_return(pool: ComputePool) -> None:
    def returning(favourites_change: bool) -> float:
        ps, random = opened(pool, "lru_lfu", rows=600), np.random.default_rng(4)
        for batch in range(120):
            first = 1000 * (batch // 12) if favourites_change else 0
            favourites = first + np.flatnonzero(random.random(400) < 0.3)
            others = 10**6 + 50 * batch + np.arange(50)
            pull(ps, np.concatenate([favourites, others]).astype(np.uint64))
        return ps._rows.cache.eviction.measured.returning

    assert returning(favourites_change=False) > 0.8
    assert returning(favourites_change=True) < 0.4


def test_scores_keep_the_order_of_the_policy() -> None:
    for name, policy in POLICIES.items():
        state = Eviction(name)
        state.visited(keys=10, cache_rows=30, overdue=0, overdue_visits=0)
        wanted = policy(*np.meshgrid(LEVEL_AGES, LEVEL_VISITS, indexing="ij"), state.measured).ravel()
        order = np.argsort(wanted, kind="stable")
        assert (np.diff(state.scores.ravel()[order].astype(int)) >= 0).all()
        assert len(np.unique(state.scores)) > 50


@pytest.mark.parametrize("name", ["ONE_VISIT", "VISIT_LEVELS", "AGE_LEVELS", "SCORES", "MOST_AHEAD"])
def test_python_and_native_code_agree_on_the_tables(name: str) -> None:
    text = (Path(eviction.__file__).parent / "entry.cuh").read_text()
    assert re.findall(rf"\b{name} = (\d+)", text) == [str(getattr(eviction, name))]
