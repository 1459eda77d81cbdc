"""Job settings: one tree of frozen models, checked once, before anything starts.

Input: a TOML file, a dictionary, or keyword arguments. Output: a `Job`, or a `ConfigError` that lists every wrong
setting with its value, what is expected, and for an unknown name the nearest known one. Settings that affect the result
(`Job.result_fields`) are distinguished from those that affect only speed; a resumed run may change the latter.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from daskps.errors import ConfigError
from daskps.settings import explain, is_url, nearest
from daskps.version import KEY_RULE

# Factors of byte units, decimal (KB) and binary (KiB).
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", start=1)}


def parse_bytes(value: object) -> object:
    """Return a text such as ``"1.5 GiB"`` as a number of bytes (1610612736); return other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", value.upper())
    if match is None:
        raise ValueError(
            f"cannot read {value!r} as a number of bytes; write for example 500_000_000, '500MB' or '2GiB'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def local_path(value: object) -> object:
    """Return a path unchanged, and a ``file://`` URL as its path; raise ValueError for every other URL.

    The log, the dense network and the rows of a model must be on one file system, with hard links and flock. With
    another URL the rows would be at the URL, and everything else in a local folder with that name.
    """
    if not isinstance(value, str) or not is_url(value):
        return value
    named = re.fullmatch(r"file:(?://(?:localhost)?)?(/(?!/).*)", value, re.IGNORECASE)
    if named is None:
        raise ValueError(
            "a model directory is a path of a file system, not a URL (file:///a/whole/path is taken as a path); "
            "give a local path, or one of a file system that all machines share"
        )
    return named[1]


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
LocalPath = Annotated[str, BeforeValidator(local_path)]
Rate = Annotated[float, Field(gt=0)]
# pydantic's error for a default_factory that could not run because another field is invalid. It is not reported; the
# other error is.
FOLLOWING = "default_factory_not_called"
NonNegative = Annotated[float, Field(ge=0)]
# Validation context for settings from a snapshot. Validators that are newer than some snapshots accept them unchecked:
# a trained model must stay readable.
RECORDED = "recorded"
MOST_BLOCKS = 4096  # largest number of blocks in a step; daskps.nn.architecture says why


def default_block(minibatch_examples: int) -> int:
    """Return the default of train.block_examples."""
    return min(max(minibatch_examples // 8, 64), 1024)


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def _float32(value: float) -> float:
    """Return the value rounded to float32, as kernels get it."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _finite_in_float32(value: float, info: pydantic.ValidationInfo) -> float:
    if info.context != RECORDED and not np.isfinite(_float32(value)):
        raise ValueError("must be a finite number, in float32 too")
    return value


def _above_0_in_float32(value: float, info: pydantic.ValidationInfo) -> float:
    if info.context != RECORDED and not _float32(value) > 0:
        raise ValueError("must be above 0, in float32 too")
    return value


def _below_1_in_float32(value: float, info: pydantic.ValidationInfo) -> float:
    if info.context != RECORDED and not 0 <= _float32(value) < 1:
        raise ValueError("must be at least 0 and below 1, in float32 too, which 0.99999998 and more are not")
    return value


Finite = Annotated[float, AfterValidator(_finite_in_float32)]
FiniteNonNegative = Annotated[Finite, Field(ge=0)]
LearningRate = Annotated[Finite, AfterValidator(_above_0_in_float32)]
Decay = Annotated[float, AfterValidator(_below_1_in_float32)]


class Optimizer(Settings):
    """Optimizer of a table's rows or of the dense network; daskps/nn/OPTIMIZERS.md has the formulas of all kinds.

    Gradients are means over a step's examples. They are clipped, then L2 is added; this is the same for rows and
    network. A field that the kind does not use is an error.
    """

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"] = "adagrad"
    learning_rate: LearningRate = 0.05
    l2: FiniteNonNegative = 0.0  # in the network for weights, not for biases
    clip_norm: FiniteNonNegative = 0.0  # largest norm of a row's gradient, or of the whole network's; 0: no clipping
    epsilon: FiniteNonNegative = 1e-8  # adagrad, adam; 0 only with an initial_accumulator
    initial_accumulator: FiniteNonNegative = 0.0  # adagrad, ftrl
    beta1: Decay = 0.9  # adam
    beta2: Decay = 0.999  # adam
    l1: FiniteNonNegative = 0.0  # ftrl
    beta: FiniteNonNegative = 1e-5  # ftrl; small because gradients are means; with single examples 1 is usual

    @property
    def known_fields(self) -> set[str]:
        """Names of the fields that the kind uses."""
        own: dict[str, set[str]] = {
            "sgd": set(),
            "adagrad": {"epsilon", "initial_accumulator"},
            "rowwise_adagrad": {"epsilon", "initial_accumulator"},
            "adam": {"epsilon", "beta1", "beta2"},
            "ftrl": {"initial_accumulator", "l1", "beta"},
        }
        return own[self.kind] | {"kind", "learning_rate", "l2", "clip_norm"}

    @pydantic.model_validator(mode="after")
    def _fields_of_the_kind(self) -> Optimizer:
        known = self.known_fields
        if wrong := sorted(self.model_fields_set - known):
            raise ValueError(f"{self.kind} has no setting {', '.join(wrong)}; it has {', '.join(sorted(known))}")
        return self

    @pydantic.model_validator(mode="after")
    def _divides_by_more_than_0(self, info: pydantic.ValidationInfo) -> Optimizer:
        if info.context == RECORDED:
            return self
        divisors: dict[str, tuple[str, ...]] = {
            "adagrad": ("epsilon", "initial_accumulator"),
            "rowwise_adagrad": ("epsilon", "initial_accumulator"),
            "adam": ("epsilon",),
            "ftrl": ("beta", "initial_accumulator", "l2"),
        }
        names = divisors.get(self.kind, ())
        if names and not any(_float32(getattr(self, name)) for name in names):
            raise ValueError(
                f"{names[0]} = {getattr(self, names[0])}: {self.kind} would divide 0 by 0 at the first gradient of 0; "
                f"set {' or '.join(names)} above 0"
            )
        return self

    @pydantic.model_serializer(mode="wrap")
    def _only_those(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return only the fields of the kind, so that settings in a snapshot can be read again as the same job."""
        known = self.known_fields
        return {name: value for name, value in handler(self).items() if name in known}


class Initialiser(Settings):
    """Initial embeddings; they depend only on (seed, table, key)."""

    kind: Literal["constant", "uniform", "normal"] = "uniform"
    scale: Finite = 0.01  # the constant, the half-width of the interval, or the standard deviation

    @pydantic.model_validator(mode="after")
    def _width(self) -> Initialiser:
        if self.kind != "constant" and self.scale < 0:
            raise ValueError(f"scale = {self.scale}: {self.kind} wants at least 0; only a constant may be negative")
        return self


class Table(Settings):
    """Table: slots that share dimension, optimizer and initialiser."""

    dimension: Annotated[int, Field(ge=1, le=256)] = 8
    pooling: Literal["sum", "mean", "sqrtn"] = (
        "sum"  # mean and sqrtn divide by the number of keys (its root), not by the sum of their weights
    )
    optimizer: Optimizer = Optimizer()
    initialiser: Initialiser = Initialiser()


class Slot(Settings):
    """Feature field. Without `column`, the slot's name is also its column."""

    name: str
    column: str | None = None
    kind: Literal["categorical", "integer", "dense", "multi"] = "categorical"
    raw: bool = False  # integers are used as keys directly, not hashed with their slot
    table: str = "main"


class SyntheticData(Settings):
    """Generated examples with a known best AUC; see daskps.data.synthetic."""

    examples: PositiveInt = 1_000_000
    slots: PositiveInt = 20
    keys_per_bag: PositiveInt = 1
    keys_per_slot: Annotated[int, Field(ge=1, le=2**64)] = 1_000_000
    zipf_exponent: NonNegative = 1.05
    dense_features: Annotated[int, Field(ge=0)] = 0
    weight_scale: NonNegative | None = None
    interaction_scale: NonNegative | None = None
    drift_rows: Annotated[int, Field(ge=0)] = 0  # period in examples: every weight changes to another one and back
    seed: int = 0


class Hashing(Settings):
    """OP+OSRP: every example's keys become at most `bins` of 2 * `bins` binary features; see daskps.data.osrp."""

    bins: Annotated[int, Field(ge=1, le=2**63)]
    per_slot: bool = False  # True: each slot is hashed to features of its own; False: all slots become one slot
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0


class Data(Settings):
    """Source of examples. A position in the data is one global example number.

    csv is delimited text with a header; multislot is text of ``label slot:key[:weight] ...`` lines; frame is a Dask
    DataFrame that is passed to `train`, with validation files in Parquet. A setting that the format does not use is an
    error.
    """

    format: Literal["criteo", "csv", "parquet", "libsvm", "libffm", "multislot", "frame", "synthetic"]
    # Files, globs, directories, fsspec URLs. They are read in this order, within a glob or directory by name; a file
    # that is named twice is read once. In a directory, names that begin with . or _ are ignored.
    paths: tuple[str, ...] = ()
    validation_paths: tuple[str, ...] = ()
    validation_rows: Annotated[int, Field(ge=0)] = 0  # synthetic: number of examples after the training examples
    synthetic: SyntheticData | None = None
    label: Annotated[str, Field(min_length=1)] = "label"
    weight: str | None = None  # column of example weights, in any unit: a step divides them by its largest weight
    hash_seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    key_rule: Annotated[int, Field(ge=1, le=KEY_RULE)] = (
        KEY_RULE  # how values become keys (daskps.data.schema); a model keeps its rule
    )
    osrp: Hashing | None = None  # hash the keys a second time, to fewer keys
    bad_lines: Literal["strict", "lenient"] = "strict"
    bad_share: Annotated[float, Field(ge=0, le=1)] = 0.01  # lenient: a larger fraction of bad examples is an error
    shuffle_window_rows: Annotated[int, Field(ge=0)] = 0  # 0 keeps the order

    @pydantic.field_validator("paths", "validation_paths", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str | os.PathLike) else value

    @pydantic.model_validator(mode="after")
    def _source_given(self) -> Data:
        if self.format == "synthetic" and self.synthetic is None:
            object.__setattr__(self, "synthetic", SyntheticData())
        generated = {"synthetic", "validation_rows"}
        unknown = {"synthetic": {"paths", "validation_paths", "weight", "shuffle_window_rows"}}
        unknown["frame"] = generated | {"paths"}
        if wrong := sorted(name for name in unknown.get(self.format, generated) if getattr(self, name)):
            raise ValueError(
                f"{self.format} data has no {', '.join(wrong)}; leave {'it' if len(wrong) == 1 else 'them'} out or "
                "choose another format (validation_rows are of synthetic data, validation_paths of all other)"
            )
        if self.format not in {"synthetic", "frame"} and not self.paths:
            raise ValueError(f"format {self.format!r} needs paths: files, globs, directories or URLs")
        return self


class Model(Settings):
    """Dense network over the pooled slots."""

    kind: Literal["lr", "fm", "dnn", "deepfm"] = "dnn"
    hidden: tuple[PositiveInt, ...] = (128, 64)  # dnn, deepfm
    optimizer: Optimizer = Optimizer(kind="adagrad", learning_rate=0.05)

    @property
    def layers(self) -> tuple[int, ...]:
        """Sizes of the hidden layers; empty for kinds without hidden layers."""
        return self.hidden if self.kind in {"dnn", "deepfm"} else ()

    @pydantic.model_validator(mode="after")
    def _dense_optimizer(self) -> Model:
        if self.optimizer.kind not in {"sgd", "adagrad", "adam"}:
            raise ValueError(f"the dense network learns with sgd, adagrad or adam, not {self.optimizer.kind}")
        return self


class Train(Settings):
    """Settings of the run. Those up to `block_examples` affect the result; the others affect only speed.

    There are two exceptions: with early stopping, `validate_every_batches` and `batch_examples` decide where the run
    may stop; with `sync_every` above 1, nodes and batches affect the result.
    """

    minibatch_examples: Annotated[int, Field(ge=1, le=2**20)] = 4096  # examples of one step, over all nodes and devices
    epochs: PositiveInt = 1  # passes over the data; a step may have the end of one pass and the beginning of the next
    # Stop after so many validations without improvement; 0: never stop early. Above 0, every new best validation is
    # kept as a snapshot, and the best one is the model at the end of the run, also if the run reaches the end of data.
    early_stopping_patience: Annotated[int, Field(ge=0)] = 0
    best_metric: Literal["log_loss", "normalised_entropy", "auc"] = "log_loss"  # of the validation data
    block_examples: PositiveInt = Field(  # dense layers are computed in blocks of so many examples, one block per core
        default_factory=lambda known: default_block(known.get("minibatch_examples", 4096))
    )
    validate_every_batches: Annotated[int, Field(ge=0)] = 0  # 0: only after each pass
    batch_examples: PositiveInt | None = None  # None: chosen from measured times and budgets
    depth: Annotated[int, Field(ge=1, le=8)] = 3  # batches in flight
    # Every run ends with a snapshot. Before that, one is made every so many minutes of the driver's clock, but not
    # sooner than 19 times as long as the last one took; 0: none. If snapshot_every_batches is above 0, only it counts.
    snapshot_every_minutes: NonNegative = 5.0
    snapshot_every_batches: Annotated[int, Field(ge=0)] = 0
    keep_snapshots: PositiveInt = 2
    sync_every: PositiveInt = 1  # steps between merges of the nodes' replicas; above 1, nodes and batches affect it

    @pydantic.model_validator(mode="after")
    def _few_blocks(self) -> Train:
        if (least := -(-self.minibatch_examples // MOST_BLOCKS)) > self.block_examples:
            raise ValueError(
                f"a step of {self.minibatch_examples} examples in blocks of {self.block_examples} has more than "
                f"{MOST_BLOCKS} of them, whose sums could overflow: set train.block_examples to at least {least}"
            )
        return self


class Budget(Settings):
    """Upper bounds of what a node uses.

    A job that cannot fit is an error at the start; a forecast warns if growing tables will not fit later.
    """

    memory_bytes: Bytes = 2 * 1024**3
    hbm_bytes: Bytes = 2 * 1024**3
    disk_bytes: Bytes | None = None  # divided over tables like memory: by row bytes per example; None: all free space


class Cluster(Settings):
    """Nodes, devices, partitions and timeouts."""

    nodes: PositiveInt = 1  # above 1, each node opens a port on its Dask worker's interface during the run
    devices: PositiveInt = 1  # per node; CPU stand-ins where there is no GPU
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    cores: PositiveInt | None = None  # compute threads per node; None: the cores that this process may use
    partitions: Annotated[int, Field(ge=1, le=4096)] = 8  # partitions (folders) per table; at least one per node
    partition_by: Literal["hash", "modulo"] = "hash"
    lru_share: Annotated[float, Field(gt=0, lt=1)] = 0.5  # LRU list's fraction of the cache; the rest is the LFU list
    wait_seconds: Rate = 300.0  # longest wait for a peer, or for a lock that another process holds
    protocol: Literal["auto", "tcp", "tls", "ucx"] = "auto"  # between nodes; auto: that of the workers. ucx: not tested
    restarts: Annotated[int, Field(ge=0)] = 3  # how often a run goes back to a snapshot; each new snapshot resets it
    idle_devices: Literal["refuse", "accept"] = "refuse"  # for a new model, if some devices would never get an example
    check_replicas: bool = False  # all holders of a row send its hash for the owner to compare


class Job(Settings):
    """All settings of a run."""

    data: Data
    out: LocalPath = "runs/model"  # directory of the model: a path, not a URL
    start_from: LocalPath | None = (
        None  # directory of another model: the new model begins with its rows and network, at example 0 of the data
    )
    name: str = "model"
    seed: int = 0
    slots: tuple[Slot, ...] = ()  # empty: the slots of the format itself (criteo, synthetic)
    tables: dict[str, Table] = Field(default_factory=lambda: {"main": Table()})
    model: Model = Model()
    train: Train = Train()
    budget: Budget = Budget()
    cluster: Cluster = Cluster()

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
        if self.model.kind == "lr" and any(table.dimension != 1 for table in self.tables.values()):
            raise ValueError("lr has one weight a key: set dimension = 1 in every table")
        if self.model.kind in {"fm", "deepfm"} and len({table.dimension for table in self.tables.values()}) > 1:
            raise ValueError(f"{self.model.kind} multiplies slots with each other: give all tables one dimension")
        if self.model.kind in {"fm", "deepfm"} and any(table.dimension < 2 for table in self.tables.values()):
            raise ValueError(f"{self.model.kind} has a linear weight and factors: dimension must be at least 2")
        if self.merges_batches and self.train.batch_examples is None:
            raise ValueError(
                f"train.sync_every is {self.train.sync_every}: nodes then merge at every batch end too, so the size of "
                "a batch decides the result; set train.batch_examples"
            )
        train = self.train
        if train.early_stopping_patience and train.validate_every_batches and train.batch_examples is None:
            raise ValueError(
                f"train.early_stopping_patience is {train.early_stopping_patience}: where validations come decides "
                "where the run stops; set train.batch_examples, or validate only after each epoch "
                "(train.validate_every_batches = 0)"
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
        plain = self.model_dump(mode="json")
        return {name: plain[name] for name in ("seed", "slots", "tables", "model")} | {
            "data": {name: plain["data"][name] for name in ("hash_seed", "key_rule", "osrp")},
            "train": {name: plain["train"][name] for name in ("minibatch_examples", "block_examples", "sync_every")},
            "cluster": {name: plain["cluster"][name] for name in ("partitions", "partition_by")},
        }

    def result_fields(self) -> dict[str, Any]:
        """Return all settings that affect the result, as JSON values: model, data, and end of the run."""
        plain, fields = self.model_dump(mode="json"), self.identity_fields()
        data = ["format", "label", "weight", "bad_lines", "bad_share", "shuffle_window_rows"]
        data += ["synthetic"] if self.data.format == "synthetic" else []
        train = ["epochs", "early_stopping_patience", "best_metric"]
        if self.train.early_stopping_patience and self.data.format == "synthetic":
            data.append("validation_rows")  # validations decide where the run stops
        if self.batches_affect_result:
            train += ["batch_examples", "validate_every_batches"]
        if self.merges_batches:
            fields["cluster"]["nodes"] = plain["cluster"]["nodes"]
        fields["data"] |= {name: plain["data"][name] for name in data}
        fields["train"] |= {name: plain["train"][name] for name in train}
        return fields


# Settings that older snapshots lack, with the values that the code had then.
FORMER = {"data": {"key_rule": 1}}


def recorded_job(settings: Mapping[str, Any], source: str) -> Job:
    """Return the job that a snapshot records in its `settings`."""
    return make_job(_fill(settings["job"], FORMER), source, RECORDED)


def complete(job: Job, known: Mapping[str, Any]) -> Job:
    """Return `job` with every setting of `known` that it does not name itself: defaults may have changed since."""
    if known["data"].get("format", job.data.format) != job.data.format:  # rejected later, with its own message
        known = {**known, "data": {}}
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
            filled[name] = [_fill(slot, by_name.get(slot["name"], {})) for slot in mine]
        elif isinstance(mine, Mapping) and isinstance(value, Mapping) and _same_kind(mine, value):
            filled[name] = _fill(mine, value)
    return filled


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
