"""A trace shows what every thread of every node did; without one nothing is recorded and nothing is written."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import daskps
from daskps import trace
from daskps.device.pool import ComputePool
from daskps.node.dask import THREADS
from daskps.trace import OFF, Trace, merge

STAGES = ("read", "dedup", "pull", "load", "train", "push")
JOB: dict[str, Any] = {
    "data": {"format": "synthetic", "synthetic": {"examples": 8_000, "slots": 5, "keys_per_slot": 2_000}},
    "tables": {"main": {"dimension": 8}},
    "model": {"hidden": [8]},
    "train": {"minibatch_examples": 500, "batch_examples": 1_000, "epochs": 2, "snapshot_every_batches": 3},
    "budget": {"memory_bytes": 900_000, "hbm_bytes": "64MB"},  # less than all rows: disk is read and written
    "cluster": {"partitions": 2, "cores": 2},
}

Event = dict[str, Any]


def spans_of(path: Path) -> list[Event]:
    """All spans of a trace, with the names of their tracks."""
    found = json.loads(path.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert found["otherData"]["dropped_spans"] == 0
    return [{**e, "track": names[e["pid"], e["tid"]]} for e in found["traceEvents"] if e["ph"] == "X"]


def check_nesting(spans: list[Event]) -> None:
    """Spans of one track lie within each other or apart."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in spans:
        assert span["dur"] >= 0
        tracks[span["pid"], span["tid"]].append(span)
    for track in tracks.values():
        open_until: list[float] = []
        for span in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= span["ts"] + 0.002:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1] + 0.002, span
            open_until.append(end)


def check_stages(spans: list[Event], lines: list[Event], nodes: int) -> None:
    """Every stage of every batch of every node is there, for about as long as the record says."""
    assert len(lines) > 3
    for rank in range(nodes):
        mine = [span for span in spans if span["pid"] == rank and span["cat"] == "stage"]
        for line in lines:
            steps = range(line["first_step"], line["stop_step"])
            for stage in STAGES:
                found = [span["args"] for span in mine if span["name"] == stage]
                assert sum(args["first_step"] <= steps[0] < args["stop_step"] for args in found) == 1, (stage, line)
        trained = [span["args"]["step"] for span in spans if span["pid"] == rank and span["name"] == "step"]
        assert sorted(trained) == list(range(lines[0]["first_step"], lines[-1]["stop_step"]))
    for stage in STAGES:
        recorded = sum(end - start for line in lines for _, name, start, end, _ in line["stages"] if name == stage)
        traced = sum(span["dur"] for span in spans if span["cat"] == "stage" and span["name"] == stage) / 1e6
        assert traced == pytest.approx(recorded, rel=0.2, abs=0.3), stage


def names_of(spans: list[Event], track: str) -> set[str]:
    return {span["name"] for span in spans if span["track"].startswith(track)}


def test_a_run_of_one_node_shows_stages_steps_owner_and_disk(tmp_path: Path) -> None:
    outcome = daskps.train({**JOB, "out": str(tmp_path / "m")}, trace=tmp_path / "trace.json")
    assert outcome.trace == str(tmp_path / "trace.json")
    spans = spans_of(tmp_path / "trace.json")
    check_nesting(spans)
    check_stages(spans, list(outcome.batches()), 1)
    assert names_of(spans, "daskps-train") >= {"train", "wait for rows", "step", "group", "pool", "network", "update"}
    assert names_of(spans, "daskps-owner") >= {"pull", "push", "start_load", "append", "next_piece"}
    assert names_of(spans, "daskps-snapshot") >= {"append", "prepare"}
    assert names_of(spans, "daskps-ssd") >= {"read segment", "write segment", "fsync"}
    assert names_of(spans, "daskps-control") >= {"publish", "confirm"}
    assert not (tmp_path / "m" / "traces").exists()


def test_nodes_are_processes_of_a_trace_and_their_messages_are_in_it(tmp_path: Path) -> None:
    job = {**JOB, "out": str(tmp_path / "m"), "cluster": {**JOB["cluster"], "nodes": 2, "cores": 1}}
    job["budget"] = {"memory_bytes": "16MB", "hbm_bytes": "64MB"}
    outcome = daskps.train(job, trace=tmp_path / "trace.json")
    spans = spans_of(tmp_path / "trace.json")
    check_nesting(spans)
    check_stages(spans, list(outcome.batches()), 2)
    for rank in range(2):
        mine = [span for span in spans if span["pid"] == rank]
        assert names_of(mine, "daskps-network") >= {"send pull", "send push", "send sums"}
        assert names_of(mine, f"receive from node {1 - rank}") >= {"receive pull", "receive push", "receive sums"}
        assert "exchange" in names_of(mine, "daskps-train")
    for rank in range(2):  # the clocks agree: nothing arrives before it was sent; messages stay in order
        sent = sorted(span["ts"] for span in spans if (span["name"], span["pid"]) == ("send pull", rank))
        came = sorted(
            span["ts"] + span["dur"] for span in spans if (span["name"], span["pid"]) == ("receive pull", 1 - rank)
        )
        assert len(sent) == len(came) == len(list(outcome.batches()))
        assert all(0 < end - start + 2_000 < 10_000_000 for start, end in zip(sent, came, strict=True))


def test_a_submitted_run_names_its_trace(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=1, processes=False, threads_per_worker=THREADS, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        submitted = daskps.submit({**JOB, "out": str(tmp_path / "m")}, client, trace=tmp_path / "trace.json")
        result = submitted.result()
    assert result["trace"] == str(tmp_path / "trace.json")
    assert {span["name"] for span in spans_of(tmp_path / "trace.json")} >= set(STAGES)


def test_a_run_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        daskps.train({**JOB, "out": str(tmp_path / "m")}, trace=tmp_path / "trace.json", on_progress=stop)
    assert "train" in {span["name"] for span in spans_of(tmp_path / "trace.json")}


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nosuch"):
        daskps.train({**JOB, "out": str(tmp_path / "m")}, trace=tmp_path / "nosuch" / "trace.json")
    assert not (tmp_path / "m").exists()


def test_without_a_trace_nothing_is_recorded_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(trace._Span, "__enter__", lambda self: recorded.append(self._name))
    outcome = daskps.train({**JOB, "out": str(tmp_path / "m")})
    assert outcome.trace is None
    assert not recorded
    assert not [path for path in tmp_path.rglob("*") if "trace" in path.name]
    with ComputePool(1) as pool:
        assert pool.trace is OFF
    assert OFF.span("a", "b") is OFF.span("c", "d") is trace.NOTHING
    assert OFF.methods(recorded, "owner", "append") is recorded


def test_events_beyond_the_limit_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_WAITING", 10)
    monkeypatch.setattr(trace, "WRITE_SECONDS", 60.0)
    one = Trace(str(tmp_path / "traces" / "0"), 0)
    for _ in range(25):
        with one.span("work", "step"):
            pass
    one.close()
    assert merge(str(tmp_path / "traces"), str(tmp_path / "trace.json")) == 10
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped_spans"] == 15


def test_clocks_are_aligned_and_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    """Two processes whose perf_counter begins elsewhere; the second one begins a second later and is killed."""
    start = time.time_ns()
    for rank, later in enumerate((0, 1_000_000_000)):
        head = {"rank": rank, "host": "h", "process": rank, "start_ns": start + later}
        lines = [json.dumps(head), json.dumps(("train", "stage", start + later + 5_000, 2_000, "daskps-train", 7, {}))]
        (tmp_path / f"{rank}").write_text("\n".join(lines) + "\n" + '["cut of' * rank)
    assert merge(str(tmp_path), str(tmp_path / "trace.json")) == 2
    first, second = spans_of(tmp_path / "trace.json")
    assert (first["ts"], first["dur"], second["ts"]) == (5.0, 2.0, 1_000_005.0)
    assert (first["pid"], second["pid"]) == (0, 1)


def test_threads_of_one_name_have_tracks_of_their_own(tmp_path: Path) -> None:
    one = Trace(str(tmp_path / "traces" / "0"), 3)
    both = threading.Barrier(2)

    def work() -> None:
        with one.span("work", "io", size=1):
            both.wait(10)

    threads = [threading.Thread(target=work, name="daskps-ssd_0") for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    merge(str(tmp_path / "traces"), str(tmp_path / "trace.json"))
    spans = spans_of(tmp_path / "trace.json")
    check_nesting(spans)
    assert len({span["tid"] for span in spans}) == 2
    assert {(span["pid"], span["track"], span["args"]["size"]) for span in spans} == {(3, "daskps-ssd_0", 1)}
