"""``daskps train``: run a job file to its end, or go on with it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from daskps.cli.bar import Bar
from daskps.cli.command import EXIT_CODE_HELP, STOPPED, bad_rows_facts, bad_rows_value, command, facts
from daskps.cli.interrupt import Interrupt
from daskps.cluster.commit import ModelDirectory
from daskps.config import Job, read_job
from daskps.errors import ConfigError
from daskps.flow.progress import Outcome
from daskps.run import train as run_job
from daskps.view.figures import hit_rates
from daskps.view.log import JsonLines
from daskps.view.words import duration, percent, size

EPILOG = f"""\b
Examples:
  daskps train pipelines/demo.toml
  daskps train pipelines/demo.toml --set train.epochs=2 --set budget.memory_bytes=200MB --out runs/other
  daskps train pipelines/demo.toml --resume
  daskps train pipelines/demo.toml --scheduler tcp://10.0.0.1:8786

{EXIT_CODE_HELP}"""


@click.command(epilog=EPILOG)
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="PATH.TO.KEY=VALUE", help="Change a setting of the job.")
@click.option("--out", metavar="DIR", help="The model directory, instead of the job's own.")
@click.option("--resume", is_flag=True, help="Go on from the last snapshot; begin where there is none.")
@click.option("--scheduler", metavar="ADDRESS", help="Train on this Dask cluster.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes to use; without --scheduler, processes on this machine.")
@click.option("--dashboard", metavar="ADDRESS", help="Serve Dask's dashboard with the live pages, for example :8787.")
@click.option("--log", "log_path", type=click.Path(dir_okay=False), help="Append a JSON line per batch to this file.")
@command
def train(
    job: Path,
    settings: tuple[str, ...],
    out: str | None,
    resume: bool,
    scheduler: str | None,
    nodes: int | None,
    dashboard: str | None,
    log_path: str | None,
) -> tuple[Any, ...]:
    """Train the model that JOB, a TOML file, describes.

    Settings are checked before anything starts. Ctrl-C stops at a batch boundary with a snapshot; pressed twice it
    stops at once, and nothing that was committed is lost.
    """
    changes = [*settings]
    if nodes is not None:
        changes.append(f"cluster.nodes={nodes}")
    if out is not None:
        changes.append(f"out={out!r}")
    checked = read_job(job, changes)
    check_directory(checked, resume)
    if scheduler is not None and dashboard is not None:
        raise ConfigError(f"the cluster at {scheduler} has its own dashboard: leave out --dashboard")
    if dashboard is not None and not dashboard.rpartition(":")[2].isdecimal():
        raise ConfigError(f"--dashboard is where it listens, a port or host:port, for example :8787; got {dashboard!r}")
    bar = Bar()
    on_terminal = sys.stderr.isatty()
    with logs(on_terminal, log_path), Interrupt(bar.say) as interrupt, closing(bar):
        outcome = run_job(
            checked,
            client=scheduler,
            on_progress=bar.show if on_terminal else None,
            should_stop=interrupt.asked,
            dashboard_address=dashboard,
        )
    stopped = interrupt.asked() and outcome.progress.position < outcome.progress.stop_position
    return summary(outcome, stopped), summary_text(outcome, stopped), STOPPED if stopped else 0


def check_directory(job: Job, resume: bool) -> None:
    """A model that is there is not touched without --resume."""
    last = ModelDirectory(job.out).state().last
    if last is not None and not resume:
        raise ConfigError(
            f"{job.out} holds a model (snapshot {last}): --resume goes on with it, --out takes another place"
        )


@contextmanager
def logs(on_terminal: bool, path: str | None) -> Iterator[None]:
    """Show the log as plain lines where there is no bar; append it to a file if asked for."""
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
    """The run for machines."""
    progress = outcome.progress
    return {
        "model": outcome.directory,
        "snapshot": outcome.snapshot,
        "report": outcome.report,
        "stopped": stopped,
        "stopped_early": progress.stopped_early,
        "position": progress.position,
        "stop_position": progress.stop_position,
        "examples": progress.examples,
        "seconds": progress.seconds,
        "examples_per_second": progress.examples_per_second,
        "metrics": progress.metrics,
        "validation": progress.validations[-1].metrics if progress.validations else None,
        "hit_rates": hit_rates(progress.counts),
        "levels": progress.levels,
        "bad_rows": bad_rows_value(progress.bad_rows),
    }


def summary_text(outcome: Outcome, stopped: bool) -> str:
    """The run for people."""
    progress = outcome.progress
    rates = hit_rates(progress.counts)
    how = "stopped" if stopped else "stopped early" if progress.stopped_early else "trained"
    pace = f"{progress.examples:,} examples in {duration(progress.seconds)} ({progress.examples_per_second:,.0f}/s)"
    if not progress.examples and progress.position == progress.stop_position:
        how, pace = "nothing to do", f"all {progress.position:,} rows were trained on before"
    pairs = [(how, pace)]
    if progress.metrics:
        values = ", ".join(f"{name} {value:.4f}" for name, value in shown(progress.metrics).items())
        pairs.append(("progressive", values))
    if progress.validations:
        values = ", ".join(f"{name} {value:.4f}" for name, value in shown(progress.validations[-1].metrics).items())
        pairs.append(("validation", values))
    if progress.examples:
        words = (
            f"HBM {percent(rates['hbm'])} of occurrences; rows from memory {percent(rates['memory'])}, "
            f"SSD {percent(rates['disk'])}, new {percent(rates['new'])}"
        )
        pairs.append(("hits", words))
    pairs.extend(bad_rows_facts(progress.bad_rows))
    on_disk = sum(
        path.stat().st_blocks * 512 for path in Path(outcome.directory, "tables").rglob("*") if path.is_file()
    )
    pairs.append(("on SSD", size(on_disk)))
    pairs.append(("model", f"{outcome.directory} (snapshot {outcome.snapshot})"))
    if outcome.report:
        pairs.append(("report", outcome.report))
    return facts(pairs)


def shown(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that fit a line."""
    names = {"auc": "AUC", "log_loss": "log loss", "normalised_entropy": "NE", "calibration": "calibration"}
    return {words: metrics[name] for name, words in names.items() if name in metrics}
