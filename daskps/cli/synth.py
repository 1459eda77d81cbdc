"""``daskps synth``: write synthetic CTR data with a known best AUC."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from daskps.backend.pool import ComputePool
from daskps.cli.command import command, facts
from daskps.config import SyntheticData, make_job, read_job
from daskps.flow.inputs import synthetic
from daskps.view.words import size

EPILOG = """\b
Examples:
  daskps synth -o clicks.parquet --examples 1000000 --slots 20 --keys-per-slot 1000000
  daskps synth -o demo.parquet --job pipelines/demo.toml
"""


def _default(name: str) -> Any:
    return SyntheticData.model_fields[name].default


@click.command(epilog=EPILOG)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Parquet file.")
@click.option(
    "--job",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Take the data of this job file.",
)
@click.option("--examples", type=click.IntRange(1), help=f"Rows; {_default('examples'):,} by default.")
@click.option("--slots", type=click.IntRange(1), help=f"Slots; {_default('slots')} by default.")
@click.option("--keys-per-slot", type=click.IntRange(1), help="Distinct keys that a slot draws from.")
@click.option("--keys-per-bag", type=click.IntRange(1), help="Keys of one slot in one example.")
@click.option("--zipf-exponent", type=click.FloatRange(0), help="Skew of the keys; 0 is uniform.")
@click.option("--dense-features", type=click.IntRange(0), help="Dense columns.")
@click.option("--seed", type=int, help="Another seed gives other data.")
@command
def synth(output: Path, job: Path | None, **given: Any) -> tuple[Any, ...]:
    """Write synthetic examples as Parquet, and say which AUC no model can beat on them.

    The rows of a job (--job) are its training rows with the validation rows behind them.
    """
    base = read_job(job) if job is not None else make_job({"data": {"format": "synthetic"}})
    if base.data.synthetic is None:
        raise click.BadParameter(f"the data of {job} is {base.data.format}, not synthetic", param_hint="--job")
    changed = base.data.synthetic.model_dump() | {name: value for name, value in given.items() if value is not None}
    more = base.data.validation_rows if given["examples"] is None else 0
    settings = {"data": {"format": "synthetic", "synthetic": changed, "validation_rows": more}}
    generator = synthetic(make_job(settings))
    with ComputePool(len(os.sched_getaffinity(0))) as pool:
        generator.write_parquet(output, pool=pool)
        best = generator.best(0, generator.examples, pool)
    value: dict[str, Any] = {
        "output": str(output),
        "examples": generator.examples,
        "bytes": output.stat().st_size,
        "best_auc": best.auc,
        "best_log_loss": best.log_loss,
    }
    text = facts(
        [
            ("written", f"{output} ({generator.examples:,} examples, {size(value['bytes'])})"),
            ("best possible", f"AUC {best.auc:.4f}, log loss {best.log_loss:.4f}"),
        ]
    )
    return value, text
