"""The model directory: which snapshots there are, which is the last, and how a new one becomes it, all or nothing.

In: file operations, what each partition prepared, the dense arrays and the state of the run. Out: snapshots. Commit
order: every partition prepares; the snapshot's files are written and synced; one log entry publishes it; partitions
confirm. Whatever dies in between, opening again finds either the new snapshot whole or the one before it. FORMAT.md
draws the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from daskps.cluster.arrays import Arrays, from_files, to_files
from daskps.cluster.files import Files, LocalFiles
from daskps.cluster.log import FORMAT, Entry, Log
from daskps.cluster.sealed import checksum, seal, unseal
from daskps.errors import CorruptionError, SnapshotError, StaleError


@dataclass(frozen=True, slots=True)
class Draft:
    """What the run knows when it takes a snapshot. All values are plain JSON."""

    batch: int  # the last batch whose pushes it holds
    position: int  # global row number where training goes on
    partitions: int  # virtual partitions per table, fixed for the life of a model
    settings: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)  # passes over the data, early stopping, counters
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file must be."""

    bytes: int
    xxh3_64: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published snapshot, as its manifest tells it."""

    id: str
    epoch: int
    run: str
    created_seconds: float  # since 1970
    draft: Draft
    receipts: dict[str, Any]  # what each partition said when it had prepared
    files: dict[str, FileSum]  # by path below arrays/


@dataclass(frozen=True, slots=True)
class State:
    """What the log says, read once."""

    index: int  # of the last entry; 0 for an empty log
    epoch: int  # the newest; 0 before the first
    live: tuple[str, ...]  # snapshots published and not dropped, oldest first
    last: str | None  # the one that opening takes
    checksums: Mapping[str, str]  # of each live snapshot's manifest
    run: str = ""  # that began the newest epoch


class Partition(Protocol):
    """A row store's side of a commit. `prepared` and `confirmed` list ids; confirming twice is fine."""

    def prepared(self) -> Iterable[str]: ...
    def confirmed(self) -> Iterable[str]: ...
    def confirm(self, snapshot: str) -> None: ...
    def discard(self, snapshot: str) -> None: ...
    def drop(self, snapshot: str) -> None: ...


def follow(partition: Partition, live: Iterable[str]) -> None:
    """Confirm what is published and drop what is not live any more; what is only prepared may yet be published."""
    wanted = set(live)
    for snapshot in sorted(wanted.intersection(partition.prepared())):
        partition.confirm(snapshot)
    for snapshot in sorted(set(partition.confirmed()) - wanted):
        partition.drop(snapshot)


def settle(partition: Partition, live: Iterable[str]) -> None:
    """When a new epoch opens: also discard what was only prepared, because nobody can publish it any more."""
    follow(partition, live)
    for snapshot in list(partition.prepared()):
        partition.discard(snapshot)


class ModelDirectory:
    """Reads a model directory, and begins epochs, which alone may publish."""

    def __init__(
        self,
        path: str,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        log: Log | None = None,
        pack: Callable[[Arrays], dict[str, bytes]] = to_files,
        unpack: Callable[[Mapping[str, bytes]], dict[str, npt.NDArray[Any]]] = from_files,
    ) -> None:
        self.path = path.rstrip("/")
        self.files = files or LocalFiles()
        self.clock = clock
        self.log = log or Log(self.files, f"{self.path}/log")
        self._pack, self._unpack = pack, unpack

    def state(self) -> State:
        """What the log says now."""
        entries = self.log.entries()
        live: dict[str, str] = {}
        last, epoch, run = None, 0, ""
        for entry in entries:
            if entry.kind == "epoch":
                epoch, run = entry.epoch, entry.run
            if entry.kind == "snapshot":
                live[entry.snapshots[0]] = entry.manifest
            if entry.kind in ("snapshot", "rollback"):
                last = entry.snapshots[0]
            if entry.kind == "drop":
                for name in entry.snapshots:
                    live.pop(name, None)
        return State(len(entries), epoch, tuple(live), last, live, run)

    def snapshots(self) -> list[Snapshot]:
        """All snapshots that can be opened, oldest first."""
        state = self.state()
        return [self._manifest(name, state) for name in state.live]

    def snapshot(self, name: str | None = None) -> Snapshot | None:
        """The named snapshot, by default the last; None if nothing was published yet."""
        state = self.state()
        if name is None and state.last is None:
            return None
        return self._manifest(self._known(name or str(state.last), state), state)

    def load(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """The dense arrays of a snapshot; every byte is checked."""
        folder = f"{self.folder(snapshot.id)}/arrays"
        contents = {}
        for name, expected in snapshot.files.items():
            data = self._read(f"{folder}/{name}")
            found = FileSum(len(data), checksum(data))
            if found != expected:
                raise CorruptionError(
                    f"{folder}/{name} is damaged: it is {found}, the manifest says {expected}; restore it or roll back"
                )
            contents[name] = data
        return self._unpack(contents)

    def write_arrays(self, name: str, arrays: Arrays) -> dict[str, FileSum]:
        """Write the dense arrays of a snapshot that is about to be published; returns what its manifest says of them.

        The node that has them calls this, so that they never pass through the driver.
        """
        contents = self._pack(arrays)
        _write_durably(self.files, f"{self.folder(name)}/arrays", contents)
        return {path: FileSum(len(data), checksum(data)) for path, data in contents.items()}

    def begin_epoch(self, run: str, state: State | None = None) -> Epoch:
        """Take over the model: from here on, no older epoch can publish. StaleError if another driver was faster, or
        has been since `state`."""
        state = state or self.state()
        epoch = state.epoch + 1
        index = self.log.append(Entry("epoch", epoch, run), after=state.index)
        return Epoch(self, run, epoch, index)

    def roll_back(self, name: str, run: str = "") -> None:
        """Make an older snapshot the last. Snapshots after it stay until dropped; a live run can publish no more."""
        state = self.state()
        self._known(name, state)
        self.log.append(Entry("rollback", state.epoch, run, (name,)), after=state.index)

    def drop(self, names: Iterable[str], run: str = "") -> None:
        """Give up snapshots; the last one stays. Partitions follow when they next settle."""
        wanted = tuple(names)
        while wanted:
            state = self.state()
            for name in wanted:
                if self._known(name, state) == state.last:
                    raise SnapshotError(f"snapshot {name} is the last one of {self.path}; roll back before dropping it")
            try:
                self.log.append(Entry("drop", state.epoch, run, wanted), after=state.index)
            except StaleError:
                continue  # somebody published meanwhile: look again
            break
        for name in wanted:
            self.files.remove_folder(self.folder(name))

    def _known(self, name: str, state: State) -> str:
        if name not in state.live:
            known = ", ".join(state.live) or "none"
            raise SnapshotError(f"{self.path} has no snapshot {name!r}; it has {known}")
        return name

    def folder(self, name: str) -> str:
        """Where a snapshot's files are."""
        return f"{self.path}/snapshots/{name}"

    def _read(self, path: str) -> bytes:
        try:
            return self.files.read(path)
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing although it was published; restore it or roll back") from None

    def _manifest(self, name: str, state: State) -> Snapshot:
        path = f"{self.folder(name)}/manifest.json"
        data = self._read(path)
        fields = unseal(data, path)
        if checksum(data) != state.checksums[name]:
            raise CorruptionError(f"{path} is intact but not what was published as {name}; restore it from a copy")
        if fields.pop("format") > FORMAT:
            raise CorruptionError(f"{path} is of a newer format than {FORMAT}; open the model with a newer daskps")
        files = {path: FileSum(**item) for path, item in fields["files"].items()}
        return Snapshot(**{**fields, "draft": Draft(**fields["draft"]), "files": files})


class Epoch:
    """The right to publish, from `ModelDirectory.begin_epoch` until somebody begins the next one."""

    def __init__(self, directory: ModelDirectory, run: str, number: int, index: int) -> None:
        self.directory = directory
        self.run = run
        self.number = number
        self._index = index

    @property
    def index(self) -> int:
        """Of the last log entry that this epoch has seen."""
        return self._index

    def name(self, batch: int) -> str:
        """The id of this epoch's snapshot after `batch`; partitions prepare under it."""
        return f"{self.number:06d}-{batch:08d}"

    def commit(
        self, draft: Draft, arrays: Arrays, prepare: Callable[[str], Mapping[str, Any]], confirm: Callable[[str], None]
    ) -> Snapshot:
        """All steps in order, for one process: `prepare` every partition, write, publish, `confirm`."""
        name = self.name(draft.batch)
        receipts = prepare(name)
        snapshot = self.publish(draft, arrays, receipts)
        confirm(name)
        return snapshot

    def publish(self, draft: Draft, arrays: Arrays, receipts: Mapping[str, Any]) -> Snapshot:
        """Write the arrays of the snapshot that all partitions have prepared, then publish it."""
        return self.publish_written(draft, self.directory.write_arrays(self.name(draft.batch), arrays), receipts)

    def publish_written(self, draft: Draft, files: Mapping[str, FileSum], receipts: Mapping[str, Any]) -> Snapshot:
        """Publish, by one log entry, what all partitions have prepared and some process has written."""
        directory, name = self.directory, self.name(draft.batch)
        snapshot = Snapshot(name, self.number, self.run, directory.clock(), draft, dict(receipts), dict(files))
        manifest = seal({"format": FORMAT, **asdict(snapshot)})
        _write_durably(directory.files, directory.folder(name), {"manifest.json": manifest})
        self._append(Entry("snapshot", self.number, self.run, (name,), checksum(manifest)))
        return snapshot

    def keep(self, count: int) -> tuple[str, ...]:
        """Drop all but the newest `count` snapshots and return those dropped; the last one always stays."""
        state = self.directory.state()
        dropped = tuple(name for name in state.live[: max(0, len(state.live) - count)] if name != state.last)
        self.directory.drop(dropped, self.run)
        return dropped

    def collect(self) -> tuple[str, ...]:
        """Remove and return snapshot folders that older epochs wrote and never published, or dropped."""
        directory, live = self.directory, set(self.directory.state().live)
        names = directory.files.list(f"{directory.path}/snapshots")
        orphans = tuple(name for name in names if name not in live and name < self.name(0))
        for name in orphans:
            directory.files.remove_folder(directory.folder(name))
        directory.log.sweep()
        return orphans

    def _append(self, entry: Entry) -> None:
        """Append after what this epoch has seen; entries that only drop are stepped over, all others make it stale."""
        while True:
            try:
                self._index = self.directory.log.append(entry, after=self._index)
            except StaleError:
                newer = self.directory.log.entries()[self._index :]
                if any(other.kind != "drop" for other in newer):
                    raise
                self._index += len(newer)
            else:
                return


def _write_durably(files: Files, folder: str, contents: Mapping[str, bytes]) -> None:
    """Write and sync files below `folder`, then the folders that name them."""
    parents = set()
    for path, data in contents.items():
        target = f"{folder}/{path}"
        parent = target.rpartition("/")[0]
        if parent not in parents:
            files.make_folder(parent)
            parents.add(parent)
        files.write(target, data)
        files.sync(target)
    for parent in sorted(parents):
        files.sync(parent)
