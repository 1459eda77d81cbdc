"""Output files and folders of commands: written under a temporary name, then renamed to the final one.

Input: the path that the user asked for. Output: the path to write to. After an error, Ctrl-C or `kill -9` nothing new
has the final name, so a file under that name is always complete. What a killed process left behind is removed when
the same path is written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daskps.errors import ArgumentError
from daskps.settings import is_url
from daskps.storage.files import fsync_path

SUFFIX = ".unfinished"  # end of a temporary name


@contextmanager
def atomic_output(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path` for a file or a new folder; rename it at the end, or remove it on error.

    An existing file is replaced. An existing folder must be empty.
    """
    if is_url(os.fspath(path)):
        raise ArgumentError(
            f"cannot write {os.fspath(path)}: outputs are files of this machine, not URLs; write to a path and copy it"
        )
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file() and not folder:  # a device or a pipe cannot be replaced by rename
        yield final
        return
    if not folder and not final.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(final.parent))
    _remove_leftovers(final)
    unfinished = final.with_name(f".{final.name}.{secrets.token_hex(4)}{SUFFIX}")
    if folder:
        unfinished.mkdir(parents=True)
    else:
        unfinished.touch()
    descriptor = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # locked files are not removed as leftovers
        yield unfinished
        for written in (*(unfinished.iterdir() if folder else ()), unfinished):
            fsync_path(written)  # before the rename: after a power cut, the final name must not have incomplete content
        unfinished.replace(final)
        fsync_path(final.parent)
    finally:
        _remove(unfinished)
        os.close(descriptor)


def _remove_leftovers(final: Path) -> None:
    """Remove temporary files for `final` that killed processes have left; those of a living process are locked."""
    with contextlib.suppress(FileNotFoundError):
        for found in final.parent.iterdir():
            if not (found.name.startswith(f".{final.name}.") and found.name.endswith(SUFFIX)):
                continue
            with contextlib.suppress(OSError):  # removed meanwhile, locked, or owned by another user
                descriptor = os.open(found, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(found)
                finally:
                    os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
