"""SSD-PS: rows as immutable, checksummed Zarr files, with crash-safe snapshots.

`Store` is one partition, `Partitions` the owned ones of a table, with the same calls. FORMAT.md beside this file is the
format on disk.
"""

from daskps.ssd.manifest import Snapshot
from daskps.ssd.options import Options
from daskps.ssd.partitions import Partitions
from daskps.ssd.placement import Placement
from daskps.ssd.statistics import Statistics
from daskps.ssd.store import Store

__all__ = ["Options", "Partitions", "Placement", "Snapshot", "Statistics", "Store"]
