"""Prints a digest of every kernel's output on fixed inputs; run by test_variants.py once per built CPU variant."""

import hashlib

import numpy as np

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.hbm.dedup import partition, unique
from daskps.hbm.gradient import Status, join_sources, sum_gradients, update_rows
from daskps.hbm.hash_table import Shard, build_table, find_rows, join_shards
from daskps.hbm.optimizer import OPTIMIZERS, Initialiser, Optimizer, initialise_columns, optimizer_fields
from daskps.hbm.pooling import group_occurrences, pool_rows


def report(name: str, *arrays: np.ndarray) -> None:
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
    print(name, digest.hexdigest())


def main(pool: ComputePool) -> None:
    device, rng = CpuDevice(0, pool), np.random.default_rng(5)
    keys = (rng.zipf(1.3, 30_000) % 5000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found = unique(device, keys=keys)
    report("unique", found.keys, found.row_of)
    parts = partition(device, keys=found.keys, parts=7)
    report("partition", parts.order, parts.starts)
    for initialiser in (Initialiser("uniform", -1, 1), Initialiser("normal", 0, 0.5)):
        rows = np.zeros((len(found.keys), 40), np.float32)
        initialise_columns(
            device, keys=found.keys, rows=rows, columns=slice(0, 40), initialiser=initialiser, seed=1, table=2
        )
        report(f"initial {initialiser.kind}", rows)
    slots = build_table(device, keys=found.keys)
    offsets = np.arange(0, 30_001, 3)
    for dim in (1, 4, 6, 8, 16, 19, 32, 64, 100, 128, 256):
        for kind in OPTIMIZERS:
            width = sum(field.width for field in optimizer_fields(kind, dim))
            rows = np.abs(rng.normal(size=(len(found.keys), width))).astype(np.float32)
            shards = join_shards([Shard(device, rows, slots)])
            row_of = find_rows(device, shards=shards, keys=keys)
            where = {"row_of": row_of, "offsets": offsets, "slots": 4, "pooling": "sqrtn"}
            out = pool_rows(device, shards=shards, dim=dim, **where)
            groups = group_occurrences(device, first_row=0, row_count=len(rows), **where)
            sources, status = join_sources([device], [out], slots=4, dim=dim), Status(device)
            sums = sum_gradients(device, groups=groups, sources=sources, status=status)
            optimizer = Optimizer(kind, 0.01, l2=0.001, clip_norm=1.0)
            update_rows(
                device, groups=groups, sources=sources, optimizer=optimizer, weight=33, rows=rows, status=status
            )
            status.check()
            report(f"{kind} {dim}", out, groups.touched, groups.bags, groups.coefficients, sums, rows)


if __name__ == "__main__":
    with ComputePool(3) as threads:
        main(threads)
