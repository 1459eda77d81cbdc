"""The beginning of an epoch, on one node for all: takes the model over, so that the nodes can open it.

In: a job, and the epoch that the same driver had before. Out: a `Begun`, small enough to be told to every node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from daskps.cluster.commit import Epoch, ModelDirectory
from daskps.config import Job
from daskps.errors import ConfigError, TrainingError
from daskps.ssd.partitions import make_table, partition_name
from daskps.ssd.placement import Placement
from daskps.ssd.where import files_at


@dataclass(frozen=True, slots=True)
class Begun:
    """An epoch that all nodes of a run open."""

    epoch: int
    index: int  # of its entry in the log
    snapshot: str | None  # to go on from
    base: str | None  # of another model, that this new one starts from


def begin(job: Job, run: str, previous: int = 0, ours: bool = False) -> Begun:
    """Begin an epoch of the job's model; `previous` is the one that this run had before, or 0.

    From here on no worker can open it in an older epoch; those that have it open are to close it before nodes open it.
    LockedError if somebody writes to it and is not one of `ours`: whoever does could publish no more, and lose all that
    came after its last snapshot, while the new epoch would fail at the locks all the same.
    """
    directory = ModelDirectory(os.fspath(job.out))
    if not (previous or ours):
        check_unlocked(job)
    epoch = take_over(directory, run, previous)
    snapshot, base = directory.snapshot(), None
    if snapshot is None and job.start_from is not None:
        found = ModelDirectory(job.start_from).snapshot()
        if found is None:
            raise ConfigError(f"start_from: {job.start_from} holds no model; check the path")
        base = found.id
    if snapshot is None:
        for table in job.tables:  # each node then fills its partitions, under their locks
            make_table(f"{directory.path}/tables/{table}", placement_of(job), anew=True)
    return Begun(epoch.number, epoch.index, snapshot.id if snapshot else None, base)


def model_path(job: Job) -> str:
    """Of the job's model, as nodes know it."""
    return os.fspath(job.out).rstrip("/")


def check_unlocked(job: Job) -> None:
    """LockedError if a process writes to a partition of the job's model."""
    for table in job.tables:
        for number in range(job.cluster.partitions):
            path = f"{model_path(job)}/tables/{table}/{partition_name(number)}"
            if os.path.isdir(path):
                files = files_at(path)
                try:
                    files.lock()
                finally:
                    files.close()


def take_over(directory: ModelDirectory, run: str, previous: int) -> Epoch:
    """The next epoch, unless another run has begun one since `previous`."""
    state = directory.state()
    if previous and state.epoch != previous and state.run != run:  # of its own last one a run may not have been told
        raise TrainingError(
            f"{directory.path} was taken over by another run (epoch {state.epoch}) while this one was in epoch "
            f"{previous}; nothing is lost: let the other one go on, or stop it and train again"
        )
    epoch = directory.begin_epoch(run, state)
    epoch.collect()
    return epoch


def placement_of(job: Job) -> Placement:
    """How the job's keys are spread over partitions; a model keeps it for good."""
    return Placement(job.cluster.partitions, "mixed" if job.cluster.partition_by == "hash" else "modulo")
