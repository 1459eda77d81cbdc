"""Text files as blocks of whole lines, about 1 MiB each. One scan per file, at memory speed, counts lines and finds
the blocks.

Input: plain or compressed files. Output: `FileBlocks`, and blocks of padded text. A block of a plain file is read by
its byte range. A compressed file is decoded from its start, so reading an earlier block starts again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from daskps.data.files import PADDING, Bytes, DataFile, Stream, list_files, open_stream, padded, read_range
from daskps.data.format import FileBlocks
from daskps.data.schema import hash_bytes
from daskps.device.native import library
from daskps.errors import DataError

BLOCK_BYTES = 1 << 20  # of plain text per block
MOST_BLOCKS = 1 << 14  # blocks per file, 256 KB of index; files above 16 GiB get larger blocks
LONGEST_LINE_BYTES = 1 << 26  # a longer line is an error: the file is probably not text
LONGEST_BLANK_END = 4096  # bytes at the end of a file in which blank lines are ignored
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, eq=False)
class TextBlock:
    """Block of whole lines. `text` has PADDING more bytes than `size`, because parsers may read past the end."""

    text: Bytes
    size: int


def count_byte(text: Bytes, size: int, byte: int) -> int:
    """Return how often `byte` occurs in the first `size` bytes of `text`."""
    return int(library().data_count_byte(text=text, size=size, byte=byte))


def digest_lines(text: Bytes, size: int, first_line: int, lines: int = 1 << 62) -> int:
    """Return the digest of the first `lines` lines of `text`, numbered from `first_line`. Digests of consecutive lines
    can be added (modulo 2^64) to give the digest of all of them."""
    return int(library().data_digest_lines(text=text, size=size, first_line=first_line, lines=lines))


class _LineDigest:
    """Digest of a file's lines, computed chunk by chunk; a line may span several chunks. Line 0 follows the header."""

    def __init__(self, first_line: int) -> None:
        self.value = 0
        self._line, self._partial_line = first_line, b""

    def add(self, chunk: Bytes, size: int, last: int) -> None:
        """Add a chunk. `last` is the end of its last complete line, 0 if the chunk has no newline."""
        if not last:
            self._partial_line += chunk[:size].tobytes()
            return
        start = int(library().data_first_line(text=chunk, size=size)) if self._partial_line else 0
        if self._partial_line:
            self._take(np.frombuffer(self._partial_line + chunk[:start].tobytes(), np.uint8))
        self._take(chunk[start:last])
        self._partial_line = chunk[last:size].tobytes()

    def end(self) -> None:
        """Add the last line if it has no newline."""
        self._take(np.frombuffer(self._partial_line, np.uint8))

    def _take(self, lines: Bytes) -> None:
        self.value = (self.value + digest_lines(lines, len(lines), self._line)) % 2**64
        self._line += count_byte(lines, len(lines), ord("\n"))


def index_text(file: DataFile, header_lines: int = 0, block_bytes: int = BLOCK_BYTES) -> FileBlocks:
    """Cut `file` into blocks of whole lines, count the lines of each block and compute their digests.

    The last line may lack its newline. Blank lines at the end of the file are ignored.
    """
    block_bytes = max(block_bytes, file.size_bytes // MOST_BLOCKS)
    buffer = np.empty(block_bytes, np.uint8)
    starts, lines, line_start, ending = [0], [0], 0, b""
    skip = _head_bytes(file, header_lines)
    digest, digests = _LineDigest(-header_lines), [0]
    with open_stream(file) as stream:
        while size := stream.read_into(buffer):
            chunk_start = stream.position - size
            ending = (ending + buffer[max(0, size - LONGEST_BLANK_END) : size].tobytes())[-LONGEST_BLANK_END:]
            last = int(library().data_last_line(text=buffer, size=size))
            mark = skip if not header_lines and not chunk_start else 0  # a byte order mark is not part of line 0
            digest.add(buffer[mark:size], size - mark, max(0, last - mark))
            if last:
                line_start = chunk_start + last
                starts.append(line_start)
                lines.append(lines[-1] + count_byte(buffer, size, ord("\n")))
                digests.append(digest.value)
            elif stream.position - line_start > LONGEST_LINE_BYTES:
                raise DataError(
                    f"{file.url}: no end of line within {LONGEST_LINE_BYTES} bytes after byte {line_start}; "
                    "is this a text file?"
                )
        if stream.position > line_start:
            starts.append(stream.position)
            lines.append(lines[-1] + 1)
            digest.end()
            digests.append(digest.value)
        _drop_blank_end(ending, starts, lines, digests, header_lines, stream.position)
    blocks = FileBlocks(file, np.array(lines, np.int64), np.array(starts, np.int64), np.array(digests, np.uint64))
    if blocks.examples:  # the first block starts after a byte order mark and the header
        blocks.starts[0] = skip
        blocks.first_examples[1:] -= header_lines
        if header_lines:
            head = np.frombuffer(first_lines(file, header_lines), np.uint8)
            blocks.digests[0] = digest_lines(head, len(head), -header_lines)
    return blocks


def _drop_blank_end(
    ending: bytes, starts: list[int], lines: list[int], digests: list[int], header_lines: int, size: int
) -> None:
    """Remove blank lines at the end of a file from its last blocks; editors and tools often leave such lines."""
    total, digest, left = lines[-1], digests[-1], len(ending)
    while ending[:left].endswith(b"\n") and total > header_lines:
        line = left - (2 if ending[:left].endswith(b"\r\n") else 1)
        begins = ending[:line].endswith(b"\n") if line else size == len(ending)
        if not begins:
            break
        total -= 1
        digest -= hash_bytes(ending[line : left - 1], (total - header_lines) % 2**64)
        left = line
    stop = size - len(ending) + left
    if total < lines[-1]:
        kept = next(number for number, start in enumerate(starts) if start >= stop)
        starts[kept:], lines[kept:], digests[kept:] = [stop], [total], [digest % 2**64]


def _head_bytes(file: DataFile, header_lines: int) -> int:
    """Return the number of bytes before the first example: the header, or a byte order mark."""
    if header_lines:
        return len(first_lines(file, header_lines))
    return len(_BYTE_ORDER_MARK) if _starts_with_mark(file) else 0


# First bytes of files that are not plain text; for each the kind of file and what the user can do.
_MAGIC = {
    b"\x1f\x8b": "gzip: give it a name that ends with .gz",
    b"\x28\xb5\x2f\xfd": "zstd: give it a name that ends with .zst",
    b"BZh": "bzip2, which is not read: compress it with gzip or zstd",
    b"\xfd7zXZ\x00": "xz, which is not read: compress it with gzip or zstd",
    b"PK\x03\x04": "zip, which is not read: unpack it",
    b"PAR1": "Parquet: read it with format parquet",
}


def check_text(file: DataFile, start: bytes) -> None:
    """Raise DataError if `start`, the first bytes of a file, is not text. Otherwise binary data would appear as column
    names in later messages."""
    kind = next((words for magic, words in _MAGIC.items() if start.startswith(magic)), None)
    if kind is not None:
        raise DataError(f"{file.url} is not a text file but {kind}")


def _starts_with_mark(file: DataFile) -> bool:
    start = np.zeros(8, np.uint8)
    with open_stream(file) as stream:
        size = stream.read_into(start)
    check_text(file, start[:size].tobytes())
    return start.tobytes().startswith(_BYTE_ORDER_MARK)


def first_lines(file: DataFile, lines: int) -> bytes:
    """Return the first `lines` lines of the file, unchanged and with their line ends."""
    text = b""
    buffer = np.empty(1 << 16, np.uint8)
    with open_stream(file) as stream:
        while text.count(b"\n") < lines and (size := stream.read_into(buffer)):
            text += buffer[:size].tobytes()
    check_text(file, text)
    if b"\0" in text.partition(b"\n")[0]:
        raise DataError(f"{file.url} is not text: its first line contains NUL bytes. Check data.format and the file")
    return b"".join(line + b"\n" for line in text.split(b"\n")[:lines])[: len(text)]


def _check_line_count(text: Bytes, blocks: FileBlocks, block: int) -> TextBlock:
    """Return the block. Raise DataError if it no longer has as many lines as were counted."""
    size = len(text) - PADDING
    lines = count_byte(text, size, ord("\n")) + (text[size - 1] != ord("\n"))
    wanted = int(blocks.first_examples[block + 1] - blocks.first_examples[block])
    if lines != wanted:
        raise DataError(
            f"{blocks.file.url}: {lines} lines in block {block}, but {wanted} when it was indexed: the file changed; "
            "build the index again"
        )
    return TextBlock(text, size)


class PlainText:
    """Plain text file. Any thread may fetch any block, by its byte range."""

    def __init__(self, blocks: FileBlocks) -> None:
        self._blocks = blocks

    def fetch(self, block: int) -> TextBlock:
        """Return the lines of `block`."""
        start, stop = self._blocks.starts[block : block + 2].tolist()
        return _check_line_count(read_range(self._blocks.file, start, stop), self._blocks, block)

    def close(self) -> None:
        """Do nothing: no file is open."""


class CompressedText:
    """Compressed text file. One decoder yields the blocks in order; to go back, it starts again at the first byte."""

    def __init__(self, blocks: FileBlocks) -> None:
        self._blocks = blocks
        self._stream: Stream | None = None

    def fetch(self, block: int) -> TextBlock:
        """Return the lines of `block`."""
        start, stop = self._blocks.starts[block : block + 2].tolist()
        if self._stream is None or self._stream.position > start:
            self.close()
            self._stream = Stream(self._blocks.file)
        skipped = np.empty(min(BLOCK_BYTES, start - self._stream.position), np.uint8)
        while self._stream.position < start:
            if not self._stream.read_into(skipped[: start - self._stream.position]):
                break
        text = padded(stop - start)
        self._stream.read_into(text[:-PADDING])
        return _check_line_count(text, self._blocks, block)

    def close(self) -> None:
        """Close the decoder and the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Base of the text formats: blocks of whole lines, in plain or compressed files. A subclass adds `parser`."""

    block_bytes: int = field(default=BLOCK_BYTES, kw_only=True)
    blocks_ahead: ClassVar[int] = 8

    @property
    def header_lines(self) -> int:
        """Return the number of lines before the first example of a file."""
        return 0

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """Return the files in their global order."""
        return list_files(urls)

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """Return the number of blocks to fetch at the same time: 1 if a file is compressed, because a decoder must go
        in order; else 4 byte ranges in parallel."""
        return 1 if any(file.compression for file in files) else 4

    def index(self, file: DataFile) -> FileBlocks:
        """Cut `file` into blocks and count their lines, without the header."""
        return index_text(file, self.header_lines, self.block_bytes)

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """Return the bytes of the longest block, with padding."""
        return int(np.diff(blocks.starts).max(initial=0)) + PADDING

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> PlainText | CompressedText:
        """Open an indexed file, plain or compressed."""
        return CompressedText(blocks) if blocks.file.compression else PlainText(blocks)

    def digest(self, blocks: FileBlocks, examples: int, fetch: Callable[[int], TextBlock]) -> int:
        """Return the digest of the header and the first `examples` lines: earlier blocks, and part of a block."""
        block = int(np.searchsorted(blocks.first_examples, examples, side="right")) - 1
        first, digest = int(blocks.first_examples[block]), int(blocks.digests[block])
        if examples > first:
            payload = fetch(block)
            digest += digest_lines(payload.text, payload.size, first, examples - first)
        return digest % 2**64


class TextParser:
    """Base of the parsers of text: one thread parses a whole block, which needs no preparation."""

    task_examples = 1 << 62  # no limit: a block of text is small enough for one thread

    def prepare(self, payload: TextBlock) -> TextBlock:
        """Return the block unchanged."""
        return payload
