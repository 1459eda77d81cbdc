"""Zipf's law: its table adds up, and keys that are drawn by it follow it for any exponent and up to 2**64 ranks.

Bounds of frequencies are 5 standard deviations of fixed seeds: they hold for ever or never.
"""

import math

import numpy as np
import pytest

from daskps.data.synthetic import Synthetic, zipf_strength, zipf_table


@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.99, 1.0, 1.01, 1.5, 3.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 100, 1000])
def test_keys_follow_zipfs_law(ranks: int, exponent: float) -> None:
    config = Synthetic(100_000, slots=2, keys_per_slot=ranks, zipf_exponent=exponent, raw_keys=True)
    counts = np.bincount(config.read(0, 100_000).keys.astype(np.int64), minlength=ranks)
    law = np.arange(1, ranks + 1, dtype=np.float64) ** -exponent
    expected = counts.sum() * law / law.sum()
    assert len(counts) == ranks
    common = expected >= 10
    chi = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = max(int(common.sum()) - 1, 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom)
    rare = expected[~common].sum()
    assert abs(counts[~common].sum() - rare) <= 5 * math.sqrt(rare) + 1e-9


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05])
@pytest.mark.parametrize("ranks", [10**9, 2**63 + 12345, 2**64])
def test_octaves_of_a_huge_key_space_have_their_share(ranks: int, exponent: float) -> None:
    config = Synthetic(200_000, slots=1, keys_per_slot=ranks, zipf_exponent=exponent, raw_keys=True)
    keys = config.read(0, 200_000).keys
    octaves = np.bincount([int(key + 1).bit_length() - 1 for key in keys.tolist()], minlength=65)

    def mass(first: float, stop: float) -> float:  # the integral is right to 1e-6 from rank 2**10 on
        return (
            math.log(stop / first)
            if exponent == 1
            else (stop ** (1 - exponent) - first ** (1 - exponent)) / (1 - exponent)
        )

    low = sum(k**-exponent for k in range(1, 1024))
    masses = {j: mass(2.0**j - 0.5, min(2.0 ** (j + 1), ranks + 1.0) - 0.5) for j in range(10, ranks.bit_length())}
    total = low + sum(masses.values())
    for octave, share in masses.items():
        expected = 200_000 * share / total
        assert abs(octaves[octave] - expected) <= 5 * math.sqrt(expected) + 3


def test_every_bit_of_a_huge_rank_is_random() -> None:
    keys = Synthetic(20_000, slots=1, keys_per_slot=2**64, zipf_exponent=0.5, raw_keys=True).read(0, 20_000).keys
    ones = (keys[keys >= 2**60][:, None] >> np.arange(60, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
    assert abs(ones[:56] - 0.5).max() < 5 * 0.5 / math.sqrt((keys >= 2**60).sum())


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 1.1, 2.5])
@pytest.mark.parametrize("ranks", [1, 255, 256, 257, 511, 5000])
def test_the_octave_table_adds_up_exactly(ranks: int, exponent: float) -> None:
    table = zipf_table(ranks, exponent)
    masses = [
        math.fsum(k**-exponent for k in range(2**j, min(2 ** (j + 1), ranks + 1))) for j in range(ranks.bit_length())
    ]
    assert table.last_octave == len(masses) - 1
    np.testing.assert_allclose(table.shares[: len(masses)], np.array(masses) / math.fsum(masses), rtol=1e-13)
    np.testing.assert_allclose(table.upper[: len(masses)] / 2.0**64, np.cumsum(table.shares)[: len(masses)], rtol=1e-13)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.1])
@pytest.mark.parametrize("head_keys", [0, 1, 16, 100])
def test_popular_keys_matter_most_and_the_mean_square_is_one(exponent: float, head_keys: int) -> None:
    strength = zipf_strength(10**6, exponent, head_keys)
    assert (strength**2 * zipf_table(10**6, exponent).shares).sum() == pytest.approx(1, rel=1e-12)
    falls = [min(1.0, (head_keys or math.inf) / 2**octave) ** (exponent / 2) for octave in range(65)]
    assert strength / strength[0] == pytest.approx(falls, rel=1e-12)
