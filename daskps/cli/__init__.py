"""The command line: ``daskps``, and the same commands as ``dask ps`` in Dask's own command. One file per command."""

from daskps.cli.main import main, ps

__all__ = ["main", "ps"]
