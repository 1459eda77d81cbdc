"""``daskps bench``: run the benchmarks of a source checkout, which compare daskps with other libraries (peers)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from daskps.cli.command import command

EPILOG = """\b
Examples:
  daskps bench                     list the parts
  daskps bench ssd                 one part against its peers
  daskps bench ssd --json
  daskps bench ssd -- --rows 1000000

The `bench` extra installs the peers. Machines are noisy: compare only numbers of the same run.
"""


@click.command(epilog=EPILOG)
@click.argument("part", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@command
def bench(part: str | None, arguments: tuple[str, ...]) -> tuple[Any, ...]:
    """Measure PART of daskps and its peers; without PART, list the parts."""
    script = find_script()
    parts = sorted(path.stem for path in (script.parent / "benchmarks").glob("*.py") if path.stem not in NOT_PARTS)
    if part is None:
        return {"parts": parts}, "parts: " + ", ".join(parts)
    if part not in parts:
        raise click.BadParameter(f"no part {part!r}; there are {', '.join(parts)}", param_hint="PART")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results"
        run = [sys.executable, str(script), part, "--json", str(found), *arguments]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"the benchmark failed with code {done.returncode}:\n{done.stderr.strip()}")
        results = [json.loads(line) for line in found.read_text().splitlines()]
    return {"part": part, "results": results}, done.stdout.rstrip()


NOT_PARTS = {"__init__", "harness"}  # files in pipelines/benchmarks that are no benchmark


def find_script() -> Path:
    """Return the path of pipelines/bench.py, in the checkout of this package or in the working directory."""
    places = [Path(__file__).resolve().parents[2] / "pipelines" / "bench.py", Path.cwd() / "pipelines" / "bench.py"]
    for place in places:
        if place.is_file():
            return place
    raise click.ClickException("benchmarks are part of the source: run `daskps bench` in a checkout of daskps")
