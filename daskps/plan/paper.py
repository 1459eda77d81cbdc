"""The paper's models A to E and its hardware: stated numbers, numbers read from its plots, and derived numbers.

In: the letter of a model. Out: its `Workload`, and the `Value`s that the paper does not state itself. The paper's
speed-up of model E on 2 and 4 nodes is not an input here, but it was known when `network_share` was chosen (PLAN.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from daskps.errors import ArgumentError
from daskps.plan.estimate import Hardware, Value, Workload

MEASURED_NODES = 4
PAPER_HARDWARE = Hardware(
    name="8 GPUs with 32 GB, 48 cores, 1 TB RAM, 20 TB NVMe, 100 Gb/s RDMA",
    memory_bytes=1e12,
    disk_bytes=20e12,
    hbm_bytes=8 * 32e9,
    network_bytes_per_second=12.5e9,
    cost=10.0,  # in CPU nodes
)
# Speed-up of model E by number of nodes, as stated. The plot has 2.05e4, 3.7e4, 7.3e4 examples/s on 1, 2, 4 nodes.
E_SPEED_UP = {4: 3.57}


@dataclass(frozen=True, slots=True)
class PaperModel:
    """One model of the paper's tables and plots; all were measured on 4 nodes."""

    keys_per_example: int
    rows: float
    dense_parameters: float
    size_bytes: float
    examples_per_second: float  # from a plot
    stage_seconds: tuple[float, float, float]  # from a plot: read, pull/push, train
    mpi_nodes: int  # CPU nodes of the MPI cluster that the paper compares with
    mpi_speed_up: float  # of 4 GPU nodes relative to that MPI cluster


MODELS = {
    "A": PaperModel(100, 8e9, 7e5, 300e9, 1.2e5, (38, 8, 30), 100, 1.8),
    "B": PaperModel(100, 2e10, 2e4, 600e9, 1.8e5, (52, 25, 36), 80, 2.7),
    "C": PaperModel(500, 6e10, 2e6, 2000e9, 7.6e4, (123, 96, 94), 75, 4.8),
    "D": PaperModel(500, 1e11, 4e6, 6000e9, 7.1e4, (50, 215, 118), 150, 2.2),
    "E": PaperModel(500, 2e11, 7e6, 10000e9, 7.4e4, (78, 187, 160), 128, 2.6),
}
MINIBATCH_EXAMPLES = 4096.0  # of one node; assumed


def paper_workload(letter: str) -> tuple[Workload, list[Value]]:
    """Return the workload of model A to E, and every value that was fitted or assumed for it."""
    found = MODELS.get(letter.upper())
    if found is None:
        raise ArgumentError(f"the paper has no model {letter!r}; it has {', '.join(MODELS)}")
    slowest = max(found.stage_seconds)
    batch = found.examples_per_second * slowest / MEASURED_NODES
    row_bytes = found.size_bytes / found.rows
    values = [
        Value(
            *("batch_examples", batch, "fitted"),
            f"so that 4 nodes train {found.examples_per_second:,.0f} examples/s (plot) when the slowest stage takes "
            f"{slowest:g} s (plot); the paper says about 4 million",
        ),
        Value("minibatch_examples", MINIBATCH_EXAMPLES, "assumed", "of a node; the paper says thousands of examples"),
        Value("row_bytes", row_bytes, "fitted", "size / sparse features"),
        Value("dimension", 8.0, "assumed", "a row of 30 to 60 bytes is about 8 floats with their state"),
        Value("distinct_share", 1.0, "assumed", "not in the paper: every key counted as a row to move, an upper bound"),
        Value(
            *("network_share", PAPER_HARDWARE.network_share, "assumed"),
            "rows' part of 100 Gb/s; at 0.6 and 1.0 model E's 4 nodes are 3.57 and 3.74 times one node",
        ),
    ]
    workload = Workload(
        name=f"model {letter.upper()} of the paper",
        batch_examples=batch,
        minibatch_examples=MINIBATCH_EXAMPLES,
        keys_per_example=found.keys_per_example,
        distinct_share=1.0,
        rows=found.rows,
        row_bytes=row_bytes,
        dimension=8.0,
        dense_parameters=found.dense_parameters,
        stage_seconds=dict(zip(("read", "pull/push", "train"), found.stage_seconds, strict=True)),
        measured_nodes=MEASURED_NODES,
        sums="doubling",
        in_flight=2,
        tables=1,
    )
    return workload, values


def price_performance(letter: str, examples_per_cost: float) -> float:
    """Return examples per cost, relative to the MPI cluster that the paper compares with; its nodes cost 1 each."""
    found = MODELS[letter.upper()]
    mpi_rate = found.examples_per_second / found.mpi_speed_up
    return examples_per_cost / (mpi_rate / found.mpi_nodes)
