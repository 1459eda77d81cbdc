"""The record of a model's batches: what a reader sees after many incarnations, and after a kill at any byte."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import daskps.storage
from daskps.errors import CorruptionError, DataError
from daskps.storage.record import RecordWriter, encode, last_run, read_record


def batch_line(incarnation: int, batch: int) -> str:
    return encode({"kind": "batch", "batch": batch, "incarnation": incarnation, "run": f"run{incarnation}"})


def writer(folder: Path, incarnation: int, first: int) -> RecordWriter:
    return RecordWriter(
        str(folder), incarnation=incarnation, first_batch=first, header={"run": f"run{incarnation}", "settings": {}}
    )


def seen(folder: Path, **options: Any) -> list[tuple[int, int]]:
    return [(line["incarnation"], line["batch"]) for line in read_record(folder, "batch", **options)]


def plainly_read(folder: Path) -> list[tuple[int, int]]:
    """What the example of FORMAT.md finds."""
    text = (Path(daskps.storage.__file__).parent / "FORMAT.md").read_text()
    code = text[text.index("batches = {}") : text.index("print([(batch")]
    known: dict[str, Any] = {"model": folder, "json": json}
    exec(code, known)
    return [(line["incarnation"], batch) for batch, line in known["batches"].items()]


lives = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 80)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(lives=lives, every=st.integers(1, 5))
def test_the_last_incarnation_counts_whatever_the_others_left(lives: list[tuple[int, int, int]], every: int) -> None:
    """Each life goes on from the last snapshot, has some batches, and dies somewhere in its last line."""
    with tempfile.TemporaryDirectory() as name:
        folder, snapshot = Path(name), -1
        expected: dict[int, int] = {}
        for incarnation, (batches, interval, torn) in enumerate(lives, start=1):
            begun = snapshot
            record = writer(folder, incarnation, begun + 1)
            for batch in range(begun + 1, begun + 1 + batches):
                record.write([batch_line(incarnation, batch)], batch)
                expected = {number: life for number, life in expected.items() if number < batch} | {batch: incarnation}
                if interval and (batch + 1) % interval == 0:
                    record.end_file()
                    snapshot = batch
            record.close()
            last = folder / "record" / max(path.name for path in (folder / "record").iterdir())
            if torn and snapshot < begun + batches:  # of no snapshot: its writer may have died at it
                text = last.read_bytes()
                cut = text.rindex(b"\n", 0, -1) + 1 + torn % max(1, len(text) - text.rindex(b"\n", 0, -1) - 1)
                last.write_bytes(text[:cut])
                expected.pop(begun + batches)
        found = seen(folder)
        assert found == plainly_read(folder)
        # Batches that a later life does not have are gone with its first one, whether or not it came as far.
        assert found == [(life, batch) for batch, life in sorted(expected.items())]
        assert seen(folder, every=every) == [(life, batch) for life, batch in found if batch % every == 0]
        assert [one for one in found if one[0] == len(lives)] == seen(folder, run=f"run{len(lives)}")


def test_files_are_closed_at_snapshots_and_never_touched_again(tmp_path: Path) -> None:
    record = writer(tmp_path, 3, 7)
    record.end_file()
    assert not (tmp_path / "record").exists()  # nothing happened: no file
    record.write([batch_line(3, 7), batch_line(3, 8)], 8)
    record.end_file()
    first = tmp_path / "record" / "000003-00000007.jsonl"
    before = first.read_bytes()
    validation = encode({"kind": "validation", "batch": 8, "metrics": {"auc": None}})
    record.write([validation], 8)
    record.end_file()  # of the same batch: the file that began with the validation goes on
    record.write([batch_line(3, 9)], 9)
    record.close()
    assert first.read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "record").iterdir()) == [first.name, "000003-00000009.jsonl"]
    assert [line["kind"] for line in read_record(tmp_path)] == ["run", "batch", "batch", "run", "validation", "batch"]
    assert [line["batch"] for line in read_record(tmp_path, "validation")] == [8]


def test_a_validation_that_is_repeated_by_a_later_incarnation_counts_once(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        record = writer(tmp_path, incarnation, 0 if incarnation == 1 else 1)
        if incarnation == 1:
            record.write([batch_line(1, 0)], 0)
            record.end_file()
        record.write([encode({"kind": "validation", "batch": 0, "incarnation": incarnation})], 0)
        record.close()
    assert [line["incarnation"] for line in read_record(tmp_path, "validation")] == [2]


def test_damage_in_the_middle_is_told_with_file_and_line(tmp_path: Path) -> None:
    record = writer(tmp_path, 1, 0)
    record.write([batch_line(1, number) for number in range(3)], 2)
    record.close()
    path = tmp_path / "record" / "000001-00000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"batch":1,', b'"batch":1#'))
    with pytest.raises(CorruptionError, match=r"000001-00000000.jsonl is damaged in line 3"):
        seen(tmp_path)


def test_the_last_run_is_known_by_its_settings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no record of a run"):
        last_run(tmp_path)
    for incarnation in (1, 2):
        record = writer(tmp_path, incarnation, incarnation)
        record.write([batch_line(incarnation, incarnation)], incarnation)
        record.close()
    found = last_run(tmp_path)
    assert found is not None
    assert found["run"] == "run2"
    (tmp_path / "record" / "000003-00000003.jsonl").write_bytes(json.dumps({"run": "run3"}).encode()[:5])  # torn
    assert last_run(tmp_path) == found
