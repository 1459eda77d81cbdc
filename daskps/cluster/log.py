"""The model's log: numbered entries, each created once by whoever is first; the order of everything that ever counted.

In: entries. Out: entries in order, or StaleError for a writer that another one has overtaken. Entry n is written to a
temporary file, synced, then linked to the name `<n>.json`, and the folder is synced: a name appears with all its bytes
or not at all, and two writers cannot both take it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from daskps.cluster.files import Files
from daskps.cluster.sealed import seal, unseal
from daskps.errors import CorruptionError, StaleError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One event. `snapshots` names the one published or gone back to, or those dropped; an epoch names none."""

    kind: Literal["epoch", "snapshot", "rollback", "drop"]
    epoch: int  # of the writer; for rollback and drop the newest epoch there was
    run: str
    snapshots: tuple[str, ...] = ()
    manifest: str = ""  # checksum of the published snapshot's manifest.json


class Log:
    """The folder `model/log`."""

    def __init__(self, files: Files, folder: str, token: Callable[[], str] = lambda: uuid.uuid4().hex) -> None:
        self._files = files
        self._folder = folder
        self._token = token
        self._known: dict[int, Entry] = {}  # an entry never changes, so each is read once

    def entries(self) -> list[Entry]:
        """All entries; entry n of the log is item n - 1."""
        indexes = sorted(int(name[:-5]) for name in self._files.list(self._folder) if _is_entry(name))
        for place, index in enumerate(indexes, start=1):
            if index != place:
                raise CorruptionError(
                    f"{self._path(place)} is missing although {self._path(indexes[-1])} exists; restore it from a copy"
                )
        return [self._read(index) for index in indexes]

    def append(self, entry: Entry, after: int) -> int:
        """Make `entry` number ``after + 1`` and return that; StaleError if the number is taken."""
        index, temporary = after + 1, f"{self._folder}/.{self._token()}.tmp"
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
        except FileNotFoundError:  # a newer epoch has swept
            raise StaleError(f"{temporary} was removed by another writer; this one ({entry}) is too late") from None
        finally:
            self._files.remove(temporary)
        self._files.sync(self._folder)
        return index

    def sweep(self) -> None:
        """Remove temporary files of writers that died."""
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
