"""What a command writes gets its name when all of it is written, whatever ends the command before."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from daskps.storage.output import atomic_output
from tests.cli.helpers import Run

# Says so and waits when a part of the output is written: a row group, or, of NumPy files, the tables.
HALT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests behind itself ignores it
import numpy as np, pyarrow.parquet as pq
from daskps.cli import main
write = pq.ParquetWriter.write_table
def halt(*arguments, **options):
    if arguments and isinstance(arguments[0], pq.ParquetWriter):
        write(*arguments, **options)
    print("half", flush=True)
    time.sleep(1e6)
pq.ParquetWriter.write_table, np.savez = halt, halt
main()
"""


def commands(model: Path, folder: Path) -> dict[str, list[str]]:
    data, small = str(folder / "clicks.parquet"), ["--examples", "300", "--slots", "3", "--keys-per-slot", "40"]
    return {
        "export": ["export", str(model), "-o", str(folder / "out")],
        "export numpy": ["export", str(model), "-o", str(folder / "out"), "--format", "numpy"],
        "predict": ["predict", str(model), data, "-o", str(folder / "out")],
        "synth": ["synth", "-o", str(folder / "out"), *small],
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", ["export", "export numpy", "predict", "synth"])
def test_a_command_that_is_stopped_leaves_nothing_under_the_final_name(
    name: str, number: signal.Signals, model: Path, job_file: Path, tmp_path: Path, run: Run
) -> None:
    if name == "predict":
        run("synth", "-o", tmp_path / "clicks.parquet", "--job", job_file)
    before = sorted(tmp_path.iterdir())
    arguments = commands(model, tmp_path)[name]
    with subprocess.Popen([sys.executable, "-c", HALT, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said, early = process.stdout.readline(), (tmp_path / "out").exists()
        process.send_signal(number)
        code = process.wait()
    assert (said, early) == ("half\n", False)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    if number == signal.SIGINT:
        assert sorted(tmp_path.iterdir()) == before
    run(*arguments)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "out"]), "what was left behind is gone"
    if name == "export":
        assert pq.ParquetFile(tmp_path / "out" / "main.parquet").metadata.num_rows > 1000


def test_a_url_is_refused_and_no_folder_of_its_name_is_made(
    model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("export", model, "-o", "s3://bucket/exported", code=2)
    assert "outputs are files of this machine, not URLs" in refused.stderr
    assert os.listdir(tmp_path) == []


def test_a_writer_that_lives_keeps_its_unfinished_file_and_the_last_one_wins(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "out") as first:
        first.write_text("first")
        with atomic_output(tmp_path / "out") as second:
            assert first.exists()
            second.write_text("second")
        assert (tmp_path / "out").read_text() == "second"
    assert (tmp_path / "out").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_leftovers_of_other_outputs_and_of_living_writers_stay(tmp_path: Path) -> None:
    for name in (".out.0.unfinished", ".other.0.unfinished", ".out.1.unfinished"):
        (tmp_path / name).write_text("part")
    with (tmp_path / ".out.1.unfinished").open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with atomic_output(tmp_path / "out") as unfinished:
            unfinished.write_text("all")
    assert sorted(os.listdir(tmp_path)) == [".other.0.unfinished", ".out.1.unfinished", "out"]


def test_an_error_leaves_what_was_there_and_a_device_is_written_itself(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("earlier")
    with pytest.raises(TypeError), atomic_output(tmp_path / "out") as unfinished:
        unfinished.write_text(b"not a text")  # type: ignore[arg-type]
    assert (tmp_path / "out").read_text() == "earlier"
    with atomic_output("/dev/null") as device:
        assert device == Path("/dev/null")
    with pytest.raises(FileNotFoundError, match="missing"), atomic_output(tmp_path / "missing" / "out"):
        pass
    with atomic_output(tmp_path / "new" / "folder", folder=True) as unfinished:
        (unfinished / "file").write_text("all")
    assert (tmp_path / "new" / "folder" / "file").read_text() == "all"
