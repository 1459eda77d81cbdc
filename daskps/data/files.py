"""Files of a data set, wherever fsspec reaches: listing, ranges of bytes, and decompressed streams.

In: a URL, a glob, a directory, or a list of them. Out: `DataFile` values in the global order; their bytes by range
where they are plain, and as a stream where they are compressed (gzip, zstd, by extension).
"""

from __future__ import annotations

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

Bytes = npt.NDArray[np.uint8]
Compression = Literal["gzip", "zstd"]
_EXTENSIONS: dict[str, Compression] = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file; size and version tell whether it is still the file that was indexed."""

    url: str
    size_bytes: int
    version: str  # what the file system offers: an etag, a checksum or a time of change; else empty

    @property
    def compression(self) -> Compression | None:
        """How the file is compressed, by its extension."""
        return next((kind for end, kind in _EXTENSIONS.items() if self.url.endswith(end)), None)


def _describe(fs: Any, path: str) -> DataFile:
    info = fs.info(path)
    marks = ("ETag", "etag", "mtime", "LastModified", "created")
    version = next((str(info[name]) for name in marks if info.get(name)), "")
    url = path if is_local(fs) else fs.unstrip_protocol(path)
    return DataFile(url, int(info["size"]), version)


def is_local(fs: Any) -> bool:
    """Whether paths of `fs` are paths of this machine."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return protocol in ("file", "local")


def _hidden(path: str) -> bool:
    return path.rstrip("/").rsplit("/", 1)[-1].startswith((".", "_"))


def list_files(urls: str | Sequence[str]) -> list[DataFile]:
    """The files of the data set in their global order: that of the list, and by name within a glob or a directory.

    A file that is named twice comes once, at its first place. Names that begin with . or _ do not count in directories.
    """
    found: dict[str, tuple[Any, str]] = {}
    for url in [urls] if isinstance(urls, str) else urls:
        fs, path = fsspec.core.url_to_fs(url)
        if any(sign in path for sign in "*?["):
            paths = [name for name in fs.glob(path) if not fs.isdir(name)]
        elif fs.isdir(path):
            paths = [name for name in fs.find(path) if not _hidden(name)]
        else:
            paths = [path] if fs.exists(path) else []
        if not paths:
            raise DataError(f"no file at {url!r}; give a file, a glob or a directory that fsspec can open")
        for name in sorted(paths):
            found.setdefault(fs.unstrip_protocol(name), (fs, name))
    return [_describe(*where) for where in found.values()]


def padded(size: int) -> Bytes:
    """Room for `size` bytes of text and the 64 that parsers may read past its end."""
    array = np.empty(size + 64, np.uint8)
    array[size:] = 0
    return array


def read_range(file: DataFile, start: int, stop: int) -> Bytes:
    """Bytes [start, stop) of a plain file, padded."""
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
    """The plain bytes of a file, from its start, decompressed on the way."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self.position = 0  # in the plain bytes
        fs, path = fsspec.core.url_to_fs(file.url)
        self._raw = pa.OSFile(path, "rb") if is_local(fs) else pa.PythonFile(fs.open(path, "rb"), mode="r")
        self._plain = pa.CompressedInputStream(self._raw, file.compression) if file.compression else self._raw

    def read_into(self, out: Bytes) -> int:
        """Fill `out`; fewer bytes only at the end of the file."""
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
        """Let go of the file."""
        self._plain.close()
        self._raw.close()


@contextmanager
def open_stream(file: DataFile) -> Iterator[Stream]:
    """A `Stream` that closes itself."""
    stream = Stream(file)
    try:
        yield stream
    finally:
        stream.close()
