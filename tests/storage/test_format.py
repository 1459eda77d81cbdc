"""FORMAT.md is right: its examples read a model without daskps."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

import daskps.storage
from daskps.device.pool import ComputePool
from daskps.ssd import Options, TableStore
from daskps.storage.model_directory import ModelDirectory, SnapshotMeta
from daskps.types import Field, RowLayout

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (Path(daskps.storage.__file__).parent / "FORMAT.md").read_text(), re.DOTALL
)
LAYOUT = RowLayout((Field("embedding", 3), Field("accumulator", 1)))


def test_the_examples_of_the_page_read_a_model_without_daskps(tmp_path: Path, pool: ComputePool, capsys: Any) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 2000, np.uint64)
    old, new = (np.random.default_rng(seed).random((2000, LAYOUT.width), np.float32) for seed in (1, 2))
    directory = ModelDirectory(str(tmp_path))
    incarnation = directory.begin_incarnation("run")
    options = Options(background_compaction=False)
    with TableStore.create(
        f"{tmp_path}/tables/main", LAYOUT, pool=pool, partitions=2, file_rows=64, options=options
    ) as table:

        def prepare(name: str) -> dict[str, Any]:
            table.prepare(name)
            return {"main": table.digests(name)}

        dense = {"dense/weight": np.ones(3, np.float32)}
        table.append(keys, old)
        incarnation.commit(SnapshotMeta(1, 10, 2), dense, prepare, table.confirm)
        table.append(keys[500:], new[500:])  # leaves stale rows in the segments of the first snapshot
        table.delete(keys[:100])
        incarnation.commit(SnapshotMeta(2, 20, 2), dense, prepare, table.confirm)
    snapshot_code, rows_code, _ = EXAMPLES
    assert len(rows_code.strip().split("\n")) == 5
    known: dict[str, Any] = {}
    exec(snapshot_code.replace("runs/model", str(tmp_path)), known)
    assert known["last"] == "000001-00000002"
    said = capsys.readouterr().out
    assert "'position': 20" in said
    assert "weight (3,) float32" in said
    found: dict[int, bytes] = {}
    for number in range(2):
        exec(rows_code.replace("partition-00000", f"partition-{number:05d}"), known)
        assert sum(json.loads((known["partition"] / "keys" / "zarr.json").read_text())["shape"]) > len(known["keys"])
        found |= {int(key): row.tobytes() for key, row in zip(known["keys"], known["rows"], strict=True)}
    expected = np.concatenate([old[100:500], new[500:]])
    assert found == {int(key): row.tobytes() for key, row in zip(keys[100:], expected, strict=True)}
