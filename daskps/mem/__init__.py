"""MEM-PS, the memory tier: a cache of rows with a bounded size, in front of the disk tier."""

from daskps.mem.cache import BatchStatistics, PullReply, total
from daskps.mem.memps import MemPS

__all__ = ["BatchStatistics", "MemPS", "PullReply", "total"]
