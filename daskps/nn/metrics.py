"""Streaming metrics of one set of examples: AUC, log loss, normalised entropy, calibration.

In: labels, logits and weights of examples, in pieces of any size. Out: `MetricValues`, at any time.

The state has only integers: histograms of logits by label, and fixed-point sums. So merging is associative, and the
values are bit-identical for any batches, nodes and order of examples. Weights are any finite float32 that is not
negative, and are added exactly: if all weights are multiplied by a power of two, only `weight` itself changes.

AUC counts pairs of examples with different labels. A pair in the same bucket counts half; `auc_error` is the largest
possible difference to the exact AUC. Buckets have equal width in the logit (3.2e-5 by default). Buckets of equal width
in the probability would be worse: clicks are rare, so most probabilities are small and would share a few buckets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.device.native import library
from daskps.errors import ArgumentError, NonFiniteError
from daskps.types import Floats

BUCKETS = 1_000_000  # default number of buckets
LOGIT_LIMIT = 16.0  # probability within 1.2e-7 of 0 or 1; logits beyond the limit share the outermost buckets
LARGEST = 8192.0  # logits of this absolute value or more are refused
# Histograms of weights, as in metrics.cpp: a sum is split into limbs of 32 bits. One limb takes 16 MB.
LIMBS = 10
ONE_LIMB = 5  # the limb whose unit is 2**-20; it holds weights near 1
_BLOCK_EXAMPLES = 1 << 16  # examples per call of the kernel, so that its sums stay below 2**63
_LIMB_LIMIT = 2**62  # bound of a limb's total, so that products of two totals stay below 2**125
_TOTAL_WORDS = 8  # 64-bit words of one total in `state`
# Units of the totals: 2**-WEIGHT_BITS for weights (the smallest float32), 2**-SUM_BITS for losses and predictions.
WEIGHT_BITS = 149
SUM_BITS = 126 + 32
_PAIR_SHIFT = 32 * ONE_LIMB + 20 - WEIGHT_BITS  # bits from the unit of the totals to the unit of limb 0

Histogram = npt.NDArray[np.int64]  # (2, buckets): negatives, positives


@dataclass(frozen=True, slots=True)
class MetricValues:
    """The metrics of the examples counted so far. Means are weighted; NaN: a metric is undefined for them."""

    examples: int
    weight: float
    mean_label: float
    mean_prediction: float
    calibration: float  # mean prediction / mean label; 1 is right, above 1 clicks are predicted too often
    log_loss: float
    normalised_entropy: float  # log loss / log loss of always predicting the mean label; below 1 is better than that
    auc: float
    auc_error: float  # largest possible difference to the exact AUC


class Metrics:
    """Streaming metrics of the examples that were counted by `update`, `merge`, `load` and `add`."""

    def __init__(self, buckets: int = BUCKETS, logit_limit: float = LOGIT_LIMIT) -> None:
        if buckets < 1 or not 0 < logit_limit < math.inf:
            raise ArgumentError(f"metrics need buckets and a limit over 0, got buckets={buckets}, {logit_limit=}")
        self._clear(buckets, logit_limit)

    def update(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> None:
        """Count examples; labels are 0 or 1. If an example is invalid, raise and count none of them."""
        check_examples(labels, logits, weights)
        used = 1 << ONE_LIMB if weights is None else library().metric_limbs(weights=weights, n=len(weights))
        self._make_limbs(limb for limb in range(LIMBS) if used >> limb & 1)
        addresses = _addresses(self._limbs.get(limb) for limb in range(LIMBS))
        sums = np.empty((256, 4), np.uint64)
        for start in range(0, len(labels), _BLOCK_EXAMPLES):
            block = slice(start, start + _BLOCK_EXAMPLES)
            library().metric_update(
                labels=labels[block],
                logits=logits[block],
                weights=None if weights is None else weights[block],
                n=len(labels[block]),
                limit=self.logit_limit,
                buckets=self.buckets,
                limbs=addresses,
                sums=sums,
            )
            for exponent in np.flatnonzero(sums.any(axis=1)).tolist():
                self._add_totals([total << (exponent - 1) for total in sums[exponent].tolist()])
        self.examples += len(labels)
        bits = 20 if weights is None else 32  # an example adds at most 2**bits to a limb
        self._add_loads({limb: len(labels) << bits for limb in range(LIMBS) if used >> limb & 1})

    def merge(self, other: Metrics) -> None:
        """Add the examples that `other` has counted; it must have the same buckets."""
        self._check_like(other.buckets, other.logit_limit)
        self.examples += other.examples
        self._add_totals(other._totals)
        self._make_limbs(other._limbs)
        for limb, histogram in list(other._limbs.items()):
            self._limbs[limb] += histogram
        self._add_loads(dict(other._loads))

    def values(self) -> MetricValues:
        """Return the metrics of all examples counted so far."""
        weight, positive, loss, prediction = self._totals
        mean_label = ratio(positive, weight)
        log_loss = ratio(loss, weight << (SUM_BITS - WEIGHT_BITS))
        entropy = -sum(share * math.log(share) for share in (mean_label, 1 - mean_label) if 0 < share < 1)
        right, tied = self._pairs()
        pairs = 2 * (positive << _PAIR_SHIFT) * ((weight - positive) << _PAIR_SHIFT)
        return MetricValues(
            examples=self.examples,
            weight=ratio(weight, 1 << WEIGHT_BITS),
            mean_label=mean_label,
            mean_prediction=ratio(prediction, weight << (SUM_BITS - WEIGHT_BITS)),
            calibration=ratio(prediction, positive << (SUM_BITS - WEIGHT_BITS)),
            log_loss=log_loss,
            normalised_entropy=log_loss / entropy if entropy > 0 else math.nan,
            auc=ratio(right, pairs),
            auc_error=ratio(tied, pairs),
        )

    def _pairs(self) -> tuple[int, int]:
        """Return twice the weight of the correctly ordered pairs (ties count half), and the weight of the tied pairs.

        Both are in squared units of limb 0.
        """
        limbs = sorted(self._limbs)
        pairs = np.empty((len(limbs), len(limbs), 4), np.uint64)
        addresses = _addresses(self._limbs[limb] for limb in limbs)
        library().metric_pairs(limbs=addresses, count=len(limbs), buckets=self.buckets, pairs=pairs)
        right = tied = 0
        for i, positives in enumerate(limbs):
            for j, negatives in enumerate(limbs):
                words, shift = pairs[i, j].tolist(), 32 * (positives + negatives)
                right += (words[0] + (words[1] << 64)) << shift
                tied += (words[2] + (words[3] << 64)) << shift
        return right, tied

    def summary(self) -> dict[str, float]:
        """Return `values` as a dict of floats, for reports."""
        return {name: float(value) for name, value in dataclasses.asdict(self.values()).items()}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the whole state as arrays, with the filled buckets only; `tolist` of each array gives JSON values.

        The arrays, too, are independent of the order of examples, of batches and of nodes.
        """
        limbs = np.array(sorted(self._limbs), np.int64)
        filled = np.flatnonzero(np.bitwise_or.reduce([half for limb in self._limbs.values() for half in limb]))
        values = np.stack([self._limbs[limb][:, filled] for limb in limbs.tolist()])  # (limbs, 2, filled)
        for at, limb in enumerate(limbs[:-1]):
            if limbs[at + 1] == limb + 1:
                values[at + 1] += values[at] >> 32
                values[at] &= 0xFFFFFFFF
        return {
            "settings": np.array([self.buckets, self.logit_limit], np.float64),
            "counts": np.array([self.examples], np.int64),
            "totals": np.array([_to_words(total) for total in self._totals], np.uint64),
            "limbs": limbs,
            "filled": filled,
            "positives": values[:, 1].ravel(),  # (limbs * filled,)
            "negatives": values[:, 0].ravel(),
        }

    def load(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Replace everything by a state that `state` returned; lists in place of arrays are accepted."""
        buckets, limit = np.asarray(state["settings"], np.float64).tolist()
        self._clear(int(buckets), limit)
        self.add(state)

    def add(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Add the examples of a state that `state` returned; it must have the same buckets."""
        buckets, limit = np.asarray(state["settings"], np.float64).tolist()
        self._check_like(int(buckets), limit)
        filled = np.asarray(state["filled"], np.int64)  # bucket numbers, each only once
        if "totals" in state:
            self.examples += int(np.asarray(state["counts"], np.int64)[0])
            self._add_totals([_from_words(words) for words in np.asarray(state["totals"], np.uint64).tolist()])
            limbs = np.asarray(state["limbs"], np.int64).tolist()
        else:
            self._add_old_totals(state)
            limbs = [ONE_LIMB]
        shape = (len(limbs), len(filled))
        both = [np.asarray(state[name], np.int64).reshape(shape) for name in ("negatives", "positives")]
        self._make_limbs(limbs)
        for at, limb in enumerate(limbs):
            for label in (0, 1):
                self._limbs[limb][label, filled] += both[label][at]
        self._add_loads({limb: sum(int(values[at].sum()) for values in both) for at, limb in enumerate(limbs)})

    def _add_old_totals(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Add the totals of a state of numerics 1: weights in units of 2**-20, losses and predictions of 2**-32."""
        examples, weight, positive = np.asarray(state["counts"], np.int64).tolist()
        loss, prediction = ((high << 64) + low for high, low in np.asarray(state["sums"], np.uint64).tolist())
        self.examples += examples
        weight_shift, sum_shift = WEIGHT_BITS - 20, SUM_BITS - 32
        self._add_totals([weight << weight_shift, positive << weight_shift, loss << sum_shift, prediction << sum_shift])

    def clear(self) -> None:
        """Forget all examples."""
        self._clear(self.buckets, self.logit_limit)

    def _check_like(self, buckets: int, logit_limit: float) -> None:
        if (self.buckets, self.logit_limit) != (buckets, logit_limit):
            raise ArgumentError(
                f"metrics of {buckets} buckets within +-{logit_limit} do not merge into metrics of "
                f"{self.buckets} within +-{self.logit_limit}; make them alike"
            )

    def _clear(self, buckets: int, logit_limit: float) -> None:
        self.buckets = buckets
        self.logit_limit = logit_limit
        self.examples = 0
        self._totals = [0, 0, 0, 0]  # weight, weight of positives, loss, prediction
        self._limbs: dict[int, Histogram] = {}
        self._loads: dict[int, int] = {}  # an upper bound of each limb's total
        self._make_limbs([ONE_LIMB])

    def _add_totals(self, totals: Sequence[int]) -> None:
        self._totals = [mine + other for mine, other in zip(self._totals, totals, strict=True)]

    def _make_limbs(self, limbs: Iterable[int]) -> None:
        """Create the histograms of these limbs where they are missing; most data needs one or two limbs."""
        for limb in limbs:
            if limb not in self._limbs:
                self._limbs[limb] = np.zeros((2, self.buckets), np.int64)
                self._loads[limb] = 0

    def _add_loads(self, loads: Mapping[int, int]) -> None:
        """Raise the upper bounds of limbs' totals, and carry before a total can reach the limit.

        A carry moves the bits above the lowest 32 of every bucket to the next limb.
        """
        for limb, load in loads.items():
            self._loads[limb] += load
        if max(self._loads.values()) < _LIMB_LIMIT // 2:
            return
        for limb in range(LIMBS - 1):
            if limb not in self._limbs:
                continue
            if limb + 1 in self._limbs or int(self._limbs[limb].sum()) >= _LIMB_LIMIT // 4:
                self._make_limbs([limb + 1])
                self._limbs[limb + 1] += self._limbs[limb] >> 32
                self._limbs[limb] &= 0xFFFFFFFF
            self._loads[limb] = int(self._limbs[limb].sum())


def ratio(numerator: int, denominator: int) -> float:
    """Return the quotient, rounded once, or NaN if the denominator is 0."""
    return numerator / denominator if denominator else math.nan


def _addresses(histograms: Iterable[Histogram | None]) -> npt.NDArray[np.uint64]:
    """Return the memory addresses of the negatives and positives of each histogram; 0 for None."""
    found = [(0, 0) if h is None else (h[0].ctypes.data, h[1].ctypes.data) for h in histograms]
    return np.array(found, np.uint64)


def _to_words(total: int) -> list[int]:
    return [total >> (64 * word) & (2**64 - 1) for word in range(_TOTAL_WORDS)]


def _from_words(words: Sequence[int]) -> int:
    return sum(word << (64 * at) for at, word in enumerate(words))


def check_examples(labels: Floats, logits: Floats, weights: Floats | None) -> None:
    """Raise an error that names the first example that cannot be counted.

    Labels must be 0 or 1, logits below `LARGEST` in absolute value, weights finite and not negative.
    """
    for name, array in (("logits", logits), ("weights", weights)):
        if array is not None and array.shape != labels.shape:
            raise ArgumentError(f"{name} of shape {array.shape} do not fit labels of shape {labels.shape}")
    wrong = library().metric_check(labels=labels, logits=logits, weights=weights, n=len(labels))
    if wrong < 0:
        return
    label, logit = float(labels[wrong]), float(logits[wrong])
    if label not in (0.0, 1.0):
        raise ArgumentError(f"the label of example {wrong} is {label}; metrics of clicks need 0 or 1")
    if not abs(logit) < LARGEST:
        raise NonFiniteError(
            f"the logit of example {wrong} is {logit}, over {LARGEST:g} in size: the model has diverged; "
            "lower the learning rate, or go back to the last snapshot"
        )
    assert weights is not None
    raise ArgumentError(f"the weight of example {wrong} is {weights[wrong]}; weights are finite numbers from 0 on")
