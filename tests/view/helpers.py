"""The job that the live pages and reports show, and a mark for optional packages."""

from __future__ import annotations

import importlib.util

import pytest

JOB = {
    "name": "seen",
    "data": {
        "format": "synthetic",
        "synthetic": {"examples": 8_000, "slots": 4, "keys_per_slot": 1_000},
        "validation_rows": 1_000,
    },
    "model": {"hidden": [8]},
    "train": {"minibatch_examples": 500, "batch_examples": 1_000},
    "budget": {"memory_bytes": "16MB"},
    "cluster": {"partitions": 2},
}


def needs(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where `package` is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")
