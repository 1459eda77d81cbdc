"""A model directory: what is published is whole and last; what is not, never was."""

import json
import pathlib
import random
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from daskps.errors import ArgumentError, CorruptionError, SnapshotError, StaleError
from daskps.storage.log import FORMAT
from daskps.storage.model_directory import Incarnation, ModelDirectory, SnapshotMeta, apply_live
from daskps.storage.sealed import LOG_JSON, checksum
from tests.simulation.disk import CrashError, SimulatedDisk, SimulatedFiles


def weights(batch: int) -> dict[str, np.ndarray]:
    return {"dense/0/weight": np.full((2, 3), batch, np.float32), "optimizer/step": np.array(batch, np.int64)}


def publish(incarnation: Incarnation, batch: int) -> str:
    draft = SnapshotMeta(batch, position=batch * 10, partitions=8, settings={"seed": 1}, metrics={"auc": 0.75})
    return incarnation.publish(draft, weights(batch), {"main/0": batch}).id


def directory(disk: SimulatedDisk) -> ModelDirectory:
    return ModelDirectory("model", SimulatedFiles(disk, "model"), clock=lambda: 0.0, new_id=lambda: "id")


class FakePartition:
    """Names only: which snapshots are prepared and confirmed."""

    def __init__(self) -> None:
        self.is_prepared: set[str] = set()
        self.is_confirmed: set[str] = set()

    def prepare(self, snapshot: str) -> dict[str, int]:
        self.is_prepared.add(snapshot)
        return {"main/0": len(self.is_prepared)}

    def prepared(self) -> set[str]:
        return self.is_prepared

    def confirmed(self) -> set[str]:
        return self.is_confirmed

    def confirm(self, snapshot: str) -> None:
        self.is_prepared.discard(snapshot)
        self.is_confirmed.add(snapshot)

    def discard(self, snapshot: str) -> None:
        self.is_prepared.remove(snapshot)

    def drop(self, snapshot: str) -> None:
        self.is_confirmed.remove(snapshot)


def test_an_empty_directory_has_no_snapshot(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path / "model"))
    assert model.snapshot() is None
    assert model.snapshots() == []


def test_the_last_published_snapshot_is_opened_with_all_it_had(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path / "runs" / "model"))
    incarnation = model.begin_incarnation("run")
    publish(incarnation, 3)
    publish(incarnation, 5)
    again = ModelDirectory(str(tmp_path / "runs" / "model"))
    snapshot = again.snapshot()
    assert snapshot is not None
    assert (snapshot.id, snapshot.epoch, snapshot.run) == ("000001-00000005", 1, "run")
    assert snapshot.draft.position == 50
    assert (snapshot.draft.settings, snapshot.draft.metrics) == ({"seed": 1}, {"auc": 0.75})
    assert snapshot.receipts == {"main/0": 5}
    loaded = again.load(snapshot)
    assert loaded.keys() == weights(5).keys()
    for name, array in weights(5).items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype
    assert [item.id for item in again.snapshots()] == ["000001-00000003", "000001-00000005"]


def as_before_ids(path: pathlib.Path) -> None:
    """Make of a model what daskps wrote before models had ids: format 1, and no id anywhere."""
    manifests = {}
    for file in sorted(path.glob("snapshots/*/manifest.json")):
        fields = LOG_JSON.read(file.read_bytes(), str(file))
        del fields["model"]
        file.write_bytes(LOG_JSON.write(fields | {"format": 1}))
        manifests[file.parent.name] = checksum(file.read_bytes())
    for file in sorted(path.glob("log/*.json")):
        fields = LOG_JSON.read(file.read_bytes(), str(file))
        del fields["model"]
        if fields["kind"] == "snapshot":
            fields["manifest"] = manifests.get(fields["snapshots"][0], fields["manifest"])
        file.write_bytes(LOG_JSON.write(fields | {"format": 1}))


def test_a_model_has_one_id_for_life_and_every_snapshot_carries_it(tmp_path: pathlib.Path) -> None:
    model, other = ModelDirectory(str(tmp_path / "a")), ModelDirectory(str(tmp_path / "b"))
    assert model.state().model == ""
    for run in ("first", "second"):
        publish(model.begin_incarnation(run), 1)
        publish(other.begin_incarnation(run), 1)
    entries = ModelDirectory(str(tmp_path / "a")).log.entries()
    ids = {entry.model for entry in entries if entry.kind == "epoch"}
    assert ids == {model.state().model} == {snapshot.model for snapshot in model.snapshots()}
    assert len(model.state().model) == 32
    assert model.state().model != other.state().model


def test_a_model_from_before_ids_opens_and_gets_one_when_it_is_written_to(tmp_path: pathlib.Path) -> None:
    names = [publish(ModelDirectory(str(tmp_path)).begin_incarnation("old"), 1)]
    as_before_ids(tmp_path)
    model = ModelDirectory(str(tmp_path))
    assert model.state().model == ""
    assert [snapshot.model for snapshot in model.snapshots()] == [""]
    incarnation = model.begin_incarnation("new")
    names.append(publish(incarnation, 2))
    found = ModelDirectory(str(tmp_path))
    assert found.state().model == incarnation.model != ""
    assert [(snapshot.id, snapshot.model) for snapshot in found.snapshots()] == [
        (names[0], ""),
        (names[1], incarnation.model),
    ]


def test_a_log_with_entries_of_two_models_is_noticed(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        for run in ("first", "second"):
            publish(ModelDirectory(str(tmp_path / name)).begin_incarnation(run), 1)
    shutil.copy(tmp_path / "b" / "log" / "00000003.json", tmp_path / "a" / "log" / "00000003.json")
    with pytest.raises(CorruptionError, match="log has entries of two models"):
        ModelDirectory(str(tmp_path / "a")).state()


def test_zarr_and_json_alone_read_a_snapshot(tmp_path: pathlib.Path) -> None:
    publish(ModelDirectory(str(tmp_path)).begin_incarnation("run"), 7)
    entries = [json.loads(path.read_text()) for path in sorted((tmp_path / "log").glob("*.json"))]
    last = [entry["snapshots"][0] for entry in entries if entry["kind"] in ("snapshot", "rollback")][-1]
    folder = tmp_path / "snapshots" / last
    assert json.loads((folder / "manifest.json").read_text())["draft"]["position"] == 70
    group = zarr.open_group(folder / "arrays", mode="r")
    np.testing.assert_array_equal(group["dense/0/weight"][...], np.full((2, 3), 7, np.float32))


def test_an_older_incarnation_cannot_publish_over_a_newer_one(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    old = model.begin_incarnation("old")
    publish(old, 1)
    new = ModelDirectory(str(tmp_path)).begin_incarnation("new")
    with pytest.raises(StaleError, match=r"taken by another writer: start of .* by run 'new', incarnation 2"):
        publish(old, 2)
    publish(new, 1)
    with pytest.raises(StaleError):
        publish(old, 3)
    assert model.state().last == "000002-00000001"


def test_of_two_drivers_that_begin_at_once_one_is_refused() -> None:
    class Racing(SimulatedDisk):
        def link(self, source: str, target: str) -> None:
            self.link = super().link  # type: ignore[method-assign]
            directory(self).begin_incarnation("faster")
            super().link(source, target)

    disk = Racing()
    with pytest.raises(StaleError, match="faster"):
        directory(disk).begin_incarnation("slower")
    assert directory(disk).state().incarnation == 1


def test_dropping_keeps_the_last_and_does_not_stop_a_live_run(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    incarnation = model.begin_incarnation("run")
    first, second = publish(incarnation, 1), publish(incarnation, 2)
    other = ModelDirectory(str(tmp_path))
    other.drop([first])
    assert not (tmp_path / "snapshots" / first).exists()
    with pytest.raises(SnapshotError, match="last one"):
        other.drop([second])
    with pytest.raises(SnapshotError, match=f"has no snapshot '{first}'; it has {second}"):
        other.snapshot(first)
    third = publish(incarnation, 3)
    assert model.state().live == (second, third)


def test_dropping_looks_again_when_somebody_publishes_meanwhile() -> None:
    class Racing(SimulatedDisk):
        racing = False

        def link(self, source: str, target: str) -> None:
            if self.racing:
                self.racing = False
                publish(incarnation, 3)
            super().link(source, target)

    disk = Racing()
    incarnation = directory(disk).begin_incarnation("run")
    names = [publish(incarnation, batch) for batch in (1, 2)]
    disk.racing = True
    directory(disk).drop(names[:1])
    assert directory(disk).state().live == (names[1], incarnation.name(3))


def test_keep_drops_the_oldest(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    incarnation = model.begin_incarnation("run")
    names = [publish(incarnation, batch) for batch in range(1, 6)]
    assert incarnation.keep(2) == tuple(names[:3])
    assert incarnation.keep(2) == ()
    assert [snapshot.id for snapshot in model.snapshots()] == names[3:]


def test_rolling_back_makes_an_older_snapshot_the_last_and_stops_a_live_run(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    incarnation = model.begin_incarnation("run")
    first, second = publish(incarnation, 1), publish(incarnation, 2)
    model.roll_back(first)
    assert model.state().last == first
    with pytest.raises(StaleError, match="rollback"):
        publish(incarnation, 3)
    model.drop([second])
    assert model.state().live == (first,)
    assert publish(model.begin_incarnation("next"), 9) == model.state().last


def test_collect_removes_what_older_incarnations_left_and_nothing_else(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    incarnation = model.begin_incarnation("run")
    kept = publish(incarnation, 1)
    (tmp_path / "snapshots" / incarnation.name(2)).mkdir()
    (tmp_path / "log" / ".dead.tmp").write_text("{")
    new = model.begin_incarnation("next")
    in_the_making = tmp_path / "snapshots" / new.name(1)
    in_the_making.mkdir()
    assert new.collect() == (incarnation.name(2),)
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [kept, in_the_making.name]
    assert not list((tmp_path / "log").glob("*.tmp"))


def test_partitions_follow_the_log(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    partition = FakePartition()
    incarnation = model.begin_incarnation("run")
    for batch in (1, 2):
        incarnation.commit(SnapshotMeta(batch, 0, 8), {}, partition.prepare, partition.confirm)
    published = incarnation.publish(SnapshotMeta(3, 0, 8), {}, partition.prepare(incarnation.name(3))).id
    partition.prepare(incarnation.name(4))
    model.drop([incarnation.name(1)])
    apply_live(partition, model.state().live, discard_unpublished=True)
    assert partition.is_prepared == set()
    assert partition.is_confirmed == {incarnation.name(2), published}


def test_confirming_a_snapshot_leaves_the_next_one_prepared(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    partition = FakePartition()
    incarnation = model.begin_incarnation("run")
    first = incarnation.publish(SnapshotMeta(1, 0, 8), {}, partition.prepare(incarnation.name(1))).id
    partition.prepare(incarnation.name(2))
    apply_live(partition, model.state().live)
    assert (partition.is_prepared, partition.is_confirmed) == ({incarnation.name(2)}, {first})


def test_every_flipped_byte_of_every_file_is_noticed_and_named(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    publish(model.begin_incarnation("run"), 1)

    def read_all() -> None:
        fresh = ModelDirectory(str(tmp_path))
        for snapshot in fresh.snapshots():
            fresh.load(snapshot)

    rng = random.Random(0)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        places = range(len(data)) if len(data) < 400 else rng.sample(range(len(data)), 60)
        for place in places:
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
            with pytest.raises(CorruptionError, match=path.name.replace(".", r"\.")):
                read_all()
        for shorter in (data[:-1], data[: len(data) // 2], b""):
            path.write_bytes(shorter)
            with pytest.raises(CorruptionError, match=path.name.replace(".", r"\.")):
                read_all()
        if path.parent.name != "log":
            path.unlink()
            with pytest.raises(CorruptionError, match=path.name.replace(".", r"\.")):
                read_all()
        path.write_bytes(data)
        read_all()


def test_a_missing_log_entry_is_noticed(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    publish(model.begin_incarnation("run"), 1)
    (tmp_path / "log" / "00000001.json").unlink()
    with pytest.raises(CorruptionError, match=r"00000001\.json is missing"):
        model.state()


def test_an_entry_in_the_place_of_another_is_noticed(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    publish(model.begin_incarnation("run"), 1)
    shutil.copy(tmp_path / "log" / "00000001.json", tmp_path / "log" / "00000002.json")
    with pytest.raises(CorruptionError, match=r"00000002\.json says it is another entry"):
        ModelDirectory(str(tmp_path)).state()


def test_a_manifest_in_the_place_of_another_is_noticed(tmp_path: pathlib.Path) -> None:
    model = ModelDirectory(str(tmp_path))
    incarnation = model.begin_incarnation("run")
    first, second = (tmp_path / "snapshots" / publish(incarnation, batch) / "manifest.json" for batch in (1, 2))
    shutil.copy(first, second)
    with pytest.raises(CorruptionError, match="intact but not what was published as 000001-00000002"):
        model.snapshot()


def test_a_writer_whose_temporary_file_was_swept_is_too_late() -> None:
    class Swept(SimulatedDisk):
        def link(self, source: str, target: str) -> None:
            self.remove(source)
            super().link(source, target)

    with pytest.raises(StaleError, match=r"temporary file .* was removed by another writer; this one .* is too late"):
        directory(Swept()).begin_incarnation("slow")


def test_a_manifest_of_a_newer_format_is_refused_in_words(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("daskps.storage.model_directory.FORMAT", FORMAT + 1)
        publish(ModelDirectory(str(tmp_path)).begin_incarnation("run"), 1)
    with pytest.raises(CorruptionError, match=rf"manifest\.json is of a newer format than {FORMAT}"):
        ModelDirectory(str(tmp_path)).snapshot()


def test_a_newer_format_is_refused_in_words(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("daskps.storage.log.FORMAT", FORMAT + 1)
        ModelDirectory(str(tmp_path)).begin_incarnation("run")
    with pytest.raises(CorruptionError, match="newer daskps"):
        ModelDirectory(str(tmp_path)).state()


def test_values_that_json_cannot_hold_are_refused(tmp_path: pathlib.Path) -> None:
    incarnation = ModelDirectory(str(tmp_path)).begin_incarnation("run")
    with pytest.raises(ArgumentError, match="plain finite numbers"):
        incarnation.publish(SnapshotMeta(1, 0, 8, metrics={"auc": float("nan")}), {}, {})


@given(seed=st.integers(0, 2**32), crash_after=st.integers(0, 60), crashes=st.integers(1, 3))
def test_after_a_power_cut_at_any_operation_the_last_published_snapshot_opens(
    seed: int, crash_after: int, crashes: int
) -> None:
    disk = SimulatedDisk(random.Random(seed))
    done = attempted = 0  # last batch whose publishing returned, and last that was tried
    for _ in range(crashes):
        disk.crash_after = disk.changes + crash_after
        try:
            model = directory(disk)
            incarnation = model.begin_incarnation("run")
            incarnation.collect()
            for _ in range(3):
                attempted = max(attempted, done) + 1
                publish(incarnation, attempted)
                done = attempted
                incarnation.keep(1)
        except CrashError:
            pass
        disk.power_cut()
        model = directory(disk)
        snapshot = model.snapshot()
        found = 0 if snapshot is None else snapshot.draft.batch
        assert found in (done, attempted)
        if snapshot is not None:
            np.testing.assert_array_equal(model.load(snapshot)["dense/0/weight"], weights(found)["dense/0/weight"])
        for kept in model.snapshots():
            model.load(kept)
        done = found
