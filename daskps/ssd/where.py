"""From a path to the files of a partition: a folder, an fsspec URL, or a Zarr store."""

from __future__ import annotations

import os
from typing import Any

from daskps.errors import ArgumentError
from daskps.ssd.files import Files, LocalFiles
from daskps.ssd.remote import RemoteFiles


def files_at(path: Any) -> Files:
    """Local paths and file:// URLs take the fast way; other URLs and Zarr stores go through Zarr's store interface."""
    if isinstance(path, LocalFiles | RemoteFiles):
        return path
    if isinstance(path, os.PathLike):
        return LocalFiles(path)
    if isinstance(path, str):
        if path.startswith("file://"):
            return LocalFiles(path.removeprefix("file://"))
        return RemoteFiles.from_url(path) if "://" in path else LocalFiles(path)
    if hasattr(path, "set") and hasattr(path, "list_prefix"):
        return RemoteFiles(path, str(path))
    raise ArgumentError(f"a store's path is a folder, a URL or a Zarr store, got {type(path).__name__}")


def child(path: Any, name: str) -> Any:
    """The path of `name` below a folder or URL."""
    return os.path.join(path, name) if "://" not in str(path) else f"{str(path).rstrip('/')}/{name}"
