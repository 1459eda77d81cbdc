"""How many steps make a batch: a few seconds' worth, of one size from batch to batch; all that fits if disk is read."""

from types import SimpleNamespace
from typing import Any

import pytest

from daskps.driver.sizing import FILL_FRACTION, TARGET_SECONDS, Sizer


def sizer(read_steps: int = 1_000, batch_examples: int | None = None, merges_batches: bool = False) -> Sizer:
    train = SimpleNamespace(minibatch_examples=4096, batch_examples=batch_examples)
    job: Any = SimpleNamespace(train=train, merges_batches=merges_batches)
    opened: Any = SimpleNamespace(read_steps=read_steps, rows=4096 * 1000, position=0)
    return Sizer(job, opened)


def report(steps: int, seconds: float, misses: int = 0, keys: int = 100, read_steps: int = 1_000) -> Any:
    return SimpleNamespace(
        token=SimpleNamespace(first_step=7, stop_step=7 + steps),
        stages=(SimpleNamespace(seconds=seconds + 3, waited_seconds=3.0), SimpleNamespace(seconds=0, waited_seconds=0)),
        counts={"distinct_keys": keys, "misses": misses},
        levels={"row_capacity": 10_000, "read_steps": read_steps},
    )


@pytest.mark.parametrize(
    ("of_wanted", "steps"), [(0.01, 16), (0.4, 16), (0.6, 8), (1.0, 8), (1.9, 8), (2.5, 4), (30.0, 4)]
)
def test_only_a_batch_far_from_the_wanted_time_changes_the_size_and_by_two_at_most(
    of_wanted: float, steps: int
) -> None:
    one, seconds = sizer(), of_wanted * TARGET_SECONDS
    one.learn([report(8, 0.01), report(8, seconds)])
    assert one.steps() == steps


@pytest.mark.parametrize("misses", [0, 5])
def test_no_batch_is_larger_than_fits_and_with_reads_from_disk_it_is_as_large(misses: int) -> None:
    one = sizer()
    keys = int(FILL_FRACTION * 10_000 / 1.5)  # of 8 steps: 12 fit
    one.learn([report(8, TARGET_SECONDS, misses, keys)])
    size = 12 if misses else 8
    assert one.steps() == size
    one.learn([report(size, TARGET_SECONDS, misses, 2 * keys)])
    assert one.steps() == size * 3 // 4


def test_batches_of_an_earlier_size_that_are_still_in_flight_do_not_change_it_back() -> None:
    one = sizer()
    one.learn([report(8, TARGET_SECONDS / 3)])
    assert one.steps() == 16
    one.learn([report(8, TARGET_SECONDS / 1.8)])
    one.learn([report(8, 3 * TARGET_SECONDS)])
    assert one.steps() == 16


def test_a_little_more_room_is_not_worth_another_size() -> None:
    one = sizer()
    one.learn([report(8, TARGET_SECONDS, 5, int(FILL_FRACTION * 10_000 / 1.2))])
    assert one.steps() == 8


def test_no_batch_is_larger_than_may_be_read_at_once_and_the_first_that_tells_lets_others_grow() -> None:
    one = sizer(read_steps=1)
    assert one.steps() == 1
    one.learn([report(1, 0.01, read_steps=6), report(1, 0.01, read_steps=5)])
    assert one.steps() == 5
    one.learn([report(5, 0.01, read_steps=5)])
    assert one.steps() == 5
    one.learn([report(5, 0.01, read_steps=3)])
    assert one.steps() == 3


@pytest.mark.parametrize(("merges_batches", "most"), [(False, 5), (True, 40)])
def test_once_a_batch_was_cut_no_larger_ones_are_read_unless_their_ends_are_part_of_the_result(
    merges_batches: bool, most: int
) -> None:
    found = sizer(40, 4096 * 40, merges_batches)
    assert found.most_steps == 40
    found.cut(5)
    assert found.most_steps == most
    assert found.steps() == 40  # what the job says; validations and snapshots are counted by it


@pytest.mark.parametrize("batch_examples", [None, 4096 * 40])
def test_a_batch_that_was_cut_for_its_many_keys_does_not_hold_later_ones_down(batch_examples: int | None) -> None:
    found = sizer(40, batch_examples)
    found.cut(5)
    for steps in (5, 10, 20):
        assert found.most_steps == steps
        found.learn([report(steps, 0.1, keys=100 * steps, read_steps=40)])
    assert found.most_steps == found.steps() == 40


def test_batches_that_just_fit_are_not_tried_larger_again() -> None:
    found = sizer(40)
    found.cut(9)
    for _ in range(3):
        found.learn([report(9, 0.1, keys=9_000, read_steps=40)])  # ten steps would fit, and nine are left as slack
        assert (found.steps(), found.most_steps) == (7, 9)
        found.learn([report(7, 0.1, keys=7_000, read_steps=40)])
