"""Measure ourselves beside peers: same process, same data, turn by turn, median of several rounds.

In: contenders, each a callable that does the whole work once. Out: `Result` lines, printed as a table and, when asked,
written as one JSON object a line. Machines are shared and noisy, so only ratios within one run mean anything.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a benchmark. `target` is the least ratio wanted; None where the line only informs."""

    name: str
    ours: float | None
    peer: str
    peer_value: float | None  # None: the peer is missing, as `unit` says
    ratio: float | None
    target: float | None
    unit: str

    @property
    def verdict(self) -> str:
        """Met, missed, or nothing to compare."""
        if self.target is None or self.ratio is None:
            return ""
        return "met" if self.ratio >= self.target else "MISSED"


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    before: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Median seconds of each contender over `rounds` turns, after one to warm up; `before` runs untimed each time."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            if before is not None:
                before()
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare(
    name: str, seconds: Mapping[str, float], *, items: float, unit: str, targets: Mapping[str, float | None]
) -> list[Result]:
    """`items` per second of "ours" against every peer in `seconds`."""
    ours = items / seconds["ours"]
    return [
        Result(name, ours, peer, items / seconds[peer], seconds[peer] / seconds["ours"], target, unit)
        for peer, target in targets.items()
    ]


def missing(name: str, peer: str, install: str) -> Result:
    """A peer that is not installed is named, never skipped in silence."""
    return Result(name, None, peer, None, None, None, f"missing: {install}")


def report(results: list[Result], json_path: Path | None) -> None:
    """Print the table; write the JSON lines."""
    header = f"{'name':<44} {'ours':>10} {'peer':<26} {'peer value':>10} {'ratio':>7} {'target':>7}  unit"
    print(header, "-" * len(header), sep="\n")
    for result in results:
        numbers = [f"{value:,.3g}" if value is not None else "-" for value in (result.ours, result.peer_value)]
        ratio = f"{result.ratio:.2f}x" if result.ratio is not None else "-"
        target = f"{result.target:.2g}x" if result.target is not None else "-"
        print(
            f"{result.name:<44} {numbers[0]:>10} {result.peer:<26} {numbers[1]:>10} {ratio:>7} {target:>7}  "
            f"{result.unit} {result.verdict}"
        )
    if json_path is not None:
        json_path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
