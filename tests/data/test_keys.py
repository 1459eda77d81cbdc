"""The same value in the same slot gives the same key on any machine, forever."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from daskps.data.schema import (
    Slot,
    bucket_bounds,
    bucket_keys,
    bucket_text,
    hash_bytes,
    key_of,
    respelled,
    slot_seed,
    small_buckets,
)
from daskps.errors import ArgumentError
from tests.data import text_twins

# Never change these: models on disk depend on them.
GOLDEN = [
    (Slot(name="C1"), "68fd1e64", 0, 6601481875315734487),
    (Slot(name="C1"), "68fd1e64", 1, 17690371388560088570),
    (Slot(name="C2"), "68fd1e64", 0, 3210591636251440355),
    (Slot(name="C1"), None, 0, 3861981521770203694),
    (Slot(name="C1"), 7, 0, 117724338518205657),
    (Slot(name="C1"), "7", 0, 117724338518205657),
    (Slot(name="C1"), -7, 0, 3072419597912455259),
    (Slot(name="I1", kind="integer"), 0, 0, 17254996829055413444),
    (Slot(name="I1", kind="integer"), -3, 0, 937735933503213948),
    (Slot(name="I1", kind="integer"), 2, 0, 10548877327734501853),
    (Slot(name="I1", kind="integer"), 3, 0, 17481512401942014629),
    (Slot(name="I1", kind="integer"), 4, 0, 17481512401942014629),
    (Slot(name="I1", kind="integer"), 5, 0, 7539723457032806649),
    (Slot(name="I1", kind="integer"), 2**63 - 1, 0, 3785979637278154378),
    (Slot(name="I1", kind="integer"), None, 0, 11878573713742349498),
    (Slot(name="tags", kind="multi"), "Käse und Brot, dreißig Zeichen und mehr", 2**64 - 1, 10741230512557981636),
    (Slot(name="tags", kind="multi"), b"\xff\x00\xfe", 0, 7953152548576713882),
    (Slot(name="id", raw=True), 2**64 - 1, 5, 2**64 - 1),
    (Slot(name="id", raw=True), -1, 5, 2**64 - 1),
    (Slot(name="id", raw=True), 0, 5, 0),
]


@pytest.mark.parametrize(("slot", "value", "seed", "key"), GOLDEN)
def test_golden_keys(slot: Slot, value: str | bytes | int | None, seed: int, key: int) -> None:
    assert key_of(value, slot, seed) == key


# What key rule 1 gave before there was another (commit c861977); models of then depend on it.
RULE_1 = {
    "52.0": 2876072072295825126,
    "52": 16701274396816987075,
    "True": 12292402506360771874,
    "true": 12804127419588818727,
    "False": 4380661191224269775,
    "-0.0": 1049425484693132506,
    "052.0": 5076631989287704064,
    "1e3": 850860070427851881,
    52: 16701274396816987075,
    "0": 8110704648623847893,
}


@pytest.mark.parametrize(("value", "key"), RULE_1.items())
def test_key_rule_1_still_gives_the_keys_of_then(value: str | int, key: int) -> None:
    assert key_of(value, Slot(name="a"), 3, key_rule=1) == key


@pytest.mark.parametrize(("slot", "value", "seed", "key"), GOLDEN)
def test_values_that_are_neither_whole_floats_nor_booleans_have_one_key_by_both_rules(
    slot: Slot, value: str | bytes | int | None, seed: int, key: int
) -> None:
    assert key_of(value, slot, seed, key_rule=1) == key_of(value, slot, seed, key_rule=2) == key


SPELLINGS = {
    b"52": (b"52.0", b"52.00", b"5.2e+01", b"5.2E1", b"52e+0", b"52.0e+00"),
    b"-7": (b"-7.0", b"-7.000000e+00"),
    b"0": (b"0.0", b"-0.0", b"-0", b"false", b"False", b"FALSE", b"0e+99", b"-0.000"),
    b"1": (b"1.0", b"true", b"True", b"TRUE", b"1.000000000000000e+00"),
    b"16777216": (b"1.6777216e+07", b"16777216.0", b"1.6777216E7"),
    b"9007199254740991": (b"9007199254740991.0", b"9.007199254740991e+15"),
    b"1000000000000000": (b"1e+15", b"1.0E15"),
}
OTHERS = (
    *(b"", b".", b"+", b"-", b"-0.", b"0.", b".0", b"e+1", b"1e+", b"+7", b"+7.0", b"052", b"052.0", b"1e3", b"12e5"),
    *(b"5e-1", b"50e-1", b"50.0e-1", b"1.5", b"1.55e+1", b"1.0.0", b"1.0 ", b" 1.0", b"1,0", b"0x1.0", b"--1.0"),
    *(b"NaN", b"nan", b"inf", b"None", b"yes", b"tRUE", b"trUe", b"truE", b"Truex", b"tru", b"fALSE", b"falsE", b"T"),
    *(b"9007199254740992.0", b"9.007199254740992e+15", b"1e+16", b"1e+400", b"1.0e99999999999999", b"68fd1e64"),
    *(b"1." + b"0" * 31, b"abcdefgh-0", b"abcdefghtrue"),
)


def test_whole_floats_and_booleans_are_the_integer_by_key_rule_2() -> None:
    for integer, spellings in SPELLINGS.items():
        assert respelled(integer) == integer
        for spelling in spellings:
            assert respelled(spelling) == integer, spelling
            assert key_of(spelling, Slot(name="a")) == key_of(int(integer), Slot(name="a")), spelling
            assert key_of(spelling, Slot(name="a", raw=True)) == int(integer) % 2**64
            assert key_of(spelling, Slot(name="a", kind="integer")) == key_of(
                int(integer), Slot(name="a", kind="integer")
            )


def test_all_other_text_is_hashed_as_it_stands() -> None:
    for text in OTHERS:
        assert respelled(text) == text, text
    assert respelled(b"1." + b"0" * 30) == b"1"  # 32 characters


@given(
    st.one_of(st.text("0123456789.+-eE", max_size=34), st.text("TtRrUuEeFfAaLlSs", max_size=6), st.floats().map(repr))
)
@example("0.1e+1")
@example("0e+1000")
@example("1.0e+000000000000000000000")
def test_the_spellings_are_those_of_the_plain_twin(value: str) -> None:
    assert respelled(value.encode()) == text_twins.respelled(value.encode())


def test_floats_and_booleans_have_the_keys_of_their_columns() -> None:
    slot = Slot(name="a")
    assert key_of(52.0, slot) == key_of(52, slot)
    assert key_of(-0.0, slot) == key_of(0, slot)
    assert key_of(True, slot) == key_of(1, slot) == key_of(np.True_, slot)
    assert key_of(float("nan"), slot) == key_of(None, slot)
    for value in (0.5, 2.0**53, float("inf")):
        with pytest.raises(ArgumentError, match="a float must be a whole number"):
            key_of(value, slot)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
@example(b"", 0)
@example(b"x" * 31, 1)
@example(b"x" * 32, 1)
@example(bytes(range(256)) * 9, 2**64 - 1)
def test_our_hash_is_the_librarys(value: bytes, seed: int) -> None:
    assert hash_bytes(value, seed) == xxhash.xxh64_intdigest(value, seed)


def test_the_slot_and_the_jobs_seed_are_part_of_a_key() -> None:
    keys = {key_of("a", Slot(name=name), seed) for name in ("C1", "C2") for seed in (0, 1)}
    assert len(keys) == 4
    assert slot_seed(3, "C1") == xxhash.xxh64_intdigest(b"C1", 3)


@given(st.integers(3, 2**63 - 1))
@example(3)
@example(2**63 - 1)
def test_buckets_are_the_squared_logarithm_exactly(value: int) -> None:
    with localcontext(prec=60):
        assert bucket_text(value) == b"%d" % int(Decimal(value).ln() ** 2)


def test_every_boundary_of_a_bucket_is_exact() -> None:
    with localcontext(prec=60):
        for bucket, bound in enumerate(bucket_bounds().tolist()):
            assert int(Decimal(bound).ln() ** 2) == bucket
            assert bound == 1 or int(Decimal(bound - 1).ln() ** 2) == bucket - 1


def test_the_table_of_small_buckets_agrees_with_the_bounds() -> None:
    values = np.arange(3, 65536)
    np.testing.assert_array_equal(small_buckets()[3:], np.searchsorted(bucket_bounds(), values, side="right") - 1)


def test_the_table_of_bucket_keys_agrees_with_hashing_their_text() -> None:
    texts = ["SP0", "SP1", "SP2", *map(str, range(len(bucket_bounds())))]
    wanted = [xxhash.xxh64_intdigest(text.encode(), 77) for text in texts]
    assert bucket_keys(77).tolist() == wanted


def test_a_raw_slot_has_no_key_for_a_missing_value() -> None:
    with pytest.raises(ArgumentError, match="no key for a missing value"):
        key_of(None, Slot(name="id", raw=True))
