"""How many steps make a batch. It decides only the speed, so it is chosen from what was measured.

In: the job, what nodes can hold, reports of finished batches. Out: steps of the next batch. A batch should
take a few seconds: the more steps share a row, the fewer rows are moved for each of them (from 8 to 32 steps, pulls and
pushes fell from 16 to 7 ms a step on a workload of Zipf keys), until tables outgrow the CPU's cache; where rows come
from disk it should be as large as the budgets allow, because then more of each file that is opened is wanted; and the
run should have enough batches for the stages to overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from daskps.config import Job
from daskps.flow.opened import Opened
from daskps.flow.progress import BatchReport

FIRST_EXAMPLES = 32_768
WANTED_SECONDS = 3.0
LEAST_BATCHES = 16  # of a run, so that stages overlap
ROOM = 0.7  # of what fits: working sets of later batches may be larger
STEADY = 1.25  # a batch that would fit is so much larger, or it is not worth another size


class Sizer:
    """Doubles or halves, or else keeps the number.

    Sizes should be equal: a small batch trains too fast for the large one behind it to be ready, and only batches of
    one size can use each other's memory again. When sizes followed every measurement, fresh pages took 9% of a node's
    time; when reports of batches of an earlier size counted, 16 and 32 steps took turns, and that a fifth of it.
    """

    def __init__(self, job: Job, opened: Opened) -> None:
        self._minibatch = job.train.minibatch_examples
        self._fixed = job.train.batch_examples
        self.read_steps = opened.read_steps  # that one read may have
        self._most = max(1, (opened.rows - opened.position) // self._minibatch // LEAST_BATCHES)
        self._first = min(max(1, FIRST_EXAMPLES // self._minibatch), self._most)
        self._steps = min(self._first, self.read_steps)
        self._fitting: int | None = None  # steps of the last batch that had to be cut; more when later ones are smaller
        self._whole = job.merges_batches  # then a batch is what the job says, unless it must be cut

    @property
    def most_steps(self) -> int:
        """Steps that a batch may have now: of what can be read at once, as many as fitted when one was cut."""
        if self._whole or self._fitting is None:
            return self.read_steps
        return min(self.read_steps, self._fitting)

    def steps(self) -> int:
        """Steps of the next batch; if their number was set, they may have to be read in pieces of `most_steps`."""
        if self._fixed is not None:
            return max(1, self._fixed // self._minibatch)
        return self._steps

    def cut(self, fitting: int) -> None:
        """A batch did not fit: only `fitting` steps of it did."""
        self._steps = self._first = self._fitting = max(1, fitting)

    def learn(self, reports: Sequence[BatchReport]) -> None:
        """Take in a finished batch; one of an earlier size says nothing of the size that is tried now."""
        held = self._steps == self.read_steps  # until somebody knew how large examples are
        self.read_steps = int(min(report.levels["read_steps"] for report in reports))
        if held and self._steps < min(self._first, self.read_steps):
            self._steps = min(self._first, self.read_steps)
            return
        self._steps = min(self._steps, self.read_steps)
        now = reports[0].token.stop_step - reports[0].token.first_step
        keys = max(report.counts["distinct_keys"] for report in reports)
        capacity = min(report.levels["row_capacity"] for report in reports)
        would_fit = capacity / max(keys, 1) * now
        if self._fitting is not None and would_fit > STEADY * self._fitting:
            self._fitting = int(min(would_fit, 2 * self._fitting))
        if now != self._steps:
            return
        fitting = ROOM * would_fit
        slowest = max(stage.seconds - stage.waited_seconds for report in reports for stage in report.stages)
        wanted = now * WANTED_SECONDS / max(slowest, 1e-6)
        if sum(report.counts.get("misses", 0) for report in reports):
            wanted = fitting if fitting > STEADY * now else now
        elif now / 2 < wanted < 2 * now:
            wanted = now
        self._steps = int(max(1, min(max(wanted, now / 2), fitting, 2 * now, self._most, self.most_steps)))
