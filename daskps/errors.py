"""Every exception of daskps, in one tree.

    DaskpsError
    ├── ArgumentError          a call got a wrong argument (also a ValueError)
    ├── ConfigError            a job's settings do not hold together (also a ValueError)
    ├── BackendError           the asked-for device is not there
    │   └── NativeLibraryError the CPU library is missing or does not load
    ├── CapacityError          something does not fit: table, cache, disk or budget, with figures
    ├── DataError              input data is bad, with file, line, column and reason
    ├── StoreError             the disk tier cannot do what was asked
    │   ├── CorruptionError    a checksum does not match, or a file that must be there is not
    │   ├── LockedError        another live process writes to this partition
    │   └── SnapshotError      no such snapshot, or it is in the wrong state
    ├── ProtocolError          a pull or push breaks the order of batches in flight
    │   └── StaleError         a message of another run, epoch or batch
    └── TrainingError          the run cannot go on
        ├── NonFiniteError     a loss, gradient or row became NaN or infinite
        └── PeerError          another node is lost, stuck or has stopped

A message says what happened, with the values, and what to do.
"""

from __future__ import annotations


class DaskpsError(Exception):
    """The root: `except DaskpsError` catches everything that daskps raises on purpose."""


class ArgumentError(DaskpsError, ValueError):
    """A call got a wrong argument."""


class ConfigError(DaskpsError, ValueError):
    """A job's settings do not hold together."""


class BackendError(DaskpsError):
    """The asked-for device is not there."""


class NativeLibraryError(BackendError):
    """The CPU library is missing or does not load."""


class CapacityError(DaskpsError):
    """Something does not fit."""


class DataError(DaskpsError):
    """Input data is bad."""


class StoreError(DaskpsError):
    """The disk tier cannot do what was asked."""


class CorruptionError(StoreError):
    """A checksum does not match, or a file that must be there is not."""


class LockedError(StoreError):
    """Another live process writes to this partition."""


class SnapshotError(StoreError):
    """No such snapshot, or it is in the wrong state."""


class ProtocolError(DaskpsError):
    """A pull or push breaks the order of batches in flight."""


class StaleError(ProtocolError):
    """A message of another run, epoch or batch."""


class TrainingError(DaskpsError):
    """The run cannot go on."""


class NonFiniteError(TrainingError):
    """A loss, gradient or row became NaN or infinite."""


class PeerError(TrainingError):
    """Another node is lost, stuck or has stopped."""
