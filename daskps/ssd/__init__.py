"""SSD-PS, the disk tier: rows in segments (immutable, checksummed Zarr chunks), with crash-safe snapshots.

`Store` is one partition of a table. `TableStore` is a `RowStore` over the partitions that a node owns.
storage/FORMAT.md describes the files.
"""

from daskps.ssd.manifest import PartitionSnapshot
from daskps.ssd.options import Options, Statistics
from daskps.ssd.store import Store
from daskps.ssd.table_store import TableStore
from daskps.storage.partition import Placement

__all__ = ["Options", "PartitionSnapshot", "Placement", "Statistics", "Store", "TableStore"]
