"""SSD-PS beside a raw file, RocksDB and LMDB: append, cold and warm load, opening, and what smaller partitions cost.

``python pipelines/bench.py ssd [--rows N] [--folder DIR] [--large BYTES]``. Everything is written below --folder, which
must be on the disk to be measured, and removed again.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.harness import Result, alternate, compare, missing
from daskps.device.pool import ComputePool
from daskps.ssd import Options, Store, TableStore
from daskps.types import Field, RowLayout

LAYOUT = RowLayout((Field("embedding", 8), Field("accumulator", 1), Field("steps", 1, "uint32")))
WIDTH = LAYOUT.width
PIECE = 16 << 20


def run(argv: list[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog="bench.py ssd", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the store that is loaded from")
    parser.add_argument("--index-keys", type=int, default=50_000_000, help="keys of the store that is opened")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; by default the temporary folder")
    parser.add_argument("--large", type=int, default=0, metavar="BYTES", help="only a store of that many bytes on disk")
    arguments = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="daskps-bench-", dir=arguments.folder))
    try:
        with ComputePool(arguments.cores) as pool:
            if arguments.large:
                return large(folder, pool, arguments.large)
            return [
                *appends(folder, pool, arguments.rows, arguments.rounds),
                *loads(folder, pool, arguments.rows, arguments.rounds),
                *openings(folder, pool, arguments.index_keys, arguments.rounds),
            ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys all over the 64 bits, and rows."""
    keys = np.random.default_rng(0).permutation(rows).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys, np.random.default_rng(1).random((rows, WIDTH), np.float32)


def write_raw(path: Path, arrays: list[np.ndarray]) -> None:
    """The peer of every write: the same bytes in one file, with fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for array in arrays:
        view = memoryview(array).cast("B")
        for offset in range(0, len(view), PIECE):
            part = view[offset : offset + PIECE]
            while len(part):
                part = part[os.write(fd, part) :]
    os.fsync(fd)
    os.close(fd)


def write_direct(path: Path, arrays: list[np.ndarray]) -> None:
    """The same past the page cache, as fast as one thread can: what is left of the disk's own speed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without it
        fd = os.open(path, flags)
    buffer = mmap.mmap(-1, PIECE)  # at a page, as O_DIRECT wants it
    for array in arrays:
        view = memoryview(array).cast("B")
        for offset in range(0, len(view), PIECE):
            part = view[offset : offset + PIECE]
            buffer[: len(part)] = part
            os.write(fd, memoryview(buffer)[: -(-len(part) // mmap.PAGESIZE) * mmap.PAGESIZE])
    os.fsync(fd)
    os.close(fd)


def read_raw(path: Path, buffer: np.ndarray) -> None:
    """The peer of every read: the whole file, in large pieces, into memory that is there already."""
    with open(path, "rb", buffering=0) as file:
        view = memoryview(buffer).cast("B")
        while len(view) and (count := file.readinto(view[:PIECE])):
            view = view[count:]


def drop_pages(folder: Path, *peers: Peer | None) -> str:
    """Take the files below `folder` out of the page cache, and the peers' own caches with them; says how."""
    for peer in peers:
        if peer is not None:
            peer.reopen()
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "page cache dropped (drop_caches)"
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    return "pages given up (posix_fadvise)"


def appends(folder: Path, pool: ComputePool, rows: int, rounds: int) -> list[Result]:
    """Whole appends with checksums and fsync against a raw write of the same bytes, with fsync."""
    keys, values = data(rows)
    places = folder / "append"
    numbers = iter(range(10**6))

    def ours(index: bool) -> Callable[[], None]:
        def work() -> None:
            with Store.create(places / str(next(numbers)), LAYOUT, pool=pool) as store:
                if not index:  # what a restore does: rows to disk, checksums and fsync; the index follows from the keys
                    store._stock.index = _NoIndex()  # type: ignore[assignment]
                store.append(keys, values)
                store.commit("a", save_index=False)

        return work

    def parted() -> None:
        with TableStore.create(places / str(next(numbers)), LAYOUT, pool=pool) as table:
            table.append(keys, values)
            table.commit("a", save_index=False)

    def clear() -> None:
        shutil.rmtree(places, ignore_errors=True)
        places.mkdir()
        os.sync()

    seconds = alternate(
        {
            "raw": lambda: write_raw(places / "raw", [keys, values]),
            "direct": lambda: write_direct(places / "raw", [keys, values]),
            "without": ours(False),
            "with": ours(True),
            "partitions": parted,
        },
        rounds,
        before=clear,
    )
    shutil.rmtree(places)
    gigabytes = (keys.nbytes + values.nbytes) / 1e9

    def line(name: str, who: str, target: float | None, peer: str = "raw") -> list[Result]:
        pair = {"ours": seconds[who], "peer": seconds[peer]}
        titles = {"raw": "raw file + fsync", "direct": "O_DIRECT + fsync", "with": "1 partition"}
        (result,) = compare(name, pair, items=gigabytes, unit="GB/s", targets={"peer": target})
        return [Result(name, result.ours, titles[peer], result.peer_value, result.ratio, target, "GB/s")]

    return [
        *line(f"append {rows:,} rows, checksums, fsync", "without", 0.8),
        *line("  the same", "without", None, "direct"),
        *line(f"append {rows:,} rows, with the index", "with", 0.5),
        *line(f"append {rows:,} rows, 8 partitions", "partitions", None),
        *line("  the same", "partitions", None, "with"),
    ]


class _NoIndex:
    """Stands in for the index where only the way to the disk is measured."""

    memory_bytes = 0

    def insert(self, keys: np.ndarray, places: np.ndarray, coming: int = 0) -> np.ndarray:
        return np.full(len(keys), 0xFFFFFFFF, np.uint32)

    def __len__(self) -> int:
        return 0


def loads(folder: Path, pool: ComputePool, rows: int, rounds: int) -> list[Result]:
    """Loads of 10 k, 100 k and 1 M keys, uniform and Zipf, warm and cold, against RocksDB and LMDB; and of all."""
    keys, values = data(rows)
    path, raw = folder / "store", folder / "raw"
    write_raw(raw, [keys, values])
    results = []
    rocks, lmdb = _rocks(folder, keys, values), _lmdb(folder, keys, values)
    with Store.create(path, LAYOUT, pool=pool) as store:
        store.append(keys, values)
        store.commit("a")
    with Store.open(path, pool=pool) as store, TableStore.create(folder / "parts", LAYOUT, pool=pool) as table:
        table.append(keys, values)
        table.commit("a")
        out = np.ones((rows, WIDTH + 2), np.float32)  # keys and rows
        for how in ("warm", "cold"):
            before = (lambda: None) if how == "warm" else (lambda: drop_pages(folder, rocks, lmdb))
            note = "" if how == "warm" else f", {drop_pages(folder, rocks, lmdb)}"
            seconds = alternate(
                {"ours": lambda: [len(part) for part, _ in store.scan("a")], "raw file": lambda: read_raw(raw, out)},
                rounds,
                before,
            )
            results += compare(
                f"load everything, whole files, {how}",
                seconds,
                items=out.nbytes / 1e9,
                unit=f"GB/s{note}",
                targets={"raw file": 0.8},
            )
            for draw in ("uniform", "zipf"):
                for count in (10_000, 100_000, 1_000_000):
                    wanted = keys[_draw(draw, min(count, rows), rows)]
                    part = np.empty((len(wanted), WIDTH), np.float32)
                    contenders: dict[str, Callable[[], object]] = {
                        "ours": lambda k=wanted, o=part: store.load(k, o),
                        "8 partitions": lambda k=wanted, o=part: table.load(k, o),
                    }
                    peers = wanted[:20_000] if how == "warm" else wanted  # cold, more keys share what was read
                    if rocks:
                        contenders["RocksDB"] = lambda k=peers: rocks(k)
                    if lmdb:
                        contenders["LMDB"] = lambda k=peers: lmdb(k)
                    seconds = alternate(contenders, rounds, before)
                    for peer in {"RocksDB", "LMDB"} & seconds.keys():
                        seconds[peer] *= len(wanted) / len(peers)
                    goal = 20.0 if count == 1_000_000 else None
                    results += compare(
                        f"load {count:,} of {rows:,}, {draw}, {how}",
                        seconds,
                        items=len(wanted),
                        unit=f"rows/s{note}",
                        targets={peer: goal if peer == "RocksDB" else None for peer in seconds if peer != "ours"},
                    )
    if not rocks:
        results.append(missing("load", "RocksDB", "pip install rocksdict"))
    if not lmdb:
        results.append(missing("load", "LMDB", "pip install lmdb"))
    return results


def _draw(kind: str, count: int, rows: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    if kind == "uniform":
        return rng.integers(0, rows, count)
    return (rng.zipf(1.2, count) - 1) % rows


class Peer(Protocol):
    """Another store that holds the same rows."""

    def __call__(self, wanted: np.ndarray) -> object:
        """Get the rows of the keys."""

    def reopen(self) -> None:
        """Give up everything cached."""


def _rocks(folder: Path, keys: np.ndarray, values: np.ndarray) -> Peer | None:
    try:
        from rocksdict import Options as RocksOptions
        from rocksdict import Rdict, WriteBatch
    except ImportError:
        return None
    options = RocksOptions(raw_mode=True)
    options.create_if_missing(True)
    options.increase_parallelism(os.cpu_count() or 1)
    table = Rdict(str(folder / "rocks"), options)
    for first in range(0, len(keys), 1 << 18):
        batch = WriteBatch(raw_mode=True)
        for key, row in zip(keys[first : first + (1 << 18)].tolist(), values[first : first + (1 << 18)], strict=True):
            batch.put(key.to_bytes(8, "big"), row.tobytes())
        table.write(batch)
    table.flush()
    table.compact_range(None, None)

    table.close()

    class Rocks:
        def __init__(self) -> None:
            self.table = Rdict(str(folder / "rocks"), options)

        def __call__(self, wanted: np.ndarray) -> object:
            rows = self.table.get([key.to_bytes(8, "big") for key in wanted.tolist()])  # its batched get
            return np.frombuffer(b"".join(rows), np.float32)

        def reopen(self) -> None:
            self.table.close()
            self.table = Rdict(str(folder / "rocks"), options)

    return Rocks()


def _lmdb(folder: Path, keys: np.ndarray, values: np.ndarray) -> Peer | None:
    try:
        import lmdb
    except ImportError:
        return None
    environment = lmdb.open(str(folder / "lmdb"), map_size=1 << 40, writemap=True, sync=False)
    order = np.argsort(keys)
    with environment.begin(write=True) as transaction, transaction.cursor() as cursor:
        pairs = ((int(keys[i]).to_bytes(8, "big"), values[i].tobytes()) for i in order)
        cursor.putmulti(pairs, append=True)
    environment.sync(True)

    environment.close()

    class Lmdb:
        def __init__(self) -> None:
            self.environment = lmdb.open(str(folder / "lmdb"), map_size=1 << 40, readonly=True)

        def __call__(self, wanted: np.ndarray) -> object:
            with self.environment.begin() as transaction, transaction.cursor() as cursor:
                found = cursor.getmulti([key.to_bytes(8, "big") for key in wanted.tolist()])
            return np.frombuffer(b"".join(row for _, row in found), np.float32)

        def reopen(self) -> None:
            self.environment.close()
            self.environment = lmdb.open(str(folder / "lmdb"), map_size=1 << 40, readonly=True)

    return Lmdb()


def openings(folder: Path, pool: ComputePool, count: int, rounds: int) -> list[Result]:
    """Opening with a saved index against a raw read of its bytes, and with an index made from the keys."""
    layout = RowLayout((Field("weight", 1),))
    path = folder / "open"
    with Store.create(path, layout, pool=pool) as store:
        for first in range(0, count, 1 << 22):
            keys = np.arange(first, min(count, first + (1 << 22)), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            store.append(keys, np.zeros((len(keys), 1), np.float32))
        store.commit("a", save_index=True)
        per_key = (store._stock.index.memory_bytes + store._stock.ledger.memory_bytes) / count
    image = path / "index" / "1" / "c.0"
    buffer = np.empty(image.stat().st_size, np.uint8)

    def open_store(rebuild: bool) -> None:
        Store.open(path, pool=pool, read_only=True, rebuild_index=rebuild).close()

    seconds = alternate({"ours": lambda: open_store(False), "raw read": lambda: read_raw(image, buffer)}, rounds)
    rebuilt = alternate({"ours": lambda: open_store(True)}, rounds)["ours"]
    shutil.rmtree(path)
    name = f"open {count:,} keys"
    return [
        *compare(f"{name}, saved index", seconds, items=len(buffer) / 1e9, unit="GB/s", targets={"raw read": 0.5}),
        Result(f"{name}, index rebuilt", count / rebuilt, "20 M keys/s", 20e6, count / rebuilt / 20e6, 1.0, "keys/s"),
        Result("index and live bits, bytes a key", per_key, "12 bytes", 12.0, 12.0 / per_key, 1.0, "bytes"),
    ]


def large(folder: Path, pool: ComputePool, wanted_bytes: int) -> list[Result]:
    """A store larger than memory: filled in batches, updated while compaction works, loaded from cold."""
    free = shutil.disk_usage(folder).free
    rows = wanted_bytes // (8 + LAYOUT.row_bytes)
    if free < 2.2 * wanted_bytes and free < wanted_bytes + 20e9:
        raise SystemExit(f"{wanted_bytes / 1e9:.0f} GB wanted, {free / 1e9:.0f} GB free in {folder}")
    batch = 4_000_000
    rng = np.random.default_rng(0)
    values = rng.random((batch, WIDTH), np.float32)
    results = []

    def keys_of(numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    with Store.create(folder / "large", LAYOUT, pool=pool, options=Options()) as store:
        start = time.perf_counter()
        for first in range(0, rows, batch):
            numbers = np.arange(first, min(rows, first + batch))
            store.append(keys_of(numbers), values[: len(numbers)])
        store.commit("filled")
        seconds = time.perf_counter() - start
        stats = store.stats()
        per_key = (store._stock.index.memory_bytes + store._stock.ledger.memory_bytes) / rows
        size = f"{stats.disk_bytes / 1e9:.1f} GB, {rows / 1e6:.0f} M rows"
        results.append(_alone(f"fill {size}", stats.appended_bytes / 1e9 / seconds, "GB/s"))
        results.append(_alone("  index and live bits", per_key, "bytes a key"))
        for count in (1_000_000, 10_000_000):
            note = drop_pages(folder)
            wanted = keys_of(rng.integers(0, rows, count))
            before = store.stats()
            start = time.perf_counter()
            _, found = store.load(wanted)
            seconds = time.perf_counter() - start
            assert found.all()
            after = store.stats()
            read = (after.read_bytes - before.read_bytes) / 1e9
            results.append(_alone(f"  load {count:,} keys, cold", count / seconds, f"rows/s, {note}"))
            results.append(_alone("    read from disk", read / seconds, f"GB/s ({read:.1f} GB)"))
        store.drop("filled")
        start = time.perf_counter()
        updated = 0
        while updated < rows // 10:
            store.append(keys_of(rng.integers(0, rows, batch)), values)
            updated += batch
        seconds = time.perf_counter() - start
        after = store.stats()
        results.append(_alone(f"  update {updated:,} rows in place of old ones", updated / seconds, "rows/s"))
        amplification = (after.written_bytes - stats.written_bytes) / (after.appended_bytes - stats.appended_bytes)
        results.append(_alone("    write amplification", amplification, f"x, {after.compactions} files compacted"))
        live = after.live_rows * (8 + LAYOUT.row_bytes)
        results.append(_alone("    disk use over live rows", after.disk_bytes / live, "x"))
    start = time.perf_counter()
    with Store.open(folder / "large", pool=pool) as store:
        results.append(_alone("  open: remove what no snapshot holds", time.perf_counter() - start, "s"))
    return results


def _alone(name: str, value: float, unit: str) -> Result:
    print(f"{name}: {value:,.4g} {unit}", file=sys.stderr, flush=True)  # a run of many minutes: say what is known
    return Result(name, value, "-", None, None, None, unit)
