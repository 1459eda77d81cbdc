"""Contract of row optimizers: what every record of OPTIMIZERS promises to the rest of daskps.

A new kind is held to it without a line here. Its formula is compared with a NumPy twin in tests/kernels.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import daskps
from daskps.config import make_job
from daskps.device.compile import KERNELS
from daskps.device.device import Device, devices
from daskps.device.native import struct_dtype
from daskps.device.pool import ComputePool
from daskps.hbm.gradient import Status, apply_sums
from daskps.hbm.optimizer import (
    OPTIMIZERS,
    Initialiser,
    Optimizer,
    OptimizerKind,
    initialise_rows,
    optimizer_fields,
    state_initialisers,
)
from daskps.types import Floats, RowLayout
from tests.contracts.backends import needs_gpu, run_on_ptx
from tests.processes import needs_ptxrun

every_kind = pytest.mark.parametrize("kind", OPTIMIZERS)
DIM, COUNT = 5, 12


class RowOptimizerContract:
    """Tests of one kind on one backend; a subclass names the backend."""

    backend: str

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with ComputePool(2) as pool:
            yield devices(self.backend, 1, pool=pool)[0]

    def initial(self, device: Device, optimizer: Optimizer, extra: int = 0) -> tuple[RowLayout, Floats]:
        """Return initial rows of `extra` more values than the optimizer needs."""
        layout = RowLayout(optimizer_fields(optimizer.kind, DIM))
        rows = device.empty((COUNT, layout.width), np.float32)
        initialisers = {"embedding": Initialiser("uniform", -1, 1), **state_initialisers(optimizer)}
        keys = device.from_host(np.arange(COUNT, dtype=np.uint64))
        initialise_rows(device, keys=keys, rows=rows, layout=layout, initialisers=initialisers, seed=0, table=0)
        wide = np.full((COUNT, layout.width + extra), 7, np.float32)
        wide[:, : layout.width] = device.to_host(rows)
        return layout, wide

    def stepped(
        self, device: Device, optimizer: Optimizer, rows: Floats, touched: list[int], gradient: float
    ) -> Floats:
        on_device, status = device.from_host(rows.copy()), Status(device)
        apply_sums(
            device,
            touched=device.from_host(np.array(touched, np.int32)),
            sums=device.from_host(np.full((len(touched), DIM), int(gradient * 2**36), np.int64)),
            optimizer=optimizer,
            weight=1.0,
            rows=on_device,
            status=status,
        )
        status.check()
        return device.to_host(on_device)

    @every_kind
    def test_only_touched_rows_change_and_only_the_optimizers_own_values(
        self, device: Device, kind: OptimizerKind
    ) -> None:
        optimizer = Optimizer(kind, 0.1, initial_accumulator=0.1)
        _, rows = self.initial(device, optimizer, extra=2)
        found = self.stepped(device, optimizer, rows, [3, 8], 0.5)
        untouched = [row for row in range(COUNT) if row not in (3, 8)]
        np.testing.assert_array_equal(found[untouched], rows[untouched])
        np.testing.assert_array_equal(found[:, -2:], 7)  # statistics, or another field that follows
        assert (found[[3, 8], :DIM] != rows[[3, 8], :DIM]).all()

    @every_kind
    def test_a_step_goes_against_the_gradient(self, device: Device, kind: OptimizerKind) -> None:
        optimizer = Optimizer(kind, 0.1, initial_accumulator=0.1, beta=1.0)
        _, rows = self.initial(device, optimizer)
        rows[:, :DIM] = 0
        assert (self.stepped(device, optimizer, rows, [0], 0.5)[0, :DIM] < 0).all()
        assert (self.stepped(device, optimizer, rows, [0], -0.5)[0, :DIM] > 0).all()

    @every_kind
    def test_every_state_field_is_used_and_starts_at_its_initial_value(
        self, device: Device, kind: OptimizerKind
    ) -> None:
        optimizer = Optimizer(kind, 0.1, initial_accumulator=0.25)
        layout, rows = self.initial(device, optimizer)
        found = self.stepped(device, optimizer, rows, [4], 0.5)
        for state in OPTIMIZERS[kind].state:
            at = layout.place(state.name)
            assert (rows[:, at] == (0 if state.initial is None else getattr(optimizer, state.initial))).all()
            assert (found[4, at] != rows[4, at]).all(), state.name

    @every_kind
    def test_equal_rows_and_gradients_stay_equal(self, device: Device, kind: OptimizerKind) -> None:
        optimizer = Optimizer(kind, 0.1, initial_accumulator=0.1, l2=0.01, clip_norm=0.2)
        _, rows = self.initial(device, optimizer)
        rows[:] = rows[0]
        for gradient in (0.5, -0.1, 0.0):
            rows = self.stepped(device, optimizer, rows, list(range(COUNT)), gradient)
            np.testing.assert_array_equal(rows, rows[:1].repeat(COUNT, axis=0))


class TestOnCpu(RowOptimizerContract):
    backend = "cpu"


@needs_gpu
class TestOnCuda(RowOptimizerContract):
    backend = "cuda"


@needs_ptxrun
def test_row_optimizers_keep_the_contract_on_interpreted_ptx() -> None:
    run_on_ptx(__file__)


class TestRecords:
    """Places that must agree with a record."""

    def test_every_kind_is_named_in_the_type(self) -> None:
        assert tuple(OPTIMIZERS) == get_args(OptimizerKind)

    def test_numbers_are_those_of_the_kernels(self) -> None:
        text = (KERNELS / "optimizer.cuh").read_text()
        declared = re.search(r"enum \{ (SGD.*?) \};", text)
        assert declared is not None
        names = [name.lower() for name in declared[1].split(", ")]
        assert {kind: record.number for kind, record in OPTIMIZERS.items()} == {
            name: number for number, name in enumerate(names)
        }

    @every_kind
    def test_settings_are_those_of_a_job_and_of_the_kernel(self, kind: OptimizerKind) -> None:
        record = OPTIMIZERS[kind]
        names = {field.name for field in fields(Optimizer)}
        assert {*record.settings, *record.divisors} <= names
        assert set(struct_dtype("Optimizer").names or ()) <= {*names, "factor"}
        settings = {"kind": kind, **dict.fromkeys(record.settings, 0.5)}
        job = make_job({"data": {"format": "synthetic"}, "tables": {"main": {"optimizer": settings}}})
        assert job.tables["main"].optimizer.model_dump().keys() == {*settings, "learning_rate", "l2", "clip_norm"}

    @every_kind
    def test_counts_are_not_averaged_when_replicas_merge(self, kind: OptimizerKind) -> None:
        for field in optimizer_fields(kind, DIM):
            assert field.merge == ("max" if field.dtype == "uint32" else "mean"), field.name

    @every_kind
    def test_the_formula_is_documented(self, kind: OptimizerKind) -> None:
        text = (Path(daskps.__file__).parent / "nn" / "OPTIMIZERS.md").read_text()
        line = next(line for line in text.splitlines() if line.startswith(f"| {kind} |"))
        assert all(f"`{state.name}`" in line for state in OPTIMIZERS[kind].state)
