"""Trace of a run as Chrome trace events: what each thread of each node did, and when.

Input: spans from the threads of a node. Output: a file of lines per node and incarnation, which `merge` turns into one
JSON file for ui.perfetto.dev or chrome://tracing: a process per node, a track per thread. A recorded span costs about
a microsecond; where there is no trace (`OFF`), one check of an attribute.

>>> import json, tempfile
>>> folder = tempfile.mkdtemp()
>>> trace = Trace(f"{folder}/node", rank=0)
>>> with trace.span("train", "stage", batch=3):
...     with trace.span("step", "step"):
...         pass
>>> trace.close()
>>> merge(folder, f"{folder}/trace.json")
2
>>> with open(f"{folder}/trace.json") as file:
...     events = json.load(file)["traceEvents"]
>>> [event["name"] for event in events if event["ph"] == "X"]
['step', 'train']
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

MAX_WAITING = 50_000  # events in memory that are not written yet; further ones are dropped and counted
MAX_WRITTEN = 5_000_000  # events in the file of a node; further ones are dropped and counted
WRITE_SECONDS = 0.25  # interval at which waiting events are written
NOTHING: AbstractContextManager[None] = nullcontext()
# Tracks of a node from top to bottom, by the beginning of their names; others come last.
ORDER = (
    *(f"daskps-{stage}" for stage in ("read", "dedup", "pull", "load", "train", "push", "control")),
    *(f"daskps-{thread}" for thread in ("owner", "snapshot", "network", "copy", "ssd", "compaction", "fetch")),
    "receive from node",
)


class _Span:
    """Span in progress; it is recorded when it ends."""

    __slots__ = ("_kind", "_name", "_start", "_trace", "_values")

    def __init__(self, trace: Trace, name: str, kind: str, values: dict[str, Any]) -> None:
        self._trace, self._name, self._kind, self._values = trace, name, kind, values

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self._trace.add(self._name, self._kind, self._start, **self._values)


class Trace:
    """Recorder of one node's spans. Without a path it is off and records nothing."""

    def __init__(self, path: str | None = None, rank: int = 0) -> None:
        self.on = path is not None
        self.dropped = 0
        if path is None:
            return
        self._events: deque[tuple[Any, ...]] = deque()
        self._offset = time.time_ns() - time.perf_counter_ns()  # to the wall clock, which aligns the nodes
        self._written = 0
        self._ending = threading.Event()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        head = {"rank": rank, "host": socket.gethostname(), "process": os.getpid(), "start_ns": time.time_ns()}
        self._file.write(json.dumps(head) + "\n")
        self._writer = threading.Thread(target=self._write, name="daskps-trace", daemon=True)
        self._writer.start()

    def span(self, name: str, kind: str, **values: Any) -> AbstractContextManager[None]:
        """Return a context that records the time in it. `kind` is the category; `values` are shown with the span."""
        return _Span(self, name, kind, values) if self.on else NOTHING

    def call(self, name: str, kind: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return ``function(*arguments)``, called in a span."""
        if not self.on:
            return function(*arguments)
        with self.span(name, kind):
            return function(*arguments)

    def methods(self, target: T, kind: str, *names: str) -> T:
        """Return `target` with a span around each call of the named methods; `target` itself if the trace is off."""
        return cast(T, _Traced(target, self, kind, names)) if self.on else target

    def add(self, name: str, kind: str, start_ns: int, *, track: str = "", **values: Any) -> None:
        """Record a span that began at `start_ns` (time.perf_counter_ns) and ends now.

        `track` names a track of its own, for what is not the work of one thread.
        """
        if not self.on:
            return
        if len(self._events) >= MAX_WAITING:
            self.dropped += 1
            return
        stop_ns = time.perf_counter_ns()
        thread = (track, 0) if track else (threading.current_thread().name, threading.get_ident())
        self._events.append((name, kind, start_ns, stop_ns - start_ns, *thread, values))

    def close(self) -> None:
        """Write all events and close the file. Later ones are not recorded."""
        if self.on:
            self.on = False
            self._ending.set()
            self._writer.join()
            self._file.write(json.dumps({"dropped": self.dropped}) + "\n")
            self._file.close()

    def _write(self) -> None:
        """Write waiting events to the file until `close`."""
        while not self._ending.wait(WRITE_SECONDS):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        for _ in range(len(self._events)):
            name, kind, start_ns, *rest = self._events.popleft()
            if self._written >= MAX_WRITTEN:
                self.dropped += 1
                continue
            self._written += 1
            self._file.write(json.dumps((name, kind, start_ns + self._offset, *rest), default=str) + "\n")
        self._file.flush()


OFF = Trace()


class _Traced:
    """Stand-in for an object that records a span for every call of some of its methods."""

    def __init__(self, target: Any, trace: Trace, kind: str, names: tuple[str, ...]) -> None:
        self._target, self._trace, self._kind, self._names = target, trace, kind, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._names:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            with self._trace.span(name, self._kind):
                return found(*arguments, **options)

        return call


def merge(folder: str, target: str) -> int:
    """Merge the files of all nodes in `folder` into one JSON file of trace events; return the number of spans.

    Node and thread are process and track of a trace. Times begin with the first node's. A last line that a killed
    process left incomplete is skipped.
    """
    files = sorted(path for path in Path(folder).iterdir() if str(path) != target)
    heads: dict[Path, dict[str, Any]] = {path: next(_lines(path), {}) for path in files}
    base = min((head["start_ns"] for head in heads.values() if head), default=0)
    tracks: dict[tuple[int, str, int], int] = {}
    count = dropped = 0
    with open(target, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for path, head in heads.items():
            rank = head.get("rank", 0)
            for line in _lines(path):
                if isinstance(line, dict):
                    dropped += line.get("dropped", 0)
                    continue
                name, kind, start_ns, length_ns, thread, number, values = line
                track = tracks.setdefault((rank, thread, number), len(tracks) + 1)
                event = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": track}
                event |= {"ts": (start_ns - base) / 1000, "dur": length_ns / 1000, "args": values}
                out.write(json.dumps(event) + ",\n")
                count += 1
        ranks = sorted({head["rank"] for head in heads.values() if head})
        named = [_metadata("process_name", rank, 0, {"name": f"node {rank}"}) for rank in ranks]
        for (rank, thread, _), track in tracks.items():
            named.append(_metadata("thread_name", rank, track, {"name": thread}))
            place = next((place for place, name in enumerate(ORDER) if thread.startswith(name)), len(ORDER))
            named.append(_metadata("thread_sort_index", rank, track, {"sort_index": place}))
        out.write(",\n".join(map(json.dumps, named)))
        out.write('\n], "otherData": ' + json.dumps({"dropped_spans": dropped, "nodes": list(heads.values())}) + "}\n")
    return count


def _metadata(name: str, rank: int, track: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return an event that describes a process or a track."""
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": values}


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
