"""The job of the tests of the command line, and the type of their fixture `run`."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

JOB = """
name = "small"

[data]
format = "synthetic"
validation_rows = 1_000

[data.synthetic]
examples = 8_000
slots = 4
keys_per_slot = 2_000

[tables.main]
dimension = 4

[model]
hidden = [8]

[train]
minibatch_examples = 500
batch_examples = 2_000
snapshot_every_batches = 2

[cluster]
partitions = 2

[budget]
memory_bytes = "16MB"
"""

Run = Callable[..., Result]
