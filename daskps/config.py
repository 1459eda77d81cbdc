"""Job settings: one tree of frozen models, checked once, before anything starts.

In: a TOML file, a dictionary, or keyword arguments. Out: a `Job`, or a `ConfigError` that names every wrong key, what
came, what is wanted, and for an unknown key the nearest known one. Settings that decide the result
(`Job.result_fields`) are kept apart from those that decide only the speed, so that a resumed run may change the latter.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from daskps.errors import ConfigError
from daskps.explain import explain, nearest

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", start=1)}


def parse_bytes(value: object) -> object:
    """``"1.5 GiB"`` to 1610612736; numbers pass."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", value.upper())
    if match is None:
        raise ValueError(
            f"cannot read {value!r} as a number of bytes; write for example 500_000_000, '500MB' or '2GiB'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
FOLLOWING = "default_factory_not_called"  # a default that needs other settings, which are wrong themselves
NonNegative = Annotated[float, Field(ge=0)]
MOST_BLOCKS = 4096  # of a step, as daskps.model.architecture says why


class Settings(BaseModel):
    """What all parts of a job share: frozen, and no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Optimizer(Settings):
    """How a table's rows or the dense network learn. Fields that a kind does not use are refused, not ignored."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"] = "adagrad"
    learning_rate: Rate = 0.05
    l2: NonNegative = 0.0
    clip_norm: NonNegative = 0.0  # largest norm of a row's gradient after the sum; 0 is none
    epsilon: NonNegative = 1e-8  # adagrad, adam
    initial_accumulator: NonNegative = 0.0  # adagrad, ftrl
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # adam
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # adam
    l1: NonNegative = 0.0  # ftrl
    beta: NonNegative = 1.0  # ftrl

    @property
    def known_fields(self) -> set[str]:
        """The fields that the kind uses."""
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

    @pydantic.model_serializer(mode="wrap")
    def _only_those(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written can be read again: the settings in a snapshot make the same job."""
        known = self.known_fields
        return {name: value for name, value in handler(self).items() if name in known}


class Initialiser(Settings):
    """Initial embeddings, a function of (seed, table, key) alone."""

    kind: Literal["constant", "uniform", "normal"] = "uniform"
    scale: float = 0.01  # the constant, the half-width of the interval, or the standard deviation


class Table(Settings):
    """Slots that share dimension, optimizer and initialiser."""

    dimension: Annotated[int, Field(ge=1, le=256)] = 8
    pooling: Literal["sum", "mean", "sqrtn"] = "sum"
    optimizer: Optimizer = Optimizer()
    initialiser: Initialiser = Initialiser()


class Slot(Settings):
    """One feature field. Without `column` the slot's name is its column."""

    name: str
    column: str | None = None
    kind: Literal["categorical", "integer", "dense", "multi"] = "categorical"
    raw: bool = False  # integers are keys as they are, not hashed with their slot
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
    drift_rows: Annotated[int, Field(ge=0)] = 0  # rows in which every weight turns to another and back
    seed: int = 0


class Hashing(Settings):
    """OP+OSRP: every example's keys become at most `bins` of 2 * `bins` binary features; see daskps.data.osrp."""

    bins: Annotated[int, Field(ge=1, le=2**63)]
    per_slot: bool = False  # each slot to features of its own; else all slots together become one
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0


class Data(Settings):
    """Where examples come from. A position in them is one global row number.

    csv is delimited text with a header; multislot is text of ``label slot:key[:weight] ...`` lines; frame is a Dask
    DataFrame that is handed to `train`; its validation files are Parquet. Settings that a format does not use are
    refused, not ignored.
    """

    format: Literal["criteo", "csv", "parquet", "libsvm", "libffm", "multislot", "frame", "synthetic"]
    paths: tuple[str, ...] = ()  # files, globs, directories, fsspec URLs; read in this order, within a glob by name
    validation_paths: tuple[str, ...] = ()
    validation_rows: Annotated[int, Field(ge=0)] = 0  # synthetic: so many rows after the training ones
    synthetic: SyntheticData | None = None
    label: Annotated[str, Field(min_length=1)] = "label"
    weight: str | None = None  # column of example weights
    hash_seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    osrp: Hashing | None = None  # hash the keys once more, to fewer
    bad_lines: Literal["strict", "lenient"] = "strict"
    bad_share: Annotated[float, Field(ge=0, le=1)] = 0.01  # lenient: more than this share is an error
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
    """The dense network over the pooled slots."""

    kind: Literal["lr", "fm", "dnn", "deepfm"] = "dnn"
    hidden: tuple[PositiveInt, ...] = (128, 64)  # dnn, deepfm
    optimizer: Optimizer = Optimizer(kind="adagrad", learning_rate=0.05)

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden layers that the kind really has."""
        return self.hidden if self.kind in {"dnn", "deepfm"} else ()

    @pydantic.model_validator(mode="after")
    def _dense_optimizer(self) -> Model:
        if self.optimizer.kind not in {"sgd", "adagrad", "adam"}:
            raise ValueError(f"the dense network learns with sgd, adagrad or adam, not {self.optimizer.kind}")
        return self


class Train(Settings):
    """The run. Up to `block_examples` these decide the result; the others only the speed, unless it stops early: then
    `validate_every_batches` and `batch_examples` say where it may."""

    minibatch_examples: Annotated[int, Field(ge=1, le=2**20)] = 4096  # of one step, over all nodes and devices
    epochs: PositiveInt = 1
    early_stopping_patience: Annotated[int, Field(ge=0)] = 0  # validations without improvement; 0 never stops early
    block_examples: PositiveInt = Field(  # dense layers run in blocks of so many examples, one block a core
        default_factory=lambda known: min(max(known.get("minibatch_examples", 4096) // 8, 64), 1024)
    )
    validate_every_batches: Annotated[int, Field(ge=0)] = 0  # 0: only after each epoch
    batch_examples: PositiveInt | None = None  # None: chosen from rates and budgets
    depth: Annotated[int, Field(ge=1, le=8)] = 3  # batches in flight
    snapshot_every_batches: Annotated[int, Field(ge=0)] = 0  # 0: only at the end
    keep_snapshots: PositiveInt = 2
    sync_every: PositiveInt = 1  # steps between merges of nodes; above 1, nodes and batches decide the result too

    @pydantic.model_validator(mode="after")
    def _few_blocks(self) -> Train:
        if (least := -(-self.minibatch_examples // MOST_BLOCKS)) > self.block_examples:
            raise ValueError(
                f"a step of {self.minibatch_examples} examples in blocks of {self.block_examples} has more than "
                f"{MOST_BLOCKS} of them, whose sums could overflow: set train.block_examples to at least {least}"
            )
        return self


class Budget(Settings):
    """Bounds on what is really used, per node. What cannot fit is refused before the first batch."""

    memory_bytes: Bytes = 2 * 1024**3
    hbm_bytes: Bytes = 2 * 1024**3
    disk_bytes: Bytes | None = None  # dealt over tables as memory is: by the bytes of an example; None: what is free


class Cluster(Settings):
    """Nodes, devices and waits."""

    nodes: PositiveInt = 1  # above 1 each opens a port for the others, on its Dask worker's interface, while it runs
    devices: PositiveInt = 1  # per node; CPU stand-ins where there is no GPU
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    cores: PositiveInt | None = None  # threads that compute, per node; None: the cores this process may use
    partitions: Annotated[int, Field(ge=1, le=4096)] = 8  # directories of rows per table; at least one a node
    partition_by: Literal["hash", "modulo"] = "hash"
    lru_share: Annotated[float, Field(gt=0, lt=1)] = 0.5  # of the cache; the rest is the LFU list
    wait_seconds: Rate = 300.0  # longest wait for a peer
    protocol: Literal["auto", "tcp", "tls", "ucx"] = "auto"  # between nodes; auto: the workers'. ucx: never tried yet
    restarts: Annotated[int, Field(ge=0)] = 3  # times a run goes back to its last snapshot by itself
    check_replicas: bool = False  # all holders of a row send its hash for the owner to compare


class Job(Settings):
    """Everything that a run needs to know."""

    data: Data
    out: str = "runs/model"
    start_from: str | None = (
        None  # a model's directory: a new model begins with its rows and network, at row 0 of the data
    )
    name: str = "model"
    seed: int = 0
    slots: tuple[Slot, ...] = ()  # empty: the format's own (criteo, synthetic)
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

    @property
    def merges_batches(self) -> bool:
        """Nodes step alone and merge, at the end of each batch too: so where batches end is part of the result."""
        return self.cluster.nodes > 1 and self.train.sync_every > 1

    def result_fields(self) -> dict[str, Any]:
        """The settings that decide the trained model, as plain JSON values."""
        plain = self.model_dump(mode="json")
        train = {name: plain["train"][name] for name in ("minibatch_examples", "block_examples", "sync_every")}
        cluster = {name: plain["cluster"][name] for name in ("partitions", "partition_by")}
        data = {name: plain["data"][name] for name in ("hash_seed", "osrp")}  # which key a feature has
        return {name: plain[name] for name in ("seed", "slots", "tables", "model")} | {
            "data": data,
            "train": train,
            "cluster": cluster,
        }


def make_job(settings: dict[str, Any], source: str = "job") -> Job:
    """Check `settings` and make the job, or raise a ConfigError that lists everything wrong."""
    try:
        return Job.model_validate(settings)
    except pydantic.ValidationError as error:
        lines = "\n".join(f"  {explain(item, Job)}" for item in error.errors() if item["type"] != FOLLOWING)
        raise ConfigError(f"{source} cannot run as it is:\n{lines}") from None


def _value(text: str) -> Any:
    """A ``--set`` value: TOML where it parses, else a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def override(settings: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """`settings` with every ``path.to.key=value`` set; the input is not changed."""
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
    """The job of a TOML file, with ``path.to.key=value`` assignments on top."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the job file {os.fspath(path)!r}: {error.strerror}") from None
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{os.fspath(path)} is not valid TOML: {error}") from None
    return make_job(override(settings, assignments), os.fspath(path))
