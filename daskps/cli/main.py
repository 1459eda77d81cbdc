"""The group of all commands."""

from __future__ import annotations

import click

from daskps.cli.bench import bench
from daskps.cli.command import EXIT_CODE_HELP
from daskps.cli.compact import compact
from daskps.cli.evaluate import evaluate
from daskps.cli.export import export
from daskps.cli.inspect import inspect
from daskps.cli.plan import plan_command
from daskps.cli.predict import predict
from daskps.cli.snapshots import snapshots
from daskps.cli.synth import synth
from daskps.cli.train import train
from daskps.cli.verify import verify
from daskps.version import __version__

EPILOG = f"""\b
Five minutes:
  daskps train pipelines/demo.toml
  daskps inspect runs/demo
  daskps evaluate runs/demo
  daskps export runs/demo -o exported

{EXIT_CODE_HELP}"""


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskps")
def main() -> None:
    """CTR models with embedding tables far larger than memory, trained as a dataflow on Dask."""


for command in (train, evaluate, predict, export, inspect, verify, compact, snapshots, synth, plan_command, bench):
    main.add_command(command)

ps = click.Group("ps", main.commands, help=main.help, epilog=EPILOG.replace("daskps ", "dask ps "))
