"""The plan agrees with the paper where the paper says something, and with a run where there was one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from daskps.cli import main
from daskps.config import make_job
from daskps.errors import ArgumentError, ConfigError, DataError
from daskps.plan import PAPER_HARDWARE, Hardware, Workload, calibrate, paper_workload, plan, workload_of
from daskps.plan.paper import MODELS, price_performance
from daskps.storage.record import RecordWriter, encode

STATED_PRICE_PERFORMANCE = {"A": 4.4, "B": 5.4, "C": 9.0, "D": 8.4, "E": 8.3}

SMALL: dict[str, Any] = {
    "data": {"format": "synthetic", "synthetic": {"examples": 1_000_000, "slots": 10, "keys_per_bag": 2}},
    "tables": {"main": {"dimension": 8, "optimizer": {"kind": "rowwise_adagrad"}}},
}


def test_model_e_scales_as_the_paper_says() -> None:
    work, values = paper_workload("E")
    one, two, four = plan(work, PAPER_HARDWARE, [1, 2, 4])
    assert four.speed_up == pytest.approx(3.57, rel=0.04)
    assert [e.examples_per_second for e in (one, two, four)] == pytest.approx([2.05e4, 3.7e4, 7.3e4], rel=0.05)
    assert four.stage_seconds == pytest.approx({"read": 78, "pull/push": 187, "train": 160})
    fitted = {value.name for value in values}
    assert fitted == {
        "batch_examples",
        "minibatch_examples",
        "row_bytes",
        "dimension",
        "distinct_share",
        "network_share",
    }


@pytest.mark.parametrize("letter", [*MODELS])
def test_every_model_has_the_rate_and_the_price_performance_of_the_paper(letter: str) -> None:
    work, _ = paper_workload(letter)
    (four,) = plan(work, PAPER_HARDWARE, [4])
    assert four.examples_per_second == pytest.approx(MODELS[letter].examples_per_second)
    assert price_performance(letter, four.examples_per_cost) == pytest.approx(
        STATED_PRICE_PERFORMANCE[letter], rel=0.03
    )
    assert not four.problems


def test_the_index_of_model_e_needs_more_than_two_nodes() -> None:
    work, _ = paper_workload("E")
    estimates = plan(work, PAPER_HARDWARE, [1, 2, 3, 4])
    assert [estimate.index_bytes for estimate in estimates] == pytest.approx([2.4e12, 1.2e12, 0.8e12, 0.6e12])
    assert ["memory" in estimate.problems for estimate in estimates] == [True, True, True, False]
    assert ["disk" in estimate.problems for estimate in estimates] == [True, False, False, False]


NODE = Hardware("node", memory_bytes=1e9, disk_bytes=1e10, hbm_bytes=1e9, network_bytes_per_second=1e8, cost=2.0)
WORK = Workload(
    name="made up",
    batch_examples=1000,
    minibatch_examples=100,
    keys_per_example=10,
    distinct_share=0.5,
    rows=1e6,
    row_bytes=42,
    dimension=8,
    dense_parameters=1000,
    stage_seconds={"read": 0.1, "pull": 0.2, "train": 0.4, "push": 0.1},
    measured_nodes=1,
    sums="pairwise",
    shared_share=0.5,
    slack=1.5,
)


def test_what_goes_over_the_network_is_counted_by_hand() -> None:
    two, four = plan(WORK, NODE, [2, 4])
    goodput = 1e8 * 0.8
    assert two.network_seconds["pull"] == two.network_seconds["push"] == pytest.approx(5000 / 2 * 50 / goodput)
    assert four.network_seconds["pull"] == pytest.approx(5000 * 3 / 4 * 50 / goodput)
    rows = 100 * 10 * 0.5 * 0.5 * (5 + 4 * 8)
    assert two.network_seconds["train"] == pytest.approx(10 * (4000 + rows) / goodput)
    assert four.network_seconds["train"] == pytest.approx(10 * (2 * 4000 + 3 * rows) / goodput)
    assert two.stage_seconds["read"] == 0.1
    assert two.batch_seconds == pytest.approx(1.5 * two.stage_seconds["train"])
    assert two.examples_per_cost == pytest.approx(2000 / two.batch_seconds / (2 * 2.0))
    assert (two.bottleneck, two.problems) == ("train", ())


@given(nodes=st.integers(1, 64), measured=st.integers(1, 64), network=st.floats(1e6, 1e12), slack=st.floats(1, 3))
def test_more_nodes_never_train_less_than_proportionally_more_on_a_slower_network(
    nodes: int, measured: int, network: float, slack: float
) -> None:
    # Rates measured on more nodes than are planned say less about the network than about what they waited for there.
    work = replace(WORK, measured_nodes=min(measured, nodes), slack=slack)
    slow, fast = (
        plan(work, replace(NODE, network_bytes_per_second=rate), [nodes])[0] for rate in (network, 2 * network)
    )
    assert 0 < slow.speed_up <= nodes * (1 + 1e-9)
    assert fast.speed_up >= slow.speed_up * (1 - 1e-9)
    assert slow.batch_seconds >= max(slow.network_seconds.values())


def test_wrong_numbers_are_refused_with_their_values() -> None:
    with pytest.raises(ArgumentError, match="1 to 64 nodes, got 65"):
        plan(WORK, NODE, [65])
    with pytest.raises(ArgumentError, match="no model 'F'"):
        paper_workload("F")
    with pytest.raises(ArgumentError, match=r"network_share is above 0 and at most 1, got 1.5"):
        replace(NODE, network_share=1.5)
    with pytest.raises(ArgumentError, match="some stage must take time"):
        replace(WORK, stage_seconds={"read": 0.0})


def test_a_job_is_planned_from_rates_and_wants_to_know_its_rows_where_it_cannot() -> None:
    work, values = workload_of(make_job(SMALL), cores=2)
    assert (work.keys_per_example, work.row_bytes, work.rows) == (20, 36, 1e7)
    assert {value.name for value in values} >= {"rates.step_keys", "distinct_share", "shared_share", "hit_rate"}
    double, _ = workload_of(make_job(SMALL), cores=4)
    rate, rate_of_double = (plan(one, NODE, [1])[0].examples_per_second for one in (work, double))
    assert rate < rate_of_double <= 2 * rate * (1 + 1e-9)
    files: dict[str, Any] = {"data": {"format": "criteo", "paths": ["day.tsv"]}}
    with pytest.raises(ConfigError, match="give --rows"):
        workload_of(make_job(files), cores=2)
    assert workload_of(make_job(files), cores=2, rows=5e6)[0].keys_per_example == 39


def write_run(model: Path, batches: int = 9, incarnation: int = 1, **settings: Any) -> Path:
    """A model whose last run had batches of 2 seconds, the slowest stage 1.6."""
    name = f"run{incarnation}"
    head = {"run": name, "settings": make_job(SMALL | settings).model_dump(mode="json")}
    writer = RecordWriter(str(model), incarnation=incarnation, first_batch=0, header=head)
    for number in range(batches):
        line = {
            "kind": "batch",
            "batch": number,
            "run": name,
            "position": 8192 * (number + 1),
            "examples": 8192,
            "counts": {"keys": 163_840, "distinct_keys": 40_960, "hits": 40_000, "misses": 960},
            "stage_seconds": {"read": 0.5, "dedup": 0.1, "pull": 0.4, "train": 1.6, "push": 0.2},
            "waited_seconds": {},
            "started": 98.0 + 2 * number,
            "ended": 100.0 + 2 * number,
            "levels": {"disk_rows": 700_000, "memory_rows": 300_000},
            "stages": [],
        }
        writer.write([encode(line)], number)
    writer.close()
    return model


def test_a_finished_run_is_its_own_plan_on_one_node(tmp_path: Path) -> None:
    work, values = calibrate(write_run(tmp_path / "model"))
    (one,) = plan(work, NODE, [1])
    assert one.examples_per_second == pytest.approx(8192 / 2)
    assert (work.distinct_share, work.keys_per_example, work.rows) == (0.25, 20, 700_000)
    assert {value.name for value in values if value.kind == "assumed"} == {"shared_share"}
    assert calibrate(tmp_path / "model", rows=1e9)[0].rows == 1e9
    write_run(tmp_path / "model", 3, incarnation=2, name="later")  # what counts is the last run, by its own settings
    assert calibrate(tmp_path / "model")[0].name == "later, as it ran on 1 node"
    with pytest.raises(DataError, match="at least 3 batches to go by, its last run had 2"):
        calibrate(write_run(tmp_path / "short", 2))
    with pytest.raises(DataError, match="has no record of a run"):
        calibrate(tmp_path)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Call ``daskps plan``; the exit code that is expected comes last."""

    def call(*arguments: str | Path, code: int = 0) -> Any:
        result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
        assert result.exit_code == code, result.output + result.stderr
        return json.loads(result.stdout) if "--json" in arguments else result.output + result.stderr

    return call


def test_the_command_says_what_it_fitted_and_how_far_it_is_from_the_paper(run: Callable[..., Any]) -> None:
    text = run()
    assert "speed-up on 4 nodes is 3.57, this is 3.68 (+3.0%); it depends on network_share, which is assumed" in text
    said = run("--json", "--model", "e", "--nodes", "1,4,64")
    assert [one["nodes"] for one in said["nodes"]] == [1, 4, 64]
    assert said["nodes"][1]["speed_up"] == pytest.approx(3.57, rel=0.04)
    for value in said["values"]:
        assert f"{value['name']} = " in text
        assert value["why"]
    faster = run("--json", "--model", "E", "--network", "25e9", "--cost", "20", "--nodes", "4")
    assert faster["nodes"][0]["examples_per_second"] == pytest.approx(74_000)  # measured on 4 nodes, so it stays
    assert faster["nodes"][0]["examples_per_cost"] == pytest.approx(74_000 / 80)


def test_the_command_plans_jobs_and_runs_and_refuses_nonsense(run: Callable[..., Any], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('name = "mine"\n[data]\nformat = "synthetic"\n')
    said = run(job, "--json", "--nodes", "2", "--set", "train.minibatch_examples=1024", "--memory", "3GB")
    assert said["workload"]["minibatch_examples"] == 1024
    assert said["hardware"]["memory_bytes"] == 3e9
    assert said["memory"]["allowed"]["memory_bytes"] == 3_000_000_000
    projected = [term["bytes"] for term in said["memory"]["terms"] if term["budget"] == "memory_bytes"]
    assert 0.99 * 3e9 < sum(projected) <= 3e9  # what the other terms leave goes to the cache
    text = run(job, "--nodes", "2", "--set", "train.minibatch_examples=1024", "--memory", "3GB")
    for term in said["memory"]["terms"]:
        assert not term["bytes"] or f"{term['bytes']:,}  {term['purpose']}" in text
    assert "as it ran on 1 node" in run("--calibrate", write_run(tmp_path / "model"))
    assert "not several" in run(job, "--model", "A", code=2)
    for option in (("--set", "train.epochs=2"), ("--cores", 2)):
        assert "are for JOB" in run("--model", "A", *option, code=2)
    assert "--rows is for JOB" in run("--rows", 5, code=2)
    assert "x>=1" in run(job, "--rows", 0, code=2)
    assert "wants numbers with commas" in run("--nodes", "1;2", code=2)
    assert "1 to 64 nodes" in run("--nodes", "0", code=2)
    assert "cannot read" in run("--memory", "much", code=2)
    assert "has no record of a run" in run("--calibrate", tmp_path, code=3)
