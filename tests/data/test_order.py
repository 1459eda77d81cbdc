"""Steps, slices and shuffled windows: every example once, in an order that is the same for any number of nodes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.data.order import Order, Steps, cut_blocks
from daskps.device.native import mix64
from daskps.errors import ConfigError, DataError

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def twin_permutation(seed: int, epoch: int, window: int, examples: int) -> list[int]:
    """Fisher-Yates in plain Python."""
    base = mix64(seed ^ mix64(epoch ^ mix64(window + 1)))
    order = list(range(examples))
    for i in range(examples - 1, 0, -1):
        j = (mix64((base + i * GOLDEN) & MASK) * (i + 1)) >> 64
        order[i], order[j] = order[j], order[i]
    return order


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 300))
def test_a_permutation_is_the_twins(seed: int, epoch: int, window: int, examples: int) -> None:
    order = Order(window_examples=300, seed=seed).permutation(epoch, window, examples)
    assert order.tolist() == twin_permutation(seed, epoch, window, examples)
    assert sorted(order.tolist()) == list(range(examples))


def test_a_golden_permutation() -> None:
    """Never change this: resumed runs depend on it."""
    assert Order(window_examples=10, seed=1).permutation(2, 3, 10).tolist() == [7, 2, 3, 1, 4, 9, 8, 6, 5, 0]


def test_seed_epoch_and_window_each_give_another_permutation() -> None:
    orders = [Order(seed=s).permutation(e, w, 50).tolist() for s in (0, 1) for e in (0, 1) for w in (0, 1)]
    assert len({tuple(order) for order in orders}) == 8


def test_places_are_uniform() -> None:
    """Where example 0 of a window of 10 lands, over 5,000 windows: chi-square with 9 degrees of freedom, p > 1e-6."""
    places = [int(np.flatnonzero(Order(seed=5).permutation(0, window, 10) == 0)[0]) for window in range(5000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 48


@given(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 300))
def test_parts_are_whole_blocks_and_nearly_equal(examples: int, parts: int, block: int) -> None:
    cuts = cut_blocks(examples, parts, block)
    assert cuts[0] == 0
    assert cuts[-1] == examples
    assert all(cut % block == 0 or cut == examples for cut in cuts)
    blocks = [-(-(stop - start) // block) for start, stop in itertools.pairwise(cuts)]
    assert max(blocks) - min(blocks) <= 1


@given(
    total=st.integers(0, 3000),
    minibatch=st.integers(1, 700),
    nodes=st.integers(1, 5),
    block=st.integers(1, 100),
    origin=st.integers(0, 3200),
)
def test_the_slices_of_all_nodes_are_the_examples_of_the_data(
    total: int, minibatch: int, nodes: int, block: int, origin: int
) -> None:
    ranks = [Steps(minibatch, nodes, rank, block_examples=block, origin=origin) for rank in range(nodes)]
    steps = ranks[0].count(total)
    assert all(start < stop for start, stop in (ranks[0].examples(step, total) for step in range(steps)))
    examples = [example for step in range(steps) for rank in ranks for example in range(*rank.slice(step, total))]
    assert examples == list(range(origin, total))


def test_devices_cut_a_slice_as_nodes_cut_a_step() -> None:
    assert Steps(1000, devices=3, block_examples=100).device_starts(750) == [0, 200, 500, 750]


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"rank": 2, "nodes": 2}, {"block_examples": 0}, {"origin": -1}])
def test_impossible_steps_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="steps need"):
        Steps(**({"minibatch_examples": 8} | wrong))


def test_a_run_goes_on_at_the_start_of_a_step_or_at_the_end_of_the_data() -> None:
    steps = Steps(300)
    assert [steps.step_at(example, 1_000) for example in (0, 300, 900, 1_000)] == [0, 1, 3, 4]
    with pytest.raises(DataError, match=r"example 1000, where no step of 300 examples .*\(start_from\)"):
        steps.step_at(1_000, 2_000)
