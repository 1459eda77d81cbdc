"""Memory in named terms: the bytes that a node's budgets cover, and the division of MEM-PS's memory.

Each part of a node returns its own `Term`s. Their sum is compared with a budget; tables and errors print them. There is
no other formula for memory: the plan, the checks of what fits and the sizes of arrays all come from here.

>>> cache = largest_cache(1_000_000, store_bytes=0, row_bytes=40, nodes=1)
>>> cache.cache_rows, total_bytes(cache.terms("main")) <= 1_000_000
(10698, True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import Field

from daskps.errors import CapacityError
from daskps.settings import Bytes, Settings

BudgetName = Literal["memory_bytes", "hbm_bytes", "disk_bytes"]

# Every term by name, with what its bytes are for. DESIGN.md (Memory) has the same table.
PURPOSES = {
    "file blocks": "blocks of input files that are fetched or parsed, of training and validation data",
    "shuffle window": "examples of the window that is shuffled, and their order",
    "input batches": "examples of the batches in flight and of the one being read",
    "index": "disk tier: where each key's row is, live bits, block checksums",
    "write buffers": "disk tier: segments that are filled or being written",
    "cached rows": "rows in the memory tier",
    "cache entries": "key, last batch, next use, pins, visits and flags of each cached row",
    "hash buckets": "hash table over the keys of the cached rows",
    "staging": "rows on their way between cache and disk, and the order in which they are read",
    "snapshot copies": "old values of rows that are pushed while a snapshot is written",
    "batches in flight": "per row in flight: cache entry; on several nodes also holders, positions, deferred rows",
    "fixed": "scores of the eviction policy, histograms and small arrays of the memory tier",
    "network": "dense parameters, their optimizer state, gradient sums and one workspace per core",
    "rows of batches": "rows and keys of the batches on the devices",
    "peer positions": "where each row of a batch is at the other nodes",
    "row numbers": "row of each key occurrence, and where each slot of an example begins",
    "hash table": "hash table over the rows of one batch, for forwarded rows",
    "dedup scratch": "sorting of the key occurrences of one batch, the largest table",
    "activations": "outputs of the layers, loss, weight and metrics inputs of one step",
    "gradient sort": "key occurrences of a step and of the next one, grouped by row",
    "pooled embeddings": "inputs of the network of one step, then their gradients",
    "gradient sums": "sums that the nodes exchange in one step",
    "buffer pool": "whole pages, and buffers that are larger than the array in them",
    "live rows": "newest row of each key, with its key",
    "stale rows": "replaced rows that compaction has not removed yet, and block checksums",
    "kept snapshots": "segments that only a kept snapshot needs",
    "live bits and indexes": "of the kept snapshots, with the manifest",
}


@dataclass(frozen=True, slots=True)
class Term:
    """A named part of a budget. `purpose` says what its bytes are for."""

    name: str  # one of PURPOSES
    bytes: int
    budget: BudgetName = "memory_bytes"
    table: str = ""  # the embedding table that it belongs to; empty: the whole node

    @property
    def purpose(self) -> str:
        """Return what the bytes are for."""
        return PURPOSES[self.name]

    def as_json(self) -> dict[str, Any]:
        """Return the term as JSON values."""
        return {**asdict(self), "purpose": self.purpose}


def total_bytes(terms: Iterable[Term], budget: BudgetName | None = None) -> int:
    """Return the sum of the terms, or of those that count against `budget`."""
    return sum(term.bytes for term in terms if budget in (None, term.budget))


def terms_text(terms: Sequence[Term], allowed: Mapping[str, int | None]) -> str:
    """Return a text table of the terms, grouped by budget: the sum against what is allowed, then a line per term.

    `allowed` has the bytes of each budget to show; None: no limit.
    """
    lines = []
    for budget, limit in allowed.items():
        mine = [term for term in terms if term.budget == budget]
        names = [f"{term.name} of {term.table}" if term.table else term.name for term in mine]
        width, digits = max(map(len, names), default=0), max((len(f"{term.bytes:,}") for term in mine), default=0)
        bound = "no limit" if limit is None else f"{limit:,} allowed"
        lines.append(f"{budget}: {total_bytes(mine):,} bytes projected, {bound}")
        lines += [
            f"  {name:{width}}  {term.bytes:>{digits},}  {term.purpose}"
            for name, term in zip(names, mine, strict=True)
            if term.bytes
        ]
    return "\n".join(lines)


def capacity_error(what: str, terms: Sequence[Term], allowed: Mapping[str, int | None], remedy: str) -> CapacityError:
    """Return the error for a budget that is too small: what happened, the terms against `allowed`, what to do."""
    return CapacityError(f"{what}\n{terms_text(terms, allowed)}\n{remedy}")


# -- MEM-PS --------------------------------------------------------------------------------------------------------

ENTRY_BYTES = 16  # one `Entry` of cache.cpp
BUCKET_BYTES = 8  # one bucket of the cache's hash table
BUCKETS_PER_ROW = 4 / 3  # load factor 0.75: a search reads 1.5 adjacent buckets for a hit, 8.5 for a miss
STAGING_FRACTION = 1 / 16  # of the cached rows: staging for reads from and writes to disk; more rows go in pieces
COPIES_FRACTION = 1 / 32  # of the cached rows: old values of rows that are pushed while a snapshot is written
STAGING_EXTRA_BYTES = 40  # per staging row, beside the row: its key, position, cache entry, and NumPy's masks
ORDERED_PIECES = 4  # pieces of staging whose keys are sorted by their place on disk before the first is read
ORDER_BYTES = 20  # per key that is sorted
FIXED_BYTES = 32 << 10  # scores of the eviction policy (14 KiB), histograms, small arrays, Python objects

# Bytes per row in flight. One node keeps 4 bytes (the number of the cache entry) and needs 5 more to work. With several
# nodes: a table of holders with key 8, holders 8, cache entry 4, hash table 16; positions and deferred rows about 28.
FLIGHT_BYTES_ONE_NODE = 9
FLIGHT_BYTES_MORE_NODES = 64
# Rows in flight per cached row.
FLIGHT_ROWS_ONE_NODE = 1.25
FLIGHT_ROWS_MORE_NODES = 0.5

KEY_BYTES = 8
INDEX_BYTES = 12  # per key in the disk tier's index: an upper bound
SEGMENTS_IN_MEMORY = 3  # per partition: one is filled, two are written


def _flight_bytes(nodes: int) -> int:
    """Return the bytes of bookkeeping per row in flight."""
    return FLIGHT_BYTES_ONE_NODE if nodes == 1 else FLIGHT_BYTES_MORE_NODES


def _flight_rows(nodes: int) -> float:
    """Return the rows in flight per cached row."""
    return FLIGHT_ROWS_ONE_NODE if nodes == 1 else FLIGHT_ROWS_MORE_NODES


class BudgetSettings(Settings):
    """Upper bounds of what a node uses.

    A job that cannot fit is an error at the start; a forecast warns if growing tables will not fit later.
    """

    memory_bytes: Bytes = Field(
        default=2 * 1024**3, description="Memory of a node, beside a fixed allowance for Python and its libraries."
    )
    hbm_bytes: Bytes = Field(default=2 * 1024**3, description="Memory of a node's devices for the tables of batches.")
    disk_bytes: Bytes | None = Field(
        default=None,
        description="Disk of a node, divided over tables like memory: by row bytes per example; None: all free space.",
    )


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Division of one table's memory: the size of every array of its MEM-PS, in rows and buckets."""

    memory_bytes: int
    store_bytes: int  # index and write buffers of the disk tier, subtracted first
    row_bytes: int
    nodes: int
    cache_rows: int
    bucket_count: int
    staging_rows: int
    copy_rows: int
    flight_rows: int  # rows of all batches in flight; a row in two batches counts twice

    def cache_terms(self, table: str = "") -> list[Term]:
        """Return the terms of MEM-PS itself, without those of the disk tier."""
        staging = self.staging_rows * (self.row_bytes + STAGING_EXTRA_BYTES + ORDERED_PIECES * ORDER_BYTES)
        sizes = {
            "cached rows": self.cache_rows * self.row_bytes,
            "cache entries": self.cache_rows * ENTRY_BYTES,
            "hash buckets": self.bucket_count * BUCKET_BYTES,
            "staging": staging,
            "snapshot copies": self.copy_rows * (self.row_bytes + STAGING_EXTRA_BYTES),
            "batches in flight": self.flight_rows * _flight_bytes(self.nodes),
            "fixed": FIXED_BYTES,
        }
        return [Term(name, size, table=table) for name, size in sizes.items()]

    def terms(self, table: str = "") -> list[Term]:
        """Return all terms of `memory_bytes`; their sum is never above it."""
        return [Term("index", self.store_bytes, table=table), *self.cache_terms(table)]

    @property
    def cache_bytes(self) -> int:
        """Sum of the terms of MEM-PS itself."""
        return total_bytes(self.cache_terms())

    @property
    def used_bytes(self) -> int:
        """Sum of all terms."""
        return self.store_bytes + self.cache_bytes

    def shrunk(self, rows: int, copy_rows: int | None = None) -> CacheBudget:
        """Return the budget with a cache of only `rows` rows.

        Staging and copies shrink in proportion. Rows in flight do too, but only if they are at least as many as cached
        rows, because then they are no tighter limit than the cache. Buckets stay. `copy_rows`, if given, is
        used instead of the proportional number.
        """

        def part(count: int) -> int:
            return max(1, count * rows // self.cache_rows)

        return replace(
            self,
            cache_rows=rows,
            staging_rows=part(self.staging_rows),
            copy_rows=part(self.copy_rows) if copy_rows is None else copy_rows,
            flight_rows=part(self.flight_rows) if self.flight_rows >= self.cache_rows else self.flight_rows,
        )

    @property
    def freed_row_bytes(self) -> int:
        """Bytes that a shrinking cache frees per row, on average."""
        freed = self.cache_bytes - self.shrunk(1).cache_bytes
        return max(freed // max(1, self.cache_rows - 1), self.row_bytes + ENTRY_BYTES)

    def for_batch(self, rows: int, store_bytes: int) -> CacheBudget:
        """Return the budget that one batch of `rows` distinct rows would need beside `store_bytes` of the disk tier."""
        wanted = max(rows, math.ceil(rows / _flight_rows(self.nodes)))
        return cache_of(wanted, self.memory_bytes, store_bytes, self.row_bytes, self.nodes)


def cache_of(rows: int, memory_bytes: int, store_bytes: int, row_bytes: int, nodes: int) -> CacheBudget:
    """Return the budget with a cache of `rows` rows; it may exceed `memory_bytes`."""
    return CacheBudget(
        memory_bytes=memory_bytes,
        store_bytes=store_bytes,
        row_bytes=row_bytes,
        nodes=nodes,
        cache_rows=rows,
        bucket_count=int(rows * BUCKETS_PER_ROW) + 8,
        staging_rows=max(1, int(rows * STAGING_FRACTION)),
        copy_rows=max(1, int(rows * COPIES_FRACTION)),
        flight_rows=max(1, int(rows * _flight_rows(nodes))),
    )


def largest_cache(memory_bytes: int, *, store_bytes: int, row_bytes: int, nodes: int) -> CacheBudget:
    """Return the budget with the largest cache that fits `memory_bytes`; CapacityError if not even one row does."""

    def fits(rows: int) -> bool:
        return cache_of(rows, memory_bytes, store_bytes, row_bytes, nodes).used_bytes <= memory_bytes

    low, high = 0, min(memory_bytes // row_bytes + 1, 2**32 - 2)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if low == 0:
        least = cache_of(1, memory_bytes, store_bytes, row_bytes, nodes)
        raise capacity_error(
            f"memory_bytes={memory_bytes:,} holds no row: the disk tier's index takes {store_bytes:,} bytes, and one "
            f"row of {row_bytes} bytes with its bookkeeping needs {least.used_bytes:,} bytes in all",
            least.terms(),
            {"memory_bytes": memory_bytes},
            "raise budget.memory_bytes",
        )
    return cache_of(low, memory_bytes, store_bytes, row_bytes, nodes)


def cached_row_bytes(row_bytes: float, nodes: int) -> float:
    """Return the bytes of memory per cached row, with its part of all bookkeeping."""
    rows = 1 << 20
    return cache_of(rows, 0, 0, math.ceil(row_bytes), nodes).cache_bytes / rows


def flight_row_bytes(row_bytes: float, nodes: int) -> float:
    """Return the bytes of memory per row of the batches in flight: only a part of the cached rows may be in flight."""
    return cached_row_bytes(row_bytes, nodes) * max(1.0, 1 / _flight_rows(nodes))


# -- HBM-PS --------------------------------------------------------------------------------------------------------

SORT_BYTES = 48  # per key occurrence, while the occurrences of a step and of the next one are grouped by row
DEDUP_BYTES = 16  # per key occurrence, while distinct keys are found; one batch at a time
SEARCH_BYTES = 32  # per row, for a hash table that is at most half full; one batch at a time is searched
STEP_BYTES = 64  # per example, beside its activations: loss, weight, probability, inputs of the metrics
BUFFER_POOL_FRACTION = 1 / 4  # of the bytes in use: memory comes in whole pages, and a buffer serves smaller arrays


@dataclass(frozen=True, slots=True)
class TableLoad:
    """Size of one table's part of a batch on one node."""

    table: str
    row_bytes: int
    dimension: int
    slots: int
    rows: int  # distinct keys
    occurrences: int  # keys of all examples


def batch_terms(loads: Sequence[TableLoad], *, examples: int, batches: int, nodes: int) -> list[Term]:
    """Return the device terms that grow with the length of a batch, for `batches` batches of this size.

    Only one of the batches is deduplicated and one is searched at a time.
    """
    dedup = max((DEDUP_BYTES * load.occurrences for load in loads), default=0)
    terms = [Term("dedup scratch", dedup, "hbm_bytes")]
    for load in loads:
        offsets = 8 * (examples * load.slots + 1)
        sizes = {
            "rows of batches": batches * load.rows * (load.row_bytes + KEY_BYTES),
            "peer positions": batches * load.rows * 4 * (nodes - 1),
            "row numbers": batches * (4 * load.occurrences + offsets),
            "hash table": load.rows * SEARCH_BYTES,
        }
        terms += [Term(name, size, "hbm_bytes", load.table) for name, size in sizes.items()]
    return terms


def step_terms(
    loads: Sequence[TableLoad], *, examples: int, steps: int, layers: Sequence[int], nodes: int
) -> list[Term]:
    """Return the device terms of one step, the average of a batch of `steps` steps; `layers` are the layers' widths."""
    activations = math.ceil(examples * (4 * sum(layers) + STEP_BYTES) / steps)
    terms = [Term("activations", activations, "hbm_bytes")]
    for load in loads:
        sizes = {
            "gradient sort": load.occurrences * SORT_BYTES,
            "pooled embeddings": 4 * examples * load.slots * load.dimension,
            "gradient sums": 8 * load.rows * load.dimension if nodes > 1 else 0,
        }
        terms += [Term(name, math.ceil(size / steps), "hbm_bytes", load.table) for name, size in sizes.items()]
    return terms


def pooled(terms: Sequence[Term]) -> list[Term]:
    """Return device terms together with what the buffer pool adds to them."""
    return [*terms, Term("buffer pool", math.ceil(BUFFER_POOL_FRACTION * total_bytes(terms)), "hbm_bytes")]


def fraction_that_fits(hbm_bytes: int, fixed: Sequence[Term], step: Sequence[Term], batch: Sequence[Term]) -> float:
    """Return the fraction of a batch that fits beside the fixed terms and one step; 1 or more: all of it."""
    allowed = hbm_bytes / (1 + BUFFER_POOL_FRACTION) - total_bytes(fixed) - total_bytes(step)
    return allowed / max(total_bytes(batch), 1)


# -- SSD-PS --------------------------------------------------------------------------------------------------------


def disk_terms(rows: float, row_bytes: float, table: str = "") -> list[Term]:
    """Return the terms on disk of `rows` live rows, without snapshots: compaction keeps stale rows below live ones."""
    live = math.ceil(rows * (row_bytes + KEY_BYTES))
    return [Term(name, live, "disk_bytes", table) for name in ("live rows", "stale rows")]
