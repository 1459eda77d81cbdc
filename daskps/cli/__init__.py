"""The command line: ``daskps`` by itself, and ``dask ps`` inside Dask's own command. One command per file."""

from daskps.cli.main import main, ps

__all__ = ["main", "ps"]
