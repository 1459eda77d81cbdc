"""The beginning of an incarnation: one entry in the commit log, and the checks that a job may go on with a model.

Input: a job; when a snapshot exists, also its settings, its position and the open training data. Output: an
`IncarnationStart` for all nodes. A snapshot records a few hundred bytes about the examples before its position. On
resume they are compared: if the data before the position has changed, examples would be skipped or trained twice, so it
is a DataError. More data may have been added after the position.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from daskps.build import StepReader, of_files
from daskps.config import Job, complete, recorded_job
from daskps.data.formats import DataSettings
from daskps.errors import ConfigError, DataError, StaleError, TrainingError
from daskps.node.tables import check_clearable
from daskps.ssd.table_store import make_table, partition_name
from daskps.storage.files import files_at
from daskps.storage.log import Entry
from daskps.storage.model_directory import Incarnation, ModelDirectory
from daskps.storage.partition import Placement
from daskps.version import NUMERICS


@dataclass(frozen=True, slots=True)
class IncarnationStart:
    """Ticket of an incarnation: all nodes of the run open the model with it."""

    incarnation: int  # its number, the fencing token
    index: int  # of its entry in the commit log
    snapshot: str | None  # to resume from
    base: str | None  # snapshot of the model in `start_from`, with which this new model begins
    model: str  # id of the model
    job: Job | None = None  # the job, with the model's settings where it names none itself; None: unchanged
    accept_changed_data: bool = False  # go on although the data before the position has changed
    trace: str = ""  # folder for the traces of the nodes; empty: no trace


def begin(job: Job, run: str, previous: int = 0, ours: bool = False, resume: bool = True) -> IncarnationStart:
    """Begin an incarnation of the job's model; `previous` is the run's incarnation before it, or 0.

    After this no worker can open the model in an older incarnation. Workers that have it open must close it before the
    nodes open it.

    Raise LockedError if a process outside this cluster writes to the model; `ours` says that a worker of this cluster
    does. A new incarnation would stop that process from publishing, so it would lose everything after its last
    snapshot, and this run could not take the locks anyway. Raise ConfigError if there is a model and `resume` is
    False. The check is made here, on a worker, because the client may see another file system.
    """
    directory = ModelDirectory(os.fspath(job.out))
    if not (resume or previous):
        check_empty(directory)
    job = taken_up(job, directory)
    if directory.snapshot() is None and job.cluster.idle_devices == "refuse" and (idle := job.idle_devices()):
        raise ConfigError(
            f"{idle}; or use fewer nodes or devices, or smaller blocks, or set cluster.idle_devices = 'accept'"
        )
    if not (previous or ours):
        check_unlocked(job)
    incarnation = take_over(directory, run, previous)
    snapshot, base = directory.resume_point(), None
    if snapshot is None and job.start_from is not None:
        found = ModelDirectory(job.start_from).snapshot()
        base = found.id if found is not None else None
    if snapshot is None:
        for table in job.tables:  # later each node fills its own partitions, under their locks
            path = f"{directory.path}/tables/{table}"
            for name in directory.files.list_folder(f"tables/{table}"):
                if name.startswith("partition-"):
                    check_clearable(f"{path}/{name}", incarnation.model)
            make_table(path, placement_of(job), anew=True)
    start = snapshot.id if snapshot else None
    return IncarnationStart(incarnation.number, incarnation.index, start, base, incarnation.model, job)


def check_empty(directory: ModelDirectory) -> None:
    """Raise ConfigError if there is a model: without `resume` it must not be changed."""
    last = directory.state().last
    if last is not None:
        raise ConfigError(
            f"{directory.path} holds a model (snapshot {last}): --resume (Python: resume=True) goes on with it, --out "
            "takes another place"
        )


def check_begun(directory: ModelDirectory, begun: IncarnationStart, run: str, rank: int) -> None:
    """Raise ConfigError unless this node sees the same directory as node 0; StaleError if a newer incarnation exists.

    The whole log entry is compared: its index and the incarnation's number may be equal in another directory.
    """
    entries, mine = directory.log.entries(), Entry("epoch", begun.incarnation, run, model=begun.model)
    found = entries[begun.index - 1] if begun.index <= len(entries) else None
    if found != mine:
        seen = f"here it ends at entry {len(entries)}"
        if found is not None:
            model = found.model or "without an id"
            seen = f"here that is of incarnation {found.epoch} of run {found.run}, model {model}"
        raise ConfigError(
            f"node {rank} sees another directory in {os.path.realpath(directory.path)} than node 0, which has begun "
            f"incarnation {begun.incarnation} of model {begun.model} as entry {begun.index} of its log ({seen}): give "
            "`out` as an absolute path on a file system that all workers share; nothing was changed here"
        )
    newest = max(entry.epoch for entry in entries if entry.kind == "epoch")
    if newest > begun.incarnation:
        over = f"incarnation {begun.incarnation} of run {run} is over"
        raise StaleError(f"{directory.path} is in incarnation {newest}; {over}")


def taken_up(job: Job, directory: ModelDirectory) -> Job:
    """Return the job, with the settings of the model that it resumes or starts from where it names none itself.

    Raise ConfigError if this daskps would compute other bits, or other keys, than the one that trained the model.
    """
    snapshot = directory.resume_point()
    if snapshot is not None:
        settings = snapshot.draft.settings
        if (numerics := settings.get("numerics", 1)) != NUMERICS:
            raise ConfigError(
                f"{directory.path} was trained with numerics {numerics} (snapshot {snapshot.id}), this daskps computes "
                f"with numerics {NUMERICS}: going on would mix the two, and no run could repeat it. Train a new model "
                f"that begins with its rows and network (start_from = {directory.path!r} and another `out`), or go on "
                "with the daskps that made it"
            )
        known = recorded_job(settings, f"the settings in snapshot {snapshot.id}")
        # The number cannot be taken from the model any more: the workers are already chosen.
        if known.merges_batches and "nodes" not in job.cluster.model_fields_set:
            raise ConfigError(
                f"{directory.path} was trained by {known.cluster.nodes} nodes with train.sync_every = "
                f"{known.train.sync_every}, so their number is part of the result: name it, cluster.nodes = "
                f"{known.cluster.nodes} (--nodes {known.cluster.nodes}) to go on as before"
            )
        return complete(job, known.result_fields())
    if job.start_from is None:
        return job
    base = ModelDirectory(job.start_from).snapshot()
    if base is None:
        raise ConfigError(f"start_from: {job.start_from} holds no model; check the path")
    known = recorded_job(base.draft.settings, f"the settings in snapshot {base.id} of {job.start_from}")
    if known.data.key_rule != job.data.key_rule:
        raise ConfigError(
            f"start_from: {job.start_from} has keys by rule {known.data.key_rule}, this job makes them by rule "
            f"{job.data.key_rule}: its rows would belong to other values. Set data.key_rule = {known.data.key_rule} to "
            "go on with its keys"
        )
    return complete(job, known.identity_fields())


def model_path(job: Job) -> str:
    """Return the path of the job's model in the form that nodes use."""
    return os.fspath(job.out).rstrip("/")


def check_unlocked(job: Job) -> None:
    """Raise LockedError if a process writes to a partition of the job's model."""
    for table in job.tables:
        for number in range(job.cluster.partitions):
            path = f"{model_path(job)}/tables/{table}/{partition_name(number)}"
            if os.path.isdir(path):
                files = files_at(path)
                try:
                    files.lock()
                finally:
                    files.close()


def take_over(directory: ModelDirectory, run: str, previous: int) -> Incarnation:
    """Begin the next incarnation; raise TrainingError if another run has begun one since `previous`."""
    state = directory.state()
    # A newer incarnation of this same run is fine: it may have begun just before its driver lost a worker.
    if previous and state.incarnation != previous and state.run != run:
        raise TrainingError(
            f"{directory.path} was taken over by another run (incarnation {state.incarnation}) while this one was in "
            f"incarnation {previous}; nothing is lost: let the other one go on, or stop it and train again"
        )
    incarnation = directory.begin_incarnation(run, state)
    incarnation.collect()
    return incarnation


def placement_of(job: Job) -> Placement:
    """Return how the job's keys are distributed over partitions; it never changes in the life of a model."""
    return Placement(job.cluster.partitions, "mixed" if job.cluster.partition_by == "hash" else "modulo")


# Settings of the data that decide how an example is read.
SETTINGS = ("format", "label", "weight", "token_weights", "unknown_slots", "bad_lines")
ACCEPTABLE = {*SETTINGS, "files", "contents"}  # --accept-changed-data allows these; others change the order of examples
REMEDY = (
    "Give the data and its settings as they were, or begin another model from this one (start_from); if the change is "
    "meant, go on with --accept-changed-data (Python: accept_changed_data=True), which is recorded in the model"
)


def order_before(job: Job, reader: StepReader, position: int) -> dict[str, Any]:
    """Return everything that decides which examples come before `position`, and their contents, for a snapshot."""
    files, synthetic = of_files(reader), job.data.synthetic
    rows, window = reader.examples // job.train.epochs, job.data.shuffle_window_rows
    before = min(position, rows)  # examples of one pass
    # Any example of a shuffled window may have been used: round up to whole windows.
    before = min(-(-before // window) * window, rows) if window else before
    return {
        "rows": rows,  # examples of one pass
        "shuffle_window_rows": window,
        "files": "" if files is None else files.index.files_before(min(position, rows)),
        "synthetic": None if synthetic is None else synthetic.model_dump(mode="json", exclude={"examples"}),
        "before": before,
        "contents": "" if files is None else files.data_before(before),
    }


def changed_settings(then: DataSettings, now: DataSettings, accept: bool) -> list[str]:
    """Return the changed settings with which past examples would have been read differently.

    Raise DataError if there are any and `accept` is False.
    """
    wrong = [name for name in SETTINGS if getattr(then, name) != getattr(now, name)]
    if wrong and not accept:
        values = ", ".join(f"data.{name} {getattr(then, name)!r} then, {getattr(now, name)!r} now" for name in wrong)
        raise DataError(f"the rows before the last snapshot were read in another way: {values}. {REMEDY}")
    return wrong


def check_order(job: Job, reader: StepReader, position: int, known: dict[str, Any], accept: bool = False) -> list[str]:
    """Return what has changed in the examples before `position` since `known` was recorded.

    Raise DataError if something has, unless the change is accepted and acceptable.
    """
    found, rows, window = order_before(job, reader, position), known["rows"], known["shuffle_window_rows"]
    files = of_files(reader)
    wrong = [name for name in ("files", "synthetic") if found[name] != known[name]]
    if files is not None and "contents" in known:  # older snapshots have no contents
        there = known["before"] <= found["rows"]
        if not there or files.data_before(known["before"]) != known["contents"]:
            wrong.append("contents")
    if found["shuffle_window_rows"] != window and position % rows:
        wrong.append("shuffle_window_rows")
    if found["rows"] != rows and position > (rows - rows % window if window else rows):
        wrong.append("rows")  # the old end of the pass, or the start of its last window, lies before `position`
    if wrong and (not accept or set(wrong) - ACCEPTABLE or position > reader.examples):
        words = {"files": "other names or numbers of rows of the files", "contents": "other contents of the data"}
        told = "; ".join(words.get(name, f"{name} {known[name]} then, {found[name]} now") for name in wrong)
        raise DataError(
            f"row {position}, where the snapshot ends, is not the row that it was: {told}. Rows would be trained on "
            f"twice or never, or be others than those that were. {REMEDY}"
        )
    return wrong
