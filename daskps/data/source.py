"""A data set as a job names it: where the files are, their format, the schema, and what to do about bad rows.

In: settings. Out: the row index of the data, and open `Reader`s over it. A `Source` is small and travels to workers; so
does the index, which one process builds once: counting lines costs one pass over text (and its decompression), Parquet
tells its rows in the footers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

import fsspec

from daskps.backend.pool import ComputePool
from daskps.data.bad import BadRowPolicy
from daskps.data.files import DataFile
from daskps.data.format import Format
from daskps.data.index import FileBlocks, RowIndex
from daskps.data.order import Order, Steps
from daskps.data.reader import ANY_BYTES, Reader
from daskps.data.schema import Schema

IN_ORDER = Order()
STRICT = BadRowPolicy()


@dataclass(frozen=True, slots=True)
class Source:
    """Rows in files."""

    urls: Sequence[str]  # files, globs or directories, anywhere that fsspec reaches
    format: Format
    schema: Schema
    hash_seed: int = 0  # of the job: other seeds give other keys
    bad_rows: BadRowPolicy = STRICT

    def index(self, threads: int = 1, cache_url: str = "") -> RowIndex:
        """Count the rows of every block. With `cache_url`, files that did not change are not read again."""
        files = self.format.list([self.urls] if isinstance(self.urls, str) else self.urls)
        self.format.parser(self.schema, self.hash_seed, files)  # a schema that does not fit is refused before the pass
        known = _cached(cache_url)
        with ThreadPoolExecutor(threads, thread_name_prefix="daskps-index") as pool:
            # The caller's context goes along: a Dask client that is current only there is found by the frame, too.
            futures = [pool.submit(copy_context().run, self._blocks, file, known) for file in files]
            index = RowIndex([future.result() for future in futures])
        if cache_url:
            with fsspec.open(cache_url, "w") as out:
                out.write(index.to_json())
        return index

    def _blocks(self, file: DataFile, known: dict[DataFile, FileBlocks]) -> FileBlocks:
        return known.get(file) or self.format.index(file)

    def open(
        self,
        index: RowIndex,
        pool: ComputePool,
        order: Order = IN_ORDER,
        steps: Steps | None = None,
        blocks_bytes: int = ANY_BYTES,
    ) -> Reader:
        """A reader of the global order; `steps` is needed for `read_steps` only. Fetched blocks take at most
        `blocks_bytes`, but two of them are always there."""
        files = sorted(index.files, key=lambda blocks: blocks.rows == 0)[:1]  # `index` has checked them all
        parser = self.format.parser(self.schema, self.hash_seed, [blocks.file for blocks in files])
        columns = self.schema.columns
        return Reader(index, self.format, parser, columns, pool, order, steps, self.bad_rows, blocks_bytes)


def _cached(cache_url: str) -> dict[DataFile, FileBlocks]:
    """The blocks of the files that a kept index knows; size and version are part of a `DataFile`."""
    if not cache_url:
        return {}
    fs, path = fsspec.core.url_to_fs(cache_url)
    if not fs.exists(path):
        return {}
    return {blocks.file: blocks for blocks in RowIndex.from_json(fs.cat_file(path).decode()).files}
