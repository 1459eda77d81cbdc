"""``daskps train``: train the model of a job file, or resume it."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

import click

from daskps import api
from daskps.cli.command import EXIT_CODE_HELP, INTERRUPTED, STOPPED, bad_rows_facts, bad_rows_value, command, facts
from daskps.config import read_job
from daskps.driver.dask import WORKER_SECONDS
from daskps.driver.driver import Outcome
from daskps.errors import ConfigError
from daskps.node.begin import check_empty
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from daskps.view.figures import hit_rates
from daskps.view.log import JsonLines
from daskps.view.words import duration, metrics_name, percent, size

UP_AND_CLEAR = "\x1b[1A\r\x1b[2K"  # terminal codes: one line up, clear that line
BAR_CELLS = 24  # characters of the bar on a wide terminal


class ProgressBar:
    """Progress bar of two lines on a terminal."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = out
        self._drawn = False

    def show(self, progress: Progress) -> None:
        """Draw the bar, over the previous one."""
        columns = shutil.get_terminal_size().columns
        first, second = (line[: columns - 1] for line in lines(progress, columns - 1))
        back = "\r\x1b[2K" + UP_AND_CLEAR if self._drawn else ""
        self._out.write(f"{back}{first}\n{second}")
        self._out.flush()
        self._drawn = True

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        back = "\r\x1b[2K" + UP_AND_CLEAR if self._drawn else ""
        self._out.write(f"{back}{message}\n")
        self._out.flush()
        self._drawn = False

    def close(self) -> None:
        """Leave the bar on the terminal and move to the next line."""
        if self._drawn:
            self._out.write("\n")
            self._out.flush()
            self._drawn = False


def lines(progress: Progress, columns: int = 120) -> tuple[str, str]:
    """Return the bar's two lines. On a narrow terminal the bar is shorter and the second line has fewer fields."""
    done = progress.position / max(progress.stop_position, 1)
    rates = hit_rates(progress.counts)
    words = (
        f"  {progress.position:,} of {progress.stop_position:,} examples"
        f"  {progress.examples_per_second:,.0f} examples/s  {duration(progress.seconds_left)} left"
    )
    whole = min(max(columns - len(words) - 5, 4), BAR_CELLS)
    cells = int(done * whole)
    first = f"{percent(done):>4} {'━' * cells}{'─' * (whole - cells)}{words}"
    auc = f"AUC {progress.metrics['auc']:.4f}" if "auc" in progress.metrics else "AUC -"
    if progress.metrics.get("pass", 1) > 1:
        auc = f"{metrics_name(progress.metrics)}: {auc}"
    if progress.validations:
        auc += f" (validation {progress.validations[-1].metrics['auc']:.4f})"
    rows = f"memory {percent(rates['memory'])}, SSD {percent(rates['disk'])}, new {percent(rates['new'])}"
    fields = [f"rows from {rows}", f"HBM hits {percent(rates['hbm'])}"]  # HBM: share of key occurrences, not of rows
    if "disk_bytes" in progress.levels:
        fields.append(f"on SSD {size(progress.levels['disk_bytes'])}")
    second = f"     {auc}"
    for field in fields:
        if len(second) + 2 + len(field) > columns:
            break
        second += f"  {field}"
    return first, second


class Interrupt:
    """Context manager that catches SIGINT and SIGTERM: the first one asks the run to stop, the second ends at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._asked = False
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Return True if a signal has asked the run to stop."""
        return self._asked

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self._say("stopped at once; the last committed snapshot is whole, go on with --resume")
            # A normal exit would wait for threads in native code. Nothing is lost: committed snapshots are on disk, and
            # worker processes end with this process.
            os._exit(INTERRUPTED)
        self._asked = True
        self._say("stopping after the batches in flight, with a snapshot; press Ctrl-C again to stop at once")


EPILOG = f"""\b
Examples:
  daskps train pipelines/demo.toml
  daskps train pipelines/demo.toml --set train.epochs=2 --set budget.memory_bytes=200MB --out runs/other
  daskps train pipelines/demo.toml --resume
  daskps train pipelines/demo.toml --trace trace.json
  daskps train pipelines/demo.toml --scheduler tcp://10.0.0.1:8786

{EXIT_CODE_HELP}"""


@click.command(epilog=EPILOG)
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="PATH.TO.KEY=VALUE", help="Change a setting of the job.")
@click.option("--out", metavar="DIR", help="The model directory, instead of the job's own.")
@click.option("--resume", is_flag=True, help="Resume from the last snapshot; start anew if there is none.")
@click.option(
    "--accept-changed-data",
    is_flag=True,
    help="Resume although data that was trained on has changed; the model records it.",
)
@click.option("--scheduler", metavar="ADDRESS", help="Train on this Dask cluster.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=WORKER_SECONDS,
    show_default=True,
    help="With --scheduler: how long to wait for enough workers that no other run uses.",
)
@click.option("--nodes", type=click.IntRange(1), help="Nodes to use; without --scheduler, processes on this machine.")
@click.option("--dashboard", metavar="ADDRESS", help="Serve Dask's dashboard with the live pages, for example :8787.")
@click.option("--log", "log_path", type=click.Path(dir_okay=False), help="Append a JSON line per batch to this file.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    help="Write a trace of all stages, I/O and messages to this file, for ui.perfetto.dev.",
)
@command
def train(
    job: Path,
    settings: tuple[str, ...],
    out: str | None,
    resume: bool,
    accept_changed_data: bool,
    scheduler: str | None,
    wait: float,
    nodes: int | None,
    dashboard: str | None,
    log_path: str | None,
    trace: str | None,
) -> tuple[Any, ...]:
    """Train the model that JOB, a TOML file, describes.

    Settings are checked before anything starts. Ctrl-C stops at a batch boundary with a snapshot. A second Ctrl-C stops
    at once; committed snapshots are never lost.
    """
    changes = [*settings]
    if nodes is not None:
        changes.append(f"cluster.nodes={nodes}")
    if out is not None:
        changes.append(f"out={out!r}")
    checked = read_job(job, changes)
    if not resume:
        check_empty(ModelDirectory(checked.out))  # early, if this machine can see it; workers check again
    if scheduler is not None and dashboard is not None:
        raise ConfigError(f"the cluster at {scheduler} has its own dashboard: leave out --dashboard")
    if dashboard is not None and not dashboard.rpartition(":")[2].isdecimal():
        raise ConfigError(f"--dashboard is where it listens, a port or host:port, for example :8787; got {dashboard!r}")
    bar = ProgressBar()
    on_terminal = sys.stderr.isatty()
    with logs(on_terminal, log_path), Interrupt(bar.say) as interrupt, closing(bar):
        outcome = api.train(
            checked,
            client=scheduler,
            on_progress=bar.show if on_terminal else None,
            should_stop=interrupt.asked,
            dashboard_address=dashboard,
            worker_seconds=wait,
            accept_changed_data=accept_changed_data,
            resume=resume,
            trace=trace,
        )
    stopped = interrupt.asked() and outcome.progress.position < outcome.progress.stop_position
    if stopped:
        bar.say(f"go on with: {_again(job, out, nodes, scheduler, settings)}")
    return summary(outcome, stopped), summary_text(outcome, stopped), STOPPED if stopped else 0


def _again(job: Path, out: str | None, nodes: int | None, scheduler: str | None, settings: tuple[str, ...]) -> str:
    """Return the command that resumes a stopped run."""
    given = {"--out": out, "--nodes": nodes, "--scheduler": scheduler}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    changes = [word for setting in settings for word in ("--set", setting)]
    return shlex.join(["daskps", "train", str(job), "--resume", *options, *changes])


@contextmanager
def logs(on_terminal: bool, path: str | None) -> Iterator[None]:
    """Print the log as plain lines if there is no bar, and append it as JSON lines to the file `path` if given."""
    handlers: list[logging.Handler] = []
    if not on_terminal:
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        handlers.append(lines)
    if path is not None:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(JsonLines())
        handlers.append(file)
    logger = logging.getLogger("daskps")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.level, logger.propagate = before
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def summary(outcome: Outcome, stopped: bool) -> dict[str, Any]:
    """Return the result of a run as JSON values."""
    progress = outcome.progress
    return {
        "model": outcome.directory,
        "snapshot": outcome.snapshot,
        "report": outcome.report,
        "trace": outcome.trace,
        "stopped": stopped,
        "stopped_early": progress.stopped_early,
        "position": progress.position,
        "stop_position": progress.stop_position,
        "examples": progress.examples,
        "seconds": progress.seconds,
        "examples_per_second": progress.examples_per_second,
        "metrics": progress.metrics,
        "validation": progress.validations[-1].metrics if progress.validations else None,
        "best": {"batch": progress.best.batch, "validation": progress.best.metrics} if progress.best else None,
        "hit_rates": hit_rates(progress.counts),
        "levels": progress.levels,
        "bad_rows": bad_rows_value(progress.bad_rows),
        "warnings": progress.warnings,
    }


def summary_text(outcome: Outcome, stopped: bool) -> str:
    """Return the result of a run as text."""
    progress = outcome.progress
    rates = hit_rates(progress.counts)
    how = "stopped" if stopped else "stopped early" if progress.stopped_early else "trained"
    pace = f"{progress.examples:,} examples in {duration(progress.seconds)} ({progress.examples_per_second:,.0f}/s)"
    if not progress.examples and progress.position == progress.stop_position:
        how, pace = "nothing to do", f"all {progress.position:,} rows were trained on before"
    elif not progress.examples and progress.stopped_early:
        how, pace = "nothing to do", "the run has ended: it stopped early; more train.early_stopping_patience goes on"
    pairs = [(how, pace)]
    if progress.metrics:
        values = ", ".join(f"{name} {value:.4f}" for name, value in shown(progress.metrics).items())
        pairs.append((metrics_name(progress.metrics), values))
    if progress.validations:
        values = ", ".join(f"{name} {value:.4f}" for name, value in shown(progress.validations[-1].metrics).items())
        pairs.append(("validation", values))
    if progress.best is not None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in shown(progress.best.metrics).items())
        pairs.append(("best", f"{values} after batch {progress.best.batch}: the model that is left"))
    if progress.examples:
        words = (
            f"HBM {percent(rates['hbm'])} of occurrences; rows from memory {percent(rates['memory'])}, "
            f"SSD {percent(rates['disk'])}, new {percent(rates['new'])}"
        )
        pairs.append(("hits", words))
    pairs.extend(bad_rows_facts(progress.bad_rows))
    pairs.extend(("warning", words) for words in progress.warnings)
    on_disk = sum(
        path.stat().st_blocks * 512 for path in Path(outcome.directory, "tables").rglob("*") if path.is_file()
    )
    pairs.append(("on SSD", size(on_disk)))
    pairs.append(("model", f"{outcome.directory} (snapshot {outcome.snapshot})"))
    if outcome.report:
        pairs.append(("report", outcome.report))
    if outcome.trace:
        pairs.append(("trace", f"{outcome.trace}: open it in ui.perfetto.dev or chrome://tracing"))
    return facts(pairs)


def shown(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that are shown in one line of text, by display name."""
    names = {"auc": "AUC", "log_loss": "log loss", "normalised_entropy": "NE", "calibration": "calibration"}
    return {words: metrics[name] for name, words in names.items() if name in metrics}
