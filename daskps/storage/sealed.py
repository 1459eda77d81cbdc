"""JSON files that carry their own checksum: log entries, manifests, Zarr metadata.

Input: a document of plain values. Output: the bytes of its file, one field of which is the checksum of the text without
that field. A file counts only if writing what it says gives the same bytes again, so every changed byte is detected.

    >>> data = LOG_JSON.write({"index": 1})
    >>> LOG_JSON.read(data, "log/00000001.json")
    {'index': 1}
    >>> LOG_JSON.read(data.replace(b"1", b"2"), "log/00000001.json")
    Traceback (most recent call last):
    daskps.errors.CorruptionError: log/00000001.json is damaged: ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from daskps.errors import ArgumentError, CorruptionError


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3 (64 bits) of `data` as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a JSON document: sorted keys, no spaces, a newline at the end."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _indented(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class SealedJson:
    """A kind of JSON file with its own checksum in it."""

    field: str  # name of the field with the checksum
    checksum: Callable[[bytes], str | int]  # of the text without that field
    encode: Callable[[Mapping[str, Any]], bytes] = canonical
    end: bytes = b""  # after the text, not part of the checksum
    inside: str = ""  # name of the object that has the field; by default the document itself

    def write(self, document: Mapping[str, Any]) -> bytes:
        """Return the bytes of a file with this document and its checksum."""
        try:
            found = {self.field: self.checksum(self.encode(document))}
            sealed = {self.inside: {**document[self.inside], **found}} if self.inside else found
            return self.encode({**document, **sealed}) + self.end
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"cannot be written as JSON: {error}; give plain finite numbers, strings, lists and dictionaries"
            ) from None

    def read(self, data: bytes, path: str) -> dict[str, Any]:
        """Return the document of a file, without the checksum. Raises CorruptionError, which names `path`."""
        try:
            document: dict[str, Any] = json.loads(data)
            found = (document[self.inside] if self.inside else document).pop(self.field)
            intact = self.write(document) == data
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise CorruptionError(
                f"{path} is damaged or cut short ({len(data)} bytes are no JSON with a checksum); restore it from a "
                "copy"
            ) from None
        if not intact:
            raise CorruptionError(f"{path} is damaged: its checksum is not {found}; restore it from a copy")
        return document


# Log entries and manifests of snapshots: indented, for people.
LOG_JSON = SealedJson("xxh3_64", checksum, _indented, end=b"\n")
