"""Streaming metrics of one set of examples: AUC, log loss, normalised entropy, calibration.

In: labels, logits and weights of examples, in any pieces. Out: `MetricValues`, whenever asked.

State is integers only: histograms of logits by label, and fixed-point sums. So merging is associative and the values
are the same bits whatever the batches, nodes and order. AUC counts pairs of examples of different labels; pairs that
share a bucket count half, and `auc_error` says how far that can be from the exact AUC. Buckets are equally wide in the
logit, 3.2e-5 by default, where equal steps of probability would crowd a rare click's small probabilities into a few.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.errors import ArgumentError, CapacityError, NonFiniteError
from daskps.types import Floats

BUCKETS = 1_000_000
LOGIT_LIMIT = 16.0  # a probability within 1.2e-7 of 0 or 1; what lies beyond shares the outermost buckets
LARGEST = 8192.0  # of a weight, or of a logit's size
WEIGHT_ONE = 2**20  # a weight of 1, as in metrics.cpp; weights are rounded to 2**-20
SUM_ONE = 2**32  # a loss or prediction of 1 in the sums
_BLOCK_EXAMPLES = 1 << 20  # a block's weight stays under 2**53
_TOTAL_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class MetricValues:
    """What the examples so far amount to; means are by weight, and NaN is what cannot be said of them."""

    examples: int
    weight: float
    mean_label: float
    mean_prediction: float
    calibration: float  # mean prediction / mean label: 1 is right, more is too sure of clicks
    log_loss: float
    normalised_entropy: float  # log loss / log loss of always predicting the mean label: under 1 is better than that
    auc: float
    auc_error: float  # the exact AUC is no farther away than this


class Metrics:
    """The metrics of the examples that `update` has seen and `merge` has brought."""

    def __init__(self, buckets: int = BUCKETS, logit_limit: float = LOGIT_LIMIT) -> None:
        if buckets < 1 or not 0 < logit_limit < math.inf:
            raise ArgumentError(f"metrics need buckets and a limit over 0, got buckets={buckets}, {logit_limit=}")
        self._clear(buckets, logit_limit)

    def update(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> None:
        """Count examples; labels are 0 or 1. Examples that cannot be counted raise, and then none is."""
        check_examples(labels, logits, weights)
        if self._weight + len(labels) * int(LARGEST) * WEIGHT_ONE >= _TOTAL_LIMIT:
            self._check_room(fixed_weight(labels, weights))
        sums = np.empty(6, np.uint64)
        for start in range(0, len(labels), _BLOCK_EXAMPLES):
            block = slice(start, start + _BLOCK_EXAMPLES)
            library().metric_update(
                labels=labels[block],
                logits=logits[block],
                weights=None if weights is None else weights[block],
                n=len(labels[block]),
                limit=self.logit_limit,
                buckets=self.buckets,
                positives=self._positives,
                negatives=self._negatives,
                sums=sums,
            )
            weight, positive, loss_low, loss_high, prediction_low, prediction_high = sums.tolist()
            self._weight += weight
            self._positive += positive
            self._loss += loss_low + (loss_high << 64)
            self._prediction += prediction_low + (prediction_high << 64)
        self.examples += len(labels)

    def merge(self, other: Metrics) -> None:
        """Count what `other` has counted; it must have the same buckets."""
        self._check_like(other.buckets, other.logit_limit)
        self._check_room(other._weight)
        self.examples += other.examples
        self._weight += other._weight
        self._positive += other._positive
        self._loss += other._loss
        self._prediction += other._prediction
        self._positives += other._positives
        self._negatives += other._negatives

    def values(self) -> MetricValues:
        """The metrics now."""
        weight, negative = self._weight, self._weight - self._positive
        mean_label = ratio(self._positive, weight)
        log_loss = ratio(self._loss * WEIGHT_ONE, weight * SUM_ONE)
        entropy = -sum(share * math.log(share) for share in (mean_label, 1 - mean_label) if 0 < share < 1)
        pairs = np.empty(4, np.uint64)
        library().metric_pairs(positives=self._positives, negatives=self._negatives, buckets=self.buckets, pairs=pairs)
        right_low, right_high, tied_low, tied_high = pairs.tolist()
        return MetricValues(
            examples=self.examples,
            weight=weight / WEIGHT_ONE,
            mean_label=mean_label,
            mean_prediction=ratio(self._prediction * WEIGHT_ONE, weight * SUM_ONE),
            calibration=ratio(self._prediction * WEIGHT_ONE, self._positive * SUM_ONE),
            log_loss=log_loss,
            normalised_entropy=log_loss / entropy if entropy > 0 else math.nan,
            auc=ratio(right_low + (right_high << 64), 2 * self._positive * negative),
            auc_error=ratio(tied_low + (tied_high << 64), 2 * self._positive * negative),
        )

    def summary(self) -> dict[str, float]:
        """`values` by name, for reports."""
        return {name: float(value) for name, value in dataclasses.asdict(self.values()).items()}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """All of it as arrays, of the filled buckets only; `tolist` of each makes JSON."""
        filled = np.flatnonzero(self._positives | self._negatives)
        return {
            "settings": np.array([self.buckets, self.logit_limit], np.float64),
            "counts": np.array([self.examples, self._weight, self._positive], np.int64),
            "sums": np.array([divmod(total, 2**64) for total in (self._loss, self._prediction)], np.uint64),
            "filled": filled,
            "positives": self._positives[filled],
            "negatives": self._negatives[filled],
        }

    def load(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Become what `state` was taken of; arrays may have become lists on the way."""
        buckets, limit = np.asarray(state["settings"], np.float64).tolist()
        self._clear(int(buckets), limit)
        self.add(state)

    def add(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Count what metrics had counted that `state` was taken of; they must have had the same buckets."""
        buckets, limit = np.asarray(state["settings"], np.float64).tolist()
        self._check_like(int(buckets), limit)
        examples, weight, positive = np.asarray(state["counts"], np.int64).tolist()
        loss, prediction = ((high << 64) + low for high, low in np.asarray(state["sums"], np.uint64).tolist())
        self._check_room(weight)
        self.examples += examples
        self._weight += weight
        self._positive += positive
        self._loss += loss
        self._prediction += prediction
        filled = np.asarray(state["filled"], np.int64)  # each once
        self._positives[filled] += np.asarray(state["positives"], np.int64)
        self._negatives[filled] += np.asarray(state["negatives"], np.int64)

    def clear(self) -> None:
        """Have counted nothing."""
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
        self._weight = 0  # units of 1 / WEIGHT_ONE
        self._positive = 0
        self._loss = 0  # units of 1 / SUM_ONE
        self._prediction = 0
        self._positives = np.zeros(buckets, np.int64)
        self._negatives = np.zeros(buckets, np.int64)

    def _check_room(self, weight: int) -> None:
        if self._weight + weight >= _TOTAL_LIMIT:
            raise CapacityError(
                f"a total weight of {(self._weight + weight) / WEIGHT_ONE:.4g} does not fit, metrics hold less than "
                f"{_TOTAL_LIMIT / WEIGHT_ONE:.4g}; scale the weights down or begin new metrics"
            )


def ratio(numerator: int, denominator: int) -> float:
    """The quotient, rounded once; NaN where there is none."""
    return numerator / denominator if denominator else math.nan


def fixed_weight(labels: Floats, weights: Floats | None) -> int:
    """The examples' total weight in units of 1 / WEIGHT_ONE, or one unit an example more."""
    if weights is None:
        return len(labels) * WEIGHT_ONE
    return int(weights.sum(dtype=np.float64) * WEIGHT_ONE) + len(labels)


def check_examples(labels: Floats, logits: Floats, weights: Floats | None) -> None:
    """Refuse what cannot be counted, naming the first such example."""
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
    raise ArgumentError(f"the weight of example {wrong} is {weights[wrong]}; weights lie in [0, {LARGEST:g})")
