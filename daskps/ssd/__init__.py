"""SSD-PS: rows as immutable, checksummed Zarr files, with crash-safe snapshots."""
