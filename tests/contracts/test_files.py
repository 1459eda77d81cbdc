"""The contract of `Files`. A new implementation subclasses `FilesContract` and says how it is made."""

import threading
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.storage import MemoryStore, ObjectStore

from daskps.errors import CorruptionError, LockedError, StoreError
from daskps.storage.files import Files, LocalFiles, ObjectFiles, files_at
from tests.simulation.disk import SimulatedDisk, SimulatedFiles


def put(files: Files, name: str, data: bytes) -> None:
    files.write(name, [data], len(data))
    files.sync([name])


class FilesContract:
    """What commit log, model directory and disk tier rely on. Subclasses have a fixture `files`, an empty root."""

    creates_exclusively = True
    creates_at_once = True  # False: the server of the test looks before it writes, so writers come one after the other
    has_locks = True

    def another(self, files: Any) -> Files:
        """Return the files of the same root as another process sees them."""
        raise NotImplementedError

    def test_a_written_file_is_its_pieces_and_then_zeros(self, files: Files) -> None:
        keys, rows = np.arange(5, dtype=np.uint64), np.ones((3, 2), np.float32)
        sent = files.write("keys/c.0", [keys, rows, b"end"], 100)
        expected = keys.tobytes() + rows.tobytes() + b"end"
        files.sync(["keys/c.0"])
        files.sync_data(["keys/c.0"])
        assert files.read("keys/c.0") == expected.ljust(100, b"\0")
        assert files.size("keys/c.0") == 100
        assert len(expected) <= sent <= 100

    def test_writing_again_overwrites(self, files: Files) -> None:
        for data in (b"a long first text", b"short"):
            put(files, "a", data)
            assert files.read("a") == data
            files.replace("b", data)
            assert files.read("b") == data
        assert sorted(files.names()) == ["a", "b"]

    def test_parts_of_a_file_fill_arrays(self, files: Files) -> None:
        put(files, "rows/c.0.0", bytes(range(100)))
        first, second, nothing = np.empty(3, np.uint8), np.empty((2, 2), np.uint32), np.empty(0, np.float32)
        files.read_into("rows/c.0.0", 7, [first, nothing, second])
        assert first.tobytes() + second.tobytes() == bytes(range(7, 26))
        files.read_into("rows/c.0.0", 7, [nothing])

    def test_a_file_that_ends_early_is_named(self, files: Files) -> None:
        put(files, "rows/c.0.0", bytes(20))
        with pytest.raises(CorruptionError, match=r"rows/c\.0\.0.*ends"):
            files.read_into("rows/c.0.0", 10, [np.empty(11, np.uint8)])

    def test_a_missing_file_is_named_and_has_no_size(self, files: Files) -> None:
        assert files.size("live/4/c.0") == -1
        with pytest.raises(CorruptionError, match=r"live/4/c\.0.*missing"):
            files.read("live/4/c.0")
        with pytest.raises(CorruptionError, match=r"live/4/c\.0.*missing"):
            files.read_into("live/4/c.0", 0, [np.empty(1, np.uint8)])

    def test_a_folder_lists_its_files_and_folders_sorted(self, files: Files) -> None:
        files.make(["log"])
        for name in ("b", "log/2", "log/1", "log/old/9", "logs/x"):
            put(files, name, b"text")
        assert files.list_folder("log") == ["1", "2", "old"]
        assert files.list_folder("") == ["b", "log", "logs"]
        assert files.list_folder("nowhere") == []
        assert sorted(files.names()) == ["b", "log/1", "log/2", "log/old/9", "logs/x"]

    def test_what_is_removed_is_gone_and_nothing_else(self, files: Files) -> None:
        for name in ("snapshots/1/a", "snapshots/1/b/c", "snapshots/10/a", "a"):
            put(files, name, b"text")
        files.remove_folder("snapshots/1")
        files.remove_folder("snapshots/2")
        files.remove("a")
        files.remove("nowhere")
        assert files.names() == ["snapshots/10/a"]
        assert files.list_folder("snapshots") == ["10"]

    def test_of_many_writers_of_one_name_one_wins(self, files: Files) -> None:
        if not self.creates_exclusively:
            with pytest.raises(StoreError, match="cannot create a file exclusively"):
                files.create_exclusive("log/1", b"text")
            assert files.names() == []
            return
        files.make(["log"])
        winners: list[int] = []
        start, turn = threading.Barrier(4), nullcontext() if self.creates_at_once else threading.Lock()

        def create(number: int) -> None:
            mine = self.another(files)
            start.wait()
            with turn, suppress(FileExistsError):
                mine.create_exclusive("log/1", b"writer %d" % number)
                winners.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert files.read("log/1") == b"writer %d" % winners[0]
        assert files.names() == ["log/1"]
        with pytest.raises(FileExistsError):
            files.create_exclusive("log/1", b"later")

    def test_a_reader_keeps_a_file_from_being_seized(self, files: Files) -> None:
        put(files, "manifest.json", b"text")
        other = self.another(files)
        if not self.has_locks:
            with pytest.raises(OSError, match="no locks"):
                files.share("manifest.json")
            assert other.seize("manifest.json") is not None
            return
        first, second = files.share("manifest.json"), files.share("manifest.json")
        assert other.seize("manifest.json") is None
        first()
        assert other.seize("manifest.json") is None
        second()
        release = other.seize("manifest.json")
        assert release is not None
        release()
        files.share("manifest.json")()
        assert other.seize("nowhere") is not None
        with pytest.raises(FileNotFoundError):
            files.share("nowhere")

    def test_there_is_one_writer(self, files: Files) -> None:
        files.make()
        other = self.another(files)
        files.lock()
        if self.has_locks:
            with pytest.raises(LockedError):
                other.lock()
        files.close()
        other.lock()
        other.close()

    def test_free_space_and_descriptors_are_known_or_none(self, files: Files) -> None:
        files.make()
        put(files, "a", b"text")
        free, descriptor = files.free_bytes(), files.descriptor("a")
        assert free is None or free > 0
        if descriptor is not None:
            with open(descriptor, "rb") as opened:
                assert opened.read() == b"text"


class TestLocalFiles(FilesContract):
    """A folder of this machine, which does not exist yet."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> LocalFiles:
        return LocalFiles(tmp_path / "some" / "model")

    def another(self, files: LocalFiles) -> Files:
        return files_at(files.url)


class TestS3(FilesContract):
    """A stand-in for S3, through fsspec."""

    creates_at_once = has_locks = False

    @pytest.fixture
    def files(self, s3: Any) -> ObjectFiles:
        bucket = f"b{uuid.uuid4().hex}"
        s3.mkdir(bucket)
        return ObjectFiles.from_url(f"s3://{bucket}/model")

    def another(self, files: ObjectFiles) -> Files:
        return files_at(files.url)


class TestObstore(FilesContract):
    """obstore's store in memory."""

    has_locks = False

    @pytest.fixture
    def files(self) -> ObjectFiles:
        stores = pytest.importorskip("obstore.store", reason="obstore is not installed")
        return ObjectFiles(ObjectStore(stores.MemoryStore()), "obstore memory")

    def another(self, files: ObjectFiles) -> Files:
        return ObjectFiles(files._store, files.url)


class TestZarrMemory(FilesContract):
    """A Zarr store that cannot create files exclusively: a partition may be there, a commit log may not."""

    creates_exclusively = has_locks = False

    @pytest.fixture
    def files(self) -> ObjectFiles:
        return ObjectFiles(MemoryStore(), "zarr memory")

    def another(self, files: ObjectFiles) -> Files:
        return ObjectFiles(files._store, files.url)


class TestFsspecMemory(TestZarrMemory):
    """fsspec's memory: its create looks before it writes, so it is refused."""

    @pytest.fixture
    def files(self) -> ObjectFiles:
        return ObjectFiles.from_url(f"memory://{uuid.uuid4()}")


class TestSimulatedFiles(FilesContract):
    """The disk of the simulator."""

    @pytest.fixture
    def files(self) -> SimulatedFiles:
        return SimulatedFiles(SimulatedDisk(), "model")

    def another(self, files: SimulatedFiles) -> Files:
        return SimulatedFiles(files._disk, files.url)

    def test_a_power_cut_keeps_what_was_synced(self, files: SimulatedFiles) -> None:
        put(files, "a", b"synced")
        files.replace("b", b"synced")
        files.create_exclusive("log/1", b"synced")
        files._disk.power_cut()
        assert {name: files.read(name) for name in files.names()} == dict.fromkeys(["a", "b", "log/1"], b"synced")
