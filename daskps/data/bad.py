"""Bad rows: why a row is bad, and what to do about it.

In: the status of every row as the parsers write it (0: fine; else reason and column). Out: strict mode raises the first
bad row with file, line, column and reason; lenient mode counts by reason, keeps the first places of each, and raises
once more than a set share of the rows is bad.

A skipped row keeps its place: it becomes an example without keys and with weight 0. So a position stays one row number,
a step keeps its blocks of examples, and N nodes train on exactly what one node would.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from daskps.errors import ConfigError, DataError
from daskps.types import Int32s

# The same numbers stand in numbers.cuh.
REASONS = {
    1: "wrong number of columns",
    2: "the label is not 0 or 1",
    3: "not an integer",
    4: "not a number",
    5: "number out of range",
    6: "cannot read this token",
    7: "a slot that the schema does not name",
    8: "a quoted field; write the file without quotes, or as Parquet",
    9: "a missing value",
    10: "a negative example weight",
    11: "keys and weights differ in number",
}
WRONG_COLUMN_COUNT = 1
CODES = {reason: code for code, reason in REASONS.items()}
PLACES_KEPT = 5  # per reason


@dataclass(frozen=True, slots=True)
class BadRowPolicy:
    """Strict stops at the first bad row; lenient goes on until more than `max_share` of the rows were bad."""

    mode: Literal["strict", "lenient"] = "strict"
    max_share: float = 0.01
    least_rows: int = 10_000  # the share is judged against at least so many rows, or all rows of smaller data

    def __post_init__(self) -> None:
        if self.mode not in ("strict", "lenient"):
            raise ConfigError(f"bad rows: mode {self.mode!r} is not one of strict, lenient")
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"bad rows: max_share must be within 0 and 1, got {self.max_share}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run of rows came from, for messages."""

    url: str
    first_row: int  # of the file, from 0
    header_lines: int = 0
    unit: Literal["line", "row"] = "line"
    columns: tuple[str, ...] = ()  # names of the columns, where the format has them
    column_unit: Literal["column", "token"] = "column"

    def place(self, row: int, reason: int, column: int) -> str:
        """File, line and column of a bad row, and why."""
        number = self.first_row + row + 1 + self.header_lines
        words = f"{self.url}, {self.unit} {number}"
        if reason == WRONG_COLUMN_COUNT:
            wanted = f"{len(self.columns)} ({self.columns[0]} to {self.columns[-1]})"
            return f"{words}: {REASONS[reason]}: {column}, the schema wants {wanted}"
        name = f" ({self.columns[column - 1]})" if 0 < column <= len(self.columns) else ""
        return f"{words}, {self.column_unit} {column}{name}: {REASONS[reason]}"


@dataclass(slots=True)
class BadRows:
    """Counts what was read and what of it was bad, and stops where the policy says so."""

    policy: BadRowPolicy
    total_rows: int  # of the data set: small data is judged by its own size
    rows: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """Bad rows so far."""
        return self.by_reason.total()

    def examine(self, status: Int32s, origin: Origin) -> bool:
        """Take note of a run of rows; True when some of them are bad."""
        self.rows += len(status)
        bad = np.flatnonzero(status)
        if not len(bad):
            return False
        for row in bad.tolist():
            code = int(status[row])
            reason, column = code & 0xFF, code >> 8
            if self.policy.mode == "strict":
                raise DataError(f"{origin.place(row, reason, column)}. Correct the data, or read it in lenient mode")
            kept = self.places.setdefault(REASONS[reason], [])
            if len(kept) < PLACES_KEPT:
                kept.append(origin.place(row, reason, column))
            self.by_reason[REASONS[reason]] += 1
        self.judge()
        return True

    def judge(self) -> None:
        """DataError if more are bad than the policy allows."""
        judged = max(self.rows, min(self.policy.least_rows, self.total_rows))
        if self.bad > self.policy.max_share * judged:
            raise DataError(
                f"{self.bad} of {self.rows} rows read are bad, more than the allowed share of "
                f"{self.policy.max_share:g} (of {judged}): {self.report()}. Correct the data, or raise data.bad_share"
            )

    def skipped(self) -> dict[str, tuple[int, str]]:
        """By reason: how many rows so far, and the first place."""
        return {reason: (count, self.places[reason][0]) for reason, count in list(self.by_reason.items())}

    def report(self) -> str:
        """Counts by reason, each with its first place."""
        counts = self.by_reason.most_common()
        return "; ".join(f"{n} x {reason}, as in {self.places[reason][0]}" for reason, n in counts) or "no bad rows"
