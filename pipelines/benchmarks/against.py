"""Ours now against ours at an earlier commit: ``bench.py against [COMMIT] --part kernels|train``, turn by turn.

Each turn is a process of its own that runs the benchmark of its own tree, without peers. A line's ratio is the median
of the rates now / the median of the rates then; 0.97 is wanted where a change may cost nothing. Rates of `train` are
passes over the data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Result

ROOT = Path(__file__).parents[2]
WANTED = 0.97

# Run in either tree, so only with what both have: contenders and peers are cut down to ours, seconds are printed.
KERNELS = """
import json, os
from benchmarks import harness, kernels
found = {}
def only_ours(contenders, *args, **kwargs):
    return harness.alternate({k: v for k, v in contenders.items() if k in {"ours", "fixed", "float"}}, *args, **kwargs)
def keep(name, seconds, *, items, **kwargs):
    found[name] = items / seconds["ours"]
    return []
kernels.alternate, kernels.compare, kernels._peer = only_ours, keep, lambda name: None
with kernels.ComputePool(os.cpu_count()) as pool:
    device = kernels.CpuDevice(0, pool)
    kernels.distinct_keys(device)
    for work in kernels.WORKLOADS:
        kernels.embedding_step(device, work)
print(json.dumps(found))
"""
TRAIN = """
import json, os
from benchmarks import train
found, seconds = {}, train.second_pass_seconds
def keep(*args):  # its arguments were others then
    passed = seconds(*args)
    found[work.name] = 1 / passed
    return passed
train.second_pass_seconds, train.PEERS = keep, {}
for work in train.WORKLOADS:
    train.against_peers(work, 384, 1, os.cpu_count())
print(json.dumps(found))
"""
PARTS = {"kernels": KERNELS, "train": TRAIN}


def rates(tree: Path, part: str) -> dict[str, float]:
    """Return the rates that the benchmark of `tree` finds, by name."""
    paths = os.pathsep.join(map(str, (tree, tree / "pipelines")))
    done = subprocess.run(
        [sys.executable, "-c", PARTS[part]],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=tree,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run(arguments: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py against")
    parser.add_argument("commit", nargs="?", default="c861977")
    parser.add_argument("--part", choices=PARTS, default="kernels")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder)
        archive = subprocess.run(["git", "-C", ROOT, "archive", options.commit], check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", old], check=True, input=archive.stdout)
        for tree in (old, ROOT):  # compile the kernels before anything is timed
            folder_then_or_now = "device" if (tree / "daskps" / "device").is_dir() else "backend"
            subprocess.run(
                [sys.executable, "-m", f"daskps.{folder_then_or_now}.compile"],
                env=os.environ | {"PYTHONPATH": str(tree)},
                cwd=tree,
                check=True,
            )
        turns = [(rates(old, options.part), rates(ROOT, options.part)) for _ in range(options.rounds)]
    results = []
    for name in turns[0][1]:
        then, now = (statistics.median(turn[index][name] for turn in turns) for index in (0, 1))
        results.append(Result(name, now, options.commit, then, now / then, WANTED, "per second"))
    return results
