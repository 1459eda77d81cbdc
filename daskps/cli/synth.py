"""``daskps synth``: write synthetic CTR data whose best possible AUC is known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from daskps.build import synthetic
from daskps.cli.command import command, facts
from daskps.config import make_job, read_job
from daskps.data.formats import SyntheticSettings
from daskps.device.pool import ComputePool
from daskps.storage.output import atomic_output
from daskps.view.words import size

EPILOG = """\b
Examples:
  daskps synth -o clicks.parquet --examples 1000000 --slots 20 --keys-per-slot 1000000
  daskps synth -o demo.parquet --job pipelines/demo.toml
"""


def _default(name: str) -> Any:
    return SyntheticSettings.model_fields[name].default


@click.command(epilog=EPILOG)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Parquet file.")
@click.option(
    "--job",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Take the data of this job file.",
)
@click.option("--examples", type=click.IntRange(1), help=f"Examples; {_default('examples'):,} by default.")
@click.option("--slots", type=click.IntRange(1), help=f"Slots; {_default('slots')} by default.")
@click.option("--keys-per-slot", type=click.IntRange(1), help="Distinct keys that a slot draws from.")
@click.option("--keys-per-bag", type=click.IntRange(1), help="Keys of one slot in one example.")
@click.option("--zipf-exponent", type=click.FloatRange(0), help="Skew of the keys; 0 is uniform.")
@click.option("--dense-features", type=click.IntRange(0), help="Dense columns.")
@click.option("--seed", type=int, help="Another seed gives other data.")
@command
def synth(output: Path, job: Path | None, **given: Any) -> tuple[Any, ...]:
    """Write synthetic examples as Parquet, and print the best AUC that any model can reach on them.

    With --job, the file has the job's training examples, followed by its validation examples.
    """
    base = read_job(job) if job is not None else make_job({"data": {"format": "synthetic"}})
    if base.data.synthetic is None:
        raise click.BadParameter(f"the data of {job} is {base.data.format}, not synthetic", param_hint="--job")
    changed = base.data.synthetic.model_dump() | {name: value for name, value in given.items() if value is not None}
    more = base.data.validation_rows if given["examples"] is None else 0
    settings = {"data": {"format": "synthetic", "synthetic": changed, "validation_rows": more}}
    generator = synthetic(make_job(settings))
    with ComputePool(len(os.sched_getaffinity(0))) as pool:
        with atomic_output(output) as unfinished:
            generator.write_parquet(unfinished, pool=pool)
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
