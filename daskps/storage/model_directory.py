"""The model directory: its snapshots, which of them is the last, and the atomic commit of a new one.

Input: file operations, the digests that the partitions have prepared, the dense arrays and the state of the run.
Output: snapshots. A commit is a two-phase commit: (1) every partition prepares; (2) the files of the snapshot are
written and synced; (3) one log entry publishes it; (4) the partitions confirm. After a crash of any process at any
point, opening finds either the complete new snapshot or the one before it. FORMAT.md describes the files.

An `Incarnation` of a run has the right to publish. Its number is a fencing token: after a newer incarnation has begun,
an older one can publish nothing. Files call that number `epoch` (FORMAT.md), and so do the fields of `Entry` and
`Snapshot`, which are written as they are.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore

from daskps.errors import CorruptionError, LockedError, SnapshotError, StaleError
from daskps.storage.files import Files, LocalFiles, Release
from daskps.storage.log import FORMAT, Entry, Log
from daskps.storage.sealed import LOG_JSON, checksum

Arrays = Mapping[str, npt.NDArray[Any]]


def to_files(arrays: Arrays) -> dict[str, bytes]:
    """Return the files of a Zarr group that holds `arrays`, each as one uncompressed chunk, by path."""
    contents: dict[str, Buffer] = {}
    group = zarr.open_group(MemoryStore(contents), mode="w", zarr_format=3)
    for name, array in arrays.items():
        made = group.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=tuple(max(1, count) for count in array.shape),
            compressors=None,
            config={"write_empty_chunks": True},  # otherwise a lost chunk would read as zeros too
        )
        if array.size:
            made[...] = array
    return {path: contents[path].to_bytes() for path in sorted(contents)}


def from_files(contents: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a Zarr group from its files, in the order of their names."""
    make = default_buffer_prototype().buffer.from_bytes
    group = zarr.open_group(MemoryStore({path: make(data) for path, data in contents.items()}), mode="r")
    found = {
        name: np.asarray(item[...]) for name, item in group.members(max_depth=None) if isinstance(item, zarr.Array)
    }
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class SnapshotMeta:
    """The state of a run at a snapshot, without arrays. All values can be written as JSON."""

    batch: int  # the last batch whose pushes the snapshot holds
    position: int  # number of the example, counted over all data, at which training continues
    partitions: int  # partitions per table, fixed when the model is created
    settings: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)  # passes over the data, early stopping, counters
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileSum:
    """The expected size and checksum of a file."""

    bytes: int
    xxh3_64: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published snapshot: the contents of its manifest."""

    id: str
    epoch: int  # number of the incarnation that published it
    run: str
    created_seconds: float  # since 1970
    draft: SnapshotMeta
    receipts: dict[str, Any]  # by table and name of the partition: the digest of what that partition has prepared
    files: dict[str, FileSum]  # by path below arrays/
    model: str = ""  # id of the model; "" if an older daskps, which had no ids, has published it

    def digests(self, table: str) -> dict[str, str]:
        """Return the digests of a table's partitions by name; empty for a snapshot of an older daskps."""
        receipts = self.receipts.get(table, {})
        return {name: digest for name, digest in receipts.items() if name.startswith("partition-")}


@dataclass(frozen=True, slots=True)
class State:
    """The state of a model that follows from all entries of its log."""

    index: int  # number of the last entry; 0 for an empty log
    incarnation: int  # number of the newest incarnation; 0 before the first
    live: tuple[str, ...]  # snapshots that are published and not dropped, oldest first
    last: str | None  # the snapshot that is opened by default
    checksums: Mapping[str, str]  # of the manifest of each live snapshot
    run: str = ""  # the run that began the newest incarnation
    model: str = ""  # id of the model: random, never changed; "" before the first incarnation and with older daskps
    ended_at: str | None = None  # if a run made its best snapshot the last one: where training would continue


class Lease:
    """A reader's lease on a snapshot: while it is locked, no writer drops the snapshot. Close it or use it in a `with`.

    A reader that cannot lock (no right to, or a file system without locks) can still read. It gets a `SnapshotError`
    from `ModelDirectory.unless_dropped` when the files of the snapshot are gone.
    """

    def __init__(self, snapshot: Snapshot, release: Release | None) -> None:
        self.snapshot = snapshot
        self.locked = release is not None
        self._release = release

    def close(self) -> None:
        """Release the lock."""
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CommitParticipant(Protocol):
    """A partition's side of the two-phase commit. Snapshots are named by id; `confirm` is idempotent."""

    def prepared(self) -> Iterable[str]: ...
    def confirmed(self) -> Iterable[str]: ...
    def confirm(self, snapshot: str) -> None: ...
    def discard(self, snapshot: str) -> None: ...
    def drop(self, snapshot: str) -> None: ...


def apply_live(partition: CommitParticipant, live: Iterable[str], *, discard_unpublished: bool = False) -> None:
    """Apply the log to a partition: confirm the live snapshots, drop confirmed ones that are not live any more.

    Other prepared snapshots stay, because they may still be published, unless `discard_unpublished` is set. A new
    incarnation sets it when it opens the partition: older incarnations prepared them, and cannot publish any more.
    """
    wanted = set(live)
    for snapshot in sorted(wanted.intersection(partition.prepared())):
        partition.confirm(snapshot)
    for snapshot in sorted(set(partition.confirmed()) - wanted):
        partition.drop(snapshot)
    if discard_unpublished:
        for snapshot in list(partition.prepared()):
            partition.discard(snapshot)


class ModelDirectory:
    """A model directory: reads snapshots, and begins incarnations. Only an incarnation can publish."""

    def __init__(
        self,
        path: str,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        log: Log | None = None,
        pack: Callable[[Arrays], dict[str, bytes]] = to_files,
        unpack: Callable[[Mapping[str, bytes]], dict[str, npt.NDArray[Any]]] = from_files,
    ) -> None:
        self.path = path.rstrip("/")
        self.files = files or LocalFiles(self.path)
        self.clock = clock
        self.log = log or Log(self.files)
        self._new_id = new_id
        self._pack, self._unpack = pack, unpack

    def state(self) -> State:
        """Read the log and return the state that follows from it."""
        entries = self.log.entries()
        live: dict[str, str] = {}
        last, incarnation, run, model, ended_at = None, 0, "", "", None
        for entry in entries:
            if entry.kind == "epoch":
                incarnation, run = entry.epoch, entry.run
                if model not in ("", entry.model):
                    raise CorruptionError(
                        f"{self.path}/log has entries of two models, {model} and {entry.model or 'one without an id'}; "
                        "restore it from a copy"
                    )
                model = entry.model
            if entry.kind == "snapshot":
                live[entry.snapshots[0]] = entry.manifest
            if entry.kind in ("snapshot", "rollback"):
                last, ended_at = entry.snapshots[0], (*entry.snapshots[1:], None)[0]
            if entry.kind == "drop":
                for name in entry.snapshots:
                    live.pop(name, None)
        ended_at = ended_at if ended_at in live else None
        return State(len(entries), incarnation, tuple(live), last, live, run, model, ended_at)

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots that can be opened, oldest first."""
        state, found = self.state(), []
        for name in state.live:
            with contextlib.suppress(SnapshotError):  # dropped since the log was read
                found.append(self._manifest(name, state))
        return found

    def snapshot(self, name: str | None = None) -> Snapshot | None:
        """Return the named snapshot, by default the last one; None if nothing is published yet."""
        state = self.state()
        if name is None and state.last is None:
            return None
        return self._manifest(self._known(name or str(state.last), state), state)

    def resume_point(self) -> Snapshot | None:
        """Return the snapshot from which training continues.

        That is the last one; or, if a run has made its best snapshot the last one, the one at which that run ended.
        """
        return self.snapshot(self.state().ended_at)

    def read(self, name: str | None = None) -> Lease | None:
        """Return a lease on the named snapshot, by default the last one; None if nothing is published yet."""
        while True:
            state = self.state()
            if name is None and state.last is None:
                return None
            wanted = self._known(name or str(state.last), state)
            release: Release | None = None
            with contextlib.suppress(OSError):  # locking is not possible here, or the file is gone
                release = self.files.share(_manifest_name(wanted))
            try:
                lease = Lease(self._manifest(wanted, state), release)
                if wanted in self.state().live:  # a writer may have dropped it before the lock was taken
                    return lease
            except SnapshotError:
                pass
            except BaseException:
                if release is not None:
                    release()
                raise
            if release is not None:
                release()

    @contextlib.contextmanager
    def unless_dropped(self, name: str) -> Iterator[None]:
        """Turn errors about damaged or missing files into a SnapshotError if the snapshot was dropped meanwhile."""
        try:
            yield
        except CorruptionError as error:
            if name in self.state().live:
                raise
            raise SnapshotError(
                f"snapshot {name} of {self.path} was dropped while it was open here without a lock, and its files are "
                "gone or used again; nothing is damaged: model.refresh() goes to the newest snapshot"
            ) from error

    def load(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """Return the dense arrays of a snapshot. Every byte is checked."""
        with self.unless_dropped(snapshot.id):
            return self._load(snapshot)

    def _load(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        contents = {}
        for path, expected in snapshot.files.items():
            name = f"{_folder(snapshot.id)}/arrays/{path}"
            data = self.files.read(name)
            found = FileSum(len(data), checksum(data))
            if found != expected:
                raise CorruptionError(
                    f"{self.path}/{name} is damaged: it is {found}, the manifest says {expected}; restore it or roll "
                    "back"
                )
            contents[path] = data
        return self._unpack(contents)

    def write_arrays(self, name: str, arrays: Arrays) -> dict[str, FileSum]:
        """Write the dense arrays of a snapshot before it is published; return sizes and checksums for its manifest.

        The node that has the arrays calls this, so that they do not pass through the driver.
        """
        contents = self._pack(arrays)
        _write_durably(self.files, {f"{_folder(name)}/arrays/{path}": data for path, data in contents.items()})
        return {path: FileSum(len(data), checksum(data)) for path, data in contents.items()}

    def begin_incarnation(self, run: str, state: State | None = None) -> Incarnation:
        """Begin a new incarnation with one log entry; from then on, no older incarnation can publish.

        Raises StaleError if another driver has appended an entry first, or has done so since `state` was read. A model
        without an id gets one.
        """
        state = state or self.state()
        number, model = state.incarnation + 1, state.model or self._new_id()
        self.files.make(["log"])
        index = self.log.append(Entry("epoch", number, run, model=model), after=state.index)
        return Incarnation(self, run, number, index, model)

    def roll_back(self, name: str, run: str = "") -> None:
        """Make an older snapshot the last one. Newer ones stay until they are dropped.

        A run that is training now cannot publish any more.
        """
        state = self.state()
        self._known(name, state)
        self.log.append(Entry("rollback", state.incarnation, run, (name,)), after=state.index)

    def drop(self, names: Iterable[str], run: str = "", *, skip_open: bool = False) -> tuple[str, ...]:
        """Drop snapshots and return their ids. The last one cannot be dropped.

        Partitions remove their rows when they next apply the log (`apply_live`). A snapshot that somebody reads is
        never dropped: it raises LockedError, or is skipped with `skip_open`.
        """
        locks = {name: self.files.seize(_manifest_name(name)) for name in names}
        try:
            if (read := [name for name, release in locks.items() if release is None]) and not skip_open:
                raise LockedError(
                    f"{', '.join(read)} of {self.path} cannot be dropped: another process, or an open model in this "
                    "one, reads it; close it there (or call its refresh()) and drop again"
                )
            wanted = tuple(name for name in locks if name not in read)
            self._drop(wanted, run)
        finally:
            for release in locks.values():
                if release is not None:
                    release()
        return wanted

    def _drop(self, wanted: tuple[str, ...], run: str) -> None:
        while wanted:
            state = self.state()
            for name in wanted:
                if self._known(name, state) == state.last:
                    raise SnapshotError(f"snapshot {name} is the last one of {self.path}; roll back before dropping it")
            try:
                self.log.append(Entry("drop", state.incarnation, run, wanted), after=state.index)
            except StaleError:
                continue  # another writer has appended an entry meanwhile: read the log again
            break
        for name in wanted:
            self.files.remove_folder(_folder(name))

    def _known(self, name: str, state: State) -> str:
        if name not in state.live:
            known = ", ".join(state.live) or "none"
            raise SnapshotError(f"{self.path} has no snapshot {name!r}; it has {known}")
        return name

    def _manifest(self, name: str, state: State) -> Snapshot:
        with self.unless_dropped(name):
            return self._read_manifest(name, state)

    def _read_manifest(self, name: str, state: State) -> Snapshot:
        path = f"{self.path}/{_manifest_name(name)}"
        data = self.files.read(_manifest_name(name))
        fields = LOG_JSON.read(data, path)
        if checksum(data) != state.checksums[name]:
            raise CorruptionError(f"{path} is intact but not what was published as {name}; restore it from a copy")
        if fields.pop("format") > FORMAT:
            raise CorruptionError(f"{path} is of a newer format than {FORMAT}; open the model with a newer daskps")
        if fields.get("model", "") not in ("", state.model):
            raise CorruptionError(f"{path} is of model {fields['model']}, the log of {state.model}; restore its own")
        files = {path: FileSum(**item) for path, item in fields["files"].items()}
        return Snapshot(**{**fields, "draft": SnapshotMeta(**fields["draft"]), "files": files})


class Incarnation:
    """One incarnation of a run, with the right to publish until the next one begins."""

    def __init__(self, directory: ModelDirectory, run: str, number: int, index: int, model: str) -> None:
        self.directory = directory
        self.run = run
        self.number = number
        self.model = model  # id
        self._index = index

    @property
    def index(self) -> int:
        """Return the number of the last log entry that this incarnation has seen."""
        return self._index

    def name(self, batch: int) -> str:
        """Return the id of this incarnation's snapshot after `batch`. Partitions prepare under this id."""
        return f"{self.number:06d}-{batch:08d}"

    def commit(
        self,
        draft: SnapshotMeta,
        arrays: Arrays,
        prepare: Callable[[str], Mapping[str, Any]],
        confirm: Callable[[str], None],
    ) -> Snapshot:
        """Run all steps of a commit in one process: `prepare` the partitions, write, publish, `confirm`."""
        name = self.name(draft.batch)
        receipts = prepare(name)
        snapshot = self.publish(draft, arrays, receipts)
        confirm(name)
        return snapshot

    def publish(self, draft: SnapshotMeta, arrays: Arrays, receipts: Mapping[str, Any]) -> Snapshot:
        """Write the arrays of a snapshot that all partitions have prepared, then publish it."""
        return self.publish_written(draft, self.directory.write_arrays(self.name(draft.batch), arrays), receipts)

    def publish_written(
        self, draft: SnapshotMeta, files: Mapping[str, FileSum], receipts: Mapping[str, Any]
    ) -> Snapshot:
        """Publish with one log entry a snapshot that all partitions have prepared and whose arrays are written."""
        directory, name = self.directory, self.name(draft.batch)
        said = dict(receipts), dict(files), self.model
        snapshot = Snapshot(name, self.number, self.run, directory.clock(), draft, *said)
        manifest = LOG_JSON.write({"format": FORMAT, **asdict(snapshot)})
        _write_durably(directory.files, {_manifest_name(name): manifest})
        self._append(Entry("snapshot", self.number, self.run, (name,), checksum(manifest)))
        return snapshot

    def keep(self, count: int, best: str | None = None) -> tuple[str, ...]:
        """Drop all but the newest `count` snapshots and return the ids of those dropped.

        The last one and `best` always stay. A snapshot that somebody reads stays until a later call.
        """
        state = self.directory.state()
        counted = [name for name in state.live if name != best]
        older = tuple(name for name in counted[: max(0, len(counted) - count)] if name != state.last)
        return self.directory.drop(older, self.run, skip_open=True)

    def end_with(self, best: str) -> None:
        """Make the run's best snapshot the last one, and record the previous last one as the point to resume from.

        Does nothing if `best` is the last one already, or has been dropped.
        """
        state = self.directory.state()
        if state.last is not None and best in state.live and best != state.last:
            self._append(Entry("rollback", self.number, self.run, (best, state.last)))

    def collect(self) -> tuple[str, ...]:
        """Remove the snapshot folders that older incarnations have dropped or never published; return their ids."""
        directory, live = self.directory, set(self.directory.state().live)
        names = directory.files.list_folder("snapshots")
        orphans = tuple(name for name in names if name not in live and name < self.name(0))
        for name in orphans:
            directory.files.remove_folder(_folder(name))
        directory.log.sweep()
        return orphans

    def _append(self, entry: Entry) -> None:
        """Append an entry after the last one that this incarnation has seen.

        If other writers have appended "drop" entries only, try again after those. Any other entry means that this
        incarnation is stale: StaleError.
        """
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


def _folder(snapshot_id: str) -> str:
    return f"snapshots/{snapshot_id}"


def _manifest_name(snapshot_id: str) -> str:
    """Return the name of a snapshot's manifest. Readers lock this file."""
    return f"{_folder(snapshot_id)}/manifest.json"


def _write_durably(files: Files, contents: Mapping[str, bytes]) -> None:
    for name, data in contents.items():
        files.write(name, [data], len(data))
    files.sync(contents)
