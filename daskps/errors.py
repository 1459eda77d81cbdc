"""The exceptions of daskps, in one tree.

    DaskpsError
    ├── ArgumentError          a call got a wrong argument (also a ValueError)
    ├── ConfigError            a job's settings are invalid or do not fit together (also a ValueError)
    ├── BackendError           the requested device, or enough Dask workers, are not there
    │   └── NativeLibraryError the CPU library is missing or does not load
    ├── CapacityError          something does not fit: table, cache, disk or budget, with figures
    ├── DataError              input data is bad, with file, line, column and reason
    ├── StoreError             the disk tier cannot do what was asked
    │   ├── CorruptionError    a checksum does not match, or a file that must be there is not
    │   ├── LockedError        another live process writes to this partition
    │   └── SnapshotError      no such snapshot, or it is in the wrong state
    ├── ProtocolError          a message is malformed or breaks the order of batches in flight
    │   └── StaleError         a message of another run, incarnation or batch
    └── TrainingError          the run cannot go on
        ├── NonFiniteError     a loss, gradient or row became NaN or infinite
        └── PeerError          another node is lost, stuck or has stopped

A message says what happened, with the values, and what to do.
"""

from __future__ import annotations


class DaskpsError(Exception):
    """Root of all: `except DaskpsError` catches everything that daskps raises on purpose."""


class ArgumentError(DaskpsError, ValueError):
    """Wrong argument of a call."""


class ConfigError(DaskpsError, ValueError):
    """Invalid settings of a job, or settings that do not fit together."""


class BackendError(DaskpsError):
    """Missing device, or missing Dask workers."""


class NativeLibraryError(BackendError):
    """CPU library that is missing or does not load."""


class CapacityError(DaskpsError):
    """Table, cache, disk or budget that is too small; the message has the figures."""


class DataError(DaskpsError):
    """Bad input data; the message has file, line, column and reason."""


class StoreError(DaskpsError):
    """Failure of the disk tier."""


class CorruptionError(StoreError):
    """Checksum that does not match, or a required file that is missing."""


class LockedError(StoreError):
    """Partition to which another live process writes."""


class SnapshotError(StoreError):
    """Snapshot that does not exist or is in the wrong state."""


class ProtocolError(DaskpsError):
    """Message between nodes that is malformed or breaks the order of batches in flight."""


class StaleError(ProtocolError):
    """Message or request of another run, incarnation or batch."""


class TrainingError(DaskpsError):
    """Failure that ends the run."""


class NonFiniteError(TrainingError):
    """Loss, gradient or row that became NaN or infinite."""


class PeerError(TrainingError):
    """Node that is lost, does not answer or has stopped."""
