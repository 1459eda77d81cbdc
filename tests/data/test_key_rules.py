"""One frame, one set of keys: as CSV, as Parquet, and handed over as it is. Key rule 1, of models before, is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.data.columns import Parquet
from daskps.data.delimited import Delimited
from daskps.data.format import Format
from daskps.data.frame import frame_batch
from daskps.data.reader import Source
from daskps.data.schema import Schema, Slot, key_of
from daskps.data.tokens import Tokens
from daskps.device.pool import ComputePool
from daskps.errors import DataError

WHOLE = st.integers(-(2**53) + 1, 2**53 - 1)
TEXTS = st.one_of(
    st.sampled_from(["52", "52.0", "-0.0", "True", "false", "052", "1e3", "1e+3", "NaN", "a.b", "1.5", "0.0", "2.50"]),
    st.text("0123456789.+-eEtrufals", min_size=1, max_size=10),
)


def maybe(values: Any) -> Any:
    return st.one_of(st.none(), values)


COLUMNS = {
    "float64": (maybe(WHOLE), lambda values: pd.Series(values, dtype="float64")),
    "float32": (maybe(st.integers(-(2**24) + 1, 2**24 - 1)), lambda values: pd.Series(values, dtype="float32")),
    "Float64": (maybe(WHOLE), lambda values: pd.Series(values, dtype="Float64")),
    "Int64": (maybe(st.integers(-(2**63), 2**63 - 1)), lambda values: pd.Series(values, dtype="Int64")),
    "bool": (st.booleans(), lambda values: pd.Series(values, dtype="bool")),
    "boolean": (maybe(st.booleans()), lambda values: pd.Series(values, dtype="boolean")),
    "objects": (maybe(st.booleans()), lambda values: pd.Series(values, dtype="object")),
    "text": (TEXTS, lambda values: pd.Series(values, dtype="object")),
    "category": (TEXTS, lambda values: pd.Series(values, dtype="category")),
}
FRAMES = st.integers(1, 30).flatmap(
    lambda examples: st.fixed_dictionaries(
        {name: st.lists(values, min_size=examples, max_size=examples) for name, (values, _) in COLUMNS.items()}
    )
)


def keys_of(paths: list[Path], format: Format, schema: Schema) -> np.ndarray[Any, Any]:
    with ComputePool(1) as pool:
        source = Source([str(path) for path in paths], format, schema)
        with source.open(source.index(), pool) as reader:
            return reader.read(0, reader.examples).keys.copy()


@settings(max_examples=50, deadline=None)
@given(FRAMES)
def test_a_frame_has_the_same_keys_as_csv_as_parquet_and_in_memory(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[Any]]
) -> None:
    folder = tmp_path_factory.mktemp("frame")
    frame = pd.DataFrame({name: make(columns[name]) for name, (_, make) in COLUMNS.items()})
    frame.insert(0, "label", 0)
    schema = Schema(tuple(Slot(name=name) for name in COLUMNS))
    frame.to_csv(folder / "pandas.csv", index=False)
    table = pa.Table.from_pandas(frame.astype({"category": "object"}))
    pyarrow.csv.write_csv(
        table, folder / "arrow.csv", pyarrow.csv.WriteOptions(quoting_style="none", quoting_header="none")
    )
    frame.to_parquet(folder / "pandas.parquet", row_group_size=7)
    expected = keys_of([folder / "pandas.parquet"], Parquet(), schema)
    assert (frame_batch(frame, schema, 0).keys == expected).all()
    assert (keys_of([folder / "pandas.csv"], Delimited(","), schema) == expected).all()
    assert (keys_of([folder / "arrow.csv"], Delimited(","), schema) == expected).all()


@pytest.mark.parametrize("kind", ["categorical", "integer", "raw"])
def test_whole_floats_and_booleans_in_csv_have_the_keys_of_their_integers_in_every_kind_of_slot(
    tmp_path: Path, kind: str
) -> None:
    slot = (
        Slot(name="a", raw=True)
        if kind == "raw"
        else Slot(name="a", kind="integer" if kind == "integer" else "categorical")
    )
    values = ["52.0", "True", "false", "-7.0", "1.6777216e+07"]
    (tmp_path / "a.csv").write_text("label,a\n" + "".join(f"0,{value}\n" for value in values))
    found = keys_of([tmp_path / "a.csv"], Delimited(","), Schema((slot,)))
    assert found.tolist() == [key_of(value, slot) for value in (52, 1, 0, -7, 16777216)]


def test_lists_and_tokens_follow_the_rule_too(tmp_path: Path) -> None:
    slot = Slot(name="a", kind="multi")
    wanted = [key_of(value, slot) for value in (52, 1, 3)]
    (tmp_path / "a.csv").write_text("label,a\n0,52.0|True|3\n")
    pq.write_table(pa.table({"label": [0], "a": [["52.0", "True", "3"]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": [0, 0], "a": [[52.0], [1.0, 3.0]]}), tmp_path / "floats.parquet")
    (tmp_path / "a.txt").write_text("0 a:52.0 a:True a:3\n")
    assert keys_of([tmp_path / "a.csv"], Delimited(","), Schema((slot,))).tolist() == wanted
    assert keys_of([tmp_path / "a.parquet"], Parquet(), Schema((slot,))).tolist() == wanted
    assert keys_of([tmp_path / "floats.parquet"], Parquet(), Schema((slot,))).tolist() == wanted
    assert keys_of([tmp_path / "a.txt"], Tokens("multislot"), Schema((slot,))).tolist() == wanted


def test_floats_that_are_rounded_as_text_are_no_keys(tmp_path: Path) -> None:
    """pandas writes the 32-bit float 123456792 as 1.2345679e+08: the CSV would have another key than the frame."""
    schema = Schema((Slot(name="a"),))
    for values, limit in ((np.float32([2**24 - 1, 2**24]), 2**24), (np.float64([2**53 - 1, 2**53]), 2**53)):
        table = pa.table({"a": values})
        assert frame_batch(table[:1], schema, 0).keys[0] == key_of(limit - 1, Slot(name="a"))
        with pytest.raises(DataError, match="example 2, column 1 \\(a\\): number out of range"):
            frame_batch(table, schema, 0)
    then = Schema((Slot(name="a"),), key_rule=1)
    assert frame_batch(pa.table({"a": np.float32([2**24])}), then, 0).keys[0] == key_of(2**24, Slot(name="a"))


def test_by_key_rule_1_readers_give_the_keys_of_then(tmp_path: Path) -> None:
    """Recorded with commit c861977, before there was another rule."""
    (tmp_path / "a.csv").write_text("label,a\n0,52.0\n0,True\n0,-0.0\n0,52\n")
    pq.write_table(pa.table({"label": [0, 0], "a": ["52.0", "True"]}), tmp_path / "text.parquet")
    pq.write_table(pa.table({"label": [0, 0], "a": [52.0, None]}), tmp_path / "floats.parquet")
    pq.write_table(pa.table({"label": [0, 0], "a": [True, False]}), tmp_path / "bools.parquet")
    schema = Schema((Slot(name="a"),), key_rule=1)
    integer, text = 18122660296766139110, [310034611932694277, 12925698062978832162]
    expected = {
        "csv": [*text, 3228486285647754498, integer],
        "text": text,
        "floats": [integer, 16008780465975270454],
        "bools": [18283114864617801111, 2245211995831457254],
    }
    assert keys_of([tmp_path / "a.csv"], Delimited(","), schema).tolist() == expected["csv"]
    for name in ("text", "floats", "bools"):
        assert keys_of([tmp_path / f"{name}.parquet"], Parquet(), schema).tolist() == expected[name]
