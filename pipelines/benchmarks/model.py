"""The dense network of a step, on all cores: forward, log loss, backward to the pooled slots, dense Adagrad.

Ours gives bits that no number of threads changes; the peer is torch on the CPU with the same network, inputs, loss and
optimizer. Sizes: input width and examples a step of the three workloads of the training benchmark.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import numpy as np

from benchmarks.harness import Result, alternate, compare, missing
from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.nn.architecture import KINDS
from daskps.nn.network import DenseNetwork, build
from daskps.nn.optimizer import DenseOptimizer

HIDDEN = (128, 64)
WORKLOADS = [(26, 16, 8192), (50, 8, 8192), (100, 8, 4096)]  # slots, dimension, examples a step
STEPS = 10


def _ours(network: DenseNetwork, pooled: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    gradients = [np.empty_like(pooled)]

    def steps() -> None:
        for _ in range(STEPS):
            result = network.step(pooled=[pooled], labels=labels, gradients=gradients)
            network.apply(result.sums)

    return steps


def _torch(pooled: np.ndarray, labels: np.ndarray, cores: int) -> Callable[[], None]:
    import torch

    torch.set_num_threads(cores)
    sizes = (pooled.shape[1], *HIDDEN)
    layers: list[torch.nn.Module] = []
    for i in range(len(HIDDEN)):
        layers += [torch.nn.Linear(sizes[i], sizes[i + 1]), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, foreach=True)
    inputs = torch.from_numpy(pooled).requires_grad_()
    targets = torch.from_numpy(labels)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            inputs.grad = None
            logits = model(inputs)[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
            loss.backward()
            optimizer.step()

    return steps


def run(argv: list[str]) -> list[Result]:
    """Examples/s of each workload, ours against torch."""
    parser = argparse.ArgumentParser(prog="bench.py model", description=__doc__)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--kinds", nargs="*", default=["lr", "fm", "deepfm"], help="others than dnn, without a peer")
    arguments = parser.parse_args(argv)
    results = []
    with ComputePool(arguments.cores) as pool:
        for slots, dim, examples in WORKLOADS:
            random = np.random.default_rng(0)
            labels = random.integers(0, 2, examples).astype(np.float32)
            for kind in ["dnn", *arguments.kinds]:
                shape = (slots, 1 if kind == "lr" else dim)
                hidden = HIDDEN if KINDS[kind].has_hidden else ()
                optimizer = DenseOptimizer("adagrad", learning_rate=0.01)
                network = build(kind, tables=[shape], hidden=hidden, device=CpuDevice(0, pool), optimizer=optimizer)
                pooled = random.normal(0, 0.1, (examples, slots * shape[1])).astype(np.float32)
                contenders = {"ours": _ours(network, pooled, labels)}
                title = f"{kind} step, {slots} slots, D {shape[1]}, {examples} examples"
                if kind == "dnn":
                    try:
                        contenders["torch"] = _torch(pooled, labels, arguments.cores)
                    except ImportError:
                        results.append(missing(title, "torch", "pip install torch"))
                seconds = alternate(contenders)
                items = examples * STEPS
                if "torch" in contenders:
                    results += compare(title, seconds, items=items, unit="examples/s", targets={"torch": 1.0})
                else:
                    results.append(Result(title, items / seconds["ours"], "-", None, None, None, "examples/s"))
    return results
