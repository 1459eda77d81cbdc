"""kill -9 of a writer at random instants: the last commit opens, bit for bit, every time.

20 kills by default; ``pytest -m slow tests/ssd/test_kill.py`` does 250.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from daskps.device.pool import ComputePool
from daskps.ssd import Store
from tests.processes import ROOT, module_command
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, check
from tests.ssd.writer import FILE_ROWS, number_of, step


class Expected:
    """The rows after each step, computed as far as they are asked for."""

    def __init__(self) -> None:
        self._states: list[dict[int, bytes]] = [{}]

    def at(self, number: int) -> dict[int, bytes]:
        while len(self._states) <= number:
            keys, rows, deleted = step(len(self._states))
            state = self._states[-1] | as_dict(keys, rows)
            for key in deleted.tolist():
                state.pop(key, None)
            self._states.append(state)
        return self._states[number]


def kill_many_times(path: Path, pool: ComputePool, kills: int, seed: int) -> tuple[int, int]:
    """Returns the commits that survived and the orphaned files that were removed."""
    chance = random.Random(seed)
    expected = Expected()
    Store.create(path, LAYOUT, pool=pool, file_rows=FILE_ROWS).close()
    orphans = last = 0
    writer = subprocess.Popen(
        module_command("tests.ssd.writer"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for _ in range(kills):
            writer.stdin.write(f"{path}\n")
            writer.stdin.flush()
            pid = int(writer.stdout.readline())
            assert writer.stdout.readline() == "open\n"
            committed = last
            for _ in range(chance.randrange(3)):
                committed = int(writer.stdout.readline())
            time.sleep(chance.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
            while (line := writer.stdout.readline()) != "end\n":
                committed = int(line)
            with Store.open(path, pool=pool, options=QUIET) as store:
                last = number_of(store)
                assert committed <= last <= committed + 1  # the one under way may have been published
                check(store, expected.at(last))
                store.verify()
                orphans += store.stats().recovered_files
        writer.stdin.close()
    return last, orphans


def test_the_last_commit_survives_twenty_kills(tmp_path, pool: ComputePool) -> None:
    commits, orphans = kill_many_times(tmp_path, pool, kills=20, seed=1)
    assert commits > 10
    assert orphans > 0


@pytest.mark.slow
def test_the_last_commit_survives_hundreds_of_kills(tmp_path, pool: ComputePool) -> None:
    commits, orphans = kill_many_times(tmp_path, pool, kills=250, seed=2)
    print(f"250 kills, {commits} commits survived, {orphans} orphaned files removed")
    assert commits > 125
    assert orphans > 100
