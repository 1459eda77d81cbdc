"""Arguments and options that several commands take."""

from __future__ import annotations

import click

FORMATS = ["criteo", "csv", "parquet", "libsvm", "libffm", "multislot"]

model_argument = click.argument("model", type=click.Path(exists=True, file_okay=False))
format_option = click.option("--format", type=click.Choice(FORMATS), help="Format of DATA; by default the job's.")
snapshot_option = click.option("--snapshot", metavar="ID", help="Take this snapshot instead of the last.")
