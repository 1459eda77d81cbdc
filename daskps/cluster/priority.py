"""Which threads of a node go first on a busy core.

In: the calling thread. Out: its priority. All nodes wait for the slowest in every step, so threads that train and that
carry messages go first. What works ahead holds nobody up until the batches in flight are used up.
"""

from __future__ import annotations

import os
import sys
import threading

NICENESS = 5  # of the threads that work ahead


def step_back() -> None:
    """Let others go first; for threads that work ahead. Threads that this one starts do so, too."""
    if sys.platform == "linux":  # where priorities are of threads, not of processes
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
