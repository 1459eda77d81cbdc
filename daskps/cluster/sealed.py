"""JSON files that notice every changed byte.

In: a dictionary of plain values. Out: bytes of indented JSON whose last field is the checksum of all others. A file is
accepted only if sealing what it says gives exactly its bytes again, so a flipped blank is noticed too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from daskps.errors import ArgumentError, CorruptionError

SEAL = "xxh3_64"


def checksum(data: bytes | memoryview) -> str:
    """XXH3 of `data`, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def seal(fields: Mapping[str, Any]) -> bytes:
    """The file's bytes."""
    try:
        body = json.dumps(fields, indent=1, allow_nan=False)
        return _with_seal(body, checksum(body.encode())).encode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"cannot be written as JSON: {error}; give plain finite numbers, strings, lists and dictionaries"
        ) from None


def _with_seal(body: str, found: str) -> str:
    """The same as JSON again with one more field, for half the time of writing all of them again."""
    fields = body[:-1].rstrip()
    return f'{fields}{"," if len(fields) > 1 else ""}\n "{SEAL}": "{found}"\n}}\n'


def unseal(data: bytes, path: str) -> dict[str, Any]:
    """The fields of the file `path` that holds `data`, or a CorruptionError that names it."""
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
