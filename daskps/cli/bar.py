"""The progress bar of a run, on a terminal: two lines that are drawn again in place.

In: `Progress`. Out: text on standard error: how far, examples/s, time left; AUC, and the hit rate of each tier.
"""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from daskps.flow.progress import Progress
from daskps.view.figures import hit_rates
from daskps.view.words import duration, percent, size

UP_AND_CLEAR = "\x1b[1A\r\x1b[2K"
BAR_CELLS = 24


class Bar:
    """Draws progress until `close`."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = out
        self._drawn = False

    def show(self, progress: Progress) -> None:
        """Draw again."""
        columns = shutil.get_terminal_size().columns
        first, second = (line[: columns - 1] for line in lines(progress, columns - 1))
        back = "\r\x1b[2K" + UP_AND_CLEAR if self._drawn else ""
        self._out.write(f"{back}{first}\n{second}")
        self._out.flush()
        self._drawn = True

    def say(self, message: str) -> None:
        """A line above the bar."""
        back = "\r\x1b[2K" + UP_AND_CLEAR if self._drawn else ""
        self._out.write(f"{back}{message}\n")
        self._out.flush()
        self._drawn = False

    def close(self) -> None:
        """Leave the bar as it is and go on below."""
        if self._drawn:
            self._out.write("\n")
            self._out.flush()
            self._drawn = False


def lines(progress: Progress, columns: int = 120) -> tuple[str, str]:
    """What the bar says; where it is narrow the bar itself gives way, not the time left."""
    done = progress.position / max(progress.stop_position, 1)
    rates = hit_rates(progress.counts)
    words = (
        f"  {progress.position:,} of {progress.stop_position:,} rows"
        f"  {progress.examples_per_second:,.0f} examples/s  {duration(progress.seconds_left)} left"
    )
    whole = min(max(columns - len(words) - 5, 4), BAR_CELLS)
    cells = int(done * whole)
    first = f"{percent(done):>4} {'━' * cells}{'─' * (whole - cells)}{words}"
    auc = f"AUC {progress.metrics['auc']:.4f}" if "auc" in progress.metrics else "AUC -"
    if progress.validations:
        auc += f" (validation {progress.validations[-1].metrics['auc']:.4f})"
    second = (
        f"     {auc}  hits: HBM {percent(rates['hbm'])}, memory {percent(rates['memory'])}, "
        f"SSD {percent(rates['disk'])}, new {percent(rates['new'])}"
    )
    if "disk_bytes" in progress.levels:
        second += f"  SSD {size(progress.levels['disk_bytes'])}"
    return first, second
