"""The parts that all commands share: error messages, exit codes, ``--json``, tables of text.

In: a function that does the work. Out: a click command that shows tracebacks only with ``--debug``.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from daskps.data.formats import FILE_FORMATS
from daskps.errors import (
    ArgumentError,
    BackendError,
    CapacityError,
    ConfigError,
    DaskpsError,
    DataError,
    ProtocolError,
    StoreError,
    TrainingError,
)
from daskps.view.words import plain

EXIT_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    ArgumentError: 2,
    DataError: 3,
    CapacityError: 4,
    StoreError: 5,
    TrainingError: 6,
    ProtocolError: 6,
    BackendError: 7,
    OSError: 8,
}
STOPPED = 10  # exit code of a run that was stopped on request at a batch boundary, with a snapshot
INTERRUPTED = 130  # exit code of a command that was stopped at once

# Text of a table cell that is a number, a number of bytes or a percentage.
NUMBER = re.compile(r"[\d,.]*( ?[kMGT]?B|%)?|nan")

EXIT_CODE_HELP = """\b
Exit codes:
  0    done
  1    an error that daskps did not expect
  2    wrong usage or wrong settings
  3    bad data
  4    something does not fit: memory, device, disk or budget
  5    the model's files: damaged, locked, or no such snapshot
  6    training cannot go on
  7    the asked-for device is not there
  8    a file or an address that the system refused
  10   stopped on request at a batch boundary, with a snapshot
  130  stopped at once
"""


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error."""
    if isinstance(error, click.ClickException):
        return error.exit_code
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` and ``--debug`` to a command that returns its output.

    The function returns (value, text) or (value, text, exit code). The value is printed with ``--json``, otherwise the
    text.
    """

    @click.option("--json", "as_json", is_flag=True, help="Write one JSON object to standard output.")
    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @functools.wraps(function)
    def run(*arguments: Any, as_json: bool, debug: bool, **options: Any) -> None:
        try:
            with quiet(not debug):
                value, text, *code = function(*arguments, **options)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            sys.exit(explain(error, as_json=as_json, debug=debug))
        click.echo(json.dumps(plain(value)) if as_json else text)
        if code and code[0]:
            sys.exit(code[0])

    return run


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Suppress Dask's log while active, if `wanted`: the command reports the error of a failed task itself."""
    logger = logging.getLogger("distributed")
    before = logger.level
    if wanted:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def explain(error: Exception, *, as_json: bool, debug: bool) -> int:
    """Print an error, as JSON or as text, and return its exit code."""
    code = exit_code(error)
    if debug:
        traceback.print_exception(error)
    known = isinstance(error, DaskpsError | OSError)
    message = str(error) if known else f"{type(error).__name__}: {error} (unexpected; --debug shows where)"
    if as_json:
        words = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(json.dumps({"error": {"kind": type(error).__name__, "message": words, "exit_code": code}}))
    else:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(message, err=True)
    return code


def table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    """Return rows as text with aligned columns; columns of numbers are aligned to the right."""
    every = [head, *rows] if head else rows
    if not every:
        return ""
    widths = [max(len(row[column]) for row in every) for column in range(len(every[0]))]
    right = [all(NUMBER.fullmatch(row[column]) for row in rows) for column in range(len(widths))]
    lines = []
    for row in every:
        cells = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def facts(pairs: list[tuple[str, str]]) -> str:
    """Return (name, value) pairs as text, one pair per line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


# Examples that could not be read and were skipped. By reason: how many, and where the first of them is.
BadRows = Mapping[str, tuple[int, str]]


def bad_rows_value(bad_rows: BadRows) -> dict[str, Any]:
    """Return the skipped examples as JSON values."""
    return {reason: {"rows": count, "first": place} for reason, (count, place) in bad_rows.items()}


def key_counts_value(counts: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return, for each slot, the number of keys and how many of them the model has never seen, as JSON values."""
    return {slot: {"keys": keys, "unseen": unseen} for slot, (keys, unseen) in counts.items()}


def unseen_words(counts: Mapping[str, tuple[int, int]]) -> str:
    """Return text: the percentage of keys that the model has never seen, and the slots with the most of them."""
    keys, unseen = (sum(count[at] for count in counts.values()) for at in (0, 1))
    if not keys:
        return "no keys"
    shares = sorted(((new / there, slot) for slot, (there, new) in counts.items() if new), reverse=True)
    most = ", ".join(f"{slot} {100 * share:.3g}%" for share, slot in shares[:3])
    return f"{100 * unseen / keys:.3g}% of {keys:,}" + (f" (most: {most})" if len(counts) > 1 and most else "")


def bad_rows_facts(bad_rows: BadRows) -> list[tuple[str, str]]:
    """Return the skipped examples as (name, text) pairs for `facts`, one per reason."""
    counts = bad_rows.items()
    return [("skipped", f"{count:,} bad examples: {reason}, as in {place}") for reason, (count, place) in counts]


model_argument = click.argument("model", type=click.Path(exists=True, file_okay=False))
format_option = click.option("--format", type=click.Choice(FILE_FORMATS), help="Format of DATA; by default the job's.")
snapshot_option = click.option("--snapshot", metavar="ID", help="Take this snapshot instead of the last.")
