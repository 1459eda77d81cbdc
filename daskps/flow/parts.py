"""From a job's settings to the parts that learn: tables with their layouts, optimizers, the network, initial rows.

In: a `Job` and its features. Out: the same parts for a node that trains and for a model that is only read.
"""

from __future__ import annotations

from collections.abc import Callable

from daskps.backend.device import Device
from daskps.backend.ops.initial import Initialiser
from daskps.backend.ops.optimizer import Optimizer, optimizer_fields
from daskps.cluster.node import initial_rows
from daskps.config import Job
from daskps.config import Optimizer as OptimizerSettings
from daskps.flow.inputs import Features
from daskps.hbm.table import TableSpec
from daskps.model.engine import Engine
from daskps.model.network import Network, build
from daskps.model.optimizer import DenseOptimizer
from daskps.types import Floats, Keys, RowLayout


def table_specs(job: Job, features: Features) -> list[TableSpec]:
    """The job's tables with their slots and row layouts, in the order of the job."""
    specs = []
    for number, (name, table) in enumerate(job.tables.items()):
        optimizer = row_optimizer(table.optimizer)
        layout = RowLayout(optimizer_fields(optimizer.kind, table.dimension))
        slots = features.slots_of(name)
        names = tuple(features.slots[slot] for slot in slots)
        specs.append(TableSpec(name, number, slots, table.dimension, table.pooling, optimizer, layout, names))
    return specs


def row_optimizer(settings: OptimizerSettings) -> Optimizer:
    """The optimizer of rows that settings describe."""
    return Optimizer(**settings.model_dump())


def dense_optimizer(settings: OptimizerSettings) -> DenseOptimizer:
    """The optimizer of the dense network that settings describe."""
    names = {"kind", "learning_rate", "l2", "epsilon", "initial_accumulator", "beta1", "beta2"}
    return DenseOptimizer(**settings.model_dump(include=names), clip_norm=settings.clip_norm or None)


def build_network(job: Job, specs: list[TableSpec], features: Features, engine: Engine) -> Network:
    """The dense network as it begins."""
    return build(
        job.model.kind,
        tables=[(len(spec.slots), spec.dim) for spec in specs],
        dense_features=features.dense,
        hidden=job.model.layers,
        seed=job.seed,
        engine=engine,
        block_examples=job.train.block_examples,
        slot_names=[spec.slot_names for spec in specs],
    )


def row_filler(job: Job, spec: TableSpec, device: Device) -> Callable[[Keys, Floats], None]:
    """What writes the rows that unknown keys begin with: a function of (seed, table, key) alone."""
    settings = job.tables[spec.name].initialiser
    scale = settings.scale
    embedding = {
        "constant": Initialiser("constant", scale),
        "uniform": Initialiser("uniform", -scale, scale),
        "normal": Initialiser("normal", 0.0, scale),
    }[settings.kind]
    fill: Callable[[Keys, Floats], None] = initial_rows(spec, embedding, job.seed, device)
    return fill
