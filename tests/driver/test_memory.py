"""Promise 8: what a run really takes stays below its budgets, from a process of its own that trains real batches.

Peaks are of the whole process above what it had before the run. One short run by default; all formats and sizes with
`python -m pytest tests/driver/test_memory.py -m slow -s`.
"""

import json
from pathlib import Path

import pytest

from daskps.data.synthetic import Synthetic
from tests.data.criteo_rows import criteo_text
from tests.driver.helpers import Settings, merged
from tests.processes import run_module

# Not in the budgets, and the same for all jobs: 16 MB of histograms for the AUC, Dask's tasks and messages, stacks of
# threads, holes in the C library's heap.
ALLOWED_BYTES = 26_000_000
EXAMPLES, SLOTS = 60_000, 10
BASE: Settings = {
    "tables": {"main": {"dimension": 8, "optimizer": {"kind": "adagrad", "learning_rate": 0.05}}},
    "model": {"hidden": [64, 32]},
    "train": {"minibatch_examples": 500},
    "cluster": {"cores": 2},
}
WARM: Settings = {"budget": {"memory_bytes": "8MB", "hbm_bytes": "12MB"}, "train": {"minibatch_examples": 100}}


def data(kind: str, path: Path, examples: int) -> Settings:
    """Data of one kind in `path`, as a job names it."""
    if kind == "synthetic":
        described = {"examples": examples, "slots": SLOTS, "keys_per_bag": 3, "keys_per_slot": 50_000}
        return {"data": {"format": "synthetic", "synthetic": described}}
    file = path / f"{kind}{examples}"
    if kind == "criteo":
        file.write_bytes(criteo_text(examples))
        return {"data": {"format": "criteo", "paths": [str(file)]}}
    made = Synthetic(examples=examples, slots=SLOTS, keys_per_bag=3, keys_per_slot=50_000)
    made.write_parquet(file, row_group_rows=2_000)
    slots = [{"name": f"slot{slot}", "kind": "multi", "raw": True} for slot in range(SLOTS)]
    return {"data": {"format": "parquet", "paths": [str(file)]}, "slots": slots}


@pytest.mark.parametrize(
    ("kind", "batches", "memory_bytes", "hbm_bytes"),
    [
        ("synthetic", 8, 16_000_000, 16_000_000),
        *(
            pytest.param(kind, 10_000, memory, hbm, marks=pytest.mark.slow)
            for kind in ("synthetic", "parquet", "criteo")
            for memory, hbm in ((16_000_000, 16_000_000), (50_000_000, 60_000_000), (100_000_000, 400_000_000))
        ),
    ],
)
def test_a_run_takes_no_more_than_its_budgets(
    tmp_path: Path, kind: str, batches: int, memory_bytes: int, hbm_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = {"budget": {"memory_bytes": memory_bytes, "hbm_bytes": hbm_bytes}, "train": {"batch_examples": EXAMPLES}}
    job = merged(BASE, data(kind, tmp_path, EXAMPLES), budget, {"out": str(tmp_path / "model")})
    warm = merged(BASE, data(kind, tmp_path, 1_000), WARM, {"out": str(tmp_path / "warm")})
    found = json.loads(run_module("tests.driver.memory_peak", json.dumps(job), json.dumps(warm), batches))
    with capsys.disabled():
        print(
            f"\n{kind}: budgets {memory_bytes / 1e6:.0f} + {hbm_bytes / 1e6:.0f} MB, peak {found['peak'] / 1e6:.1f} MB"
        )
    mapped = sum(file.stat().st_size for file in tmp_path.glob("parquet*"))  # pages of files are the system's
    assert found["most_steps"] > 1
    assert found["peak"] <= memory_bytes + hbm_bytes + ALLOWED_BYTES + mapped
