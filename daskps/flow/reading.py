"""The part of a node's memory that reading takes: blocks of files, and batches from their first byte to their push.

In: a job, its features, open readers, batches as they are read. Out: bytes to set aside; how many steps one read may
have, so that as many batches as may be in flight fit; how many such parts a batch that came out larger takes.
"""

from __future__ import annotations

from daskps.config import Job
from daskps.data.order import Steps
from daskps.errors import CapacityError
from daskps.flow.inputs import Features, StepReader, job_schema, of_files
from daskps.types import Batch

LINES_OF_TOKENS = ("libsvm", "libffm", "multislot")  # there any slot may have any number of keys
READING = 4  # of the budget, one part at most for batches, unless a step needs more
MOST_READING = 2  # of a budget, one part must be left to rows


def raw_bytes(batch: Batch) -> int:
    """What the arrays of a batch take."""
    arrays = (batch.labels, batch.keys, batch.offsets, batch.weights, batch.dense, batch.example_weights)
    return sum(array.nbytes for array in arrays if array is not None)


def bounded_keys(job: Job, features: Features) -> tuple[int, bool]:
    """The fewest keys that an example can have, and whether none can have more."""
    if job.data.osrp is not None or job.data.format in LINES_OF_TOKENS:
        return 0, False
    if job.data.synthetic is not None:
        return len(features.slots) * job.data.synthetic.keys_per_bag, True
    slots = job_schema(job).slots
    least = sum(slot.kind != "multi" and slot.missing_key for slot in slots)
    return least, least == len(slots)


class Reading:
    """Memory for `depth` batches in flight and one that is being put together, and for the blocks of files."""

    def __init__(
        self,
        job: Job,
        features: Features,
        steps: Steps,
        training: StepReader,
        validation: StepReader | None = None,
        *,
        on_cpu: bool,
    ) -> None:
        self._job, self._depth, self._on_cpu = job, job.train.depth, on_cpu
        first, last = steps.slice(0, training.rows)
        self.least_keys, known = bounded_keys(job, features)
        self._known = known or first == last  # a node without examples has no say in how large they are
        label_and_status = 8
        bags = label_and_status + 8 * len(features.slots) + 4 * features.dense + (4 if job.data.weight else 0)
        self._example_bytes: float = bags + 8 * self.least_keys  # at least; the most there was as soon as one is read
        files = [reader for reader in map(of_files, (training, validation)) if reader is not None]
        rows = training.rows // job.train.epochs
        window = min(job.data.shuffle_window_rows, rows) * (self._example_bytes + 8)  # and its order
        self._blocks_bytes = int(window) + sum(reader.held_bytes for reader in files)
        self.step_examples = max(1, last - first)
        self._all_steps = steps.count(rows)
        if job.train.batch_examples is not None:
            self._all_steps = min(self._all_steps, max(1, job.train.batch_examples // job.train.minibatch_examples))
        batch = self._all_steps * self.step_examples
        wanted = self._example_bytes * batch if self._known else job.budget.hbm_bytes + job.budget.memory_bytes
        self._whole = job.merges_batches  # none may be read in pieces then
        allowed = wanted if self._whole and self._known else self._budget[1] // READING // (self._depth + 1)
        self.share_bytes = int(max(min(wanted, allowed), self._step_bytes))
        for reader in files:
            reader.bound(self.batches_bytes)

    @property
    def _budget(self) -> tuple[str, int]:
        """Where batches are counted: beside what is made of them, which is in the same memory if it has no GPU."""
        budget = self._job.budget
        return ("hbm_bytes", budget.hbm_bytes) if self._on_cpu else ("memory_bytes", budget.memory_bytes)

    @property
    def _step_bytes(self) -> float:
        return self.step_examples * self._example_bytes

    @property
    def batches_bytes(self) -> int:
        """What batches may take, those that are ready and the one that is made of its parts."""
        return (self._depth + 1) * self.share_bytes

    @property
    def memory_bytes(self) -> int:
        """What reading takes of the memory."""
        return self._blocks_bytes + (0 if self._on_cpu else self.batches_bytes)

    @property
    def hbm_bytes(self) -> int:
        """What reading takes of the devices' memory, which stand-ins have in common with the node."""
        return self.batches_bytes if self._on_cpu else 0

    def check(self) -> None:
        """CapacityError, before anything is read, if reading leaves too little to rows."""
        name, budget_bytes = self._budget
        if self.batches_bytes > budget_bytes // MOST_READING:
            raise CapacityError(
                f"{self._depth} batches in flight of one step each, and one that is read, take {self.batches_bytes:,} "
                f"bytes as they are read ({self.step_examples:,} examples of {self._example_bytes:.0f} bytes here), "
                f"more than half of budget.{name} ({budget_bytes:,}); the rest is for their rows: raise it, lower "
                f"train.depth, or use smaller steps"
            )
        memory_bytes = self._job.budget.memory_bytes
        if self.memory_bytes > memory_bytes // MOST_READING:
            raise CapacityError(
                f"reading takes {self._blocks_bytes:,} bytes for blocks of files (row groups of Parquet, windows that "
                f"are shuffled), more than half of budget.memory_bytes ({memory_bytes:,}); the rest is for rows: raise "
                f"it, lower data.shuffle_window_rows, or write files with smaller row groups"
            )

    def steps(self) -> int:
        """Steps that one read may have, as large as examples have been so far; one until that is known."""
        if self._whole:
            return self._all_steps
        return max(1, int(self.share_bytes / self._step_bytes)) if self._known else 1

    def shares(self, batch: Batch) -> int:
        """How many batches' parts this one takes: more than one where its examples are larger than those before."""
        taken = raw_bytes(batch)
        if batch.examples:
            self._example_bytes, self._known = max(self._example_bytes, taken / batch.examples), True
        return max(1, -(-taken // self.share_bytes))
