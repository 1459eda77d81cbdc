"""Benchmarks against peers: ``python pipelines/bench.py PART [--json FILE]``; PART is a module of pipelines/benchmarks.

Peers come from the ``bench`` extra: ``pip install '.[bench]'``. Each part's module has ``run(arguments) -> results``.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks import harness

PARTS = sorted(
    path.stem
    for path in (Path(__file__).parent / "benchmarks").glob("*.py")
    if path.stem not in {"harness", "__init__"}
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write one JSON object a line")
    arguments, rest = parser.parse_known_args()
    results = importlib.import_module(f"benchmarks.{arguments.part}").run(rest)
    harness.report(results, arguments.json)


if __name__ == "__main__":
    main()
