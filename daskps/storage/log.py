"""The commit log of a model: numbered JSON entries with checksums. The first writer of a number wins, others fail.

Input: entries to append. Output: the list of all entries, which together give the state of the model
(`ModelDirectory.state`). A changed byte is detected when a file is read, and the error names the file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from daskps.errors import CorruptionError, StaleError
from daskps.storage.files import TEMPORARY, Files
from daskps.storage.sealed import LOG_JSON

FORMAT = 2  # version of log entries and manifests; since 2, entries that begin an incarnation have the model's id


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log. The names of its fields are those in the file, where an incarnation is called `epoch`.

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

    def __str__(self) -> str:
        kind = "start of an incarnation" if self.kind == "epoch" else f"{self.kind} of {', '.join(self.snapshots)}"
        return f"{kind} by run {self.run!r}, incarnation {self.epoch}"


class Log:
    """The log of one model, in the folder `log` of its directory."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[int, Entry] = {}  # an entry never changes, so each is read once

    def entries(self) -> list[Entry]:
        """Return all entries; item i is entry number i + 1. Raises CorruptionError if one is missing."""
        indexes = sorted(int(name[:-5]) for name in self._files.list_folder("log") if _is_entry(name))
        for place, index in enumerate(indexes, start=1):
            if index != place:
                raise CorruptionError(
                    f"{self._path(place)} is missing although {self._path(indexes[-1])} exists; restore it from a copy"
                )
        return [self._read(index) for index in indexes]

    def append(self, entry: Entry, after: int) -> int:
        """Write `entry` as number ``after + 1`` and return that number. Raises StaleError if the number is taken."""
        index = after + 1
        try:
            data = LOG_JSON.write({"format": FORMAT, "index": index, **asdict(entry)})
            self._files.create_exclusive(_name(index), data)
        except FileExistsError:
            raise StaleError(
                f"{self._path(index)} was taken by another writer: {self._read(index)}; this one ({entry}) is too late "
                "and must open the model again"
            ) from None
        except FileNotFoundError:  # a newer incarnation has called `sweep`
            raise StaleError(
                f"the temporary file of {self._path(index)} was removed by another writer; this one ({entry}) is too "
                "late"
            ) from None
        return index

    def sweep(self) -> None:
        """Remove temporary files, which writers leave behind when they are killed."""
        for name in self._files.list_folder("log"):
            if name.endswith(TEMPORARY):
                self._files.remove(f"log/{name}")

    def _path(self, index: int) -> str:
        return f"{self._files.url}/{_name(index)}"

    def _read(self, index: int) -> Entry:
        if index not in self._known:
            self._known[index] = self._load(index)
        return self._known[index]

    def _load(self, index: int) -> Entry:
        path = self._path(index)
        fields = LOG_JSON.read(self._files.read(_name(index)), path)
        if fields.pop("format") > FORMAT:
            raise CorruptionError(f"{path} is of a newer format than {FORMAT}; open the model with a newer daskps")
        if fields.pop("index") != index:
            raise CorruptionError(f"{path} says it is another entry: {fields}; restore it from a copy")
        return Entry(**{**fields, "snapshots": tuple(fields["snapshots"])})


def _name(index: int) -> str:
    return f"log/{index:08d}.json"


def _is_entry(name: str) -> bool:
    return name.endswith(".json") and name[:-5].isdigit()
