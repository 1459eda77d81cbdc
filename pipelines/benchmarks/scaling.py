"""Two nodes against one, and daskps against the in-memory parameter server of the slides.

``bench.py scaling`` trains 50 slots x 2 keys, D = 8, dnn 128-64 on generated examples, 4096 per node and step: on one
node, on two, by the baseline (pipelines/baseline.py) on the same two workers, and twice on one node at the same time,
two runs that know nothing of each other: what this machine gives two busy cores. Every node is a worker process on a
core of its own; scheduler and client are on the first core. Rates are of the second half of a run; runs are repeated in
turn and the median is taken.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from baseline import train_in_memory
from distributed import Client

from benchmarks.harness import Result, missing
from daskps.config import Job, make_job
from daskps.driver.dask import local_workers, run_job
from daskps.driver.driver import Outcome
from daskps.reports import Progress

EXAMPLES = 4096  # per node and step

Run = tuple[float, float, float]  # examples/s, bytes sent per example, AUC


def pin(core: int) -> None:
    """All threads of this process to one core; threads made later inherit it."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


@contextmanager
def workers(cores: Sequence[int]) -> Iterator[Client]:
    """One worker process on each of the cores; scheduler and client on the first core of the machine."""
    with local_workers(len(cores), processes=True) as client:
        pin(0)
        for core, worker in zip(cores, sorted(client.scheduler_info(n_workers=-1)["workers"]), strict=True):
            client.run(pin, core, workers=[worker])
        yield client


def job_of(nodes: int, steps: int, out: str) -> Job:
    """The workload on so many nodes: the same work for each of them."""
    settings: dict[str, Any] = {
        "out": out,
        "data": {
            "format": "synthetic",
            "synthetic": {
                "examples": EXAMPLES * nodes * steps,
                "slots": 50,
                "keys_per_bag": 2,
                "keys_per_slot": 200_000,
                "zipf_exponent": 1.05,
            },
        },
        "tables": {"main": {"dimension": 8, "optimizer": {"kind": "rowwise_adagrad", "learning_rate": 0.05}}},
        "model": {"hidden": [128, 64], "optimizer": {"kind": "adagrad", "learning_rate": 0.01}},
        "train": {"minibatch_examples": EXAMPLES * nodes},
        "budget": {"memory_bytes": "2GiB", "hbm_bytes": "2GiB"},
        "cluster": {"nodes": nodes, "cores": 1},
    }
    return make_job(settings)


def second_half(ends: dict[int, float]) -> float:
    """Steps a second, from when each was done; only ends of batches are known."""
    steps = sorted(ends)
    middle = min(steps, key=lambda step: abs(step - steps[-1] / 2))
    return (steps[-1] - middle) / (ends[steps[-1]] - ends[middle])


def step_ends(outcome: Outcome) -> dict[int, float]:
    """When each batch was pushed by all nodes, by its last step."""
    return {line["stop_step"]: line["ended"] for line in outcome.batches()}


def train_daskps(client: Client, nodes: int, steps: int) -> Run:
    """Train by daskps."""
    sent: dict[str, int] = {}

    def note_at_the_end(progress: Progress) -> None:
        if progress.position == progress.stop_position:
            sent.update(client.run(bytes_sent))

    with tempfile.TemporaryDirectory() as out:
        outcome = run_job(job_of(nodes, steps, out), client=client, on_progress=note_at_the_end)
        rate = second_half(step_ends(outcome)) * EXAMPLES * nodes
    return rate, sum(sent.values()) / (EXAMPLES * nodes * steps), outcome.metrics["auc"]


def bytes_sent(dask_worker: Any) -> int:
    """Of this worker's node to its peers."""
    node = dask_worker.plugins["daskps"].node
    return int(node.link.peers.session.bytes_sent) if node is not None else 0


def train_baseline(client: Client, nodes: int, steps: int) -> Run:
    """Train by the in-memory parameter server."""
    with tempfile.TemporaryDirectory() as out:
        outcome = train_in_memory(job_of(nodes, steps, out), client)
    rate = second_half(dict(enumerate(outcome.step_ends, 1))) * EXAMPLES * nodes
    return rate, outcome.bytes_sent / (EXAMPLES * nodes * steps), outcome.metrics["auc"]


def train_apart(clients: Sequence[Client], steps: int) -> float:
    """Examples/s of one-node runs at the same time, on a core each."""
    with ThreadPoolExecutor(len(clients)) as threads:
        return sum(rate for rate, _, _ in threads.map(lambda client: train_daskps(client, 1, steps), clients))


def note(found: dict[str, list[Run]], name: str, run: Run) -> None:
    """Keep a run, and show it."""
    found.setdefault(name, []).append(run)
    print(f"{name}: {run[0]:,.0f} examples/s", flush=True)


def run(arguments: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py scaling")
    parser.add_argument("--steps", type=int, default=512, help="of a run; batches are at most a 16th of it")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if len(os.sched_getaffinity(0)) < 2:
        return [missing("2 nodes", "a second core", "this process may use one core only")]
    steps = options.steps
    found: dict[str, list[Run]] = {}
    apart: list[float] = []
    for _ in range(options.rounds):  # idle workers cost the others a few per cent, so they come and go
        with workers([0]) as alone:
            note(found, "1 node", train_daskps(alone, 1, steps))
            with workers([1]) as other:
                apart.append(train_apart([alone, other], steps))
        with workers([0, 1]) as both:
            note(found, "2 nodes", train_daskps(both, 2, steps))
            note(found, "baseline", train_baseline(both, 2, steps))
    rates = {name: statistics.median(rate for rate, _, _ in values) / 1e3 for name, values in found.items()}
    ceiling = statistics.median(apart) / 1e3
    (_, sent, auc), (_, baseline_sent, baseline_auc) = found["2 nodes"][-1], found["baseline"][-1]
    lines = [
        ("2 nodes", rates["2 nodes"], "1 node", rates["1 node"], 1.8, "k examples/s"),
        ("2 runs of 1 node at once", ceiling, "1 node", rates["1 node"], None, "k examples/s, the machine's own limit"),
        ("2 nodes", rates["2 nodes"], "2 runs of 1 node at once", ceiling, None, "k examples/s"),
        ("2 nodes", rates["2 nodes"], "in-memory parameter server", rates["baseline"], 2.0, "k examples/s"),
        ("sent by 2 nodes", sent, "in-memory parameter server", baseline_sent, None, "bytes an example"),
        ("AUC of 2 nodes", auc, "in-memory parameter server", baseline_auc, None, "(within 0.001 wanted)"),
    ]
    return [
        Result(name, ours, peer, value, ours / value, target, unit) for name, ours, peer, value, target, unit in lines
    ]
