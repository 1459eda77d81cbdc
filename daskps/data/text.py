"""Text files as blocks of whole lines: about a MiB each, found once by counting newlines at the speed of memory.

In: plain or compressed files. Out: `FileBlocks`, and blocks of padded text. A plain block is read by its range of
bytes; a compressed file is decoded from its start, so going back in it starts over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskps.backend.native import library
from daskps.data.files import Bytes, DataFile, Stream, open_stream, padded, read_range
from daskps.data.index import FileBlocks
from daskps.errors import DataError

BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 1 << 14  # per file: 256 KB of index; larger files get larger blocks
LONGEST_LINE_BYTES = 1 << 26
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, eq=False)
class TextBlock:
    """Whole lines; `text` has 64 more bytes than `size`."""

    text: Bytes
    size: int


def count_byte(text: Bytes, size: int, byte: int) -> int:
    """How often `byte` stands in the first `size` bytes."""
    return int(library().data_count_byte(text=text, size=size, byte=byte))


def index_text(file: DataFile, header_lines: int = 0, block_bytes: int = BLOCK_BYTES) -> FileBlocks:
    """Cut `file` into blocks that end with a line, and count their lines. A last line needs no newline."""
    block_bytes = max(block_bytes, file.size_bytes // MOST_BLOCKS)
    buffer = np.empty(block_bytes, np.uint8)
    starts, lines, line_start = [0], [0], 0
    with open_stream(file) as stream:
        while size := stream.read_into(buffer):
            chunk_start = stream.position - size
            last = int(library().data_last_line(text=buffer, size=size))
            if last:
                line_start = chunk_start + last
                starts.append(line_start)
                lines.append(lines[-1] + count_byte(buffer, size, ord("\n")))
            elif stream.position - line_start > LONGEST_LINE_BYTES:
                raise DataError(
                    f"{file.url}: no end of line within {LONGEST_LINE_BYTES} bytes after byte {line_start}; "
                    "is this a text file?"
                )
        if stream.position > line_start:
            starts.append(stream.position)
            lines.append(lines[-1] + 1)
    blocks = FileBlocks(file, np.array(lines, np.int64), np.array(starts, np.int64))
    return _without_header(blocks, header_lines)


def _without_header(blocks: FileBlocks, header_lines: int) -> FileBlocks:
    """Start the first block behind a byte order mark and the header."""
    if blocks.rows == 0:
        return blocks
    head = first_lines(blocks.file, header_lines) if header_lines else b""
    skip = len(head)
    if not header_lines and _starts_with_mark(blocks.file):
        skip = len(_BYTE_ORDER_MARK)
    blocks.starts[0] = skip
    blocks.first_rows[1:] -= header_lines
    return blocks


def _starts_with_mark(file: DataFile) -> bool:
    start = np.zeros(3, np.uint8)
    with open_stream(file) as stream:
        stream.read_into(start)
    return start.tobytes() == _BYTE_ORDER_MARK


def first_lines(file: DataFile, lines: int) -> bytes:
    """The first `lines` lines with their ends, as they stand in the file."""
    text = b""
    buffer = np.empty(1 << 16, np.uint8)
    with open_stream(file) as stream:
        while text.count(b"\n") < lines and (size := stream.read_into(buffer)):
            text += buffer[:size].tobytes()
    return b"".join(line + b"\n" for line in text.split(b"\n")[:lines])[: len(text)]


def _checked(text: Bytes, blocks: FileBlocks, block: int) -> TextBlock:
    """The block, if it still has the lines that were counted."""
    size = len(text) - 64
    lines = count_byte(text, size, ord("\n")) + (text[size - 1] != ord("\n"))
    wanted = int(blocks.first_rows[block + 1] - blocks.first_rows[block])
    if lines != wanted:
        raise DataError(
            f"{blocks.file.url}: {lines} lines in block {block}, but {wanted} when it was indexed: the file changed; "
            "build the index again"
        )
    return TextBlock(text, size)


class PlainText:
    """A plain file: any block by its range of bytes, from any thread."""

    def __init__(self, blocks: FileBlocks) -> None:
        self._blocks = blocks

    def fetch(self, block: int) -> TextBlock:
        """The lines of `block`."""
        start, stop = self._blocks.starts[block : block + 2].tolist()
        return _checked(read_range(self._blocks.file, start, stop), self._blocks, block)

    def close(self) -> None:
        """Nothing is held open."""


class CompressedText:
    """A compressed file: blocks in order from one decoder, which starts over to go back."""

    def __init__(self, blocks: FileBlocks) -> None:
        self._blocks = blocks
        self._stream: Stream | None = None

    def fetch(self, block: int) -> TextBlock:
        """The lines of `block`."""
        start, stop = self._blocks.starts[block : block + 2].tolist()
        if self._stream is None or self._stream.position > start:
            self.close()
            self._stream = Stream(self._blocks.file)
        skipped = np.empty(min(BLOCK_BYTES, start - self._stream.position), np.uint8)
        while self._stream.position < start:
            if not self._stream.read_into(skipped[: start - self._stream.position]):
                break
        text = padded(stop - start)
        self._stream.read_into(text[:-64])
        return _checked(text, self._blocks, block)

    def close(self) -> None:
        """Drop the decoder."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def longest_block(blocks: FileBlocks) -> int:
    """Bytes of the longest block, padded."""
    return int(np.diff(blocks.starts).max(initial=0)) + 64


def text_fetch_threads(files: Sequence[DataFile]) -> int:
    """A decoder goes through its file in order; ranges of plain files may be asked for side by side."""
    return 1 if any(file.compression for file in files) else 4


def open_text(blocks: FileBlocks) -> PlainText | CompressedText:
    """The file, opened as its compression asks."""
    return CompressedText(blocks) if blocks.file.compression else PlainText(blocks)
