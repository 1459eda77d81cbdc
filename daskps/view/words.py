"""Formatting of numbers as short text, and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def percent(share: float) -> str:
    """Return a share as percent: 0.714 gives ``71%``."""
    return f"{100 * share:.0f}%"


def duration(seconds: float) -> str:
    """Return seconds as a clock shows them: 95 gives ``1:35``, 7500 gives ``2:05:00``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Return bytes with a unit: 16035776 gives ``16.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def short(number: float) -> str:
    """Return a number with at most three digits and a suffix: 1234567 gives ``1.23M``."""
    if abs(number) < 1000:
        return f"{number:.3g}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
    return f"{number / 1000:,.3g}T"


def metrics_name(metrics: Mapping[str, float]) -> str:
    """Return the name of a pass's metrics: "progressive", or "training, pass N" from the second pass on.

    From the second pass on, the examples have been trained on before, so the metrics are no longer progressive.
    """
    number = metrics.get("pass", 1.0)
    return f"training, pass {number:.0f}" if number > 1 else "progressive"


def plain(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and infinity become None, because JSON has neither."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
