"""A job: all settings of a run, composed of the settings that stand beside the parts, and checked before it starts.

Input: a TOML file, a dictionary, or keyword arguments. Output: a `Job`, or a `ConfigError` that lists every wrong
setting with its value, what is expected, and for an unknown name the nearest known one. Settings that affect the result
(`affects_result`) are distinguished from those that affect only speed; a resumed run may change the latter.
`daskps settings` prints all of them. The settings of steps, passes, nodes and timeouts are in this module, because the
parts that they configure import it. Those of the network are here because they contain the settings of an optimizer,
which are in `hbm`.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field, PositiveInt

from daskps.budget import BudgetSettings
from daskps.data.formats import DataSettings, foreign_settings, formats_with
from daskps.data.schema import SETTINGS_OF_KINDS, Slot
from daskps.errors import ConfigError
from daskps.hbm.optimizer import OptimizerSettings
from daskps.hbm.table import TableSettings
from daskps.mem.eviction import DEFAULT_POLICY, POLICIES
from daskps.nn.architecture import KINDS as NETWORKS
from daskps.nn.architecture import MAX_BLOCKS, NetworkKind, wrong_dimensions
from daskps.nn.optimizer import DENSE_OPTIMIZERS
from daskps.settings import RECORDED, LocalPath, NonNegative, Rate, Settings, explain, nearest

logger = logging.getLogger("daskps.config")

# pydantic's error for a default_factory that could not run because another field is invalid. It is not reported; the
# other error is.
FOLLOWING = "default_factory_not_called"


# Settings that affect the result; all others affect only speed. Snapshots record them (`Job.result_fields`), and
# `daskps settings` marks them. IDENTITY are those that rows and network depend on: a resumed run must have the same.
IDENTITY = (
    *("seed", "slots", "tables", "model"),
    *("data.hash_seed", "data.key_rule", "data.osrp", "data.dense_integers"),
    *("train.minibatch_examples", "train.block_examples", "train.sync_every"),
    *("cluster.partitions", "cluster.partition_by"),
)
# Settings that decide which examples are read, how, and where the run ends.
EXAMPLES_AND_END = (
    *("data.format", "data.label", "data.weight", "data.token_weights", "data.unknown_slots"),
    *("data.bad_lines", "data.bad_share", "data.shuffle_window_rows"),
    *("train.epochs", "train.early_stopping_patience", "train.best_metric"),
)
# Settings that affect the result only of some jobs: of which jobs, in words and as a function of the job.
SOMETIMES: dict[str, tuple[str, Callable[[Job], bool]]] = {
    "data.synthetic": ("with synthetic data", lambda job: job.data.synthetic is not None),
    "data.validation_rows": (
        "with early stopping",
        lambda job: job.train.early_stopping_patience > 0 and job.data.synthetic is not None,
    ),
    "train.batch_examples": (
        "with early stopping between passes, or sync_every above 1",
        lambda job: job.batches_affect_result,
    ),
    "train.validate_every_batches": (
        "with early stopping between passes, or sync_every above 1",
        lambda job: job.batches_affect_result,
    ),
    "cluster.nodes": ("with sync_every above 1", lambda job: job.merges_batches),
}
# Settings that affect the result by the content of the files that they name. Files may move, so snapshots do not
# compare the names.
FILES = {
    "data.paths": "by the examples in the files",
    "data.validation_paths": "with early stopping, by the examples in the files",
    "start_from": "by the rows and the network of that model",
}


def affects_result(path: str) -> str:
    """Return ``yes``, ``no``, or in words when the setting ``path.to.key`` affects the result.

    A group of settings affects the result if one of its settings always does.
    """
    for known in (*IDENTITY, *EXAMPLES_AND_END):
        if f"{path}.".startswith(f"{known}.") or known.startswith(f"{path}."):
            return "yes"
    words = {known: words for known, (words, _) in SOMETIMES.items()} | FILES
    return next((text for known, text in words.items() if f"{path}.".startswith(f"{known}.")), "no")


def default_block(minibatch_examples: int) -> int:
    """Return the default of train.block_examples."""
    return min(max(minibatch_examples // 8, 64), 1024)


class ModelSettings(Settings):
    """Dense network over the pooled slots."""

    kind: NetworkKind = Field(
        default="dnn", description=" ".join(f"{name}: {record.meaning}." for name, record in NETWORKS.items())
    )
    hidden: tuple[PositiveInt, ...] = Field(
        default=(128, 64),
        description=", ".join(name for name, record in NETWORKS.items() if record.has_hidden)
        + ": sizes of the hidden layers.",
    )
    optimizer: OptimizerSettings = Field(
        default=OptimizerSettings(kind="adagrad", learning_rate=0.05), description="Optimizer of the network."
    )

    @property
    def layers(self) -> tuple[int, ...]:
        """Sizes of the hidden layers; empty for kinds without hidden layers."""
        return self.hidden if NETWORKS[self.kind].has_hidden else ()

    @pydantic.model_validator(mode="after")
    def _dense_optimizer(self) -> ModelSettings:
        if self.optimizer.kind not in DENSE_OPTIMIZERS:
            *most, last = DENSE_OPTIMIZERS
            raise ValueError(f"the dense network learns with {', '.join(most)} or {last}, not {self.optimizer.kind}")
        return self


class TrainSettings(Settings):
    """Settings of the run: steps, passes, batches, validations, snapshots."""

    minibatch_examples: int = Field(
        default=4096, ge=1, le=2**20, description="Examples of one step, over all nodes and devices."
    )
    epochs: PositiveInt = Field(
        default=1,
        description="Passes over the data; a step may have the end of one pass and the beginning of the next.",
    )
    early_stopping_patience: int = Field(
        default=0,
        ge=0,
        description="Number of validations without improvement after which the run stops; 0: it never stops early. "
        "Above 0, the state with the best validation is kept as a snapshot and is the model at the end of the run, "
        "also of a run that reaches the end of the data.",
    )
    best_metric: Literal["log_loss", "normalised_entropy", "auc"] = Field(
        default="log_loss", description="Metric of the validation data that early stopping compares."
    )
    block_examples: PositiveInt = Field(
        default_factory=lambda known: default_block(known.get("minibatch_examples", 4096)),
        description="Examples of a block: one core or device computes the dense layers of a whole block. By default an "
        "eighth of minibatch_examples, at least 64 and at most 1024.",
    )
    validate_every_batches: int = Field(
        default=0, ge=0, description="Batches between validations; 0: validate only after each pass."
    )
    batch_examples: PositiveInt | None = Field(
        default=None, description="Examples of one batch; None: chosen from measured times and budgets."
    )
    depth: int = Field(default=3, ge=1, le=8, description="Batches in flight.")
    snapshot_every_minutes: NonNegative = Field(
        default=5.0,
        description="Minutes between snapshots; at least 19 times as long as the last one took. 0: none by time. Every "
        "run ends with a snapshot.",
    )
    snapshot_every_batches: int = Field(
        default=0, ge=0, description="Batches from one snapshot to the next. Above 0, minutes do not count."
    )
    keep_snapshots: PositiveInt = Field(default=2, description="Number of newest snapshots that are kept.")
    sync_every: PositiveInt = Field(
        default=1,
        description="Steps between merges of the nodes' replicas; above 1, nodes and batches affect the result.",
    )

    @pydantic.model_validator(mode="after")
    def _few_blocks(self) -> TrainSettings:
        if (least := -(-self.minibatch_examples // MAX_BLOCKS)) > self.block_examples:
            raise ValueError(
                f"a step of {self.minibatch_examples} examples in blocks of {self.block_examples} has more than "
                f"{MAX_BLOCKS} of them, whose sums could overflow: set train.block_examples to at least {least}"
            )
        return self


class ClusterSettings(Settings):
    """Nodes, devices, partitions and timeouts."""

    nodes: PositiveInt = Field(
        default=1,
        description="Nodes of the run. Above 1, each opens a port on its Dask worker's interface during the run.",
    )
    devices: PositiveInt = Field(default=1, description="Devices per node; CPU stand-ins where there is no GPU.")
    backend: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Kind of the devices; auto: GPUs where there are any."
    )
    cores: PositiveInt | None = Field(
        default=None, description="Compute threads per node; None: the cores that this process may use."
    )
    partitions: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Partitions (folders) per table; at least one per node. Fixed when a model is made.",
    )
    partition_by: Literal["hash", "modulo"] = Field(
        default="hash", description="How a key's partition is found: by a hash of the key, or by its remainder."
    )
    eviction: str = Field(
        default=DEFAULT_POLICY,
        json_schema_extra={"enum": list(POLICIES)},
        description=f"Which rows leave a node's cache first: {', '.join(POLICIES)}; never changes the result.",
    )
    wait_seconds: Rate = Field(
        default=300.0, description="Longest wait for a peer, or for a lock that another process holds."
    )
    protocol: Literal["auto", "tcp", "tls", "ucx"] = Field(
        default="auto", description="Protocol between nodes; auto: that of the workers. ucx is not tested."
    )
    restarts: int = Field(
        default=3, ge=0, description="How often a run goes back to a snapshot; each new snapshot resets the count."
    )
    idle_devices: Literal["refuse", "accept"] = Field(
        default="refuse", description="What happens to a new model if some devices would never get an example."
    )
    check_replicas: bool = Field(
        default=False, description="All holders of a row send its hash for the owner to compare."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_lru_share(cls, values: Any) -> Any:
        """Accept `lru_share` of older jobs, which has no meaning any more."""
        if isinstance(values, dict) and "lru_share" in values:
            logger.warning("cluster.lru_share has no effect any more; cluster.eviction chooses the eviction policy")
            values = {name: value for name, value in values.items() if name != "lru_share"}
        return values

    @pydantic.field_validator("eviction")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"no policy {value!r}; there are {', '.join(POLICIES)}")
        return value


class Job(Settings):
    """All settings of a run."""

    data: DataSettings = Field(description="Source of examples.")
    out: LocalPath = Field(default="runs/model", description="Directory of the model: a path, not a URL.")
    start_from: LocalPath | None = Field(
        default=None,
        description="Directory of another model: the new model begins with its rows and network, at example 0 of the "
        "data.",
    )
    name: str = Field(default="model", description="Name of the model in reports.")
    seed: int = Field(default=0, description="Seed of initial rows, of the initial network and of the shuffling.")
    slots: tuple[Slot, ...] = Field(
        default=(), description="Features to learn from; empty: the slots of the format itself (criteo, synthetic)."
    )
    tables: dict[str, TableSettings] = Field(
        default_factory=lambda: {"main": TableSettings()},
        description="Tables by name; the name is that of the table's folder.",
    )
    model: ModelSettings = Field(default=ModelSettings(), description="Dense network over the pooled slots.")
    train: TrainSettings = Field(default=TrainSettings(), description="Steps, passes, batches, validations, snapshots.")
    budget: BudgetSettings = Field(default=BudgetSettings(), description="Upper bounds of what a node uses.")
    cluster: ClusterSettings = Field(default=ClusterSettings(), description="Nodes, devices, partitions and timeouts.")

    @pydantic.model_validator(mode="after")
    def _holds_together(self) -> Job:
        names = [slot.name for slot in self.slots]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"slots named more than once: {', '.join(twice)}")
        if wrong := sorted(name for name in self.tables if not re.fullmatch(r"[\w-][\w.-]*", name)):
            raise ValueError(f"a table's name is that of its folder: letters, digits, '_', '-', '.'; got {wrong}")
        for slot in self.slots:
            if slot.kind != "dense" and slot.table not in self.tables:
                raise ValueError(f"slot {slot.name!r} is in table {slot.table!r}; {nearest(slot.table, self.tables)}")
        self._check_slot_settings()
        if problem := wrong_dimensions(self.model.kind, [table.dimension for table in self.tables.values()]):
            raise ValueError(problem)
        if self.merges_batches and self.train.batch_examples is None:
            raise ValueError(
                f"train.sync_every is {self.train.sync_every}: nodes then merge at every batch end too, so the size of "
                "a batch decides the result; set train.batch_examples"
            )
        train = self.train
        if train.early_stopping_patience and train.validate_every_batches and train.batch_examples is None:
            raise ValueError(
                f"train.early_stopping_patience is {train.early_stopping_patience}: a run stops at a validation, so "
                "the places of validations affect the result; set train.batch_examples, or validate only after each "
                "pass (train.validate_every_batches = 0)"
            )
        if train.early_stopping_patience and not (self.data.validation_paths or self.data.validation_rows):
            raise ValueError(
                f"train.early_stopping_patience is {train.early_stopping_patience}, but there is no validation data to "
                "stop by: name data.validation_paths (synthetic data: data.validation_rows)"
            )
        if self.cluster.nodes > self.cluster.partitions:
            raise ValueError(
                f"{self.cluster.nodes} nodes need at least as many partitions, but cluster.partitions is "
                f"{self.cluster.partitions}; it is fixed when a model is made"
            )
        return self

    def _check_slot_settings(self) -> None:
        """Raise ValueError if a slot has a setting that the data's format does not use."""
        for slot in self.slots:
            for name in sorted(foreign_settings(self.data.format).intersection(slot.changed)):
                raise ValueError(
                    f"slot {slot.name!r}: {name} is not a setting of {self.data.format} data, only of "
                    f"{', '.join(formats_with(name))}"
                )
        if self.data.dense_integers and self.slots:
            raise ValueError(
                "data.dense_integers is for jobs without slots: give the slots of integers that should be dense "
                "kind = 'dense' and transform = 'log'"
            )

    def idle_devices(self) -> str:
        """Return a message if some devices would never get an example, with a remedy; empty if all would."""
        train, devices = self.train, self.cluster.nodes * self.cluster.devices
        block = train.block_examples
        blocks = -(-train.minibatch_examples // block)
        if devices <= blocks:
            return ""
        wanted = devices * block
        if block == default_block(train.minibatch_examples):  # the default grows with the step
            wanted = next(size for size in (64 * devices, 1024 * devices) if -(-size // default_block(size)) >= devices)
        return (
            f"{self.cluster.nodes} nodes x {self.cluster.devices} devices share steps of {train.minibatch_examples:,} "
            f"examples in {blocks} blocks of {block} (train.block_examples), and a block is never cut: "
            f"{devices - blocks} of {devices} devices would never have an example. Mini-batches of {wanted:,} examples "
            f"(train.minibatch_examples) would fill all"
        )

    def with_whole_paths(self) -> Job:
        """Return the job with absolute paths: a worker has another working directory."""
        data = self.data
        paths = {name: tuple(map(_whole_path, getattr(data, name))) for name in ("paths", "validation_paths")}
        known = {name: value for name, value in paths.items() if value}
        changes: dict[str, Any] = {"out": _whole_path(self.out), "data": data.model_copy(update=known)}
        if self.start_from is not None:
            changes["start_from"] = _whole_path(self.start_from)
        return self.model_copy(update=changes)

    @property
    def merges_batches(self) -> bool:
        """True if nodes step alone and merge, also at the end of each batch: batches then affect the result."""
        return self.cluster.nodes > 1 and self.train.sync_every > 1

    @property
    def batches_affect_result(self) -> bool:
        """True if the ends of batches decide where nodes merge, or where a run may stop early."""
        return self.merges_batches or bool(self.train.early_stopping_patience and self.train.validate_every_batches)

    def identity_fields(self) -> dict[str, Any]:
        """Return the settings that rows and network depend on, as JSON values: a resumed run must have the same."""
        return self._fields(IDENTITY)

    def result_fields(self) -> dict[str, Any]:
        """Return all settings that affect the result, as JSON values: model, data, and end of the run."""
        sometimes = (path for path, (_, affects) in SOMETIMES.items() if affects(self))
        return self._fields((*IDENTITY, *EXAMPLES_AND_END, *sometimes))

    def _fields(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return the settings at ``name`` or ``group.name``, as JSON values."""
        plain = self.model_dump(mode="json")
        fields: dict[str, Any] = {}
        for path in paths:
            group, _, name = path.partition(".")
            if name:
                fields.setdefault(group, {})[name] = plain[group][name]
            else:
                fields[group] = plain[group]
        return fields


# Settings that older snapshots lack, with the values that the code had then.
FORMER = {"data": {"key_rule": 1}}


def recorded_job(settings: Mapping[str, Any], source: str) -> Job:
    """Return the job that a snapshot records in its `settings`."""
    return make_job(_fill(settings["job"], FORMER), source, RECORDED)


def complete(job: Job, known: Mapping[str, Any]) -> Job:
    """Return `job` with every setting of `known` that it does not name itself: defaults may have changed since.

    `known` may be of a model that was trained on another format of data: settings that the job's format does not have
    are left out.
    """
    foreign = foreign_settings(job.data.format) | ({"dense_integers"} if job.slots else set())
    known = {
        **known,
        "data": {name: value for name, value in known["data"].items() if name not in foreign},
        "slots": [{name: value for name, value in slot.items() if name not in foreign} for slot in known["slots"]],
    }
    if known["data"].get("format", job.data.format) != job.data.format:  # rejected later, with its own message
        known["data"] = {}
    return make_job(
        _fill(job.model_dump(mode="json", exclude_unset=True), known),
        "the job, with the settings of its model where it names none,",
    )


def differences(job: Job, other: Job) -> dict[str, Any]:
    """Return the settings of `other` that differ from those of `job`, by ``path.to.key``."""
    before, after = _flat(job.model_dump(mode="json")), _flat(other.model_dump(mode="json"))
    return {path: value for path, value in after.items() if path not in before or before[path] != value}


def _flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested settings by ``path.to.key``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return flat


def _fill(named: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return `named`, with the settings that only `known` has.

    If `named` has tables or slots, only these are filled in; none are added.
    """
    filled = dict(named)
    for name, value in known.items():
        if name not in named:
            filled[name] = value
            continue
        mine = named[name]
        if name == "tables":
            filled[name] = {table: _fill(item, value.get(table, {})) for table, item in mine.items()}
        elif name == "slots" and isinstance(mine, list):
            by_name = {slot["name"]: slot for slot in value}
            filled[name] = [_fill(slot, _of_kind(slot, by_name.get(slot["name"], {}))) for slot in mine]
        elif isinstance(mine, Mapping) and isinstance(value, Mapping) and _same_kind(mine, value):
            filled[name] = _fill(mine, value)
    return filled


def _of_kind(slot: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the slot `known` that the job's slot, which may be of another kind, has too."""
    kind = slot.get("kind", known.get("kind"))
    return {name: value for name, value in known.items() if kind in SETTINGS_OF_KINDS.get(name, (kind,))}


def _same_kind(named: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return True unless the two name different kinds (of an optimizer, say), which have different settings."""
    return "kind" not in named or named["kind"] == known.get("kind")


def _whole_path(path: str) -> str:
    """Return the absolute path; URLs, including chained ones (``simplecache::s3://``), stay unchanged."""
    return path if "://" in path or "::" in path else os.path.abspath(path)


def make_job(settings: dict[str, Any], source: str = "job", context: str | None = None) -> Job:
    """Return the job of checked `settings`; raise a ConfigError that lists all mistakes."""
    try:
        return Job.model_validate(settings, context=context)
    except pydantic.ValidationError as error:
        lines = "\n".join(f"  {explain(item, Job)}" for item in error.errors() if item["type"] != FOLLOWING)
        raise ConfigError(f"{source} cannot run as it is:\n{lines}") from None


def _value(text: str) -> Any:
    """Return the value of a ``--set`` assignment: parsed as TOML if possible, otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def override(settings: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return `settings` with every ``path.to.key=value`` applied; the input is not changed."""
    result: dict[str, Any] = {**settings}
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"cannot read {assignment!r}; write path.to.key=value, for example train.epochs=2")
        *parents, last = path.strip().split(".")
        place = result
        for parent in parents:
            inside = place.get(parent, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"cannot set {path!r}: {parent!r} is {inside!r}, not a group of settings")
            place[parent] = {**inside}
            place = place[parent]
        place[last] = _value(text.strip())
    return result


def read_job(path: str | os.PathLike[str], assignments: Iterable[str] = ()) -> Job:
    """Read the job of a TOML file, and apply ``path.to.key=value`` assignments."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the job file {os.fspath(path)!r}: {error.strerror}") from None
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{os.fspath(path)} is not valid TOML: {error}") from None
    return make_job(override(settings, assignments), os.fspath(path))
