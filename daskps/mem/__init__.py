"""MEM-PS: a bounded cache of rows in memory over the disk tier."""

from daskps.mem.delivery import BatchStatistics, Delivery, total
from daskps.mem.memps import MemPS
from daskps.mem.store import RowStore

__all__ = ["BatchStatistics", "Delivery", "MemPS", "RowStore", "total"]
