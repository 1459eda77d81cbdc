"""What training really takes: `python -m tests.flow.memory_peak SETTINGS WARM` prints bytes above the baseline.

In: the settings of two jobs as JSON. The second one is small and runs first, so that what Python, its libraries and
Dask take of themselves is there before the baseline is taken. Out: one line of JSON.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

from daskps.config import make_job
from daskps.flow.embedded import local_workers
from daskps.flow.train import train


def status_bytes(name: str) -> int:
    """A figure of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def settle() -> int:
    """What this process has when nothing runs; the peak is forgotten."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def main() -> None:
    settings, warm = (json.loads(text) for text in sys.argv[1:])
    with local_workers(1, processes=False) as client:
        train(make_job(warm), client=client)
        baseline = settle()
        progress = train(make_job(settings), client=client).progress
        peak = status_bytes("VmHWM") - baseline
    print(json.dumps({"peak": peak, "batches": progress.batch + 1, "counts": progress.counts}))


if __name__ == "__main__":
    main()
