"""Bad examples: the reasons why an example cannot be read, and the policy for them.

Input: the status of every example, as parsers write it: 0 for a good example, else the reason in the low 8 bits and the
column above them. Output: strict mode raises an error at the first bad example, with file, line, column and reason.
Lenient mode counts bad examples by reason, keeps the first locations of each reason, and raises an error as soon as the
fraction of bad examples exceeds a limit.

A skipped example keeps its number: it stays in the batch, without keys and with weight 0. So global example numbers and
the blocks of a step do not change, and N nodes train on exactly the same examples as one node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from daskps.errors import ConfigError, DataError
from daskps.types import Int32s

# By reason number; numbers.cuh has the same numbers.
REASONS = {
    1: "wrong number of columns",
    2: "the label is not 0 or 1",
    3: "not an integer",
    4: "not a number",
    5: "number out of range",
    6: "cannot read this token",
    7: "a slot that the schema does not name",
    8: "a quoted field, which is not read; write the file without quotes and commas in values, or as Parquet",
    9: "a missing value",
    10: "a negative example weight",
    11: "keys and weights differ in number",
}
WRONG_COLUMN_COUNT = 1
COMMENT = 12  # a comment line: skipped like a bad example, but not an error and not counted
CODES = {reason: code for code, reason in REASONS.items()}
PLACES_KEPT = 5  # locations kept per reason


@dataclass(frozen=True, slots=True)
class BadExamplePolicy:
    """Policy for bad examples: strict stops at the first one, lenient when more than a fraction `max_share` is bad."""

    mode: Literal["strict", "lenient"] = "strict"
    max_share: float = 0.01  # fraction of the examples read
    least_examples: int = 10_000  # smallest number of examples to take the fraction of; smaller data: all its examples

    def __post_init__(self) -> None:
        if self.mode not in ("strict", "lenient"):
            raise ConfigError(f"bad examples: mode {self.mode!r} is not one of strict, lenient")
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"bad examples: max_share must be within 0 and 1, got {self.max_share}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Location of consecutive examples in a file, for messages."""

    url: str
    first_example: int  # number of the first example in the file, from 0
    header_lines: int = 0
    unit: Literal["line", "example"] = "line"
    columns: tuple[str, ...] = ()  # names of the columns, where the format has them
    column_unit: Literal["column", "token"] = "column"

    def place(self, example: int, reason: int, column: int) -> str:
        """Return file, line, column and reason of a bad example, as text for a message."""
        number = self.first_example + example + 1 + self.header_lines
        words = f"{self.url}, {self.unit} {number}"
        if reason == WRONG_COLUMN_COUNT:
            wanted = f"{len(self.columns)} ({self.columns[0]} to {self.columns[-1]})"
            return f"{words}: {REASONS[reason]}: {column}, the schema wants {wanted}"
        name = f" ({self.columns[column - 1]})" if 0 < column <= len(self.columns) else ""
        return f"{words}, {self.column_unit} {column}{name}: {REASONS[reason]}"


@dataclass(slots=True)
class BadExamples:
    """Counters of the examples read and of the bad ones among them. Raises an error when the policy requires it."""

    policy: BadExamplePolicy
    total_examples: int  # examples of the data set; limits `policy.least_examples` for small data
    examples: int = 0  # examples read
    by_reason: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """Number of bad examples so far."""
        return self.by_reason.total()

    def examine(self, status: Int32s, origin: Origin) -> bool:
        """Count consecutive examples with this `status`, the first one at `origin`. Return True if any is bad. Raise
        DataError if the policy requires it."""
        self.examples += len(status)
        bad = np.flatnonzero((status != 0) & (status & 0xFF != COMMENT))
        if not len(bad):
            return False
        for example in bad.tolist():
            code = int(status[example])
            reason, column = code & 0xFF, code >> 8
            if self.policy.mode == "strict":
                raise DataError(
                    f"{origin.place(example, reason, column)}. Correct the data, or read it in lenient mode"
                )
            kept = self.places.setdefault(REASONS[reason], [])
            if len(kept) < PLACES_KEPT:
                kept.append(origin.place(example, reason, column))
            self.by_reason[REASONS[reason]] += 1
        self.judge()
        return True

    def judge(self) -> None:
        """Raise DataError if more examples are bad than the policy allows."""
        judged = max(self.examples, min(self.policy.least_examples, self.total_examples))
        if self.bad > self.policy.max_share * judged:
            raise DataError(
                f"{self.bad} of {self.examples} examples read are bad, more than the allowed share of "
                f"{self.policy.max_share:g} (of {judged}): {self.report()}. Correct the data, or raise data.bad_share"
            )

    def skipped(self) -> dict[str, tuple[int, str]]:
        """Return, by reason, the number of bad examples so far and the location of the first one."""
        return {reason: (count, self.places[reason][0]) for reason, count in list(self.by_reason.items())}

    def report(self) -> str:
        """Return the counts by reason as text, each with the location of the first bad example."""
        counts = self.by_reason.most_common()
        return "; ".join(f"{n} x {reason}, as in {self.places[reason][0]}" for reason, n in counts) or "no bad examples"
