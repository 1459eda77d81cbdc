"""SSD-PS: rows as immutable, checksummed Zarr files, with crash-safe snapshots.

`Store` is one partition; FORMAT.md beside this file is its format on disk.
"""

from daskps.ssd.options import Options
from daskps.ssd.statistics import Statistics
from daskps.ssd.store import Store

__all__ = ["Options", "Statistics", "Store"]
