"""The contract of `Format`: statements that hold for every format of the table, and for both kinds of text files.

To add a format, add a subclass of `FormatContract` that writes EXAMPLES in it.
"""

from __future__ import annotations

import doctest
import gzip
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import daskps.data.format as format_module
from daskps.data.batches import allocate, as_batch
from daskps.data.format import FileBlocks, Format, Part
from daskps.data.formats import FORMATS, FormatOptions
from daskps.data.frame import Frame, frame_source
from daskps.data.schema import CRITEO_COLUMNS, Schema, Slot, key_of
from daskps.errors import ConfigError
from daskps.types import Batch

# Label, value of the slot `user`, values of the slot `tags`.
EXAMPLES = [(n % 2, 100 + n % 7, [f"{k}{n % 5}" for k in range(1, 1 + n % 3)]) for n in range(41)]
USER, TAGS = Slot(name="user"), Slot(name="tags", kind="multi")
HASH_SEED = 9


class FormatContract:
    """Contract of one format. A subclass sets `name` and writes examples; `slots` are the schema's slots."""

    name: ClassVar[str]  # in FORMATS
    slots: ClassVar[tuple[Slot, ...]] = (USER, TAGS)
    unfit: ClassVar[Schema] = Schema((Slot(name="no such column"),))
    covers_values: ClassVar[bool] = True  # the digest covers the values, not only the number of examples

    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        """Write examples to files, in several blocks; return their URLs."""
        raise NotImplementedError

    def make(self, examples: Sequence[Any]) -> Format:
        """Return the format, with small blocks."""
        return FORMATS[self.name].make(FormatOptions(block_bytes=128))

    def values(self, example: Any) -> list[list[Any]]:
        """Return the values of an example by slot."""
        return [[example[1]], example[2]]

    @property
    def schema(self) -> Schema:
        return Schema(self.slots)

    def opened(self, folder: Path, examples: Sequence[Any] = EXAMPLES) -> tuple[Format, list[FileBlocks]]:
        format = self.make(examples)
        return format, [format.index(file) for file in format.list(self.write(folder, examples))]

    def read(self, format: Format, blocks: FileBlocks, parts: Sequence[tuple[int, int, int]]) -> list[Batch]:
        """Read parts (block, first, last) of one file, in this order, each as a batch."""
        parser = format.parser(self.schema, HASH_SEED, [blocks.file])
        file = format.open(blocks, self.schema.columns)
        batches = []
        for block, first, last in parts:
            part = Part(0, block, first, last)
            payload = parser.prepare(file.fetch(block))
            piece = allocate(part.examples, parser.most_keys(payload, part), parser.shape)
            piece.used = parser.parse(payload, part, piece)
            assert not piece.status.any()
            batches.append(as_batch(piece, parser.shape, 0))
        file.close()
        return batches

    def whole_blocks(self, blocks: FileBlocks) -> list[tuple[int, int, int]]:
        return [(number, 0, int(size)) for number, size in enumerate(np.diff(blocks.first_examples))]

    def expect(self, batches: Sequence[Batch], examples: Sequence[Any]) -> None:
        """The batches have exactly these examples: labels, keys in the bags of their slots."""
        labels = np.concatenate([batch.labels for batch in batches])
        assert labels.tolist() == [example[0] for example in examples]
        found = [
            batch.keys[batch.offsets[bag] : batch.offsets[bag + 1]].tolist()
            for batch in batches
            for bag in range(len(batch.offsets) - 1)
        ]
        wanted = [
            [key_of(value, slot, HASH_SEED) for value in values]
            for example in examples
            for slot, values in zip(self.slots, self.values(example), strict=True)
        ]
        assert found == wanted

    def test_files_have_one_order(self, tmp_path: Path) -> None:
        format, urls = self.make(EXAMPLES), self.write(tmp_path, EXAMPLES)
        assert format.list(urls) == format.list(urls)

    def test_blocks_cover_all_examples_once_and_in_order(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        assert all(blocks.first_examples[0] == 0 and (np.diff(blocks.first_examples) >= 0).all() for blocks in files)
        assert sum(blocks.examples for blocks in files) == len(EXAMPLES)
        assert sum(len(blocks.first_examples) - 1 for blocks in files) > 1, "write more than one block"
        self.expect([b for blocks in files for b in self.read(format, blocks, self.whole_blocks(blocks))], EXAMPLES)

    def test_every_example_can_be_parsed_alone(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        for blocks in files:
            parts = [(number, at, at + 1) for number, _, size in self.whole_blocks(blocks) for at in range(size)]
            first = sum(other.examples for other in files[: files.index(blocks)])
            self.expect(self.read(format, blocks, parts), EXAMPLES[first : first + blocks.examples])

    def test_blocks_may_be_fetched_in_any_order_and_again(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        forwards = self.whole_blocks(files[0])
        there = self.read(format, files[0], forwards)
        back = self.read(format, files[0], [*forwards, *forwards[::-1]])[len(forwards) :]
        for one, other in zip(there, back[::-1], strict=True):
            assert np.array_equal(one.keys, other.keys)
            assert np.array_equal(one.labels, other.labels)

    def test_a_parser_has_no_state_so_any_number_of_threads_may_use_it(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        parser, blocks = format.parser(self.schema, HASH_SEED, [files[0].file]), files[0]
        file = format.open(blocks, self.schema.columns)
        payload, size = parser.prepare(file.fetch(0)), int(blocks.first_examples[1])

        def parse(at: int) -> list[int]:
            part = Part(0, 0, at % size, size)
            piece = allocate(part.examples, parser.most_keys(payload, part), parser.shape)
            return piece.keys[: parser.parse(payload, part, piece)].tolist()

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(parse, range(64))) == [parse(at) for at in range(64)]
        file.close()

    def test_a_parser_promises_an_upper_bound_of_keys_and_says_if_examples_have_one_shape(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        for blocks in files:
            parser = format.parser(self.schema, HASH_SEED, [blocks.file])
            assert parser.shape.slots == len(self.slots)
            assert not parser.shape.fixed, "the examples have different numbers of keys"
            assert parser.task_examples >= 1

    def test_the_index_says_how_much_to_fetch_at_once(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        assert format.blocks_ahead >= 1
        assert format.fetch_threads([blocks.file for blocks in files]) >= 1
        assert all(format.most_block_bytes(blocks, self.schema.columns) >= 0 for blocks in files)

    def test_a_digest_sees_changes_before_a_position_and_depends_on_nothing_else(self, tmp_path: Path) -> None:
        def digest(name: str, examples: Sequence[Any], position: int) -> int:
            (tmp_path / name).mkdir()
            format, files = self.opened(tmp_path / name, examples)
            file = format.open(files[0], self.schema.columns)
            try:
                return format.digest(files[0], position, file.fetch)
            finally:
                file.close()

        changed = [*EXAMPLES[:19], (1 - EXAMPLES[19][0], 999, EXAMPLES[19][2] + ["77"]), *EXAMPLES[20:]]
        first = digest("first", EXAMPLES, 20)
        assert digest("the same elsewhere", EXAMPLES, 20) == first
        assert digest("fewer", EXAMPLES[:10], 10) != first
        if self.covers_values:
            assert digest("changed", changed, 20) != first

    def test_a_schema_that_does_not_fit_is_a_config_error_before_anything_is_read(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        with pytest.raises(ConfigError):
            format.parser(self.unfit, HASH_SEED, [blocks.file for blocks in files])

    def test_a_bad_example_can_be_located(self, tmp_path: Path) -> None:
        format, files = self.opened(tmp_path)
        parser = format.parser(self.schema, HASH_SEED, [blocks.file for blocks in files])
        here = parser.origin(files[0].file, 0).place(5, 4, 1)
        assert files[0].file.url in here
        assert here != parser.origin(files[0].file, 0).place(6, 4, 1)
        assert here == parser.origin(files[0].file, 5).place(0, 4, 1)


class TestCsv(FormatContract):
    name = "csv"

    def lines(self, examples: Sequence[Any]) -> list[str]:
        return ["label,user,tags", *(f"{label},{user},{'|'.join(tags)}" for label, user, tags in examples)]

    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        (folder / "a.csv").write_text("\n".join(self.lines(examples)))
        return [str(folder)]


class TestCompressedCsv(TestCsv):
    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        text = "\n".join(self.lines(examples)).encode()
        (folder / "a.csv.gz").write_bytes(gzip.compress(text, mtime=0))
        return [str(folder)]


class TestCriteo(FormatContract):
    name = "criteo"
    slots = (Slot(name="user", column="C1"), Slot(name="tags", column="C26", kind="multi"))

    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        place = {name: number for number, name in enumerate(CRITEO_COLUMNS)}
        lines = []
        for label, user, tags in examples:
            fields = [""] * len(CRITEO_COLUMNS)
            fields[0], fields[place["C1"]], fields[place["C26"]] = str(label), str(user), "|".join(tags)
            lines.append("\t".join(fields))
        (folder / "day_0").write_text("\n".join(lines) + "\n")
        return [str(folder / "day_0")]


class TestParquet(FormatContract):
    name = "parquet"

    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        for number, share in enumerate((examples[:20], examples[20:])):
            if share:
                frame = pd.DataFrame(share, columns=["label", "user", "tags"])
                frame.to_parquet(folder / f"{number}.parquet", row_group_size=8)
        return [str(folder)]


class TestFrame(FormatContract):
    name = "frame"
    covers_values = False  # the digest has the sizes of partitions: values are not known before they are computed

    def make(self, examples: Sequence[Any]) -> Frame:
        frame = pd.DataFrame(examples, columns=["label", "user", "tags"])
        with dask.config.set({"dataframe.convert-string": False}):  # it would make text of lists
            source = frame_source(dd.from_pandas(frame, npartitions=3, sort=False), self.schema, HASH_SEED)
        assert isinstance(source.format, Frame)
        return source.format

    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        return []


class TokenContract(FormatContract):
    unfit = Schema((USER,), (Slot(name="price", kind="dense"),))

    def tokens(self, example: Any) -> list[str]:
        raise NotImplementedError

    def write(self, folder: Path, examples: Sequence[Any]) -> list[str]:
        (folder / "a.txt").write_text("\n".join(f"{each[0]} {' '.join(self.tokens(each))}" for each in examples))
        return [str(folder)]


class TestLibsvm(TokenContract):
    name = "libsvm"
    slots = (TAGS,)

    def values(self, example: Any) -> list[list[Any]]:
        return [example[2]]

    def tokens(self, example: Any) -> list[str]:
        return [f"{tag}:1" for tag in example[2]]


class TestLibffm(TokenContract):
    name = "libffm"
    slots = (Slot(name="user", column="3"), Slot(name="tags", column="8"))

    def tokens(self, example: Any) -> list[str]:
        return [f"3:{example[1]}:1", *(f"8:{tag}:0.5" for tag in example[2])]


class TestMultislot(TokenContract):
    name = "multislot"

    def tokens(self, example: Any) -> list[str]:
        return [f"user:{example[1]}", *(f"tags:{tag}:2" for tag in example[2])]


def test_every_format_that_is_read_in_blocks_is_under_contract() -> None:
    def below(group: type[FormatContract]) -> set[str]:
        return {getattr(group, "name", "")}.union(*map(below, group.__subclasses__()))

    assert below(FormatContract) - {""} == {name for name, known in FORMATS.items() if known.source != "generated"}


def test_the_example_in_the_documentation_reads_a_block(tmp_path: Path) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(
        Format, "Format", globs=vars(format_module) | {"Batch": Batch}
    )
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    contract = TestCsv()
    format, urls = contract.make(EXAMPLES), contract.write(tmp_path, EXAMPLES)
    batch = example.globs["first_block"](format, urls, contract.schema)
    assert batch.labels.tolist() == [label for label, _, _ in EXAMPLES[: len(batch.labels)]]
    assert len(batch.labels) > 1
