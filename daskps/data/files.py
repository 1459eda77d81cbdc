"""Files of a data set, on any file system of fsspec: listing, byte ranges, and decompressed streams.

Input: a URL, a glob, a directory, or a list of them. Output: `DataFile` values in the global order. Plain files are
read by byte range; compressed files (gzip or zstd, by extension) as a stream.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from daskps.errors import DataError

logger = logging.getLogger("daskps.data")

Bytes = npt.NDArray[np.uint8]
Compression = Literal["gzip", "zstd"]
_EXTENSIONS: dict[str, Compression] = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, slots=True)
class DataFile:
    """File of a data set. Size and version show whether it changed since it was indexed."""

    url: str
    size_bytes: int
    version: str  # what the file system offers: ETag, time of modification or creation; else empty

    @property
    def compression(self) -> Compression | None:
        """Return the compression by the file's extension, or None for a plain file."""
        return next((kind for end, kind in _EXTENSIONS.items() if self.url.lower().endswith(end)), None)


def _describe(fs: Any, path: str) -> DataFile:
    info = fs.info(path)
    marks = ("ETag", "etag", "mtime", "LastModified", "created")
    version = next((str(info[name]) for name in marks if info.get(name)), "")
    url = path if is_local(fs) else fs.unstrip_protocol(path)
    return DataFile(url, int(info["size"]), version)


def is_local(fs: Any) -> bool:
    """Return True if `fs` is the local file system of this machine."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return protocol in ("file", "local")


def _hidden(parts: Sequence[str], named: Sequence[str] = ()) -> bool:
    """Return True if a path has a part that begins with . or _: internal files of Jupyter, Spark and file systems.

    `named` are the parts of a glob. If one of them begins with . or _, paths with that character are wanted.
    """
    asked = {part[0] for part in named if part[:1] in (".", "_")}
    return any(part[:1] in (".", "_") and part[0] not in asked for part in parts)


def _matches(fs: Any, pattern: str) -> list[str]:
    """Return the files that match a glob, without hidden files, unless the glob names hidden files."""
    parts = pattern.split("/")
    fixed = next(number for number, part in enumerate(parts) if any(sign in part for sign in "*?["))
    found = [name for name in fs.glob(pattern) if not fs.isdir(name)]
    return [name for name in found if not _hidden(name.split("/")[fixed:], parts[fixed:])]


def list_files(urls: str | Sequence[str]) -> list[DataFile]:
    """Return the files of the data set in their global order: the order of the list, and sorted by name within a glob
    or a directory.

    A file that is named twice is read once, at its first place. Files and folders that begin with . or _ are ignored
    below a directory and below the fixed part of a glob. A path that exists is never treated as a glob, even if it
    contains *, ? or [.
    """
    found: dict[str, tuple[Any, str]] = {}
    for url in [urls] if isinstance(urls, str) else urls:
        fs, path = fsspec.core.url_to_fs(url)
        if any(sign in path for sign in "*?[") and not fs.exists(path):
            paths = _matches(fs, path)
        elif fs.isdir(path):
            below = len(path.rstrip("/")) + 1
            paths = [name for name in fs.find(path) if not _hidden(name[below:].split("/"))]
        else:
            paths = [path] if fs.exists(path) else []
        if not paths:
            raise DataError(f"no file at {url!r}; give a file, a glob or a directory that fsspec can open")
        for name in sorted(paths):
            if fs.unstrip_protocol(name) in found:
                logger.warning("%s is named twice in the data; it is read once, at its first place", name)
            found.setdefault(fs.unstrip_protocol(name), (fs, name))
    return [_describe(*where) for where in found.values()]


PADDING = 64  # zero bytes behind a text, because parsers may read past its end


def padded(size: int) -> Bytes:
    """Return an array for `size` bytes of text, with padding."""
    array = np.empty(size + PADDING, np.uint8)
    array[size:] = 0
    return array


def read_range(file: DataFile, start: int, stop: int) -> Bytes:
    """Return bytes [start, stop) of a plain file, with padding. Raise DataError if the file is shorter than indexed."""
    out = padded(stop - start)
    fs, path = fsspec.core.url_to_fs(file.url)
    if not is_local(fs):
        got = fs.cat_file(path, start=start, end=stop)
        out[: len(got)] = np.frombuffer(got, np.uint8)
        filled = len(got)
    else:
        filled = 0
        descriptor = os.open(path, os.O_RDONLY)
        try:
            view = out.data
            while filled < stop - start:
                count = os.preadv(descriptor, [view[filled : stop - start]], start + filled)
                if not count:
                    break
                filled += count
        finally:
            os.close(descriptor)
    if filled != stop - start:
        raise DataError(
            f"{file.url} ends at byte {start + filled}, but was indexed with {file.size_bytes} bytes: it changed; "
            "build the index again"
        )
    return out


class Stream:
    """Stream of a file's plain bytes from its start, decompressed if needed."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self.position = 0  # plain bytes read so far
        fs, path = fsspec.core.url_to_fs(file.url)
        self._raw = pa.OSFile(path, "rb") if is_local(fs) else pa.PythonFile(fs.open(path, "rb"), mode="r")
        self._plain = pa.CompressedInputStream(self._raw, file.compression) if file.compression else self._raw

    def read_into(self, out: Bytes) -> int:
        """Read into `out` and return the number of bytes: less than its size only at the end of the file."""
        view, filled = out.data, 0
        while filled < len(out):
            try:
                count = self._plain.readinto(view[filled:])
            except (OSError, pa.ArrowInvalid) as error:
                raise DataError(
                    f"{self.file.url}: the {self.file.compression or 'plain'} file cannot be read past byte "
                    f"{self.position + filled} of its text (byte {self._raw.tell()} of {self.file.size_bytes} in the "
                    f"file): {error}. It is truncated or damaged; fetch it again"
                ) from error
            if not count:
                break
            filled += count
        self.position += filled
        return filled

    def close(self) -> None:
        """Close the file."""
        self._plain.close()
        self._raw.close()


@contextmanager
def open_stream(file: DataFile) -> Iterator[Stream]:
    """Open a `Stream` as a context manager, which closes it."""
    stream = Stream(file)
    try:
        yield stream
    finally:
        stream.close()
