"""What a batch did to the tiers of a node, and how full they are afterwards.

In: an open node and the batch that it has pushed. Out: plain figures by name, for its `BatchReport`.
"""

from __future__ import annotations

from daskps.cluster.node import Flight
from daskps.flow.open_node import OpenNode

DISK_LEVELS = ("disk_bytes", "stale_rows", "files", "compactions", "compacted_rows")


def counts(node: OpenNode, flight: Flight) -> dict[str, float]:
    """What the batch did, summed over tables. Other nodes may still be at it: then what the batches over now did."""
    totals: dict[str, float] = {
        "keys": sum(len(working_set.row_of) for working_set in flight.sets),
        "distinct_keys": sum(len(working_set.keys) for working_set in flight.sets),
    }
    over = [list(table.mem.statistics) for table in node.tables]
    newest = min(statistics[-1].batch if statistics else -1 for statistics in over)
    for one in (one for statistics in over for one in statistics if node.counted < one.batch <= newest):
        for name in type(one).__dataclass_fields__:
            if name != "batch":
                totals[name] = totals.get(name, 0) + float(getattr(one, name))
    node.counted = max(node.counted, newest)
    return totals


def levels(node: OpenNode, flight: Flight) -> dict[str, float]:
    """How full the tiers are, with the batch that was pushed just now."""
    row_bytes = [spec.layout.row_bytes for spec in node.specs]
    loaded = [flight, *node.flights.loaded()]
    hbm_rows = [sum(len(other.sets[number].keys) for other in loaded) for number in range(len(row_bytes))]
    mem_rows = [table.mem.cached_rows for table in node.tables]
    disk = [table.store.stats() for table in node.tables]
    return {
        "row_capacity": node.room.rows(flight, node.tables),
        "read_steps": node.reading.steps(),
        "hbm_rows": sum(hbm_rows),
        "hbm_bytes": sum(rows * size for rows, size in zip(hbm_rows, row_bytes, strict=True)),
        "memory_rows": sum(mem_rows),
        "memory_bytes": sum(rows * size for rows, size in zip(mem_rows, row_bytes, strict=True)),
        "disk_rows": sum(one.live_rows for one in disk),
        **{name: sum(getattr(one, name) for one in disk) for name in DISK_LEVELS},
    }
