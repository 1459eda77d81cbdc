"""Any range, in any order, by any number of nodes, through any number of epochs: the examples are the examples."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.data.batches import concatenate
from daskps.data.columns import Parquet
from daskps.data.delimited import criteo
from daskps.data.order import Order, Steps
from daskps.data.reader import Source
from daskps.data.schema import CRITEO_COLUMNS, Schema, Slot, criteo_schema
from daskps.data.tokens import Tokens
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, DataError
from daskps.types import Batch
from tests.data.criteo_rows import criteo_text

ROWS = 500


def same(left: Batch, right: Batch) -> None:
    for name in ("labels", "keys", "offsets", "weights"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def write_criteo(folder: Path) -> Source:
    lines = criteo_text(ROWS).splitlines(keepends=True)
    for name, part in {"0.tsv": lines[:123], "1.tsv": [], "2.tsv": lines[123:130], "3.tsv": lines[130:]}.items():
        (folder / name).write_bytes(b"".join(part))
    return Source([str(folder)], criteo(2000), criteo_schema())


def write_gzip(folder: Path) -> Source:
    source = write_criteo(folder)
    for path in folder.glob("*.tsv"):
        with pa.CompressedOutputStream(str(path) + ".gz", "gzip") as out:
            out.write(path.read_bytes())
        path.unlink()
    return source


def write_parquet(folder: Path) -> Source:
    lines = [line.decode().split("\t") for line in criteo_text(ROWS).splitlines()]
    columns = list(zip(*lines, strict=True))
    arrays = {"label": pa.array([int(x) for x in columns[0]])}
    for name, values in zip(CRITEO_COLUMNS[1:], columns[1:], strict=True):
        convert: Callable[[str], int | str] = int if name.startswith("I") else str
        arrays[name] = pa.array([convert(value) if value else None for value in values])
    table = pa.table(arrays)
    pa.parquet.write_table(table[:200], folder / "a.parquet", row_group_size=70)
    pa.parquet.write_table(table[200:], folder / "b.parquet", row_group_size=1000)
    return Source([str(folder)], Parquet(), criteo_schema())


def write_tokens(folder: Path) -> Source:
    rng = np.random.default_rng(1)
    lines = [
        " ".join([str(rng.integers(0, 2)), *(f"{rng.integers(0, 3)}:{key}:0.5" for key in rng.integers(0, 99, size))])
        for size in rng.integers(0, 9, ROWS)
    ]
    (folder / "a.txt").write_text("\n".join(lines))
    return Source(
        [str(folder)], Tokens("libffm", block_bytes=500), Schema((Slot(name="0"), Slot(name="1"), Slot(name="2")))
    )


WRITERS = {"plain": write_criteo, "gzip": write_gzip, "parquet": write_parquet, "tokens": write_tokens}


@pytest.fixture(scope="module", params=list(WRITERS))
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Batch]:
    """A source, and all its examples as one batch."""
    source = WRITERS[request.param](tmp_path_factory.mktemp(request.param))
    index = source.index()
    assert index.examples == ROWS
    with ComputePool(1) as pool, source.open(index, pool) as reader:
        return source, reader.read(0, ROWS)


def test_text_compressed_text_and_parquet_of_the_same_examples_give_the_same_batch(
    tmp_path: Path, pool: ComputePool
) -> None:
    batches = []
    for name in ("plain", "gzip", "parquet"):
        (tmp_path / name).mkdir()
        source = WRITERS[name](tmp_path / name)
        with source.open(source.index(), pool) as reader:
            batches.append(reader.read(0, ROWS))
    same(batches[0], batches[1])
    same(batches[0], batches[2])


ranges = st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, 120)), min_size=1, max_size=8)


def test_any_range_in_any_order_is_that_slice_of_the_whole(data: tuple[Source, Batch], pool: ComputePool) -> None:
    source, whole = data
    with source.open(source.index(), pool) as reader:

        @settings(max_examples=30, deadline=None)
        @given(ranges)
        def check(wanted: list[tuple[int, int]]) -> None:
            for start, size in wanted:
                stop = min(start + size, ROWS)
                batch = reader.read(start, stop)
                assert batch.first_example == start
                same(batch, whole.slice(start, stop))

        check()


@pytest.mark.parametrize("order", [Order(2), Order(2, window_examples=64, seed=4)], ids=["in order", "shuffled"])
def test_nodes_together_read_what_one_node_reads(data: tuple[Source, Batch], pool: ComputePool, order: Order) -> None:
    source, _ = data
    index = source.index()
    one = Steps(90, block_examples=16)
    with source.open(index, pool, order, one) as reader:
        steps = one.count(reader.examples)
        assert steps == 12
        whole, starts = reader.read_steps(0, steps)
        assert starts.tolist() == [*range(0, 1000, 90), 1000]
    parts: dict[int, list[Batch]] = {step: [] for step in range(steps)}
    for rank in range(3):
        with source.open(index, pool, order, replace(one, nodes=3, rank=rank)) as reader:
            for first in range(0, steps, 5):
                last = min(first + 5, steps)
                batch, starts = reader.read_steps(first, last)
                for step in range(first, last):
                    begin, end = starts[step - first : step - first + 2].tolist()
                    cut = replace(one, nodes=3, rank=rank).slice(step, reader.examples)[0] - step * 90
                    assert cut % 16 == 0 or begin == end
                    parts[step].append(batch.slice(begin, end))
    same(concatenate([part for step in range(steps) for part in parts[step]], 0), whole)


def test_a_run_that_stops_anywhere_goes_on_exactly_with_other_steps_and_nodes(
    data: tuple[Source, Batch], pool: ComputePool
) -> None:
    source, _ = data
    index, order = source.index(), Order(3, window_examples=100, seed=1)
    with source.open(index, pool, order) as reader:
        whole = reader.read(0, 3 * ROWS)
    steps = Steps(40, nodes=2, block_examples=8, origin=777)
    rest = []
    readers = [source.open(index, pool, order, replace(steps, rank=rank)) for rank in range(2)]
    for step in range(steps.count(3 * ROWS)):
        rest += [reader.read_steps(step, step + 1)[0] for reader in readers]
    for reader in readers:
        reader.close()
    same(concatenate(rest, 777), whole.slice(777, 3 * ROWS))


def test_shuffling_permutes_the_examples_of_every_window_and_no_others(
    data: tuple[Source, Batch], pool: ComputePool
) -> None:
    source, whole = data
    order = Order(2, window_examples=128, seed=9)
    with source.open(source.index(), pool, order) as reader:
        shuffled = reader.read(0, 2 * ROWS)
    for epoch in range(2):
        for window in range(4):
            begin, end = window * 128, min((window + 1) * 128, ROWS)
            permutation = order.permutation(epoch, window, end - begin)
            for place in (0, 1, 17, end - begin - 1):
                example, at = begin + int(permutation[place]), epoch * ROWS + begin + place
                same(shuffled.slice(at, at + 1), whole.slice(example, example + 1))
    epochs = [shuffled.slice(0, ROWS), shuffled.slice(ROWS, 2 * ROWS)]
    assert not np.array_equal(epochs[0].labels, epochs[1].labels)
    assert sorted(epochs[0].keys.tolist()) == sorted(whole.keys.tolist()) == sorted(epochs[1].keys.tolist())


def test_one_window_over_all_examples_is_shuffled_anew_in_every_epoch(
    data: tuple[Source, Batch], pool: ComputePool
) -> None:
    source, whole = data
    order = Order(2, window_examples=ROWS, seed=2)
    with source.open(source.index(), pool, order) as reader:
        for epoch in range(2):
            labels = reader.read(epoch * ROWS, (epoch + 1) * ROWS).labels
            np.testing.assert_array_equal(labels, whole.labels[order.permutation(epoch, 0, ROWS)])


def test_batches_run_through_the_epochs(data: tuple[Source, Batch], pool: ComputePool) -> None:
    source, whole = data
    with source.open(source.index(), pool, Order(2)) as reader:
        found = list(reader.batches(180, start=400))
    assert [batch.examples for batch in found] == [180, 180, 180, 60]
    same(concatenate(found, 400), concatenate([whole.slice(400, ROWS), whole], 400))


def test_any_number_of_threads_reads_the_same(data: tuple[Source, Batch]) -> None:
    source, whole = data
    for cores in (1, 3):
        with ComputePool(cores) as pool, source.open(source.index(), pool) as reader:
            same(reader.read(0, ROWS), whole)


def test_examples_beyond_the_data_are_refused(data: tuple[Source, Batch], pool: ComputePool) -> None:
    source, _ = data
    with source.open(source.index(), pool, steps=Steps(100)) as reader:
        with pytest.raises(
            DataError, match=r"examples \[400, 501\) were asked for, but the data has examples \[0, 500\)"
        ):
            reader.read(400, 501)
        with pytest.raises(DataError, match=r"steps \[4, 6\) were asked for, but the data has 5 steps of 100"):
            reader.read_steps(4, 6)


def test_steps_need_to_be_given(data: tuple[Source, Batch], pool: ComputePool) -> None:
    source, _ = data
    with source.open(source.index(), pool) as reader, pytest.raises(ArgumentError, match="opened without steps"):
        reader.read_steps(0, 1)


def test_a_reader_goes_on_after_an_error(tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.tsv").write_bytes(criteo_text(50) + b"bad\n" + criteo_text(50, seed=1))
    source = Source([str(tmp_path)], criteo(1000), criteo_schema())
    with source.open(source.index(), pool) as reader:
        with pytest.raises(DataError, match="line 51: wrong number of columns: 1, the schema wants 40"):
            reader.read(0, 101)
        assert reader.read(51, 101).examples == 50
