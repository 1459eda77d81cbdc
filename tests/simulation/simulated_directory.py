"""The model directory of simulated processes: the real one, with a cache of entries that were read before.

Zarr takes milliseconds for one word, and every process reads the whole log; a schedule has a hundred such processes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from daskps.storage.files import Files
from daskps.storage.log import Entry, Log
from daskps.storage.model_directory import Arrays, from_files, to_files

Entries = dict[tuple[int, bytes], Entry]


class SimLog(Log):
    """`read` are the entries that anybody has read, by number and bytes: equal bytes are an equal entry."""

    def __init__(self, files: Files, read: Entries) -> None:
        super().__init__(files)
        self._read_before = read

    def _load(self, index: int) -> Entry:
        place = (index, self._files.read(f"log/{index:08d}.json"))
        if place not in self._read_before:
            self._read_before[place] = super()._load(index)
        return self._read_before[place]


NAME, DTYPE = "dense", np.dtype(np.uint32)  # of the only array that simulated nodes have, of a word or two
CHUNK = f"{NAME}/c/0"


@functools.cache
def _files_but_chunk(words: int) -> dict[str, bytes]:
    return {path: data for path, data in to_files({NAME: np.zeros(words, DTYPE)}).items() if path != CHUNK}


def pack(arrays: Arrays) -> dict[str, bytes]:
    """Return the arrays as `to_files` writes them."""
    (array,) = arrays.values()
    assert (tuple(arrays), array.ndim, array.dtype) == ((NAME,), 1, DTYPE)
    return dict(sorted({**_files_but_chunk(len(array)), CHUNK: array.tobytes()}.items()))


def unpack(contents: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return the arrays as `from_files` reads them."""
    words, rest = divmod(len(contents.get(CHUNK, b"")), DTYPE.itemsize)
    others = {path: data for path, data in contents.items() if path != CHUNK}
    if rest or others != _files_but_chunk(words):
        return from_files(contents)
    return {NAME: np.frombuffer(contents[CHUNK], DTYPE)}
