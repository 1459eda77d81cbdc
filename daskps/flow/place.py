"""Whether a position still names the row that it did: in other data, a run would go on to train rows twice or never.

In: a job with its open training data, a position. Out: what a snapshot records of the order of rows up to there;
DataError if the data is in another order now. Rows may have been corrected, and more may have come behind.
"""

from __future__ import annotations

from typing import Any

from daskps.config import Job
from daskps.errors import DataError
from daskps.flow.inputs import StepReader, of_files


def order_before(job: Job, reader: StepReader, position: int) -> dict[str, Any]:
    """What decides which rows come before `position`."""
    files, synthetic = of_files(reader), job.data.synthetic
    rows = reader.rows // job.train.epochs
    return {
        "rows": rows,  # of one pass
        "shuffle_window_rows": job.data.shuffle_window_rows,
        "files": "" if files is None else files.index.files_before(min(position, rows)),
        "synthetic": None if synthetic is None else synthetic.model_dump(mode="json", exclude={"examples"}),
    }


def check_order(job: Job, reader: StepReader, position: int, known: dict[str, Any]) -> None:
    """DataError if the rows before `position` are not those that came before it when `known` was recorded."""
    found, rows, window = order_before(job, reader, position), known["rows"], known["shuffle_window_rows"]
    wrong = [name for name in ("files", "synthetic") if found[name] != known[name]]
    if found["shuffle_window_rows"] != window and position % rows:
        wrong.append("shuffle_window_rows")
    if found["rows"] != rows and position > (rows - rows % window if window else rows):
        wrong.append("rows")  # where a pass, or its last window, ends is behind `position` already
    if wrong:
        values = {name: (known[name], found[name]) for name in wrong if name != "files"}
        raise DataError(
            f"row {position}, where the snapshot ends, is not the row that it was: another {', '.join(wrong)} "
            f"(then and now: {values}); rows would be trained on twice or never. Give the data as it was, or begin "
            "another model from this one (start_from)"
        )
