"""What readers can do, a job can ask for: it trains the model of data that was rewritten by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from daskps.config import complete, make_job, recorded_job
from daskps.data.schema import CRITEO_COLUMNS
from tests.data.criteo_rows import criteo_text
from tests.driver.helpers import Trained, model_bits

EXAMPLES = 600
Settings = dict[str, Any]
Slots = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Two jobs that must train the same model: with a setting, and with data in which the setting's work is done."""

    data: Settings  # of `data`, for the file "given"
    slots: Slots
    write: Callable[[Path], None]
    plain: Settings  # the same for the file "plain", which needs no setting
    plain_slots: Slots
    write_plain: Callable[[Path], None]


def columns() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    users = rng.integers(0, 60, EXAMPLES)
    return pd.DataFrame({"label": (rng.random(EXAMPLES) < 0.2 + 0.5 * (users % 2)).astype(int), "user": users})


def lists(separator: str) -> Callable[[Path], None]:
    """A csv file with one to three tags per example."""

    def write(path: Path) -> None:
        tags = [separator.join(f"t{(7 * n + k) % 40}" for k in range(1 + n % 3)) for n in range(EXAMPLES)]
        columns().assign(tags=tags).to_csv(path, index=False)

    return write


def weighted_parquet(path: Path) -> None:
    ids = [[(7 * n + k) % 40 for k in range(n % 3)] for n in range(EXAMPLES)]
    scores = [[0.25 * (1 + (n + k) % 5) for k in range(n % 3)] for n in range(EXAMPLES)]
    columns().assign(ids=ids, scores=scores).to_parquet(path)


def tokens(weights: bool = True, others: bool = False) -> Callable[[Path], None]:
    """The examples of `weighted_parquet` as token text; `others`: also tokens of a slot that no job names."""

    def write(path: Path) -> None:
        frame, lines = columns(), []
        for n, (label, user) in enumerate(zip(frame["label"], frame["user"], strict=True)):
            words = [str(label), f"user:{user}"]
            words += ["shop:5:2"] if others else []
            words += [
                f"ids:{(7 * n + k) % 40}" + (f":{0.25 * (1 + (n + k) % 5)}" if weights else "") for k in range(n % 3)
            ]
            lines.append(" ".join(words))
        path.write_text("\n".join(lines))

    return write


def gaps(fill: float | None, column: str = "price") -> Callable[[Path], None]:
    """A csv file with a dense column, in which every third value is missing, or `fill`."""

    def write(path: Path) -> None:
        prices = [f"{n % 11}.5" if n % 3 else ("" if fill is None else str(fill)) for n in range(EXAMPLES)]
        columns().assign(**{column: prices}).to_csv(path, index=False)

    return write


def counts(logarithms: bool) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        values = np.arange(EXAMPLES, dtype=np.float32) - 50
        wide = values.astype(np.float64)
        logs = np.copysign(np.log1p(np.abs(wide)), wide).astype(np.float32)
        columns().assign(count=logs if logarithms else values).to_parquet(path)

    return write


def sometimes_a_shop(path: Path) -> None:
    columns().assign(shop=[f"s{n % 7}" if n % 4 else "" for n in range(EXAMPLES)]).to_csv(path, index=False)


def shop_lists(path: Path) -> None:
    columns().assign(shop=[[f"s{n % 7}"] if n % 4 else [] for n in range(EXAMPLES)]).to_parquet(path)


def criteo(path: Path) -> None:
    path.write_bytes(criteo_text(EXAMPLES, seed=2))


USER = {"name": "user"}
TAGS = {"name": "tags", "kind": "multi"}
IDS = {"name": "ids", "kind": "multi"}
SCORED = IDS | {"weights": "scores"}
PRICE = {"name": "price", "kind": "dense"}
COUNT = {"name": "count", "kind": "dense"}
DLRM = [{"name": name, "kind": "dense", "transform": "log"} for name in CRITEO_COLUMNS[1:14]]
CSV, PARQUET, MULTISLOT = {"format": "csv"}, {"format": "parquet"}, {"format": "multislot"}
CASES = {
    "separator": Case(CSV, [USER, TAGS | {"separator": ";"}], lists(";"), CSV, [USER, TAGS], lists("|")),
    "weights": Case(PARQUET, [USER, SCORED], weighted_parquet, MULTISLOT, [USER, IDS], tokens()),
    "token_weights": Case(
        MULTISLOT | {"token_weights": False}, [USER, IDS], tokens(), MULTISLOT, [USER, IDS], tokens(weights=False)
    ),
    "unknown_slots": Case(
        MULTISLOT | {"unknown_slots": "ignore"}, [USER, IDS], tokens(others=True), MULTISLOT, [USER, IDS], tokens()
    ),
    "missing_value": Case(CSV, [USER, PRICE | {"missing_value": 2.5}], gaps(None), CSV, [USER, PRICE], gaps(2.5)),
    "transform": Case(
        PARQUET, [USER, COUNT | {"transform": "log"}], counts(False), PARQUET, [USER, COUNT], counts(True)
    ),
    "missing": Case(
        CSV,
        [USER, {"name": "shop", "missing": "none"}],
        sometimes_a_shop,
        PARQUET,
        [USER, {"name": "shop", "kind": "multi"}],
        shop_lists,
    ),
    "dense_integers": Case(
        {"format": "criteo", "dense_integers": True},
        [],
        criteo,
        {"format": "criteo"},
        [*DLRM, *({"name": name} for name in CRITEO_COLUMNS[14:])],
        criteo,
    ),
}


def job_of(data: Settings, slots: Slots, path: Path) -> Settings:
    return {
        "data": {"synthetic": None, **data, "paths": [str(path)]},
        "slots": slots,
        "train": {"minibatch_examples": 100, "batch_examples": 300},
    }


@pytest.mark.parametrize("name", CASES)
def test_a_setting_of_the_reader_trains_the_model_of_rewritten_data(
    name: str, trained: Trained, tmp_path: Path
) -> None:
    case = CASES[name]
    case.write(tmp_path / "given")
    case.write_plain(tmp_path / "plain")
    given, model = job_of(case.data, case.slots, tmp_path / "given"), tmp_path / "model"
    trained(given, out=model)
    plain = trained(job_of(case.plain, case.plain_slots, tmp_path / "plain"))[1]
    assert model_bits(model) == model_bits(plain)


@pytest.mark.parametrize("name", CASES)
def test_a_snapshot_records_the_setting_and_a_job_that_does_not_name_it_takes_it_from_there(name: str) -> None:
    data, slots = CASES[name].data, CASES[name].slots
    recorded = make_job(job_of(data, slots, Path("x"))).result_fields()
    without = [{key: value for key, value in group.items() if key != name} for group in (data, *slots)]
    unnamed = make_job(job_of(without[0], without[1:], Path("x")))
    assert complete(unnamed, recorded).result_fields() == recorded
    assert unnamed.result_fields() != recorded


def test_a_snapshot_from_before_these_settings_has_the_values_that_readers_had_then() -> None:
    slots = [
        {"name": "user", "column": None, "kind": "categorical", "raw": False, "table": "main"},
        {"name": "price", "column": None, "kind": "dense", "raw": False, "table": "main"},
        {"name": "tags", "column": None, "kind": "multi", "raw": False, "table": "main"},
    ]
    job = recorded_job(
        {"job": {"data": {"format": "csv", "paths": ["x"], "key_rule": 2}, "slots": slots}}, "a snapshot"
    )
    assert [slot.missing_key for slot in job.slots if slot.kind != "dense"] == [True, False]
    assert (job.slots[1].missing_value, job.slots[1].transform, job.slots[2].separator) == (0.0, "none", "|")
    assert (job.data.token_weights, job.data.unknown_slots, job.data.dense_integers) == (True, "refuse", False)
    assert complete(make_job({"data": {"format": "csv", "paths": "x"}}), job.result_fields()).slots == job.slots
