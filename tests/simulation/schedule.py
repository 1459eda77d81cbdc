"""The settings that a seed of the simulator decides at the start."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Settings of a simulated run and of its faults."""

    tables: int
    partitions: int
    partition_by: str
    depth: int
    batch_steps: int
    snapshot_every: int
    cache_rows: int
    mean_delay: float
    faults: int
    check_replicas: bool
    passes: int
    validate_every: int
    validation_rows: int
    by_owner: bool  # keys stand in the order of their owners, as in a run of several nodes
    sync_every: int
    snapshot_delays: int  # the mean delays between snapshots by time; 0: they come by batches
    patience: int  # of early stopping, if there are validations
    readers: int  # processes that open the model while it is trained
    lock_seconds: float  # locks on partitions outlive a process that was killed by so much, as on a file server
    misfit: str  # what a driver finds: a worker's own "directory"; a partition of another "model" or "time"; or nothing
    misfit_at: int  # which driver; if none comes to that, one that finds the model trained

    @classmethod
    def of(cls, rng: random.Random, more: random.Random) -> Schedule:
        """`more` is asked for what came later, so that a seed keeps the schedule that it had before."""
        return cls(
            tables=rng.choice([1, 1, 2]),
            partitions=rng.randint(5, 7),
            partition_by=rng.choice(["mixed", "modulo"]),
            depth=rng.randint(1, 4),
            batch_steps=rng.randint(1, 3),
            snapshot_every=rng.randint(1, 4),
            cache_rows=rng.choice([16, 24, 64, 200]),
            mean_delay=rng.choice([0.01, 0.2, 1.0]),
            faults=rng.choice([0, 1, 1, 2, 3]),
            check_replicas=rng.random() < 0.5,
            passes=rng.choice([1, 1, 2]),
            validate_every=rng.choice([0, 0, 1, 2]),
            validation_rows=rng.choice([0, 1]),
            by_owner=more.random() < 0.5,
            sync_every=more.choice([1, 1, 1, 2, 3]),
            snapshot_delays=more.choice([0, 0, 1, 10]),
            patience=more.choice([0, 0, 1, 2]),
            readers=more.choice([0, 0, 1, 2]),
            lock_seconds=more.choice([0.0, 0.0, 0.0, 20.0, 100.0, 400.0]),
            misfit=more.choice(["", "", "", "", "", "directory", "model", "time"]),
            misfit_at=more.randrange(3),
        )
