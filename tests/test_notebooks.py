"""The notebooks run from top to bottom, and the committed ones show their plots."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LARGEST_BYTES = 150_000


@pytest.fixture
def criteo_rows(tmp_path: Path) -> Path:
    """Generated rows in Criteo's layout: one category decides most of the clicks."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(20_000):
        category = int(rng.integers(0, 50))
        label = int(rng.random() < (0.1 if category % 2 else 0.5))
        integers = [str(value) if value < 90 else "" for value in rng.integers(0, 100, 13)]
        others = [f"{value:08x}" for value in rng.integers(0, 3000, 25)]
        lines.append("\t".join([str(label), *integers, f"{category:08x}", *others]))
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, criteo_rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITEO", str(criteo_rows))
    source = os.fspath(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": os.fspath(path.parent)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_one_shows_its_plots_and_is_small(path: Path) -> None:
    outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert path.stat().st_size < LARGEST_BYTES
