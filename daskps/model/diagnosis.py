"""Why a step's loss or gradient is not finite: the first cause, in words.

In: what a step took and gave, and its flags. Out: one message that names the example and the slot, the dense feature or
the parameter to look at. Runs only after something went wrong, so it takes its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskps.model.architecture import Architecture

TOO_LARGE = 2  # kernels/dense.cuh
GRADIENT_LIMIT = 2**15  # of one parameter, summed over one block
EXAMPLE_LIMIT = 2**13  # weight, and weighted loss, of one example


def _host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array.get() if hasattr(array, "get") else array)


def _first_bad(array: Any) -> tuple[int, int] | None:
    """Row and column of the first value that is not finite."""
    places = np.argwhere(~np.isfinite(_host(array)))
    return (int(places[0][0]), int(places[0][1])) if len(places) else None


def _bad_input(architecture: Architecture, pooled: Sequence[Any], dense: Any, first: int) -> str | None:
    for table, array in enumerate(pooled):
        place = _first_bad(array)
        if place:
            slot, at = divmod(place[1], architecture.tables[table][1])
            value = _host(array)[place]
            return f"slot {slot} of table {table} pools to {value} at dimension {at} in example {first + place[0]}"
    place = None if dense is None else _first_bad(dense)
    if place:
        return f"dense feature {place[1]} is {_host(dense)[place]} in example {first + place[0]}"
    return None


def _bad_example(labels: Any, example_weights: Any, first: int) -> str | None:
    for name, array in (("label", labels), ("weight", example_weights)):
        values = np.zeros(0) if array is None else _host(array)
        wrong = ~np.isfinite(values)
        if name == "weight":
            wrong |= (values < 0) | (values >= EXAMPLE_LIMIT)
        if wrong.any():
            at = int(np.argmax(wrong))
            bound = f", not in [0, {EXAMPLE_LIMIT})" if name == "weight" else ""
            return f"the {name} of example {first + at} is {values[at]}{bound}"
    return None


def explain(
    architecture: Architecture,
    parameters: dict[str, Any],
    flags: Any,
    *,
    pooled: Sequence[Any],
    dense: Any,
    labels: Any,
    example_weights: Any,
    first: int,
) -> str:
    """The message; `first` is the number of the part's first example in its step."""
    values = _host(flags).tolist()
    names = ["loss"] + [f"gradient of {p.name}" for p in architecture.parameters]
    which, value = next((name, flag) for name, flag in zip(names, [values[-1], *values[:-1]], strict=True) if flag)
    bad = next((name for name, array in parameters.items() if not np.isfinite(_host(array)).all()), None)
    cause = (
        (f"parameter {bad} is not finite" if bad else None)
        or _bad_input(architecture, pooled, dense, first)
        or _bad_example(labels, example_weights, first)
    )
    if value == TOO_LARGE:
        limit = EXAMPLE_LIMIT if which == "loss" else GRADIENT_LIMIT
        what = f"the {which} is beyond the largest that is summed, {limit}"
    else:
        what = f"the {which} is not finite"
    remedy = "lower the learning rate, clip gradients, or standardise dense features and weights"
    return f"{what}: {cause or 'all inputs and parameters are finite, so the network itself overflows'}; {remedy}"
