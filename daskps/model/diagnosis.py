"""Why a step's loss or gradient could not be summed: the first cause, in words.

In: what a step took, as NumPy arrays, and which sums failed. Out: one message that names the example and the slot, the
dense feature or the parameter to look at. Runs only after something went wrong, so it takes its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from daskps.model.architecture import Architecture

GRADIENT_LIMIT = 2**15  # of one parameter, summed over one block: kernels/dense.cuh
EXAMPLE_LIMIT = 2**13  # weight, and weighted loss, of one example: kernels/loss.cu


def _first_bad(array: Any) -> tuple[int, int] | None:
    """Row and column of the first value that is not finite."""
    places = np.argwhere(~np.isfinite(array))
    return (int(places[0][0]), int(places[0][1])) if len(places) else None


def _bad_input(architecture: Architecture, pooled: Sequence[Any], dense: Any, first: int) -> str | None:
    for table, array in enumerate(pooled):
        place = _first_bad(array)
        if place:
            return _pooled_value(architecture, table, array, place, first)
    place = None if dense is None else _first_bad(dense)
    if place:
        return f"dense feature {place[1]} is {dense[place]} in example {first + place[0]}"
    return None


def _pooled_value(architecture: Architecture, table: int, array: Any, place: tuple[int, int], first: int) -> str:
    slot, at = divmod(place[1], architecture.tables[table][1])
    name = repr(architecture.slot_names[table][slot]) if architecture.slot_names else f"{slot} of table {table}"
    return f"slot {name} pools to {array[place]} at dimension {at} in example {first + place[0]}"


def _too_large(
    architecture: Architecture, parameters: Mapping[str, Any], pooled: Sequence[Any], dense: Any, first: int
) -> str:
    """Nothing is wrong by itself: the largest of all numbers."""
    arrays = {f"parameter {name}": array for name, array in parameters.items()} | {"dense": dense}
    arrays |= {str(table): array for table, array in enumerate(pooled)}
    sizes = {name: float(np.abs(array).max(initial=0.0)) for name, array in arrays.items() if array is not None}
    largest = max(sizes, key=lambda name: sizes[name])
    found = f"{largest} has a value of size {sizes[largest]:g}"
    if not largest.startswith("parameter"):
        array = arrays[largest]
        row, column = map(int, np.unravel_index(int(np.argmax(np.abs(array))), array.shape))
        if largest == "dense":
            found = f"dense feature {column} is {array[row, column]} in example {first + row}"
        else:
            found = _pooled_value(architecture, int(largest), array, (row, column), first)
    return f"all inputs and parameters are finite, but too large together: {found}"


def _bad_example(labels: Any, example_weights: Any, first: int) -> str | None:
    label = ~np.isfinite(labels)
    if label.any():
        at = int(np.argmax(label))
        return f"the label of example {first + at} is {labels[at]}"
    weights = np.zeros(0) if example_weights is None else example_weights
    wrong = ~((weights >= 0) & (weights < EXAMPLE_LIMIT))
    if wrong.any():
        at = int(np.argmax(wrong))
        return f"the weight of example {first + at} is {weights[at]}, not in [0, {EXAMPLE_LIMIT})"
    return None


def explain(
    architecture: Architecture,
    parameters: Mapping[str, Any],
    *,
    gradients: Mapping[str, Any] | None,  # of the block that failed; None: it was a loss
    pooled: Sequence[Any] | None,  # None: gradients were written over them
    dense: Any,
    labels: Any,
    example_weights: Any,
    first: int,
) -> str:
    """The message; `first` is the number of the part's first example in its step."""
    what = f"a loss is not finite or beyond {EXAMPLE_LIMIT}"
    if gradients is not None:
        names = [name for name, array in gradients.items() if not (np.abs(array) < GRADIENT_LIMIT).all()]
        what = f"the gradient of {' and '.join(names) or 'a parameter'} is not finite or beyond {GRADIENT_LIMIT}"
    bad = next((name for name, array in parameters.items() if not np.isfinite(array).all()), None)
    cause = (
        (f"parameter {bad} is not finite" if bad else None)
        or _bad_input(architecture, pooled or [], dense, first)
        or _bad_example(labels, example_weights, first)
        or (_too_large(architecture, parameters, pooled, dense, first) if pooled is not None else None)
        or "perhaps a slot, but gradients were written over the pooled slots: give `gradients` arrays of their own"
    )
    return f"{what}: {cause}; lower the learning rate, clip gradients, or scale down dense features and weights"
