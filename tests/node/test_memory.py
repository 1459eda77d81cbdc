"""The memory of a node: its buffer pool has its own limit, and its projected terms are what an open node divides."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import daskps
from daskps.budget import PURPOSES, capacity_error, terms_text, total_bytes
from daskps.config import Job, make_job
from daskps.node.begin import begin
from daskps.node.memory import projected_terms
from daskps.node.node import OpenNode


def job_of(path: Path, hbm_bytes: int, **changes: Any) -> Job:
    return make_job(
        {
            "out": str(path),
            "data": {"format": "synthetic", "synthetic": {"examples": 4_096, "slots": 4, "keys_per_slot": 1_000}},
            "train": {"minibatch_examples": 512},
            "budget": {"memory_bytes": "8MB", "hbm_bytes": hbm_bytes},
            "cluster": {"cores": 2, "devices": 2},
            **changes,
        }
    )


def open_node(stack: ExitStack, job: Job) -> OpenNode:
    node = OpenNode("run", 0, 1, job, begin(job, "run"))
    stack.callback(node.close)
    return node


def test_two_nodes_in_one_process_keep_their_own_limits(tmp_path: Path) -> None:
    with ExitStack() as stack:
        limits = (16_000_000, 32_000_000)
        small, large = (open_node(stack, job_of(tmp_path / str(size), size)) for size in limits)
        for node, limit in ((small, limits[0]), (large, limits[1])):
            assert node.pool.buffers.total_bytes == limit
            loans = [device.empty(8_000_000, np.uint8) for device in node.devices for _ in range(2)]  # 32 MB in use
            del loans
            kept = node.pool.buffers.free_bytes
            assert limit - 8_000_000 < kept <= limit
        small.close()
        assert large.pool.buffers.total_bytes == limits[1]  # the end of one node changes nothing for the other
        assert small.pool.buffers.free_bytes == 0


def test_the_projection_of_a_job_is_the_division_that_an_open_node_makes(tmp_path: Path) -> None:
    job = job_of(tmp_path / "model", 16_000_000)
    size = {"examples": 4_096, "keys": 16_384, "distinct_keys": 3_000}
    terms = projected_terms(job, nodes=1, rows={"main": 0}, **size)
    assert {term.name for term in terms} <= set(PURPOSES)
    with ExitStack() as stack:
        node = open_node(stack, job)
        (table,) = node.tables
        buffers = sum(term.bytes for term in terms if term.name == "write buffers")
        assert buffers == 3 * table.store.file_bytes
        in_memory = {term.name: term.bytes for term in terms if term.budget == "memory_bytes"}
        cached = in_memory["cached rows"] // table.spec.layout.row_bytes
        assert cached <= table.mem.cache_rows  # the open node has no write buffers yet
        assert table.mem.cache_rows - cached < 1.1 * buffers / table.spec.layout.row_bytes
        (network,) = [term.bytes for term in terms if term.name == "network"]
        assert network == node.networks[0].size_bytes(node.pool.cores)
        assert total_bytes(terms, "memory_bytes") <= job.budget.memory_bytes


def test_an_error_prints_every_term_against_what_is_allowed_and_then_the_remedy(tmp_path: Path) -> None:
    job = job_of(tmp_path, 16_000_000)
    terms = projected_terms(job, nodes=2, rows={"main": 10**6}, examples=512, keys=2_048, distinct_keys=500)
    allowed = {"memory_bytes": job.budget.memory_bytes, "disk_bytes": None}
    lines = str(capacity_error("it does not fit", terms, allowed, "raise it")).splitlines()
    assert (lines[0], lines[-1]) == ("it does not fit", "raise it")
    assert f"memory_bytes: {total_bytes(terms, 'memory_bytes'):,} bytes projected, 8,000,000 allowed" in lines
    assert f"disk_bytes: {total_bytes(terms, 'disk_bytes'):,} bytes projected, no limit" in lines
    shown = [term for term in terms if term.budget in allowed and term.bytes]
    assert len(lines) == 4 + len(shown)
    for term in shown:
        assert any(f"{term.bytes:,}  {term.purpose}" in line for line in lines)
    assert "hbm_bytes" not in terms_text(terms, allowed)


def test_a_job_for_gpus_is_projected_where_there_is_none(tmp_path: Path) -> None:
    batch = {"examples": 512, "keys": 2_048, "distinct_keys": 500}
    budgets = {}
    for backend in ("cpu", "cuda"):
        job = job_of(tmp_path, 16_000_000, cluster={"backend": backend})
        (term,) = [term for term in projected_terms(job, nodes=1, rows={}, **batch) if term.name == "input batches"]
        budgets[backend] = term.budget
    assert budgets == {"cpu": "hbm_bytes", "cuda": "memory_bytes"}


def test_a_model_that_outgrew_its_memory_is_projected_above_what_is_allowed(tmp_path: Path) -> None:
    terms = projected_terms(
        job_of(tmp_path, 16_000_000), nodes=1, rows={"main": 10**9}, examples=1, keys=1, distinct_keys=1
    )
    assert total_bytes(terms, "memory_bytes") > 12 * 10**9


def test_design_md_has_the_table_of_terms() -> None:
    text = Path(daskps.__file__).with_name("DESIGN.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count("|") >= 4
    ]
    found = {row[0]: row[-1] for row in rows if row[0] in PURPOSES}
    assert found == PURPOSES
