"""The table of input formats that a job can name. Settings, readers and the command line take them from here.

To add a format of files: write a class with the methods of `Format` (daskps/data/format.py, with an example), give it
an entry in FORMATS, and let it pass the contract tests in tests/contracts/test_format.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from daskps.data.delimited import Delimited, criteo
from daskps.data.format import Format
from daskps.data.parquet import Parquet
from daskps.data.schema import Schema, criteo_schema
from daskps.data.text import BLOCK_BYTES
from daskps.data.tokens import Style, Tokens


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of a job for its format of files; a format uses those that concern it."""

    block_bytes: int = BLOCK_BYTES  # of text
    labelled: bool = True  # False: the files have no labels
    token_weights: bool = True
    ignore_unknown_slots: bool = False


# Names of settings that formats share. A format refuses the settings that other formats have and it has not.
_FILES = frozenset({"paths", "validation_paths", "weight", "shuffle_window_rows"})
_DENSE = frozenset({"transform", "missing_value"})


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Input format as a job names it: where examples come from, which settings it has, how files of it are read."""

    source: Literal["files", "frame", "generated"]
    make: Callable[[FormatOptions], Format] = lambda options: Parquet()  # of files; by default Parquet
    settings: frozenset[str] = _FILES  # settings of `data` that not all formats have
    slot_settings: frozenset[str] = frozenset()  # settings of a slot that not all formats have
    schema: Callable[[bool], Schema] | None = None  # for a job without slots, by data.dense_integers; None: needs slots
    named_columns: bool = True  # slots, label and weight are read from columns with names
    any_number_of_keys: bool = False  # every slot may have any number of keys, whatever its kind


def _tokens(style: Style, *settings: str) -> InputFormat:
    return InputFormat(
        "files",
        lambda options: Tokens(
            style, options.token_weights, options.ignore_unknown_slots, block_bytes=options.block_bytes
        ),
        settings=_FILES | {"token_weights", *settings},
        slot_settings=frozenset({"missing"}),
        named_columns=False,
        any_number_of_keys=True,
    )


FORMATS = {
    "criteo": InputFormat(
        "files",
        lambda options: criteo(options.block_bytes, options.labelled),
        settings=_FILES | {"dense_integers"},
        slot_settings=_DENSE | {"missing", "separator"},
        schema=criteo_schema,
    ),
    "csv": InputFormat(
        "files",
        lambda options: Delimited(",", block_bytes=options.block_bytes),
        slot_settings=_DENSE | {"missing", "separator"},
    ),
    "parquet": InputFormat("files", slot_settings=_DENSE | {"missing", "weights"}),
    "libsvm": _tokens("libsvm"),
    "libffm": _tokens("libffm", "unknown_slots"),
    "multislot": _tokens("multislot", "unknown_slots"),
    # A Dask DataFrame that is passed to `train`; its validation files are Parquet, which keeps the frame's columns.
    "frame": InputFormat("frame", settings=_FILES - {"paths"}, slot_settings=_DENSE | {"missing", "weights"}),
    # `daskps synth` writes generated examples as Parquet.
    "synthetic": InputFormat("generated", settings=frozenset({"synthetic", "validation_rows"}), named_columns=False),
}
FILE_FORMATS = [name for name, format in FORMATS.items() if format.source == "files"]


def formats_with(setting: str) -> list[str]:
    """Return the names of the formats that have a setting, of `data` or of a slot."""
    return [name for name, format in FORMATS.items() if setting in format.settings | format.slot_settings]


def foreign_settings(name: str) -> set[str]:
    """Return the settings, of `data` and of slots, that other formats have and the format `name` has not."""
    every = set().union(*(format.settings | format.slot_settings for format in FORMATS.values()))
    return every - FORMATS[name].settings - FORMATS[name].slot_settings
