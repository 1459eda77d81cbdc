"""The group of all commands."""

from __future__ import annotations

import click

from daskps.cli.command import EXIT_CODE_HELP
from daskps.cli.train import train
from daskps.version import VERSION

EPILOG = f"""\b
Five minutes:
  daskps train pipelines/demo.toml
  daskps inspect runs/demo
  daskps evaluate runs/demo
  daskps export runs/demo -o exported

{EXIT_CODE_HELP}"""


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="daskps")
def main() -> None:
    """CTR models with embedding tables far larger than memory, trained as a dataflow on Dask."""


main.add_command(train)
