"""The beginning of an epoch, on one node for all: takes the model over and makes ready what the nodes then open.

In: a job, and the epoch that the same driver had before. Out: a `Begun`, small enough to be told to every node.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from daskps.cluster.commit import ModelDirectory
from daskps.config import Job
from daskps.errors import ConfigError, TrainingError
from daskps.ssd.partitions import make_table
from daskps.ssd.placement import Placement


@dataclass(frozen=True, slots=True)
class Begun:
    """An epoch that all nodes of a run open."""

    epoch: int
    index: int  # of its entry in the log
    snapshot: str | None  # to go on from
    base: str | None  # of another model, that this new one starts from; its rows are in place


def begin(job: Job, run: str, previous: int = 0) -> Begun:
    """Begin an epoch of the job's model; `previous` is the one that this run had before, or 0.

    To be called when no worker has the model open any more.
    """
    directory = ModelDirectory(os.fspath(job.out))
    newest = directory.state().epoch
    if previous and newest != previous:
        raise TrainingError(
            f"{directory.path} was taken over by another run (epoch {newest}) while this one was in epoch {previous}; "
            "nothing is lost: let the other one go on, or stop it and train again"
        )
    epoch = directory.begin_epoch(run)
    epoch.collect()
    snapshot, base = directory.snapshot(), None
    if snapshot is None:
        for table in job.tables:  # what a run left behind that never published is nobody's
            directory.files.remove_folder(f"{directory.path}/tables/{table}")
        if job.start_from is not None:
            base = _copy_rows(ModelDirectory(job.start_from), directory, job)
        else:
            for table in job.tables:
                make_table(f"{directory.path}/tables/{table}", placement_of(job))
    return Begun(epoch.number, epoch.index, snapshot.id if snapshot else None, base)


def placement_of(job: Job) -> Placement:
    """How the job's keys are spread over partitions; a model keeps it for good."""
    return Placement(job.cluster.partitions, "mixed" if job.cluster.partition_by == "hash" else "modulo")


def _copy_rows(base: ModelDirectory, directory: ModelDirectory, job: Job) -> str:
    """The rows of another model become this one's; the id of its last snapshot."""
    snapshot = base.snapshot()
    if snapshot is None:
        raise ConfigError(f"start_from: {base.path} holds no model; check the path")
    for table in job.tables:
        # Parameter files are never changed, so links will do where the file system has them.
        source, target = (f"{model.path}/tables/{table}" for model in (base, directory))
        if os.path.isdir(source):
            shutil.copytree(source, target, copy_function=_link_or_copy)
    return snapshot.id


def _link_or_copy(source: str, target: str) -> None:
    """Chunks never change and may be shared; manifests and the lock file may not."""
    try:
        if os.path.basename(source).startswith("c."):
            os.link(source, target)
            return
    except OSError:
        pass
    shutil.copyfile(source, target)
