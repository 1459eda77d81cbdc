"""Any order of messages, any crash, any number of nodes: the model is what plain dictionaries say, bit for bit.

1,000 schedules by default; 100,000 with `pytest tests/simulation/test_simulation.py -m slow`, or from any seed
on with `python -m tests.simulation.simulator FIRST COUNT`.
"""

from pathlib import Path

import numpy as np
import pytest

from daskps.storage.model_directory import from_files, to_files
from tests.simulation.simulated_directory import pack, unpack
from tests.simulation.simulator import World, run

CHUNK = 50

# Seeds that once failed, and what they found. (The schedule of a seed changes when the simulator asks for more chance;
# test_commit and test_exchange have the faults of the real code again, one by one.)
FOUND = {
    3: "confirming a snapshot discarded the next one, which was only prepared yet",
    6: "a new incarnation found partitions locked by nodes that had not heard of it",
    112: "a driver that was overtaken asked nodes of a newer incarnation for its snapshot",
    277: "a driver that was overtaken ran its batches on nodes of a newer incarnation",
    1066: "one node alone went on training after its incarnation had ended",
    2088: "a worker that was not wanted any more kept its partitions locked",
    673: "a task of a driver that was overtaken came late and removed the tables of a newer incarnation",
}


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_every_schedule_gives_the_dictionary_model(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(seed)


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_a_seed_that_once_failed_stays_fixed(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 101_000, 1000))
def test_a_hundred_thousand_schedules_give_the_dictionary_model(first: int) -> None:
    for seed in range(first, first + 1000):
        run(seed)


@pytest.mark.parametrize("seed", [0, 1, 4, 7, 18, 21])  # 18: readers; 21: a partition of another model
def test_schedules_over_the_real_disk_tier_give_the_dictionary_model(seed: int, tmp_path: Path) -> None:
    run(seed, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_schedules_over_the_real_disk_tier_give_the_dictionary_model(seed: int, tmp_path: Path) -> None:
    run(seed, folder=tmp_path)


@pytest.mark.parametrize("words", [[0], [7], [2**32 - 1, 3]])
def test_the_short_way_to_write_arrays_leads_to_the_same_files(words: list[int]) -> None:
    arrays = {"dense": np.array(words, np.uint32)}
    files = to_files(arrays)
    assert list(pack(arrays).items()) == list(files.items())
    for found in (unpack(files), from_files(files)):
        np.testing.assert_array_equal(found["dense"], arrays["dense"])


def test_a_seed_always_gives_the_same_run() -> None:
    def trace(seed: int) -> list[tuple[object, ...]]:
        sent: list[tuple[object, ...]] = []
        run(seed, lambda *event: sent.append(event))
        return sent

    for seed in (6, 8, 277):
        assert trace(seed) == trace(seed)
        assert trace(seed)


def test_schedules_reach_everything_that_they_are_for() -> None:
    worlds: list[World] = [run(seed) for seed in range(100)]
    assert {world.schedule.depth for world in worlds} == {1, 2, 3, 4}
    assert {world.most_nodes for world in worlds} >= {1, 2, 3, 4, 5}
    assert {event.split(" at ")[0] for world in worlds for event in world.events} == {
        "worker",
        "worker disk",
        "driver",
        "power",
        "zombie",
    }
    assert sum(world.stale for world in worlds) > 0
    assert sum(world.restarts for world in worlds) > 0
    assert sum(world.deferred for world in worlds) > 0
    assert sum(world.forwarded for world in worlds) > 0
    assert sum(world.evaluated for world in worlds) > 0
    assert sum(world.stopped for world in worlds) > 0
    assert sum(world.in_place for world in worlds) > 0
    assert sum(world.merges for world in worlds) > 0
    assert sum(world.by_time for world in worlds) > 0
    assert sum(world.ended_with_best for world in worlds) > 0
    assert sum(world.ended_early for world in worlds) > 0
    assert sum(world.reads for world in worlds) > 0
    assert sum(world.gone for world in worlds) > 0
    assert sum(world.outlived for world in worlds) > 0
    assert {world.schedule.misfit for world in worlds if world.refused} == {"directory", "model", "time"}
