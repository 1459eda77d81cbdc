"""JSON with its own checksum: the bytes of each kind are fixed, and no change of a byte goes unnoticed."""

import doctest

import pytest

from daskps.errors import ArgumentError, CorruptionError
from daskps.ssd.format import MANIFEST_JSON, ZARR_JSON
from daskps.storage import sealed
from daskps.storage.sealed import LOG_JSON, SealedJson

DOCUMENT = {"index": 1, "attributes": {"partitions": 8}, "empty": []}
# What daskps has written since these formats exist.
BYTES = {
    "log": b'{\n "index": 1,\n "attributes": {\n  "partitions": 8\n },\n "empty": [],\n'
    b' "xxh3_64": "3716df4ab64dba60"\n}\n',
    "manifest": b'{"attributes":{"partitions":8},"crc32c":3505926632,"empty":[],"index":1}\n',
    "zarr": b'{"attributes":{"crc32c":3505926632,"partitions":8},"empty":[],"index":1}\n',
}
KINDS = pytest.mark.parametrize(("name", "kind"), [("log", LOG_JSON), ("manifest", MANIFEST_JSON), ("zarr", ZARR_JSON)])


@KINDS
def test_the_bytes_of_a_document_are_as_ever_and_read_back(name: str, kind: SealedJson) -> None:
    assert kind.write(DOCUMENT) == BYTES[name]
    assert kind.read(BYTES[name], "file") == DOCUMENT


@KINDS
def test_every_flipped_bit_and_every_cut_is_noticed(name: str, kind: SealedJson) -> None:
    data = BYTES[name]
    changed = [data[:place] for place in range(len(data))]
    changed += [
        data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
        for place in range(len(data))
        for bit in range(8)
    ]
    for bad in [*changed, data + b" ", b"[]", b"null"]:
        with pytest.raises(CorruptionError, match=r"^file is damaged"):
            kind.read(bad, "file")


@KINDS
def test_values_that_json_has_not_are_refused(name: str, kind: SealedJson) -> None:
    for value in (float("nan"), {1, 2}):
        with pytest.raises(ArgumentError, match="plain finite numbers"):
            kind.write({**DOCUMENT, "value": value})


def test_the_example_of_the_module() -> None:
    found = doctest.testmod(sealed, optionflags=doctest.ELLIPSIS)
    assert found.attempted == 3
    assert found.failed == 0
