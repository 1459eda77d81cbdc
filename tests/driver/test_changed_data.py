"""A run goes on only with the data that it was trained on so far, or if somebody says that the change is meant."""

from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest

from daskps.errors import DataError
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from tests.driver.helpers import Trained, job_of, merged, model_bits

STEPS = {"train": {"minibatch_examples": 100, "batch_examples": 100}}


def settings_of(path: Path) -> tuple[dict[str, Any], int]:
    snapshot = ModelDirectory(str(path)).snapshot()
    assert snapshot is not None
    return snapshot.draft.settings, snapshot.draft.position


def interrupted(trained: Trained, job: dict[str, Any], out: Path, **options: Any) -> int:
    """Train a part of it; where it stopped."""
    seen: list[Progress] = []
    trained(job, out=out, on_progress=seen.append, should_stop=lambda: len(seen) >= 5, **options)
    return settings_of(out)[1]


def test_text_may_change_only_behind_the_position(frame: pd.DataFrame, trained: Trained, tmp_path: Path) -> None:
    path, out = tmp_path / "rows.csv", tmp_path / "m"
    frame.to_csv(path, index=False)
    job = merged(job_of("csv", [str(path)]), STEPS)
    position = interrupted(trained, job, out)
    assert 0 < position < 1_500
    lines = path.read_text().splitlines(keepends=True)
    lines[position] = lines[position].replace("u", "v")  # line 0 is the header: this is the last row before it
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=f"row {position}, .* other contents of the data.*--accept-changed-data"):
        trained(job, out=out)
    assert "accepted_changes" not in settings_of(out)[0]

    frame.to_csv(path, index=False)
    lines = path.read_text().splitlines(keepends=True)
    lines[position + 1] = "1,new,7,0.5\n"  # in the same block, behind it; and the file grows
    copy = tmp_path / "copy" / "rows.csv"
    copy.parent.mkdir()
    copy.write_text("".join([*lines, "0,newer,8,0.25\n"]))
    smaller = {"data": {"paths": [str(copy)]}, "budget": {"memory_bytes": "300MB"}}
    outcome, _ = trained(job, smaller, out=out)
    assert outcome.progress.position == 1_501


def test_a_change_that_is_accepted_is_recorded_for_good(frame: pd.DataFrame, trained: Trained, tmp_path: Path) -> None:
    path, out = tmp_path / "rows.csv", tmp_path / "m"
    frame.assign(other=1 - frame["label"]).to_csv(path, index=False)
    job = merged(job_of("csv", [str(path)]), STEPS)
    position = interrupted(trained, job, out)
    frame.assign(other=1 - frame["label"], user="u").to_csv(path, index=False)
    other = {"data": {"label": "other"}}
    with pytest.raises(DataError, match=r"data\.label 'label' then, 'other' now"):
        trained(job, other, out=out)
    seen: list[Progress] = []
    stop = {"on_progress": seen.append, "should_stop": lambda: len(seen) >= 2}
    trained(job, other, out=out, accept_changed_data=True, **stop)
    wanted = [{"position": position, "changed": ["label", "contents"]}]
    assert settings_of(out)[0]["accepted_changes"] == wanted
    assert trained(job, other, out=out)[0].progress.position == 1_500  # nothing has changed since
    assert settings_of(out)[0]["accepted_changes"] == wanted


@pytest.mark.parametrize(
    "change", [{"weight": "price"}, {"bad_lines": "lenient"}, {"label": "ad"}, {"format": "parquet"}]
)
def test_settings_that_say_how_rows_are_read_may_not_change(
    frame: pd.DataFrame, trained: Trained, tmp_path: Path, change: dict[str, Any]
) -> None:
    path, out = tmp_path / "rows.csv", tmp_path / "m"
    frame.to_csv(path, index=False)
    job = merged(job_of("csv", [str(path)]), STEPS, {"slots": [{"name": "user"}], "tables": {"main": {}}})
    job["tables"] = {"main": {"dimension": 4}}
    interrupted(trained, job, out)
    (name,) = change
    with pytest.raises(DataError, match=rf"read in another way: data\.{name} .* then, .* now"):
        trained(job, {"data": change}, out=out)


def test_parquet_files_and_partitions_before_the_position_may_not_change(
    frame: pd.DataFrame, trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "m"
    for number in range(3):
        frame.iloc[500 * number :][:500].to_parquet(tmp_path / f"{number}.parquet")
    job = merged(job_of("parquet", [str(tmp_path / "*.parquet")]), STEPS)
    assert interrupted(trained, job, out) in range(1, 1_000)
    frame.iloc[1_000:].assign(ad=7).to_parquet(tmp_path / "2.parquet")  # behind
    frame.iloc[:500].assign(ad=7).to_parquet(tmp_path / "0.parquet")
    with pytest.raises(DataError, match="other contents of the data"):
        trained(job, out=out)
    frame.iloc[:500].to_parquet(tmp_path / "0.parquet")
    assert trained(job, out=out)[0].progress.position == 1_500

    out, job = tmp_path / "f", merged(job_of("frame", []), STEPS)
    interrupted(trained, job, out, frame=dd.from_pandas(frame, npartitions=5))
    with pytest.raises(DataError, match="other contents of the data"):
        trained(job, out=out, frame=dd.from_pandas(frame, npartitions=7))
    trained(job, out=out, frame=dd.from_pandas(frame, npartitions=5))


def test_a_snapshot_without_digests_goes_on_as_before(frame: pd.DataFrame, trained: Trained, tmp_path: Path) -> None:
    from daskps.node import begin

    whole = merged(job_of("csv", [str(tmp_path / "rows.csv")]), STEPS)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    expected = model_bits(trained(whole)[1])
    with pytest.MonkeyPatch.context() as patch:
        then = begin.order_before
        former = ("rows", "shuffle_window_rows", "files", "synthetic")
        patch.setattr("daskps.node.node.order_before", lambda *values: {name: then(*values)[name] for name in former})
        interrupted(trained, whole, tmp_path / "m")
    assert "contents" not in settings_of(tmp_path / "m")[0]["order"]
    assert model_bits(trained(whole, out=tmp_path / "m")[1]) == expected
