"""Peak memory of training: `python -m tests.driver.memory_peak SETTINGS WARM BATCHES` prints bytes above the baseline.

In: the settings of two jobs as JSON. The second one is small and runs first, so that what Python, its libraries and
Dask take of themselves is there before the baseline is taken. The first one ends after BATCHES batches, if it has more.
Out: one line of JSON.
"""

import contextlib
import ctypes
import gc
import json
import sys
from pathlib import Path

from daskps.config import make_job
from daskps.driver.dask import local_workers, run_job
from daskps.reports import Progress


def status_bytes(name: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def settle() -> int:
    """Return the bytes of this process while nothing runs, and reset its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


class EnoughError(Exception):
    """Ends the run after the wanted number of batches."""


def main() -> None:
    settings, warm, most = (json.loads(text) for text in sys.argv[1:])
    most_steps = 0

    def count(progress: Progress) -> None:
        nonlocal most_steps
        token = progress.reports[-1].token
        most_steps = max(most_steps, token.stop_step - token.first_step)
        if progress.batch + 1 == most:
            raise EnoughError

    with local_workers(1, processes=False) as client:
        run_job(make_job(warm), client=client)
        baseline = settle()
        with contextlib.suppress(EnoughError):
            run_job(make_job(settings), client=client, on_progress=count)
        peak = status_bytes("VmHWM") - baseline
    print(json.dumps({"peak": peak, "most_steps": most_steps}))


if __name__ == "__main__":
    main()
