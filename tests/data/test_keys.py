"""The same value in the same slot gives the same key on any machine, forever."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from daskps.data.keys import bucket_bounds, bucket_keys, bucket_text, hash_bytes, key_of, slot_seed, small_buckets
from daskps.data.schema import Slot
from daskps.errors import ArgumentError

# Never change these: models on disk depend on them.
GOLDEN = [
    (Slot("C1"), "68fd1e64", 0, 6601481875315734487),
    (Slot("C1"), "68fd1e64", 1, 17690371388560088570),
    (Slot("C2"), "68fd1e64", 0, 3210591636251440355),
    (Slot("C1"), None, 0, 3861981521770203694),
    (Slot("C1"), 7, 0, 117724338518205657),
    (Slot("C1"), "7", 0, 117724338518205657),
    (Slot("C1"), -7, 0, 3072419597912455259),
    (Slot("I1", kind="integer"), 0, 0, 17254996829055413444),
    (Slot("I1", kind="integer"), -3, 0, 937735933503213948),
    (Slot("I1", kind="integer"), 2, 0, 10548877327734501853),
    (Slot("I1", kind="integer"), 3, 0, 17481512401942014629),
    (Slot("I1", kind="integer"), 4, 0, 17481512401942014629),
    (Slot("I1", kind="integer"), 5, 0, 7539723457032806649),
    (Slot("I1", kind="integer"), 2**63 - 1, 0, 3785979637278154378),
    (Slot("I1", kind="integer"), None, 0, 11878573713742349498),
    (Slot("tags", kind="multi"), "Käse und Brot, dreißig Zeichen und mehr", 2**64 - 1, 10741230512557981636),
    (Slot("tags", kind="multi"), b"\xff\x00\xfe", 0, 7953152548576713882),
    (Slot("id", raw=True), 2**64 - 1, 5, 2**64 - 1),
    (Slot("id", raw=True), -1, 5, 2**64 - 1),
    (Slot("id", raw=True), 0, 5, 0),
]


@pytest.mark.parametrize(("slot", "value", "seed", "key"), GOLDEN)
def test_golden_keys(slot: Slot, value: str | bytes | int | None, seed: int, key: int) -> None:
    assert key_of(value, slot, seed) == key


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
@example(b"", 0)
@example(b"x" * 31, 1)
@example(b"x" * 32, 1)
@example(bytes(range(256)) * 9, 2**64 - 1)
def test_our_hash_is_the_librarys(value: bytes, seed: int) -> None:
    assert hash_bytes(value, seed) == xxhash.xxh64_intdigest(value, seed)


def test_the_slot_and_the_jobs_seed_are_part_of_a_key() -> None:
    keys = {key_of("a", Slot(name), seed) for name in ("C1", "C2") for seed in (0, 1)}
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
        key_of(None, Slot("id", raw=True))
