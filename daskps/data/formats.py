"""The table of input formats that a job can name, and the settings of a job's data.

Settings, readers and the command line take the formats from the table.

To add a format of files: write a class with the methods of `Format` (daskps/data/format.py, with an example), give it
an entry in FORMATS, and let it pass the contract tests in tests/contracts/test_format.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pydantic
from pydantic import Field, PositiveInt

from daskps.data.columns import Parquet
from daskps.data.delimited import Delimited, criteo
from daskps.data.format import Format
from daskps.data.schema import Schema, criteo_schema
from daskps.data.text import BLOCK_BYTES
from daskps.data.tokens import Style, Tokens
from daskps.settings import NonNegative, Settings, nearest
from daskps.version import KEY_RULE


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


class SyntheticSettings(Settings):
    """Generated examples with a known best AUC; see daskps.data.synthetic."""

    examples: PositiveInt = Field(default=1_000_000, description="Training examples.")
    slots: PositiveInt = Field(default=20, description="Slots of an example.")
    keys_per_bag: PositiveInt = Field(default=1, description="Keys of an example in each slot.")
    keys_per_slot: int = Field(
        default=1_000_000, ge=1, le=2**64, description="Distinct keys that a slot draws its keys from."
    )
    zipf_exponent: NonNegative = Field(
        default=1.05,
        description="The k-th most popular key has a probability proportional to k**-exponent; at most 16.",
    )
    dense_features: int = Field(default=0, ge=0, description="Dense features, each of mean 0 and variance 1.")
    weight_scale: NonNegative | None = Field(
        default=None, description="Strength of single keys in the true probability; None: the generator's own."
    )
    interaction_scale: NonNegative | None = Field(
        default=None,
        description="Strength of pairs of slots in the true probability; 0: logistic regression can reach it. "
        "None: the generator's own.",
    )
    drift_rows: int = Field(
        default=0, ge=0, description="Period in examples: every weight changes to another one and back; 0: no drift."
    )
    seed: int = Field(default=0, description="Seed of the generated examples.")


class OsrpSettings(Settings):
    """OP+OSRP: every example's keys become at most `bins` of 2 * `bins` binary features; see daskps.data.osrp."""

    bins: int = Field(
        ge=1, le=2**63, description="Bins that the keys are cut into; an example has at most one key each."
    )
    per_slot: bool = Field(
        default=False,
        description="true: each slot is hashed to features of its own. false: all slots become one slot.",
    )
    seed: int = Field(default=0, ge=0, lt=2**64, description="Seed of the permutation and of the signs.")


class DataSettings(Settings):
    """Source of examples. A position in the data is one global example number.

    A setting that the format does not use is an error; daskps/data/formats.py has the table of formats.
    """

    format: str = Field(
        description="Format of the data. csv: text between commas, with a header. libsvm, libffm, multislot: lines of "
        "a label and tokens (index:value, field:index:value, slot:key[:weight]). frame: a Dask DataFrame that is "
        "passed to train. criteo and synthetic need no slots.",
        json_schema_extra={"enum": [*FORMATS]},
    )
    paths: tuple[str, ...] = Field(
        default=(),
        description="Files, globs, directories, fsspec URLs. They are read in this order, within a glob or directory "
        "by name; a file that is named twice is read once. In a directory, names that begin with . or _ are ignored.",
    )
    validation_paths: tuple[str, ...] = Field(
        default=(), description="Files of validation examples, named as in paths; not for synthetic data."
    )
    validation_rows: int = Field(
        default=0, ge=0, description="Synthetic data: number of validation examples, after the training examples."
    )
    synthetic: SyntheticSettings | None = Field(default=None, description="Generated examples, for format synthetic.")
    label: str = Field(default="label", min_length=1, description="Column of the labels.")
    weight: str | None = Field(
        default=None,
        description="Column of example weights, in any unit: a step divides them by its largest weight.",
    )
    dense_integers: bool = Field(
        default=False,
        description="criteo, if the job names no slots: the 13 integers are dense features on a logarithmic scale, as "
        "in DLRM, and not slots.",
    )
    token_weights: bool = Field(
        default=True,
        description="libsvm, libffm, multislot: the value of a token is the weight of its key; false: values are "
        "checked but not used.",
    )
    unknown_slots: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="libffm, multislot: refuse: a token of a slot that the job does not name makes its example bad. "
        "ignore: the token is skipped.",
    )
    hash_seed: int = Field(default=0, ge=0, lt=2**64, description="Seed of the hash that turns values into keys.")
    key_rule: int = Field(
        default=KEY_RULE,
        ge=1,
        le=KEY_RULE,
        description="Version of the rule by which values become keys (daskps.data.schema); a model keeps its rule.",
    )
    osrp: OsrpSettings | None = Field(default=None, description="Second hash, OP+OSRP, of all keys to fewer keys.")
    bad_lines: Literal["strict", "lenient"] = Field(
        default="strict", description="strict: a bad example is an error. lenient: it is skipped and counted."
    )
    bad_share: float = Field(
        default=0.01, ge=0, le=1, description="lenient: a larger fraction of bad examples is an error."
    )
    shuffle_window_rows: int = Field(
        default=0,
        ge=0,
        description="Examples per window; they are shuffled within each window. 0: no shuffling.",
    )

    @pydantic.field_validator("paths", "validation_paths", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str | os.PathLike) else value

    @pydantic.field_validator("format")
    @classmethod
    def _format_known(cls, value: str) -> str:
        if value not in FORMATS:
            raise ValueError(f"there is no such format; {nearest(value, FORMATS)}")
        return value

    @pydantic.model_validator(mode="after")
    def _settings_fit_the_format(self) -> DataSettings:
        known = FORMATS[self.format]
        if known.source == "generated" and self.synthetic is None:
            object.__setattr__(self, "synthetic", SyntheticSettings())
        fields = type(self).model_fields
        others = foreign_settings(self.format).intersection(fields)
        if wrong := sorted(name for name in others if getattr(self, name) != fields[name].default):
            where = "; ".join(f"{name}: {', '.join(formats_with(name))}" for name in wrong)
            raise ValueError(
                f"{self.format} data has no {', '.join(wrong)}; leave {'it' if len(wrong) == 1 else 'them'} out or "
                f"choose another format ({where}). {self.format} data has {', '.join(sorted(known.settings))}"
            )
        if known.source == "files" and not self.paths:
            raise ValueError(f"format {self.format!r} needs paths: files, globs, directories or URLs")
        return self
