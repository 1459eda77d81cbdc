"""Kernels beside their peers: distinct keys (pandas, polars), the embedding step (FBGEMM CPU TBE, torch EmbeddingBag).

A step of ours is timed whole: finding 64-bit keys in the hash table of all rows, pooling, the list of touched rows,
fixed-point sums (nothing to clear: they live in registers), rowwise Adagrad, the check for bad numbers. FBGEMM and
torch are given ready indices, FBGEMM also sorted by table. All use the same number of threads; a turn is a pass over
the same twelve mini-batches, as training runs them. Torch has no rowwise Adagrad: it runs its sparse Adagrad.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Result, alternate, compare, missing
from daskps.device import compile
from daskps.device.device import CpuDevice, Workspace
from daskps.device.native import Function, signatures, variant
from daskps.device.pool import ComputePool
from daskps.hbm.dedup import unique
from daskps.hbm.gradient import Status, join_sources, update_rows
from daskps.hbm.hash_table import Shard, build_table, find_rows, join_shards
from daskps.hbm.optimizer import Optimizer
from daskps.hbm.pooling import group_occurrences, pool_rows

EXPONENT = 1.05
STEPS = 12  # different mini-batches, more than any cache holds; a turn is one pass over them
RATE = 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """A mini-batch of the design's three."""

    slots: int
    keys_per_bag: int  # occurrences of an example in each slot
    dim: int
    examples: int
    slot_keys: int  # distinct keys of a slot

    @property
    def name(self) -> str:
        return f"{self.slots} slots x {self.keys_per_bag} keys, D={self.dim}"

    @property
    def rows(self) -> int:
        return self.slots * self.slot_keys

    @property
    def occurrences(self) -> int:
        return self.examples * self.slots * self.keys_per_bag


WORKLOADS = [Workload(26, 1, 16, 8192, 400_000), Workload(50, 2, 8, 4096, 200_000), Workload(100, 5, 8, 4096, 200_000)]


def zipf_ranks(rng: np.random.Generator, count: int, keys: int) -> np.ndarray:
    """Ranks 0 .. keys - 1 with P(rank k) proportional to (k + 1)^-1.05."""
    weights = np.arange(1, keys + 1, dtype=np.float64) ** -EXPONENT
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative, rng.random(count) * cumulative[-1]).clip(0, keys - 1)


def indices(rng: np.random.Generator, work: Workload) -> np.ndarray:
    """(examples, slots, keys_per_bag) row numbers within their slot; popular rows, the same in all mini-batches, are
    scattered over the slot."""
    ranks = zipf_ranks(rng, work.occurrences, work.slot_keys).reshape(work.examples, work.slots, work.keys_per_bag)
    scattered: np.ndarray = np.random.default_rng(5).permutation(work.slot_keys)[ranks]
    return scattered


def _peer(name: str) -> Any | None:
    try:
        return __import__(name)
    except ImportError:
        return None


def distinct_keys(device: CpuDevice) -> list[Result]:
    rng, results, workspace = np.random.default_rng(1), [], Workspace(device)
    work = WORKLOADS[0]
    slot = np.arange(work.slots, dtype=np.uint64)[None, :, None] << np.uint64(40)
    step = np.concatenate([(indices(rng, work).astype(np.uint64) | slot).ravel() for _ in range(20)])
    spread = step * np.uint64(0x9E3779B97F4A7C15)  # keys as hashed features have them
    one_slot = (zipf_ranks(rng, 4_000_000, 10_000_000).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for name, keys in {"26 slots of 400 k keys, 4.3 M": spread, "one slot of 10 M keys, 4 M": one_slot}.items():
        contenders: dict[str, Callable[[], object]] = {
            "ours": lambda k=keys: unique(device, keys=k, workspace=workspace)
        }
        targets: dict[str, float | None] = {}
        if pandas := _peer("pandas"):
            contenders["pandas.unique"] = lambda k=keys: pandas.unique(k)
            contenders["pandas.factorize"] = lambda k=keys: pandas.factorize(k)
            targets |= {"pandas.unique": 3.0, "pandas.factorize": None}
        if polars := _peer("polars"):
            series = polars.Series(keys)
            contenders["polars unique"] = lambda s=series: s.unique()
            targets |= {"polars unique": 2.0}
        title = f"distinct keys + row numbers: {name}"
        seconds = alternate(contenders, before=lambda: time.sleep(0.1))
        results += compare(title, seconds, items=len(keys) / 1e6, unit="M keys/s", targets=targets)
        results += [
            missing(title, peer, "pip install '.[bench]'") for peer in ("pandas", "polars") if _peer(peer) is None
        ]
    return results


class Ours:
    """The hash table, the rows and the buffers of one workload."""

    def __init__(self, device: CpuDevice, work: Workload, steps: list[np.ndarray]) -> None:
        rng = np.random.default_rng(2)
        self.device, self.work, self.workspace = device, work, Workspace(device)
        keys = np.arange(work.rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.rows = device.zeros((work.rows, work.dim + 1), np.float32)
        self.rows[:, : work.dim] = rng.random((work.rows, work.dim), np.float32)
        self.shards = join_shards([Shard(device, self.rows, build_table(device, keys=keys))])
        slot = (np.arange(work.slots) * work.slot_keys)[None, :, None]
        self.keys = [keys[(step + slot).ravel()] for step in steps]
        self.offsets = np.arange(work.examples * work.slots + 1, dtype=np.int64) * work.keys_per_bag
        self.out = device.empty((work.examples, work.slots * work.dim), np.float32)
        self.status, self.optimizer = Status(device), Optimizer("rowwise_adagrad", RATE)

    def run(self, gradient: np.ndarray) -> None:
        for keys in self.keys:
            self.step(keys, gradient)

    def step(self, keys: np.ndarray, gradient: np.ndarray) -> None:
        work, device = self.work, self.device
        row_of = find_rows(device, shards=self.shards, keys=keys)
        pool_rows(
            device,
            shards=self.shards,
            dim=work.dim,
            row_of=row_of,
            offsets=self.offsets,
            slots=work.slots,
            out=self.out,
        )
        groups = group_occurrences(
            device,
            row_of=row_of,
            offsets=self.offsets,
            slots=work.slots,
            first_row=0,
            row_count=work.rows,
            workspace=self.workspace,
        )
        sources = join_sources([device], [gradient], slots=work.slots, dim=work.dim)
        update_rows(
            device,
            groups=groups,
            sources=sources,
            optimizer=self.optimizer,
            weight=work.examples,
            rows=self.rows,
            status=self.status,
        )
        self.status.check()

    def updates(self, gradient: np.ndarray, float_update: Function) -> dict[str, Callable[[], object]]:
        """Only the update: as it is, and with plain float32 sums."""
        row_of = find_rows(self.device, shards=self.shards, keys=self.keys[0])
        groups = group_occurrences(
            self.device,
            row_of=row_of,
            offsets=self.offsets,
            slots=self.work.slots,
            first_row=0,
            row_count=self.work.rows,
        )
        sources = join_sources([self.device], [gradient], slots=self.work.slots, dim=self.work.dim)
        values = {
            "sources": sources.descriptors[self.device.name],
            "slots": self.work.slots,
            "stride": sources.stride,
            "touched": groups.touched,
            "touched_count": len(groups.touched),
            "starts": groups.starts,
            "bags": groups.bags,
            "learning_rate": RATE,
            "factor": 2.0**-36 / self.work.examples,
            "dim": self.work.dim,
            "width": self.work.dim + 1,
            "rows": self.rows,
        }
        return {
            "fixed": lambda: update_rows(
                self.device,
                groups=groups,
                sources=sources,
                optimizer=self.optimizer,
                weight=self.work.examples,
                rows=self.rows,
                status=self.status,
            ),
            "float": lambda: self.device.pool.launch(float_update, **values),
        }


def fbgemm_tables(work: Workload) -> Any:
    """Return FBGEMM's tables of a workload on the CPU, one per slot, with rowwise Adagrad."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    return SplitTableBatchedEmbeddingBagsCodegen(
        [(work.slot_keys, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * work.slots,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )


def fbgemm_step(work: Workload, steps: list[np.ndarray], gradient: np.ndarray) -> Callable[[], object] | None:
    torch = _peer("torch")
    if torch is None or _peer("fbgemm_gpu") is None:
        return None
    tables = fbgemm_tables(work)
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    by_table = [torch.from_numpy(step.transpose(1, 0, 2).ravel().copy()) for step in steps]
    offsets = torch.arange(work.slots * work.examples + 1, dtype=torch.int64) * work.keys_per_bag
    grad = torch.from_numpy(gradient)

    def run() -> None:
        for keys in by_table:
            tables(keys, offsets).backward(grad)

    return run


def torch_step(work: Workload, steps: list[np.ndarray], gradient: np.ndarray) -> Callable[[], object] | None:
    torch = _peer("torch")
    if torch is None:
        return None
    bags = torch.nn.EmbeddingBag(work.rows, work.dim, mode="sum", sparse=True, include_last_offset=True)
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=RATE)
    slot = (np.arange(work.slots) * work.slot_keys)[None, :, None]
    inputs = [torch.from_numpy((step + slot).ravel()) for step in steps]
    offsets = torch.arange(work.slots * work.examples + 1, dtype=torch.int64) * work.keys_per_bag
    grad = torch.from_numpy(gradient).reshape(-1, work.dim)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")

    def run() -> None:
        for keys in inputs:
            optimizer.zero_grad()
            bags(keys, offsets).backward(grad)
            optimizer.step()

    return run


def float_update(folder: Path) -> Function:
    """The kernel of float_sums.cu, compiled like the library that is loaded."""
    source = Path(__file__).with_name("float_sums.cu")
    march = compile.variants()[variant()]
    target = folder / "float_sums.so"
    include = f"-I{compile.PACKAGE / 'kernels'}"
    command = [*compile.compiler(), *compile.FLAGS, march, include, "-x", "c++", "-shared"]
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    [signature] = signatures(source.read_text())
    return Function(signature, ctypes.CDLL(str(target))[signature.name])


def embedding_step(device: CpuDevice, work: Workload) -> list[Result]:
    rng = np.random.default_rng(3)
    steps = [indices(rng, work) for _ in range(STEPS)]
    gradient = device.empty((work.examples, work.slots * work.dim), np.float32)
    gradient[:] = rng.normal(size=gradient.shape)
    ours = Ours(device, work, steps)
    contenders: dict[str, Callable[[], object]] = {"ours": lambda: ours.run(gradient)}
    targets: dict[str, float | None] = {}
    absent = []
    title = f"embedding step: {work.name}"
    for peer, make in {"FBGEMM CPU TBE": fbgemm_step, "torch EmbeddingBag": torch_step}.items():
        step = make(work, steps, gradient)
        if step is None:
            absent.append(missing(title, peer, "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0"))
        else:
            contenders[peer] = step
            targets[peer] = 3.0
    seconds = alternate(contenders, before=lambda: time.sleep(0.1))  # threads of OpenMP go on spinning for a while
    results = compare(title, seconds, items=STEPS * work.examples / 1e3, unit="k examples/s", targets=targets) + absent
    with tempfile.TemporaryDirectory() as folder:
        updates = alternate(ours.updates(gradient, float_update(Path(folder))), rounds=9)
    cost = STEPS * (updates["fixed"] - updates["float"]) / seconds["ours"]
    results.append(
        Result(
            f"fixed-point sums: {work.name}", 100 * cost, "float32 sums", 0.0, None, None, "% of a step, wanted < 10"
        )
    )
    return results


def run(arguments: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py kernels")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=["unique", "1", "2", "3"], help="one part of the benchmark")
    options = parser.parse_args(arguments)
    if torch := _peer("torch"):
        torch.set_num_threads(options.cores)
    os.environ["POLARS_MAX_THREADS"] = str(options.cores)
    print(f"keys of a slot: P(rank k) = k^-{EXPONENT} / sum of j^-{EXPONENT} for j = 1 .. keys of the slot;", end=" ")
    print(f"{options.cores} threads each; library {variant()}")
    results: list[Result] = []
    with ComputePool(options.cores) as pool:
        device = CpuDevice(0, pool)
        if options.only in {None, "unique"}:
            results += distinct_keys(device)
        for number, work in enumerate(WORKLOADS, 1):
            if options.only in {None, str(number)}:
                results += embedding_step(device, work)
                gc.collect()
    return results
