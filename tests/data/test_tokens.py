"""libsvm, libffm and multi-slot text are read as a plain Python twin reads them."""

from pathlib import Path

import pytest
from file_checks import check
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_twins import BadLineError, Row, lines_of, token_row

from daskps.backend.pool import ComputePool
from daskps.data.keys import key_of
from daskps.data.schema import Dense, Schema, Slot
from daskps.data.source import Source
from daskps.data.tokens import Tokens
from daskps.errors import ConfigError

SCHEMAS = {
    "libsvm": Schema((Slot("features", kind="multi"),)),
    "libffm": Schema((Slot("user", "0"), Slot("item", "1", raw=True), Slot("shop", "12", missing="key"))),
    "slots": Schema(
        (
            Slot("user"),
            Slot("query", "q", kind="multi", missing="key"),
            Slot("n", kind="integer"),
            Slot("id", raw=True),
            Slot("käse"),
        )
    ),
}
numbers = st.one_of(
    st.integers(0, 2**66).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.sampled_from(["1", "0.5", "-1", "inf", "nan", "", "1e39", "1e-46", "x", "1.", "0x1"]),
).map(str.encode)
names = st.sampled_from(["0", "1", "12", "user", "q", "n", "id", "käse", "other", ""]).map(str.encode)
keys = st.one_of(
    numbers,
    st.integers(-(2**65), 2**65).map(lambda x: b"%d" % x),
    st.binary(min_size=1, max_size=9).map(lambda x: x.translate(None, b"\n \t:\r") or b"k"),
)
labels = st.sampled_from([b"0", b"1", b"-1", b"+1", b"1.0", b"2", b"", b"a:b"])


def tokens(style: str) -> st.SearchStrategy[bytes]:
    parts = {
        "libsvm": st.tuples(st.integers(0, 2**70).map(lambda x: b"%d" % x), numbers),
        "libffm": st.tuples(names, st.integers(0, 2**63).map(lambda x: b"%d" % x), numbers),
        "slots": st.one_of(st.tuples(names, keys), st.tuples(names, keys, numbers)),
    }[style]
    wild = st.lists(st.one_of(names, keys, numbers), max_size=4)
    return st.one_of(parts, parts, parts, wild).map(b":".join)


def good_tokens(style: str) -> st.SearchStrategy[bytes]:
    """Tokens that are right, so that most lines are, too."""
    digits, value = st.integers(0, 2**63 - 1).map(lambda x: b"%d" % x), st.sampled_from([b"1", b"0.25", b"-2e3"])
    parts = {
        "libsvm": st.tuples(digits, value),
        "libffm": st.tuples(st.sampled_from([b"0", b"1", b"12"]), digits, value),
        "slots": st.one_of(
            st.tuples(st.sampled_from([b"user", b"q", b"n", b"id", "käse".encode()]), digits),
            st.tuples(st.sampled_from([b"user", b"q"]), st.sampled_from([b"red", b"\xff"]), value),
        ),
    }[style]
    return parts.map(b":".join)


@st.composite
def texts(draw: st.DrawFn, style: str) -> bytes:
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    lines = []
    for _ in range(draw(st.integers(0, 10))):
        bad = draw(st.integers(0, 3)) == 0
        label = draw(labels) if bad else draw(st.sampled_from([b"0", b"1"]))
        line = draw(st.lists(tokens(style) if bad else good_tokens(style), max_size=8))
        gap = draw(st.sampled_from([b" ", b"\t", b"  "]))
        lines.append(gap.join([label, *line]) + (gap if draw(st.booleans()) else b""))
    return end.join(lines) + (end if draw(st.booleans()) else b"")


@pytest.mark.parametrize("style", ["libsvm", "libffm", "slots"])
def test_any_tokens_are_read_as_the_twin_reads_them(
    style: str, tmp_path_factory: pytest.TempPathFactory, pool: ComputePool
) -> None:
    @settings(max_examples=200, deadline=None)
    @given(texts(style), st.booleans(), st.sampled_from([16, 64, 4096]), st.integers(0, 2**64 - 1))
    @example(b"1\r\n0 \r\n\r\n1", False, 64, 0)
    @example(b"1 1:2:3 user:a:1:2", False, 64, 0)
    def fuzz(text: bytes, ignore: bool, block_bytes: int, seed: int) -> None:
        schema = SCHEMAS[style]
        rows: list[Row | BadLineError] = []
        for line in lines_of(text):
            try:
                rows.append(token_row(line, schema, style, ignore, seed))
            except BadLineError as bad:
                rows.append(bad)
        path = tmp_path_factory.mktemp("fuzz") / "rows.txt"
        format = Tokens(style, ignore_unknown_slots=ignore, block_bytes=block_bytes)
        check(path, text, Source([str(path)], format, schema, seed), rows, pool, unit="token")

    fuzz()


def test_a_file_without_line_ends_is_still_one_line(tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.txt").write_bytes(b"1 3:0.5 7:2")
    source = Source([str(tmp_path)], Tokens("libsvm"), SCHEMAS["libsvm"])
    with source.open(source.index(), pool) as reader:
        batch = reader.read(0, 1)
    assert batch.keys.tolist() == [key_of(3, SCHEMAS["libsvm"].slots[0]), key_of("7", SCHEMAS["libsvm"].slots[0])]
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 2.0]


def test_weights_can_be_left_out(tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.txt").write_bytes(b"1 3:1 7:1\n")
    source = Source([str(tmp_path)], Tokens("libsvm", weights=False), SCHEMAS["libsvm"])
    with source.open(source.index(), pool) as reader:
        assert reader.read(0, 1).weights is None


def test_what_token_text_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"1 3:1\n")
    for format, schema, words in [
        (Tokens("slots"), Schema((Slot("a"),), (Dense("price"),)), r"no columns, but the schema names \['price'\]"),
        (Tokens("libsvm"), Schema((Slot("a"), Slot("b"))), "one slot, not"),
        (Tokens("slots"), Schema((Slot("a"), Slot("b", "a"))), "two slots read the same tokens"),
        (Tokens("libsvm"), SCHEMAS["libsvm"].unlabelled(), "libsvm text begin with a label, .* write a 0"),
        (Tokens("libffm"), SCHEMAS["libffm"].unlabelled(), "libffm text begin with a label, .* write a 0"),
        (Tokens("slots"), SCHEMAS["slots"].unlabelled(), "slots text begin with a label, .* write a 0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Source([str(tmp_path)], format, schema).index()
