"""The log of a run: one line per batch at level INFO, with the figures as structured fields.

In: figures. Out: records of the logger ``daskps.run``. The fields are in ``record.daskps``, where any handler can read
them; `JsonLines` writes each record as one JSON object per line.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from daskps.view.figures import BatchFigures
from daskps.view.words import duration, metrics_name, percent, plain

logger = logging.getLogger("daskps.run")


def log_batch(figures: BatchFigures) -> None:
    """Log one line for a finished batch."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", batch_line(figures), extra={"daskps": {"event": "batch", **figures.plain()}})


def log_event(event: str, message: str, **fields: Any) -> None:
    """Log any other event of a run: start, validation, snapshot, end."""
    logger.info("%s", message, extra={"daskps": {"event": event, **fields}})


def batch_line(figures: BatchFigures) -> str:
    """Return the figures of a batch as one line of text."""
    done = figures.position / max(figures.stop_position, 1)
    auc = figures.metrics.get("auc")
    rates = figures.rates
    parts = [
        f"batch {figures.batch}",
        f"{percent(done)} of {figures.stop_position:,} examples",
        f"{figures.examples_per_second:,.0f} examples/s",
        f"{metrics_name(figures.metrics)} AUC {auc:.4f}" if auc is not None else "",
        f"hits HBM {percent(rates['hbm'])} memory {percent(rates['memory'])} SSD {percent(rates['disk'])} "
        f"new {percent(rates['new'])}",
        f"{duration(figures.seconds_left)} left",
    ]
    return "  ".join(part for part in parts if part)


class JsonLines(logging.Formatter):
    """Log formatter: one JSON object per line with time, level, logger, message and the structured fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain(line | getattr(record, "daskps", {})), default=str)
