"""MEM-PS, the memory tier: a cache of rows with a bounded size, in front of the disk tier.

memps.py is the tier itself; inflight.py the batches in flight on an owner; cache.py the rows in memory; eviction.py the
policies by which rows leave it.
"""

from daskps.mem.cache import BatchStatistics, PullReply, total
from daskps.mem.memps import MemPS

__all__ = ["BatchStatistics", "MemPS", "PullReply", "total"]
