"""A partition that is not the one that was published is noticed and named, by whoever opens or checks the model."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from daskps.errors import CorruptionError
from daskps.model import compact, open_model
from daskps.ssd import recovery
from daskps.ssd.format import MANIFEST
from daskps.storage.files import LocalFiles
from daskps.storage.model_directory import ModelDirectory
from daskps.storage.sealed import LOG_JSON, checksum
from tests.driver.helpers import Trained, model_bits

PARTITION = "tables/main/partition-00001"
NAMED = "partition-00001: its part of snapshot '000001-0000000\\d' is not the one that was published"


def put_in_place(foreign: Path, path: Path, model: str | None = None) -> None:
    """Restore a partition from the wrong copy; with the right id if `model` is given."""
    shutil.rmtree(path / PARTITION)
    shutil.copytree(foreign / PARTITION, path / PARTITION)
    if model is not None:
        files = LocalFiles(path / PARTITION)
        files.replace(MANIFEST, replace(recovery.read_manifest(files), model=model).text())


@pytest.mark.parametrize("with_id", [True, False])
def test_a_partition_of_another_model_with_the_same_snapshot_id_is_noticed(trained: Trained, with_id: bool) -> None:
    """As a wrong copy that was restored; with the model's own id, or none, only the digest tells."""
    path, foreign = trained()[1], trained({"seed": 9})[1]
    assert ModelDirectory(str(path)).state().last == ModelDirectory(str(foreign)).state().last
    put_in_place(foreign, path)
    with pytest.raises(CorruptionError, match="partition-00001 is a partition of model"):
        open_model(path)
    put_in_place(foreign, path, ModelDirectory(str(path)).state().model if with_id else "")
    with pytest.raises(CorruptionError, match=NAMED):
        open_model(path)
    with pytest.raises(CorruptionError, match=NAMED):
        trained({"train": {"epochs": 2}}, out=path)
    with pytest.raises(CorruptionError, match=NAMED):
        compact(str(path))


def test_verify_notices_it_in_a_snapshot_that_is_not_opened(trained: Trained) -> None:
    several = {"train": {"snapshot_every_batches": 2, "keep_snapshots": 9}}
    path = trained(several)[1]
    files = LocalFiles(path / PARTITION)
    manifest = recovery.read_manifest(files)
    assert len(manifest.snapshots) == 3
    with open_model(path) as model:
        model.verify()
        first = replace(manifest.snapshots[0], files=manifest.snapshots[1].files)
        files.replace(MANIFEST, replace(manifest, snapshots=(first, *manifest.snapshots[1:])).text())
        with pytest.raises(CorruptionError, match=NAMED):
            model.verify()
        files.replace(MANIFEST, replace(manifest, snapshots=manifest.snapshots[1:]).text())
        with pytest.raises(CorruptionError, match=r"partition-00001/manifest\.json has no part of 000001-0000000"):
            model.verify()
    open_model(path).close()


def test_start_from_notices_it(trained: Trained) -> None:
    path, foreign = trained()[1], trained({"seed": 9})[1]
    put_in_place(foreign, path, ModelDirectory(str(path)).state().model)
    with pytest.raises(CorruptionError, match=NAMED):
        trained({"start_from": str(path)})


def test_every_published_snapshot_has_a_digest_of_every_partition(trained: Trained) -> None:
    path = trained({"train": {"snapshot_every_batches": 2, "keep_snapshots": 9}})[1]
    published = ModelDirectory(str(path)).snapshots()
    assert len(published) == 3
    compact(str(path))  # publishes one and drops the others
    names = {f"partition-{number:05d}" for number in range(3)}
    for snapshot in (*published, *ModelDirectory(str(path)).snapshots()):
        assert snapshot.digests("main").keys() == names
        assert len(set(snapshot.digests("main").values())) == 3


def test_snapshots_without_digests_still_open(trained: Trained) -> None:
    path = trained()[1]
    before = model_bits(path)
    (file,) = path.glob("snapshots/*/manifest.json")
    name = file.parent.name
    file.write_bytes(
        LOG_JSON.write(LOG_JSON.read(file.read_bytes(), str(file)) | {"receipts": {"main": {"prepared": name}}})
    )
    (entry,) = (path / "log").glob("00000002.json")
    entry.write_bytes(
        LOG_JSON.write(LOG_JSON.read(entry.read_bytes(), str(entry)) | {"manifest": checksum(file.read_bytes())})
    )
    with open_model(path) as model:
        assert model.snapshot.digests("main") == {}
        assert model.verify() > 0
    trained({"train": {"epochs": 2}}, out=path)
    assert model_bits(path) != before
    with open_model(path) as model:
        assert model.verify() > 0
