"""Numbers as people read them, and as JSON takes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def percent(share: float) -> str:
    """0.714 as ``71%``."""
    return f"{100 * share:.0f}%"


def duration(seconds: float) -> str:
    """95 seconds as ``1:35``, 7500 as ``2:05:00``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes with a unit: 16035776 as ``16.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def short(number: float) -> str:
    """A number in little room: 1234567 as ``1.23M``."""
    if abs(number) < 1000:
        return f"{number:.3g}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
    return f"{number / 1000:,.3g}T"


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
