"""What all commands share: errors in words, exit codes that mean something, and ``--json``.

In: a function that does the work. Out: a click command that never shows a traceback unless ``--debug`` asks for it.
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
STOPPED = 10  # at a batch boundary, with a snapshot
INTERRUPTED = 130

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
    """The code that stands for an error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` and ``--debug`` to a command that returns what it has to say.

    The function returns (value, text): the value for machines, the text for people; a code may follow.
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
    """Keep what Dask logs about a failing task to itself: the same error comes to us, and we say it in words."""
    logger = logging.getLogger("distributed")
    before = logger.level
    if wanted:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def explain(error: Exception, *, as_json: bool, debug: bool) -> int:
    """Say what went wrong, and return the exit code."""
    code = exit_code(error)
    if debug:
        traceback.print_exception(error)
    known = isinstance(error, DaskpsError | OSError)
    message = str(error) if known else f"{type(error).__name__}: {error} (unexpected; --debug shows where)"
    if as_json:
        click.echo(json.dumps({"error": {"kind": type(error).__name__, "message": str(error), "exit_code": code}}))
    else:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(message, err=True)
    return code


def table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    """Columns in line; a column of numbers to the right."""
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
    """Names and values, one a line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


BadRows = Mapping[str, tuple[int, str]]  # that were skipped, by reason: how many, and the first place


def bad_rows_value(bad_rows: BadRows) -> dict[str, Any]:
    """Skipped rows for machines."""
    return {reason: {"rows": count, "first": place} for reason, (count, place) in bad_rows.items()}


def bad_rows_facts(bad_rows: BadRows) -> list[tuple[str, str]]:
    """Skipped rows for people, a line for each reason."""
    return [("skipped", f"{count:,} bad rows: {reason}, as in {place}") for reason, (count, place) in bad_rows.items()]
