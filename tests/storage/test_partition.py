"""Which node owns a key: every partition has one owner, and how devices share keys has nothing to do with it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError
from daskps.hbm.dedup import parts_of
from daskps.hbm.hash_table import DEVICE_SALT
from daskps.storage.partition import KeyPartition, Placement

keys_of_any_kind = st.lists(st.integers(0, 2**64 - 1), unique=True)


@given(keys=keys_of_any_kind, partitions=st.integers(1, 70), by=st.sampled_from(["mixed", "modulo"]), data=st.data())
def test_every_key_has_the_owner_of_its_partition(
    keys: list[int], partitions: int, by: str, data: st.DataObject
) -> None:
    nodes = data.draw(st.integers(1, min(partitions, 64)))
    placement, found = Placement(partitions, by), np.array(keys, np.uint64)  # type: ignore[arg-type]
    cut = KeyPartition(placement, nodes, ComputePool(1))
    owned = [cut.owned(rank) for rank in range(nodes)]
    assert [part for one in owned for part in one] == list(range(partitions))
    assert all(owned)
    groups = cut.group(found)
    assert sorted(place for rank in range(nodes) for place in groups.group(rank).tolist()) == list(range(len(keys)))
    for rank in range(nodes):
        assert set(placement.of(found[groups.group(rank)], cut.pool).tolist()) <= set(owned[rank])


@pytest.mark.parametrize(("nodes", "partitions"), [(0, 8), (9, 8), (65, 100)])
def test_nodes_that_cannot_share_the_partitions_are_refused(nodes: int, partitions: int) -> None:
    with pytest.raises(ConfigError, match=f"{nodes} nodes cannot share {partitions} partitions"):
        KeyPartition(Placement(partitions), nodes, ComputePool(1))


def test_every_device_of_every_node_has_its_share(pool: ComputePool) -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    groups = KeyPartition(Placement(8), 4, pool).group(keys)
    by_device = parts_of(CpuDevice(0, pool), keys=keys, parts=4, salt=DEVICE_SALT)
    both = np.array([np.bincount(by_device[groups.group(rank)], minlength=4) for rank in range(4)])
    assert abs(both / (len(keys) / 16) - 1).max() < 0.1
