"""What every test shares: one compute pool of two threads."""

from collections.abc import Iterator

import pytest

from daskps.backend.pool import ComputePool


@pytest.fixture(scope="session")
def pool() -> Iterator[ComputePool]:
    with ComputePool(2) as pool:
        yield pool
