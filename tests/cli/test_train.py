"""``daskps train``: settings are checked first, a model is never overwritten, Ctrl-C keeps what was trained."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dask import cli as dask_cli

import daskps
from daskps.cli import main, ps
from daskps.cli.main import main as group
from daskps.cli.train import lines
from daskps.errors import ArgumentError, ConfigError
from daskps.reports import Progress, Validation
from daskps.storage.record import read_record
from tests.cli.helpers import Run

Json = Callable[..., Any]


def test_an_unknown_setting_suggests_the_nearest_and_shows_no_traceback(job_file: Path, run: Run) -> None:
    said = run("train", job_file, "--set", "train.epoch=3", code=2).stderr
    assert "train.epoch: unknown setting; did you mean 'epochs'?" in said
    assert "Traceback" not in said


def test_debug_shows_the_traceback(job_file: Path, run: Run) -> None:
    assert "Traceback" in run("train", job_file, "--set", "train.epoch=3", "--debug", code=2).stderr


def test_an_error_is_json_too(job_file: Path, run_json: Json) -> None:
    said = run_json("train", job_file, "--set", "train.epoch=3", code=2)
    assert said["error"]["kind"] == "ConfigError"


def test_a_dashboard_without_a_port_is_refused(job_file: Path, tmp_path: Path, run: Run) -> None:
    said = run("train", job_file, "--out", tmp_path / "m", "--dashboard", "nonsense", code=2).stderr
    assert "host:port" in said
    assert not (tmp_path / "m").exists()


def test_what_does_not_fit_has_its_own_exit_code(job_file: Path, tmp_path: Path, run: Run) -> None:
    said = run("train", job_file, "--out", tmp_path / "m", "--set", "budget.memory_bytes=200kB", code=4).stderr
    assert "memory_bytes" in said


@pytest.mark.parametrize("scheme", ["s3", "memory", "hdfs"])
def test_a_url_is_refused_before_anything_is_made(
    scheme: str, job_file: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"{scheme}://bucket/m"
    for options in (("--out", url), ("--set", f"out={url}"), ("--set", f"start_from={url}", "--out", "m")):
        said = run("train", job_file, *options, code=2).stderr
        assert "a path of a file system, not a URL" in said
        assert f"(got '{url}')" in said
    with pytest.raises(ConfigError, match="not a URL"):
        daskps.train({"data": {"format": "synthetic"}, "out": url})
    with pytest.raises(ArgumentError, match="not a URL"):
        daskps.open_model(url)
    assert not list(tmp_path.iterdir())


def test_missing_data_is_named(job_file: Path, tmp_path: Path, run: Run) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'out = "{tmp_path / "m"}"\n[data]\nformat = "criteo"\npaths = ["{tmp_path / "nothing.tsv"}"]\n')
    assert "nothing.tsv" in run("train", job, code=3).stderr


def test_a_model_is_not_overwritten(job_file: Path, model: Path, run: Run) -> None:
    assert "--resume" in run("train", job_file, "--out", model, code=2).stderr


def test_a_finished_run_that_is_resumed_has_nothing_to_do(
    trained: tuple[Path, dict[str, Any]], job_file: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    run("train", job_file, "--out", tmp_path / "m", "--set", "data.synthetic.examples=2000")
    said = run_json("train", job_file, "--out", tmp_path / "m", "--set", "data.synthetic.examples=2000", "--resume")
    assert said["examples"] == 0
    assert said["position"] == 2000
    assert said["report"] is None
    assert len(list((tmp_path / "m" / "reports").glob("*.html"))) == 1
    assert "had nothing to do" in run("inspect", tmp_path / "m").stdout


def test_rows_that_lenient_reading_skips_are_told_by_reason(tmp_path: Path, run: Run, run_json: Json) -> None:
    good = [f"{number % 2} user:{number} ad:{number % 7}" for number in range(2_000)]
    (tmp_path / "rows.txt").write_text("\n".join([*good[:10], "2 user:1", *good[10:], "7 ad:1"]))
    job = tmp_path / "job.toml"
    job.write_text(
        f'[data]\nformat = "multislot"\npaths = ["{tmp_path}/rows.txt"]\nbad_lines = "lenient"\n'
        '[[slots]]\nname = "user"\n[[slots]]\nname = "ad"\n[train]\nminibatch_examples = 500\n'
    )
    trained = run_json("train", job, "--out", tmp_path / "a")
    ((reason, told),) = trained["bad_rows"].items()
    assert trained["examples"] == trained["metrics"]["examples"] == trained["metrics"]["weight"] == 2_000
    assert trained["position"] == 2_002
    batches = list(read_record(str(tmp_path / "a"), "batch"))
    assert [sum(line[name] for line in batches) for name in ("examples", "skipped")] == [2_000, 2]
    assert (reason, told["rows"]) == ("the label is not 0 or 1", 2)
    assert "rows.txt, line 11" in told["first"]
    words = "2 bad examples: the label is not 0 or 1, as in"
    assert words in run("train", job, "--out", tmp_path / "b").stdout
    evaluated = ("evaluate", tmp_path / "a", tmp_path / "rows.txt")
    predicted = ("predict", tmp_path / "a", tmp_path / "rows.txt", "-o", tmp_path / "predictions.parquet")
    for arguments in (evaluated, (*evaluated, "--by", "ad"), predicted):
        assert run_json(*arguments)["bad_rows"] == {reason: told}
        assert words in run(*arguments).stdout


def test_the_log_file_has_one_json_line_per_batch(job_file: Path, tmp_path: Path, run: Run) -> None:
    run("train", job_file, "--out", tmp_path / "m", "--log", tmp_path / "log.jsonl")
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    batches = [event for event in events if event["event"] == "batch"]
    assert sum(batch["examples"] for batch in batches) == 8_000
    assert {"auc", "log_loss"} <= set(batches[-1]["metrics"])
    assert all(event["level"] == "INFO" for event in events)


def test_the_bar_tells_rate_auc_hits_and_time_left() -> None:
    progress = Progress(500, 1000, 3, started=time.time() - 10)
    progress.examples, progress.metrics = 500, {"auc": 0.7123}
    progress.counts = {"keys": 100, "distinct_keys": 25, "hits": 5, "misses": 4, "new_keys": 1}
    first, second = lines(progress)
    assert "50%" in first
    assert "examples/s" in first
    assert "0:10 left" in first
    assert "AUC 0.7123" in second
    assert "rows from memory 50%, SSD 40%, new 10%  HBM hits 75%" in second  # the rows add up; HBM's are occurrences


def test_on_a_narrow_terminal_the_bar_gives_way_and_not_the_time_left() -> None:
    progress = Progress(2_457_600, 3_000_000, 3, started=time.time() - 10)
    progress.examples = 2_457_600
    first, _ = lines(progress, 79)
    assert len(first) <= 79
    assert first.endswith("left")
    assert "━" in first


def test_on_a_narrow_terminal_the_second_line_drops_whole_fields_from_the_right() -> None:
    progress = Progress(500, 1000, 3, metrics={"auc": 0.7123}, validations=[Validation(3, 500, {"auc": 0.7})])
    progress.counts = {"keys": 100, "distinct_keys": 25, "hits": 5, "misses": 4, "new_keys": 1}
    progress.levels = {"disk_bytes": 674_900_000}
    fields = [
        "     AUC 0.7123 (validation 0.7000)",
        "  rows from memory 50%, SSD 40%, new 10%",
        "  HBM hits 75%",
        "  on SSD 674.9 MB",
    ]
    for columns in range(35, 120):
        fitting = max(count for count in range(1, 5) if count == 1 or len("".join(fields[:count])) <= columns)
        assert lines(progress, columns)[1] == "".join(fields[:fitting])
    assert lines(progress, 79)[1].endswith("new 10%")


LONG = ["data.synthetic.examples=100000000", "train.snapshot_every_batches=5"]


def _start(job_file: Path, out: Path, nodes: int) -> subprocess.Popen[str]:
    """Start a run in a process group of its own, as a terminal does, and wait for its first snapshot."""
    settings = [part for setting in [*LONG, f"cluster.nodes={nodes}"] for part in ("--set", setting)]
    command = [sys.executable, "-m", "daskps", "train", str(job_file), "--out", str(out), "--json", *settings]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if re.search(r" snapshot \d{6}-\d{8}$", line.rstrip()):
            return process
    raise AssertionError(f"no snapshot; exit code {process.wait()}: {''.join(said)}")


@pytest.mark.parametrize("nodes", [1, 2])
def test_ctrl_c_stops_at_a_batch_boundary_with_a_snapshot(nodes: int, job_file: Path, tmp_path: Path) -> None:
    process = _start(job_file, tmp_path / "m", nodes)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate()
    assert process.returncode == 10, errors
    said = json.loads(out)
    assert said["stopped"]
    again = next(line for line in errors.splitlines() if line.startswith("go on with: "))
    assert again.startswith(f"go on with: daskps train {job_file} --resume --out {tmp_path / 'm'} --set {LONG[0]} ")
    with daskps.open_model(tmp_path / "m") as model:
        assert model.snapshot.draft.position == said["position"] > 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_ctrl_c_twice_stops_at_once_and_keeps_the_last_snapshot(nodes: int, job_file: Path, tmp_path: Path) -> None:
    process = _start(job_file, tmp_path / "m", nodes)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:
        if "stopping" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode in (130, 10)  # 10: it had stopped before the second one came
    with daskps.open_model(tmp_path / "m") as model:
        assert model.verify() > 0


def test_every_command_has_help_with_an_example() -> None:
    runner = CliRunner()
    for name, command in main.commands.items():
        said = runner.invoke(group, [name, "--help"])
        assert said.exit_code == 0
        assert "Example" in said.output, name
        assert command.help, name


def test_the_commands_are_also_those_of_dask_ps() -> None:
    assert ps.name == "ps"
    assert ps.commands == main.commands
    assert isinstance(ps, type(dask_cli.cli))


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "pipelines").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_job_file_is_valid_and_a_short_run_of_it_trains(path: Path, tmp_path: Path, run_json: Json) -> None:
    job = daskps.read_job(path)
    if job.data.format != "synthetic":
        return  # tests/test_notebooks.py trains it
    steps = {"train.minibatch_examples": 64, "data.synthetic.examples": 128, "data.validation_rows": 64}
    settings = [part for name, value in steps.items() for part in ("--set", f"{name}={value}")]
    said = run_json("train", path, "--out", tmp_path / "m", *settings, "--set", "model.hidden=[8]")
    assert said["examples"] == 128
    assert os.path.isdir(said["model"])


def test_data_without_a_click_is_trained_on_and_what_cannot_be_said_of_it_is_no_number(
    tmp_path: Path, run: Run, run_json: Json
) -> None:
    # One label only has no AUC, no calibration and no normalised entropy: snapshots, reports and tables go without.
    data, job, model = tmp_path / "rows.csv", tmp_path / "job.toml", tmp_path / "m"
    data.write_text("label,ad\n0,seven\n")
    named = f'format = "csv"\npaths = ["{data}"]\nvalidation_paths = ["{data}"]'
    job.write_text(f'out = "{model}"\n[data]\n{named}\n[[slots]]\nname = "ad"\n')
    said = run_json("train", job, "--log", tmp_path / "log")
    assert said["position"] == 1
    assert not re.search("nan", (tmp_path / "log").read_text().replace("AUC nan", ""), re.IGNORECASE)
    assert not re.search(r"[:,\[]NaN", Path(said["report"]).read_text())
    assert said["metrics"]["auc"] is said["validation"]["auc"] is None
    assert said["metrics"]["log_loss"] > 0
    assert run_json("inspect", model)["metrics"] == said["metrics"]
    assert run_json("snapshots", "list", model)["snapshots"][-1]["metrics"] == said["metrics"]
    assert "AUC nan" in run("train", job, "--resume").output
    for command in (["inspect", model], ["snapshots", "list", model], ["evaluate", model]):
        assert "nan" in run(*command).output
