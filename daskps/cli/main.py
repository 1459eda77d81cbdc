"""The click group of all commands: ``daskps`` (`main`), and ``dask ps`` (`ps`)."""

from __future__ import annotations

from typing import Any

import click

from daskps.cli.bench import bench
from daskps.cli.command import EXIT_CODE_HELP, explain
from daskps.cli.compact import compact
from daskps.cli.evaluate import evaluate
from daskps.cli.export import export
from daskps.cli.inspect import inspect
from daskps.cli.plan import plan_command
from daskps.cli.predict import predict
from daskps.cli.settings import settings
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


class Group(click.Group):
    """A click group that reports wrong usage as JSON if ``--json`` is among the arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        as_json = ctx.meta["daskps.json"] = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.ClickException as error:
            if not as_json:
                raise
            ctx.exit(explain(error, as_json=True, debug=False))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if not ctx.meta["daskps.json"]:
                raise
            ctx.exit(explain(error, as_json=True, debug=False))


@click.group(cls=Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskps")
def main() -> None:
    """Train and use CTR models whose embedding tables are far larger than memory, as a dataflow on Dask."""


for command in (
    train,
    evaluate,
    predict,
    export,
    inspect,
    verify,
    compact,
    snapshots,
    settings,
    synth,
    plan_command,
    bench,
):
    main.add_command(command)

ps = Group("ps", main.commands, help=main.help, epilog=EPILOG.replace("daskps ", "dask ps "))
