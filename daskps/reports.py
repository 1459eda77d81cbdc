"""Reports of nodes about a batch, the progress of a run, and summaries of constant size for runs of any length.

Input: one `BatchReport` per node and batch. Output: `Progress`, a `Summary`, a `Forecast` of the memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from daskps.types import BatchId

T = TypeVar("T")
POINTS = 500  # points of a curve: a chart is 400 to 900 pixels wide
TIMELINE_BATCHES = 40  # batches of a timeline: more bars cannot be distinguished


class Thinned(Generic[T]):
    """List that keeps at most `most` of the appended items: evenly spread ones, and always the last one.

    >>> numbers = Thinned(most=5)
    >>> for number in range(100):
    ...     numbers.append(number)
    >>> list(numbers)
    [0, 32, 64, 96, 99]
    """

    def __init__(self, most: int) -> None:
        self._most, self._every, self.count = most, 1, 0
        self._kept: list[T] = []
        self._last: list[T] = []  # the last item, if it is not among the kept ones

    def append(self, item: T) -> None:
        """Add an item; when too many are kept, remove every second one."""
        if self.count % self._every == 0 and len(self._kept) == self._most - 1:
            self._kept, self._every = self._kept[::2], 2 * self._every
        kept = self.count % self._every == 0
        if kept:
            self._kept.append(item)
        self._last = [] if kept else [item]
        self.count += 1

    @property
    def last(self) -> T:
        """Item that was appended last."""
        return self._last[0] if self._last else self._kept[-1]

    def __iter__(self) -> Iterator[T]:
        return iter([*self._kept, *self._last])

    def __len__(self) -> int:
        return len(self._kept) + len(self._last)

    def clear(self) -> None:
        """Remove all items."""
        self._kept, self._last, self._every, self.count = [], [], 1, 0


@dataclass(slots=True)
class Summary:
    """Totals of a run, made from the lines of its record (storage/FORMAT.md)."""

    batches: int = 0
    examples: int = 0
    first_position: int = 0  # global example number at which the run began
    started: float = 0.0  # seconds since 1970: the first stage of the first batch
    ended: float = 0.0  # the last stage of the last batch
    counts: dict[str, float] = field(default_factory=dict)  # sums over batches
    stage_seconds: dict[str, float] = field(default_factory=dict)  # by stage: sum over batches of the slowest node
    waited_seconds: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)  # the highest value of each level
    points: Thinned[dict[str, Any]] = field(default_factory=lambda: Thinned(POINTS))  # lines without their `stages`
    timeline: list[dict[str, Any]] = field(default_factory=list)  # consecutive lines from about the middle
    _next_timeline: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Add the line of the next batch."""
        if not self.batches:
            self.started = line["started"]
            self.first_position = line["position"] - line["examples"] - line.get("skipped", 0)
        self._keep_timeline(line)
        self.batches += 1
        self.examples += line["examples"]
        self.ended = line["ended"]
        for total, name in (
            (self.counts, "counts"),
            (self.stage_seconds, "stage_seconds"),
            (self.waited_seconds, "waited_seconds"),
        ):
            for key, value in line[name].items():
                total[key] = total.get(key, 0) + value
        for key, value in line["levels"].items():
            self.most[key] = max(self.most.get(key, value), value)
        self.points.append(without_stages(line))

    def _keep_timeline(self, line: dict[str, Any]) -> None:
        """Keep TIMELINE_BATCHES consecutive lines; replace them by later ones each time the run has doubled."""
        count = self.batches
        if count < TIMELINE_BATCHES:
            self.timeline.append(line)
            return
        if count % TIMELINE_BATCHES == 0 and (count // TIMELINE_BATCHES).bit_count() == 1:  # 40, 80, 160, ...
            self._next_timeline = []
        elif not self._next_timeline:
            return
        self._next_timeline.append(line)
        if len(self._next_timeline) == TIMELINE_BATCHES:
            self.timeline, self._next_timeline = self._next_timeline, []


def without_stages(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch's line without the times of every stage on every node, which are its largest part."""
    return {name: value for name, value in line.items() if name != "stages"}


APART = 1.05  # smallest ratio between the positions of two samples that are kept
SPAN = 1.5  # smallest ratio between the two positions from which the exponent is computed


class Growth:
    """Growth of a table's rows: a power of the number of examples (Heaps' law), fitted to the last half of them.

    >>> growth = Growth(0, 0)
    >>> for position in range(100, 1100, 100):
    ...     growth.add(position, 2 * position)
    >>> growth.rows_at(50_000), growth.position_at(10_000)
    (100000, 5000)
    """

    def __init__(self, position: int, rows: int) -> None:
        self._base = rows if position == 0 else 0  # a model made with `start_from` begins with rows
        self._samples = [(position, rows - self._base)]
        self._now = self._samples[0]

    def add(self, position: int, rows: int) -> None:
        """Add the number of rows at a later position."""
        self._now = (position, rows - self._base)
        if position >= APART * self._samples[-1][0]:
            self._samples.append(self._now)

    def _exponent(self) -> float | None:
        """Return the exponent, or None if too little is known."""
        position, rows = self._now
        earlier = [sample for sample in self._samples if min(sample) > 0 and SPAN * sample[0] <= position]
        if not earlier:
            return None
        then, known = max((sample for sample in earlier if 2 * sample[0] <= position), default=earlier[0])
        return min(max(math.log(rows / known) / math.log(position / then), 0.0), 1.0)

    def rows_at(self, position: int) -> int | None:
        """Return the expected number of rows at a later position; None if too little is known."""
        if (exponent := self._exponent()) is None:
            return None
        now, rows = self._now
        return self._base + round(float(rows * (max(position, now) / now) ** exponent))

    def position_at(self, rows: int) -> int:
        """Return the position at which `rows` rows are expected. Call it only if `rows_at` has predicted so many."""
        now, known = self._now
        exponent = self._exponent()
        if not exponent or rows - self._base <= known:
            return now
        return round(float(now * ((rows - self._base) / known) ** (1 / exponent)))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast that a table's disk index on one node will leave too little memory for the rows of a step."""

    rank: int
    table: str
    rows: int  # expected rows of the table on this node at the end of the data
    index_bytes: int  # size of their index then
    position: int  # global example number at which too little memory is left
    memory_bytes: int  # a budget.memory_bytes that would be enough

    def words(self, budget_bytes: int, stop_position: int) -> str:
        """Return the warning, with a remedy."""
        return (
            f"budget.memory_bytes ({budget_bytes:,}) will not last: at this growth table {self.table!r} has about "
            f"{self.rows:,} rows on node {self.rank} after all data, whose index takes {self.index_bytes:,} bytes of "
            f"memory, and at about row {self.position:,} of {stop_position:,} too little is left for one step; "
            f"{self.memory_bytes:,} would do: stop the run, which leaves a snapshot, and go on with --resume --set "
            f"budget.memory_bytes={self.memory_bytes}; the result is the same"
        )


RATE_BATCHES = 4  # rates are means over the last 4 batches, because batches end unevenly
RECENT_VALIDATIONS = 250  # the last 250 validations are all kept


@dataclass(frozen=True, slots=True)
class StageTime:
    """Start and end of a stage's work on a batch (seconds since 1970), and the time in it spent waiting for others."""

    stage: str
    started: float
    ended: float
    waited_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time from start to end in seconds, including waits."""
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Report of one node about one batch."""

    token: BatchId
    rank: int
    examples: int  # without skipped ones
    stages: tuple[StageTime, ...]
    counts: dict[str, float]  # counters (keys, hits, misses, bytes, ...), summed over tables
    metrics: dict[str, float]  # of the current pass so far; "pass" is its number, from 1
    levels: dict[str, float] = field(default_factory=dict)  # rows and bytes in each tier when the batch was pushed
    digests: dict[str, Any] = field(default_factory=dict)  # by table: digests of a prepared snapshot's files
    # Skipped examples since the start: by reason, their number and the first place.
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)
    rows_read: int = 0  # examples read since the start, including skipped ones
    forecast: Forecast | None = None  # set if the memory will not last
    skipped: int = 0  # examples of the batch that could not be parsed


@dataclass(frozen=True, slots=True)
class Validation:
    """Metrics of the validation data, with the model exactly as after `batch`."""

    batch: int
    position: int
    metrics: dict[str, float]


def to_record(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics in the form of a snapshot or record: NaN and infinity become None, because JSON has neither."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def from_record(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics that were given to `to_record`; None becomes NaN."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def validation_line(validation: Validation, run: str, incarnation: int) -> dict[str, Any]:
    """Return the record's line of a validation (storage/FORMAT.md)."""
    fields = asdict(validation) | {"metrics": to_record(validation.metrics)}
    return {"kind": "validation", "batch": validation.batch, "run": run, "incarnation": incarnation} | fields


def kept_validations(validations: Sequence[Validation], patience: int) -> list[Validation]:
    """Return the validations that a run and its snapshots keep, a bounded number; the record has all of them.

    Kept are the most recent ones (early stopping needs `patience` of them), and the best and the worst by every metric.
    Of the others, every second one is removed whenever there are too many.
    """
    recent = max(RECENT_VALIDATIONS, patience)
    if len(validations) <= 4 * recent:
        return list(validations)
    older = validations[:-recent]
    kept = {one.batch for one in (*older[::2], *validations[-recent:])}
    for name in {name for one in older for name in one.metrics}:
        known = [one for one in older if math.isfinite(one.metrics.get(name, math.nan))]
        if known:
            kept |= {choose(known, key=lambda one: one.metrics[name]).batch for choose in (min, max)}
    return [one for one in validations if one.batch in kept]


def record_of(validations: Sequence[Validation], best: str | None = None) -> dict[str, Any]:
    """Return the validations in the form of a snapshot. With them a resumed run stops early at the same place.

    `best` is the snapshot of the best validation, if best ones are kept.
    """
    return {"validations": [{**asdict(one), "metrics": to_record(one.metrics)} for one in validations], "best": best}


def validations_of(record: dict[str, Any]) -> tuple[Validation, ...]:
    """Return the validations that were given to `record_of`."""
    return tuple(Validation(**{**one, "metrics": from_record(one["metrics"])}) for one in record.get("validations", ()))


def best_of(validations: Sequence[Validation], metric: str) -> Validation | None:
    """Return the first of the best validations by a metric; a validation without a value is the worst."""

    def loss(one: Validation) -> float:
        value = one.metrics.get(metric, math.nan)
        return math.inf if math.isnan(value) else -value if metric == "auc" else value

    return min(validations, key=loss, default=None)


@dataclass(slots=True)
class Progress:
    """Progress of a run: one object, updated in place as batches finish."""

    position: int  # global number of the next example
    stop_position: int
    batch: int
    metrics: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)  # rows and bytes in each tier now, over all nodes
    reports: tuple[BatchReport, ...] = ()  # of the last batch, one per node
    line: dict[str, Any] = field(default_factory=dict)  # the record's line of the last batch, over all nodes
    validations: list[Validation] = field(default_factory=list)
    snapshot: str | None = None
    restarts: int = 0
    examples: int = 0  # trained in this process, without skipped ones
    started: float = field(default_factory=time.time)
    stopped_early: bool = False
    best: Validation | None = None  # set if the run has ended with its best snapshot as the model: its validation
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)  # skipped, by reason: number, first place
    warnings: list[str] = field(default_factory=list)  # for the user
    history: tuple[dict[str, Any], ...] = ()  # some lines of the record from before this incarnation, evenly chosen
    _recent: deque[tuple[float, int]] = field(default_factory=deque)  # end and examples of the last batches

    def go_back(
        self,
        position: int,
        stop_position: int,
        batch: int,
        snapshot: str | None,
        metrics: dict[str, float],
        validations: Sequence[Validation] = (),
    ) -> None:
        """Go back to the start of an incarnation: later batches will be reported again.

        `validations` are those in the snapshot; this object may know more of them, up to `batch`.
        """
        self.position, self.stop_position, self.batch = position, stop_position, batch
        self.snapshot, self.metrics = snapshot, metrics
        self.reports = ()
        self._recent.clear()
        known = {validation.batch: validation for validation in (*validations, *self.validations)}
        self.validations = [known[number] for number in sorted(known) if number <= batch]

    def finish(self, token: BatchId, reports: Sequence[BatchReport], position: int) -> None:
        """Add the reports of all nodes about a batch."""
        self.batch, self.position = token.batch, position
        self.examples += sum(report.examples for report in reports)
        self.metrics = reports[0].metrics
        self.levels, self.bad_rows = {}, {}
        for report in reports:
            for reason, (count, place) in report.bad_rows.items():
                before, first = self.bad_rows.get(reason, (0, place))
                self.bad_rows[reason] = (before + count, first)
            for name, value in report.levels.items():
                self.levels[name] = self.levels.get(name, 0) + value
            for name, value in report.counts.items():
                self.counts[name] = self.counts.get(name, 0) + value
        self.reports = tuple(reports)
        times = [stage for report in reports for stage in report.stages]
        if not self._recent:
            self._recent.append((min(stage.started for stage in times), 0))
        self._recent.append((max(stage.ended for stage in times), sum(report.examples for report in reports)))
        if len(self._recent) > RATE_BATCHES + 1:
            self._recent.popleft()
        self.line = self._line()

    def _line(self) -> dict[str, Any]:
        """Return the record's line of the last batch, over all nodes (storage/FORMAT.md)."""
        token = self.reports[0].token
        started = min(stage.started for report in self.reports for stage in report.stages)
        (before, _), *recent = self._recent
        counts: dict[str, float] = {}
        busy: dict[str, float] = {}
        waited: dict[str, float] = {}
        stages = []
        for report in self.reports:
            for name, value in report.counts.items():
                counts[name] = counts.get(name, 0) + value
            for one in report.stages:
                busy[one.stage] = max(busy.get(one.stage, 0.0), round(one.seconds - one.waited_seconds, 6))
                waited[one.stage] = max(waited.get(one.stage, 0.0), round(one.waited_seconds, 6))
                times = (one.started - started, one.ended - started, one.waited_seconds)
                stages.append([report.rank, one.stage, *(round(seconds, 6) for seconds in times)])
        return {
            "kind": "batch",
            "batch": token.batch,
            "run": token.run,
            "incarnation": token.incarnation,
            "first_step": token.first_step,
            "stop_step": token.stop_step,
            "position": self.position,
            "stop_position": self.stop_position,
            "examples": recent[-1][1],
            "skipped": sum(report.skipped for report in self.reports),
            "started": started,
            "ended": recent[-1][0],
            "examples_per_second": sum(count for _, count in recent) / max(recent[-1][0] - before, 1e-9),
            "metrics": to_record(self.metrics),
            "counts": counts,
            "levels": dict(self.levels),
            "stage_seconds": busy,
            "waited_seconds": waited,
            "stages": stages,
        }

    def patience_lost(self, patience: int, metric: str = "log_loss") -> bool:
        """Return True if the last `patience` validations are no better than an earlier one; False if it is 0."""
        best = best_of(self.validations, metric)
        return bool(patience) and best is not None and best in self.validations[:-patience]

    @property
    def seconds(self) -> float:
        """Seconds since this process began its part of the run."""
        return time.time() - self.started

    @property
    def examples_per_second(self) -> float:
        """Mean rate of the part of the run in this process."""
        return self.examples / max(self.seconds, 1e-9)

    @property
    def hit_rate(self) -> float:
        """Fraction of pulled rows that were in the cache."""
        pulled = sum(self.counts.get(name, 0) for name in ("hits", "misses", "new_keys"))
        return self.counts.get("hits", 0) / pulled if pulled else 0.0

    @property
    def seconds_left(self) -> float:
        """Expected seconds to the end, at the mean rate so far."""
        return (self.stop_position - self.position) / max(self.examples_per_second, 1e-9)
