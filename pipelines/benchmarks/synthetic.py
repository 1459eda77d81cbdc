"""Synthetic data and OP+OSRP hashing: ``python pipelines/bench.py synthetic [--cores N] [--keys N]``.

Peers: the rates that the design asks for, NumPy's own Zipf sampler (keys alone, no labels), and OP+OSRP written with
whole-array NumPy operations.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from benchmarks.harness import Result, alternate, compare
from daskps.data.osrp import Osrp
from daskps.data.synthetic import Synthetic
from daskps.device.pool import ComputePool
from daskps.types import Batch

WANTED_KEYS_A_SECOND = 10e6


def mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def numpy_zipf(keys: int, exponent: float, keys_per_slot: int, seed: int) -> np.ndarray:
    """Hashed keys by NumPy's sampler, which has no upper bound: what is beyond is drawn again."""
    random = np.random.default_rng(seed)
    ranks = random.zipf(exponent, keys)
    while len(beyond := np.flatnonzero(ranks > keys_per_slot)):
        ranks[beyond] = random.zipf(exponent, len(beyond))
    return mix64(ranks.astype(np.uint64))


def numpy_osrp(batch: Batch, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """2**bits bins of 2**64 columns: sort by (example, bin), add up, take signs. Returns keys and their examples."""
    places = mix64(batch.keys) >> np.uint64(64 - bits)
    signs = np.where(mix64(batch.keys ^ np.uint64(1)) >> np.uint64(63), -1, 1)
    counts = batch.offsets[batch.slots :: batch.slots] - batch.offsets[: -1 : batch.slots]
    examples = np.repeat(np.arange(batch.examples, dtype=np.uint64), counts)
    order = np.argsort(examples << np.uint64(bits) | places, kind="stable")
    places, examples = places[order], examples[order]
    starts = np.flatnonzero(np.concatenate([[True], (places[1:] != places[:-1]) | (examples[1:] != examples[:-1])]))
    sums = np.add.reduceat(signs[order], starts)
    kept = starts[sums != 0]
    return 2 * places[kept] + (sums[sums != 0] > 0), examples[kept]


def generating(pool: ComputePool, keys: int) -> list[Result]:
    results = []
    for slots, each in ((26, 1), (50, 2), (100, 5)):
        config = Synthetic(
            keys // (slots * each), slots=slots, keys_per_bag=(each,) * slots, keys_per_slot=10**8, zipf_exponent=1.1
        )
        count = config.examples * slots * each
        seconds = alternate(
            {
                "ours": lambda config=config: config.read(0, config.examples, pool),
                "numpy keys alone": lambda count=count: numpy_zipf(count, 1.1, 10**8, 0),
            },
            rounds=3,
        )
        name = f"synthetic, {slots} slots x {each}, 1e8 keys a slot"
        results += compare(name, seconds, items=count, unit="keys/s", targets={"numpy keys alone": None})
        ours = count / seconds["ours"]
        wanted = WANTED_KEYS_A_SECOND
        results.append(Result(name, ours, "wanted on 2 cores", wanted, ours / wanted, 1.0, "keys/s"))
    return results


def hashing(pool: ComputePool, keys: int) -> list[Result]:
    results = []
    for slots, each in ((50, 2), (100, 5)):
        config = Synthetic(keys // (slots * each), slots=slots, keys_per_bag=(each,) * slots, keys_per_slot=10**8)
        batch = config.read(0, config.examples, pool)
        for bits in (16, 32):
            seconds = alternate(
                {
                    "ours": lambda batch=batch, bits=bits: Osrp(2**bits).apply(batch, pool),
                    "numpy": lambda batch=batch, bits=bits: numpy_osrp(batch, bits),
                },
                rounds=3,
            )
            name = f"OP+OSRP, {slots} slots x {each}, k = 2^{bits}"
            results += compare(name, seconds, items=len(batch.keys), unit="keys/s", targets={"numpy": None})
    return results


def run(argv: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py synthetic", description=__doc__)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--keys", type=int, default=5_000_000, help="keys in one run of a contender")
    arguments = parser.parse_args(argv)
    with ComputePool(arguments.cores) as pool:
        return generating(pool, arguments.keys) + hashing(pool, arguments.keys)
