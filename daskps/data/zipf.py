"""Zipf's law on 1 .. ranks, P(rank) ~ rank**-exponent, laid out for a sampler that needs one small table for any size.

In: how many ranks (1 .. 2**64) and the exponent (0 is uniform; under, at and over 1 alike). Out: `ZipfTable`.

Sampling, in `synthetic.cpp`: ranks fall into octaves [2**j, 2**(j+1)). The octave is drawn by inversion from
``upper[j] = floor(2**64 * P(octave <= j))``. Inside it a rank 2**j * (1 + f) is drawn uniformly, as an integer from
random bits, and kept with probability (1 + f)**-exponent, else drawn again (1.4 draws on average at exponent 1). That
is exact but for 2**-64 in the octave and about 1e-15, relative, in the power; no rank is out of reach, up to 2**64.

The table is computed in decimal arithmetic, which is correctly rounded everywhere: the same bits on every machine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt

from daskps.errors import ConfigError
from daskps.types import Keys

OCTAVES = 65
_DIRECT_OCTAVES = 8  # up to rank 255 terms are added one by one; beyond, Euler-Maclaurin is off by less than 1e-25
_DIGITS = 60


@dataclass(frozen=True, slots=True)
class ZipfTable:
    """What the sampler reads."""

    upper: Keys  # (OCTAVES,) 2**64 * P(octave <= j); not read from the last octave on
    guide: npt.NDArray[np.uint8]  # (256,) lowest octave of a draw with these top 8 bits
    shares: npt.NDArray[np.float64]  # (OCTAVES,) P(octave)
    last_octave: int
    last_ranks: int  # ranks in the last octave


@functools.lru_cache(maxsize=1024)
def zipf_table(ranks: int, exponent: float) -> ZipfTable:
    """The table of `ranks` ranks with `exponent`; tables of equal arguments are the same object."""
    if not 1 <= ranks <= 2**64:
        raise ConfigError(f"a slot has 1 to 2**64 keys to draw from, got {ranks}")
    if not 0 <= exponent <= 16:
        raise ConfigError(f"the Zipf exponent lies in 0 .. 16, got {exponent}; 0 is uniform, 1 is Zipf's own law")
    last = ranks.bit_length() - 1
    with localcontext() as context:
        context.prec = _DIGITS
        masses = [
            _octave_mass(2**octave, min(2 ** (octave + 1) - 1, ranks), Decimal(exponent)) for octave in range(last + 1)
        ]
        total = sum(masses)
        upper, below = [], Decimal(0)
        for mass in masses:
            below += mass
            upper.append(min(int(below / total * 2**64), 2**64 - 1))
        shares = [float(mass / total) for mass in masses]
    guide = [sum(bound <= top << 56 for bound in upper[:last]) for top in range(256)]
    table = ZipfTable(
        np.array(upper + [2**64 - 1] * (OCTAVES - len(upper)), np.uint64),
        np.array(guide, np.uint8),
        np.array(shares + [0.0] * (OCTAVES - len(shares)), np.float64),
        last,
        ranks - 2**last + 1,
    )
    for array in (table.upper, table.guide, table.shares):
        array.flags.writeable = False  # the cache hands the same table to everyone
    return table


@functools.lru_cache(maxsize=1024)
def zipf_strength(ranks: int, exponent: float, head_keys: int) -> npt.NDArray[np.float64]:
    """(OCTAVES,) how much keys matter by octave: alike up to rank `head_keys` (0: for ever), then as popularity**0.5.

    The mean square over occurrences is 1.
    """
    with localcontext() as context:
        context.prec = _DIGITS
        head, half = Decimal(head_keys or 2**64), Decimal(exponent) / 2
        strength = [float(min(Decimal(1), (head / 2**octave)) ** half) for octave in range(OCTAVES)]
    shares = zipf_table(ranks, exponent).shares
    scale = math.sqrt(math.fsum(share * value * value for share, value in zip(shares, strength, strict=True)))
    normalised = np.array(strength) / scale
    normalised.flags.writeable = False
    return normalised


def _power(rank: int, exponent: Decimal) -> Decimal:
    return (-exponent * Decimal(rank).ln()).exp()


def _octave_mass(first: int, last: int, exponent: Decimal) -> Decimal:
    """Sum of rank**-exponent over first .. last."""
    if first < 2**_DIRECT_OCTAVES:
        return sum((_power(rank, exponent) for rank in range(first, last + 1)), Decimal(0))
    start, end = _power(first, exponent), _power(last, exponent)
    mass = (Decimal(last) / first).ln() if exponent == 1 else (last * end - first * start) / (1 - exponent)
    mass += (start + end) / 2
    rising = Decimal(1)  # exponent * (exponent + 1) * ..., the factor of the odd derivatives
    for order, coefficient in ((1, 12), (3, -720), (5, 30240), (7, -1209600)):  # (2k)! / Bernoulli(2k)
        rising *= exponent if order == 1 else (exponent + order - 2) * (exponent + order - 1)
        mass += rising * (start / Decimal(first) ** order - end / Decimal(last) ** order) / coefficient
    return mass
