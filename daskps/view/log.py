"""The log of a run: one line per batch at INFO, with its figures as structured fields.

In: figures. Out: records of the logger ``daskps.run``; the fields are in ``record.daskps``, so that any handler can
take them, and `JsonLines` writes them as one JSON object a line.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from daskps.view.figures import BatchFigures
from daskps.view.words import duration, percent, plain

logger = logging.getLogger("daskps.run")


def log_batch(figures: BatchFigures) -> None:
    """One line for a finished batch."""
    if logger.isEnabledFor(logging.INFO):
        fields = figures.plain()
        del fields["stages"]  # exact times of every node are for the report
        logger.info("%s", batch_line(figures), extra={"daskps": {"event": "batch", **fields}})


def log_event(event: str, message: str, **fields: Any) -> None:
    """Anything else that happens to a run: start, validation, snapshot, end."""
    logger.info("%s", message, extra={"daskps": {"event": event, **fields}})


def batch_line(figures: BatchFigures) -> str:
    """The figures in words, for people."""
    done = figures.position / max(figures.stop_position, 1)
    auc = figures.metrics.get("auc")
    rates = figures.rates
    parts = [
        f"batch {figures.batch}",
        f"{percent(done)} of {figures.stop_position:,} rows",
        f"{figures.examples_per_second:,.0f} examples/s",
        f"AUC {auc:.4f}" if auc is not None else "",
        f"hits HBM {percent(rates['hbm'])} memory {percent(rates['memory'])} SSD {percent(rates['disk'])} "
        f"new {percent(rates['new'])}",
        f"{duration(figures.seconds_left)} left",
    ]
    return "  ".join(part for part in parts if part)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the structured fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain(line | getattr(record, "daskps", {})), default=str)
