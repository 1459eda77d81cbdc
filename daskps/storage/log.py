"""The commit log of a model: numbered JSON entries with checksums. The first writer of a number wins, others fail.

Input: entries to append. Output: the list of all entries, which together give the state of the model
(`ModelDirectory.state`). A changed byte is detected when a file is read, and the error names the file.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import xxhash

from daskps.errors import ArgumentError, CorruptionError, StaleError
from daskps.storage.files import Files

SEAL = "xxh3_64"  # the JSON field that holds a file's own checksum


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3 (64 bits) of `data` as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def seal(fields: Mapping[str, Any]) -> bytes:
    """Return the fields as the bytes of a JSON file, with a checksum of the other fields as the last one."""
    try:
        body = json.dumps(fields, indent=1, allow_nan=False)
        return _with_seal(body, checksum(body.encode())).encode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"cannot be written as JSON: {error}; give plain finite numbers, strings, lists and dictionaries"
        ) from None


def _with_seal(body: str, found: str) -> str:
    """Add the checksum to the JSON text as one more field. Encoding all fields again would take twice as long."""
    fields = body[:-1].rstrip()
    return f'{fields}{"," if len(fields) > 1 else ""}\n "{SEAL}": "{found}"\n}}\n'


def unseal(data: bytes, path: str) -> dict[str, Any]:
    """Return the fields of a file with these bytes. Raises CorruptionError, which names `path`, if it is damaged."""
    try:
        fields = json.loads(data)
        found = fields.pop(SEAL)
        intact = seal(fields) == data
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CorruptionError(
            f"{path} is damaged or cut short ({len(data)} bytes are no sealed JSON); restore it from a copy"
        ) from None
    if not intact:
        raise CorruptionError(f"{path} is damaged: its checksum is not {found}; restore it from a copy")
    return fields  # type: ignore[no-any-return]


FORMAT = 2  # version of log entries and manifests; since 2, entries that begin an incarnation have the model's id


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log.

    kind "epoch": an incarnation begins; `snapshots` is empty. "snapshot": `snapshots` has the one that is published.
    "rollback": it has the one that is the last again; if a run ended with its best snapshot, a second id is the
    snapshot from which training would continue. "drop": it has those that are dropped.
    """

    kind: Literal["epoch", "snapshot", "rollback", "drop"]
    epoch: int  # number of the writer's incarnation (fencing token); for rollback and drop the newest one so far
    run: str
    snapshots: tuple[str, ...] = ()
    manifest: str = ""  # checksum of the published snapshot's manifest.json
    model: str = ""  # id of the model, in entries of kind "epoch"; format 1 has none


class Log:
    """The log of one model, in the folder `log` of its directory. `token` returns a new random name."""

    def __init__(self, files: Files, folder: str, token: Callable[[], str] = lambda: uuid.uuid4().hex) -> None:
        self._files = files
        self._folder = folder
        self.token = token
        self._known: dict[int, Entry] = {}  # an entry never changes, so each is read once

    def entries(self) -> list[Entry]:
        """Return all entries; item i is entry number i + 1. Raises CorruptionError if one is missing."""
        indexes = sorted(int(name[:-5]) for name in self._files.list(self._folder) if _is_entry(name))
        for place, index in enumerate(indexes, start=1):
            if index != place:
                raise CorruptionError(
                    f"{self._path(place)} is missing although {self._path(indexes[-1])} exists; restore it from a copy"
                )
        return [self._read(index) for index in indexes]

    def append(self, entry: Entry, after: int) -> int:
        """Write `entry` as number ``after + 1`` and return that number. Raises StaleError if the number is taken."""
        index, temporary = after + 1, f"{self._folder}/.{self.token()}.tmp"
        self._files.make_folder(self._folder)
        self._files.write(temporary, seal({"format": FORMAT, "index": index, **asdict(entry)}))
        self._files.sync(temporary)
        try:
            self._files.link(temporary, self._path(index))
        except FileExistsError:
            raise StaleError(
                f"{self._path(index)} was taken by another writer: {self._read(index)}; this one ({entry}) is too late "
                "and must open the model again"
            ) from None
        except FileNotFoundError:  # a newer incarnation has called `sweep`
            raise StaleError(f"{temporary} was removed by another writer; this one ({entry}) is too late") from None
        finally:
            self._files.remove(temporary)
        self._files.sync(self._folder)
        return index

    def sweep(self) -> None:
        """Remove temporary files, which writers leave behind when they are killed."""
        for name in self._files.list(self._folder):
            if name.endswith(".tmp"):
                self._files.remove(f"{self._folder}/{name}")

    def _path(self, index: int) -> str:
        return f"{self._folder}/{index:08d}.json"

    def _read(self, index: int) -> Entry:
        if index not in self._known:
            self._known[index] = self._load(index)
        return self._known[index]

    def _load(self, index: int) -> Entry:
        path = self._path(index)
        fields = unseal(self._files.read(path), path)
        if fields.pop("format") > FORMAT:
            raise CorruptionError(f"{path} is of a newer format than {FORMAT}; open the model with a newer daskps")
        if fields.pop("index") != index:
            raise CorruptionError(f"{path} says it is another entry: {fields}; restore it from a copy")
        return Entry(**{**fields, "snapshots": tuple(fields["snapshots"])})


def _is_entry(name: str) -> bool:
    return name.endswith(".json") and name[:-5].isdigit()
