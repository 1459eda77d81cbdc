"""memory_bytes bounds what the process really takes: 1 GiB is filled, overfilled and saved in a process of its own.

Narrow rows and two nodes take longer: ``pytest tests/mem/test_budget.py -m slow``.
"""

import subprocess
import sys

import pytest

from daskps.budget import largest_cache
from daskps.errors import CapacityError

GROWTH = """
import sys
import numpy as np
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.mem import MemPS, total
from daskps.types import Field, RowLayout

class Store:
    buffer_bytes = 0

    def __init__(self):
        self.appended = 0
        self.index = []

    @property
    def memory_bytes(self):
        return sum(piece.nbytes for piece in self.index)

    def append(self, keys, rows):
        self.appended += len(keys)
        if grows:
            self.index.append(np.ones(32 * len(keys), np.uint8))

    def start_load(self, keys, positions, out):
        self.found = np.zeros(len(keys), np.bool_)
        return self

    def wait(self):
        return self.found

    def reading_order(self, keys):
        return np.arange(len(keys))

    def prepare(self, snapshot_id):
        self.prepared = snapshot_id

def initial(keys, out):
    out[:] = 1.0

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

budget, width, nodes, grows = (int(word) for word in sys.argv[1:])
working_set = budget // nodes // (400 + 16 * width)
pool = ComputePool(2)
library()
# what the stages around MEM-PS own: keys and tables of two batches in flight
keys = [np.zeros(working_set, np.uint64) for _ in range(2 * nodes)]
outs = [np.ones((working_set, width), np.float32) for _ in range(2 * nodes)]
for one in keys:
    one[:] = 1
before = status("VmRSS")
store = Store()
layout = RowLayout((Field("values", width),))
ps = MemPS(layout=layout, store=store, initial=initial, memory_bytes=budget, pool=pool, nodes=nodes)
batches = 3 + 7 * ps.cache_rows // (4 * nodes * working_set)
for batch in range(batches + 1):
    if batch < batches:
        for node in range(nodes):
            mine = keys[2 * node + batch % 2]
            start = batch * (3 * nodes * working_set // 4) + node * working_set  # a quarter was in the batch before
            mine[:] = np.arange(start, start + working_set, dtype=np.uint64)
            ps.pull(mine, batch, node, out=outs[2 * node + batch % 2])
    if batch:
        for node in range(nodes):
            last = 2 * node + (batch - 1) % 2
            ps.push(keys[last], outs[last], batch - 1, node)
    if batch == batches - 2:
        ps.flush_begin(batch - 1, "snapshot")
        ps.flush_step()
ps.flush_finish()
counted = total(ps.statistics)
assert store.appended > ps.cache_rows // 2 and store.prepared and counted.evicted > 0, counted
assert ps.cached_rows > 0.9 * ps.cache_rows, (ps.cached_rows, ps.cache_rows)
assert not grows or counted.given_rows > 0
peak = max(status("VmHWM"), status("VmRSS")) - before
print(int(status("VmRSS") - before), int(peak), ps.used_bytes)
"""


@pytest.mark.parametrize(
    ("width", "nodes", "grows"),
    [
        pytest.param(10, 1, 0, id="usual rows"),
        pytest.param(40, 1, 1, id="wide rows and a growing index"),
        pytest.param(2, 1, 0, id="narrow rows", marks=pytest.mark.slow),
        pytest.param(10, 2, 0, id="two nodes", marks=pytest.mark.slow),
    ],
)
def test_the_growth_of_the_process_stays_within_the_budget(
    width: int, nodes: int, grows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = 1 << 30
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, *map(str, (budget, width, nodes, grows))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grown, peak, used = (int(word) for word in done.stdout.split())
    with capsys.disabled():
        figures = f"counted {used >> 20}, grown {grown >> 20}, peak {peak >> 20} MiB"
        print(f"\nwidth {width}, {nodes} nodes: budget 1024, {figures}")
    assert used <= budget
    assert peak <= 1.1 * budget
    assert grown >= 0.5 * budget, "the budget was not used"


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("row_bytes", [4, 40, 400])
def test_all_of_the_budget_is_spent_and_never_more(row_bytes: int, nodes: int) -> None:
    for memory_bytes in (40_000, 1_000_000, 10**9, 10**12):
        budget = largest_cache(memory_bytes, store_bytes=1000, row_bytes=row_bytes, nodes=nodes)
        assert budget.used_bytes <= memory_bytes
        more = largest_cache(memory_bytes + 2000, store_bytes=1000, row_bytes=row_bytes, nodes=nodes)
        assert more.cache_rows > budget.cache_rows or budget.cache_rows == 2**32 - 2


def test_the_index_of_the_store_is_subtracted_first() -> None:
    with pytest.raises(CapacityError, match="the disk tier's index takes 1,000,000 bytes"):
        largest_cache(1_000_000, store_bytes=1_000_000, row_bytes=40, nodes=1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_cache_that_gives_way_to_the_index_takes_its_buffers_with_it(nodes: int) -> None:
    """What is left holds nearly as many rows as a cache that was made for it: only buckets and ring stay."""
    budget = largest_cache(10**8, store_bytes=0, row_bytes=64, nodes=nodes)
    rows = budget.cache_rows // 4
    shrunk = budget.shrunk(rows)
    made = largest_cache(shrunk.used_bytes, store_bytes=0, row_bytes=64, nodes=nodes)
    assert shrunk.staging_rows <= budget.staging_rows // 4
    assert shrunk.flight_rows >= min(budget.flight_rows, rows)
    assert rows >= (0.7 if nodes == 1 else 0.5) * made.cache_rows
    assert budget.used_bytes - shrunk.used_bytes >= (budget.cache_rows - rows) * budget.freed_row_bytes
