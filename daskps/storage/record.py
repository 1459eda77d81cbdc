"""The record of a model's batches: JSON lines in files below `record/` of the model directory (FORMAT.md).

Input: lines, which node 0 of a run gets from the driver. Output: files, one or more per incarnation, closed at each
snapshot; for readers, the valid lines in the order of batches.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from daskps.errors import CorruptionError, DataError, StoreError
from daskps.storage.files import LocalFiles, fsync_path

FOLDER = "record"
FORMAT = 1  # version of the lines
NAME = re.compile(r"(\d{6,})-(\d{8,})\.jsonl")  # incarnation and first batch
BATCH = b'{"kind":"batch","batch":'  # the first bytes of a line about a batch: such a line can be skipped unparsed


def encode(line: dict[str, Any]) -> str:
    """Return a line of the record as text. The caller has replaced NaN and infinity by None: JSON has neither."""
    return json.dumps(line, separators=(",", ":"), allow_nan=False)


class RecordWriter:
    """The writer of one incarnation's files. A file is created for its first line and closed at the next snapshot."""

    def __init__(self, directory: str, *, incarnation: int, first_batch: int, header: dict[str, Any]) -> None:
        self._folder = os.path.join(directory, FOLDER)
        self._incarnation, self._next, self._header = incarnation, first_batch, header
        self._file: BinaryIO | None = None
        self._first = first_batch  # first batch of the open file

    def write(self, lines: Sequence[str], last_batch: int) -> None:
        """Append lines about batches up to `last_batch`."""
        if not lines:
            return
        try:
            if self._file is None:
                self._file, lines = self._begin(), [self._head(), *lines]
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
        except OSError as error:
            raise StoreError(
                f"the record of the run cannot be written below {self._folder}: {error}; make room or give the right "
                "to write there, then go on with --resume"
            ) from error
        self._next = max(self._next, last_batch + 1)

    def end_file(self) -> None:
        """Make the lines durable and close the file. Called at a snapshot: later lines go to the next file."""
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        if self._next > self._first:  # otherwise the next file would have the same name
            self.close()

    def close(self) -> None:
        """Close the open file, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> BinaryIO:
        LocalFiles(self._folder).make()
        self._first = self._next
        path = os.path.join(self._folder, f"{self._incarnation:06d}-{self._first:08d}.jsonl")
        file = open(path, "xb")  # noqa: SIM115  (it stays open until the next snapshot)
        fsync_path(self._folder)
        return file

    def _head(self) -> str:
        head = {"kind": "run", "batch": self._first, "format": FORMAT, "incarnation": self._incarnation}
        return encode(head | self._header)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the record. From batch `stop` on, a later incarnation replaces its lines."""

    path: Path
    incarnation: int
    first: int
    stop: float = float("inf")


def _files(directory: str | os.PathLike[str]) -> list[_File]:
    """Return the files that may have valid lines, in the order of their batches."""
    folder = Path(directory) / FOLDER
    if not folder.is_dir():
        raise DataError(
            f"{directory} has no record of a run (no folder {folder}): it is no model directory, or was trained before "
            "daskps kept a record in files; train it again, or go on with --resume, to have one"
        )
    names = ((path, NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [_File(path, int(match[1]), int(match[2])) for path, match in names if match]
    begins: dict[int, int] = {}
    for file in found:
        begins[file.incarnation] = min(begins.get(file.incarnation, file.first), file.first)
    counting = []
    for file in sorted(found, key=lambda file: (file.incarnation, file.first)):
        stop = min((first for later, first in begins.items() if later > file.incarnation), default=float("inf"))
        if file.first < stop:
            counting.append(_File(file.path, file.incarnation, file.first, stop))
    return counting


def read_record(
    directory: str | os.PathLike[str], kind: str | None = None, *, run: str | None = None, every: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a model's record, in the order of batches.

    For each batch the last incarnation is valid: one that resumed after batch b replaces all lines of earlier ones
    about batches after b. An incomplete last line, which a killed process leaves, is skipped. `kind` is "run" (the
    first line of a file, with the job's settings), "batch" or "validation"; `run` selects one run. With `every`, only
    batches whose number is a multiple of it are yielded; the others are read but not parsed.

    >>> curve = [(line["position"], line["metrics"]["auc"]) for line in read_record(demo_model, "batch")]
    >>> curve[-1][0]
    4096
    """
    for file in _files(directory):
        yield from _lines(file, kind, run, every)


def _lines(file: _File, kind: str | None, run: str | None, every: int) -> Iterator[dict[str, Any]]:
    with open(file.path, "rb") as opened:
        for number, raw in enumerate(opened):
            if not raw.endswith(b"\n"):
                return  # incomplete: its writer was killed, or is writing it now
            if number and raw.startswith(BATCH):
                if kind not in (None, "batch"):
                    continue
                if every > 1 and int(raw[len(BATCH) : raw.index(b",", len(BATCH))]) % every:
                    continue
            try:
                line = json.loads(raw)
            except ValueError as error:
                raise CorruptionError(
                    f"{file.path} is damaged in line {number + 1}: {error}; restore it from a copy, or remove it: it "
                    "is no part of the model"
                ) from None
            if number == 0 and run is not None and line["run"] != run:
                return
            if line["batch"] < file.stop and kind in (None, line["kind"]):
                yield line


def last_run(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the first line of the last file, with the name and settings of the run that trained last; None if none.

    A file whose first line is incomplete has no other lines, so the file before it is used.
    """
    for file in reversed(_files(directory)):
        with open(file.path, "rb") as opened:
            raw = opened.readline()
        if raw.endswith(b"\n"):
            return dict(json.loads(raw))
    return None
