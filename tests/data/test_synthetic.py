"""Synthetic CTR data: what example i holds is fixed by (description, i), and labels follow the truth that is told."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import daskps.data.synthetic as synthetic_module
from daskps.data.synthetic import Synthetic, zipf_strength, zipf_table
from daskps.device.compile import LIBRARY_FOLDER, variants
from daskps.device.native import _NEEDS, Library, _cpu_flags
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, ConfigError
from daskps.types import Batch

# --- The twin: one example, in plain Python, from the same formulas. Python's floats are the C doubles. ---

MASK = 2**64 - 1
GOLDEN, STREAMS = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def mix64(x: int) -> int:
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def horner(coefficients: list[float], x: float) -> float:
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def exp(x: float) -> float:
    n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
    return horner([1 / math.factorial(k) for k in range(13, -1, -1)], r) * 2.0**n


def log_mantissa(m: float) -> float:
    s = (m - 1.4142135623730951) / (m + 1.4142135623730951)
    return 0.34657359027997264 + 2.0 * s * horner([1 / k for k in range(21, 0, -2)], s * s)


def quarter_sine(t: float) -> float:
    a = 1.5707963267948966 * t
    return a * horner([(-1) ** (k // 2) / math.factorial(k) for k in range(21, 0, -2)], a * a)


def normal_like(bits: int) -> float:
    return float(sum(bits >> 16 * d & 0xFFFF for d in range(4)) - 131070) * 2.6428997921303014e-05


def uniform_like(bits: int, d: int) -> float:
    return (float(bits >> 16 * d & 0xFFFF) - 32767.5) * 5.285799584260603e-05


class Stream:
    def __init__(self, base: int, number: int) -> None:
        self.state = mix64(base + (number + 1) * STREAMS)

    def next(self) -> int:
        self.state = (self.state + GOLDEN) & MASK
        return mix64(self.state)

    def unit_interval(self) -> float:
        return float(self.next() >> 11) * 2.0**-53


def zipf_index(stream: Stream, ranks: int, exponent: float) -> int:
    table, u = zipf_table(ranks, exponent), stream.next()
    octave = sum(u >= int(bound) for bound in table.upper[: table.last_octave])
    inside = 2**octave if octave < table.last_octave else table.last_ranks
    if inside == 1:
        return 2**octave - 1
    while True:
        offset = stream.next() >> (64 - (inside - 1).bit_length())
        if offset < inside:
            kept = exp(-exponent * log_mantissa(1.0 + float(offset) * 2.0**-octave))
            if stream.unit_interval() < kept:
                return 2**octave - 1 + offset


def turn(config: Synthetic, example: int) -> tuple[float, float]:
    """(cosine, sine) of the weights' turn at an example."""
    turns = float(example) * (1.0 / config.drift_rows)
    quarters = (turns - math.floor(turns)) * 4.0
    up, down = quarter_sine(quarters % 1), quarter_sine(1.0 - quarters % 1)
    return [(down, up), (-up, down), (-down, -up), (up, -down)][int(quarters)]


def twin(config: Synthetic, example: int) -> tuple[list[list[int]], list[np.float32], float, float]:
    """Keys by slot, dense features, true probability and label of one example."""
    seeds = [mix64(config.seed + k * GOLDEN) for k in range(6)]
    base = mix64(seeds[1] + example * GOLDEN)
    means = [(low + high) / 2 for low, high in config.bag_sizes]
    pairs = (sum(means) ** 2 - sum(mean**2 for mean in means)) / 2
    bags, linear, total, within = [], 0.0, [0.0] * 4, 0.0
    for slot, ((low, high), ranks) in enumerate(zip(config.bag_sizes, config.distinct_keys, strict=True)):
        stream, bag, bag_linear, vector = Stream(base, slot), [], 0.0, [0.0] * 4
        count = low if low == high else low + (stream.next() * (high - low + 1) >> 64)
        strength = zipf_strength(ranks, config.zipf_exponent, config.head_keys).tolist()
        for _ in range(count):
            index = zipf_index(stream, ranks, config.zipf_exponent)
            key = index if config.raw_keys else mix64(mix64(index + GOLDEN) ^ mix64((slot + 1) * STREAMS))
            power = strength[(index + 1).bit_length() - 1]
            weight = normal_like(mix64(key ^ seeds[2]))
            if config.drift_rows:
                cosine, sine = turn(config, example)
                weight = cosine * weight + sine * normal_like(mix64(key ^ seeds[3]))
            bag_linear += power * weight
            bits = mix64(key ^ seeds[4])
            if config.interaction_scale and pairs:
                vector = [value + power * uniform_like(bits, d) for d, value in enumerate(vector)]
            bag.append(key)
        bags.append(bag)
        linear += bag_linear
        total = [one + other for one, other in zip(total, vector, strict=True)]
        for value in vector:
            within += value * value
    weight_scale = config.weight_scale / math.sqrt(max(sum(means), 1.0))
    pair_scale = config.interaction_scale / math.sqrt(4 * pairs) if pairs else 0.0
    everything = 0.0
    for value in total:
        everything += value * value
    logit = config.bias + weight_scale * linear + pair_scale * (0.5 * (everything - within))
    stream, dense = Stream(base, config.slots), []
    for j in range(config.dense):
        dense.append(np.float32(normal_like(stream.next())))
        true_weight = normal_like(mix64(seeds[5] + j * GOLDEN)) * (config.dense_scale / math.sqrt(config.dense))
        logit += true_weight * float(dense[-1])
    probability = 1.0 / (1.0 + exp(-min(max(logit, -40.0), 40.0)))
    return bags, dense, probability, float(stream.unit_interval() < probability)


def assert_twin(config: Synthetic, examples: range, pool: ComputePool) -> None:
    batch = config.read(examples.start, examples.stop, pool)
    _, truth = config.truth(examples.start, examples.stop, pool)
    for i, example in enumerate(examples):
        bags, dense, probability, label = twin(config, example)
        bounds = batch.offsets[i * config.slots : (i + 1) * config.slots + 1]
        assert [batch.keys[a:b].tolist() for a, b in itertools.pairwise(bounds)] == bags
        assert truth[i] == probability
        assert batch.labels[i] == label
        if config.dense:
            assert batch.dense is not None
            assert batch.dense[i].tolist() == dense


def assert_equal(one: Batch, other: Batch) -> None:
    for field in dataclasses.fields(Batch):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), strict=True)


MIXED = Synthetic(
    1000,
    slots=5,
    keys_per_bag=(1, (0, 3), 2, (1, 1), (0, 1)),
    keys_per_slot=(1, 2**64, 100, 1000, 3),
    dense=3,
    drift_rows=300,
    seed=2**64 - 1,
)


def configs() -> st.SearchStrategy[Synthetic]:
    def build(draw: st.DrawFn) -> Synthetic:
        slots = draw(st.integers(1, 4))
        size = st.integers(0, 3) | st.tuples(st.integers(0, 2), st.integers(2, 4))
        space = st.integers(1, 2**64) | st.integers(1, 20) | st.sampled_from([2**63, 2**64, 2**64 - 1, 256, 255, 1])
        return Synthetic(
            2**40,
            slots=slots,
            keys_per_bag=tuple(draw(size) for _ in range(slots)),
            keys_per_slot=tuple(draw(space) for _ in range(slots)),
            zipf_exponent=draw(st.sampled_from([0.0, 0.5, 1.0, 1.1, 2.0, 16.0])),
            head_keys=draw(st.sampled_from([0, 1, 16])),
            dense=draw(st.integers(0, 3)),
            bias=draw(st.sampled_from([-2.0, 0.0, 60.0])),
            interaction_scale=draw(st.sampled_from([0.0, 0.7])),
            drift_rows=draw(st.sampled_from([0, 7, 10**6])),
            raw_keys=draw(st.booleans()),
            seed=draw(st.integers(0, 2**64 - 1)),
        )

    return st.composite(build)()


@settings(max_examples=60, deadline=None)
@given(config=configs(), start=st.integers(0, 2**40 - 5))
def test_every_bit_is_the_twins(config: Synthetic, start: int) -> None:
    with ComputePool(1) as pool:
        assert_twin(config, range(start, start + 5), pool)


def test_the_twin_agrees_over_many_examples(pool: ComputePool) -> None:
    assert_twin(MIXED, range(0, 200), pool)


@pytest.mark.parametrize("x", np.linspace(-45, 45, 301))
def test_the_exponential_is_right_to_the_last_digits(x: float) -> None:
    assert exp(x) == pytest.approx(math.exp(x), rel=1e-15)


@pytest.mark.parametrize("t", np.linspace(0, 1, 101))
def test_logarithm_and_sine_are_right_to_the_last_digits(t: float) -> None:
    assert log_mantissa(1 + t) == pytest.approx(math.log(1 + t), rel=1e-15, abs=3e-16)
    assert quarter_sine(t) == pytest.approx(math.sin(math.pi / 2 * t), rel=1e-15)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(100, 400), min_size=1, max_size=5), cores=st.integers(1, 5))
def test_ranges_and_threads_do_not_change_a_bit(cuts: list[int], cores: int) -> None:
    whole = MIXED.read(100, 400)
    with ComputePool(cores) as pool:
        for start, stop in itertools.pairwise([100, *sorted(cuts), 400]):
            assert_equal(MIXED.read(start, stop, pool), whole.slice(start - 100, stop - 100))


def test_the_number_of_examples_does_not_change_an_example() -> None:
    assert_equal(dataclasses.replace(MIXED, examples=50).read(0, 50), MIXED.read(0, 50))


@pytest.mark.parametrize("variant", variants())
def test_every_cpu_variant_gives_the_same_bits(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := _NEEDS.get(variant, set()) - _cpu_flags():
        pytest.skip(f"this CPU lacks {sorted(missing)} for {variant}")
    expected, truth = MIXED.read(0, 500), MIXED.truth(0, 500)[1]
    built = Library(LIBRARY_FOLDER / f"daskps-{variant}.so")
    monkeypatch.setattr(synthetic_module, "library", lambda: built)
    assert_equal(MIXED.read(0, 500), expected)
    np.testing.assert_array_equal(MIXED.truth(0, 500)[1], truth)


def test_golden_values_hold_for_ever() -> None:
    config = Synthetic(10**6, slots=3, keys_per_bag=(1, (1, 3), 1), keys_per_slot=(10, 1000, 2**64), dense=1, seed=42)
    batch = config.read(999_998, 10**6)
    assert batch.offsets.tolist() == GOLDEN_OFFSETS
    assert batch.keys.tolist() == GOLDEN_KEYS
    assert batch.dense is not None
    assert batch.dense.ravel().tolist() == GOLDEN_DENSE
    assert config.truth(999_998, 10**6)[1].tolist() == GOLDEN_TRUTH
    assert int(config.truth(0, 10_000)[0].sum()) == GOLDEN_CLICKS


GOLDEN_OFFSETS = [0, 1, 3, 4, 5, 7, 8]
GOLDEN_KEYS = [
    9680243981952160909,
    8498380634212569639,
    9216465476378195207,
    6959277148596702021,
    7196772784601851963,
    12385114169092153403,
    9216465476378195207,
    13018437037550097824,
]
GOLDEN_DENSE = [-0.0399077869951725, -0.18307366967201233]
GOLDEN_TRUTH = [0.01729110874960879, 0.10938678261638485]
GOLDEN_CLICKS = 1835


# --- Statistics. Bounds are 5 standard deviations or more of fixed seeds: they hold for ever or never. ---


def test_labels_are_calibrated_in_every_band_of_probability(pool: ComputePool) -> None:
    labels, truth = Synthetic(300_000, bias=0.0, seed=5).truth(0, 300_000, pool)
    for band in range(10):
        inside = (truth >= band / 10) & (truth < (band + 1) / 10)
        expected, spread = truth[inside].sum(), math.sqrt((truth[inside] * (1 - truth[inside])).sum())
        assert abs(labels[inside].sum() - expected) < 5 * spread
        assert inside.sum() > 500


def test_scales_are_standard_deviations_of_the_logit(pool: ComputePool) -> None:
    flat = Synthetic(50_000, slots=8, keys_per_bag=3, zipf_exponent=0.2, keys_per_slot=2**64, dense=64)
    alone = {"weight_scale": 0.0, "interaction_scale": 0.0, "dense_scale": 0.0}
    for name in alone:
        config = dataclasses.replace(flat, **(alone | {name: 1.5}))  # type: ignore[arg-type]
        _, truth = config.truth(0, 50_000, pool)
        logits = np.log(truth / (1 - truth))
        assert logits.mean() == pytest.approx(-2.0, abs=0.05)
        assert logits.std() == pytest.approx(1.5, rel=0.15 if name == "dense_scale" else 0.03)


def test_drift_turns_the_weights_around() -> None:
    config = Synthetic(8000, slots=4, interaction_scale=0.0, drift_rows=8000, bias=0.0, zipf_exponent=0.5)
    drifting = config.truth(0, 8000)[1]
    still = dataclasses.replace(config, drift_rows=0).truth(0, 8000)[1]
    drifting, still = np.log(drifting / (1 - drifting)), np.log(still / (1 - still))
    assert drifting[0] == still[0]
    assert drifting[4000] == pytest.approx(-still[4000])
    for example, expected in ((0, 1.0), (1000, math.sqrt(0.5)), (2000, 0.0), (3000, -math.sqrt(0.5)), (6000, 0.0)):
        near = slice(max(example - 200, 0), example + 200)
        assert np.corrcoef(drifting[near], still[near])[0, 1] == pytest.approx(expected, abs=0.15)


def test_slots_do_not_share_hashed_keys() -> None:
    batch = Synthetic(20_000, slots=4, keys_per_slot=5000).read(0, 20_000)
    by_slot = [np.unique(batch.keys[slot::4]) for slot in range(4)]
    assert len(np.unique(np.concatenate(by_slot))) == sum(map(len, by_slot))


# --- The best possible ---


def test_the_best_auc_and_log_loss_are_exact() -> None:
    config = Synthetic(300, slots=1, keys_per_slot=5, zipf_exponent=0.5)  # five keys: many ties
    labels, truth = config.truth(0, 300)
    ones, zeros = truth[labels == 1], truth[labels == 0]
    wins = sum((p > q) + 0.5 * (p == q) for p in ones for q in zeros)
    best = config.best(0, 300)
    assert best.auc == wins / (len(ones) * len(zeros))
    assert best.log_loss == pytest.approx(-np.mean(np.where(labels == 1, np.log(truth), np.log(1 - truth))), rel=1e-12)


def test_the_best_of_the_defaults_is_that_of_a_real_ctr_model(pool: ComputePool) -> None:
    for config in (Synthetic(100_000), Synthetic(100_000, interaction_scale=0.0)):
        assert 0.75 < config.best(0, 100_000, pool).auc < 0.85


def test_blocks_do_not_change_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MIXED.truth(10, 700)
    monkeypatch.setattr(synthetic_module, "_BLOCK_EXAMPLES", 64)
    for one, other in zip(MIXED.truth(10, 700), whole, strict=True):
        np.testing.assert_array_equal(one, other)


# --- Edges ---


def test_an_empty_range_is_an_empty_batch(pool: ComputePool) -> None:
    batch = MIXED.read(7, 7, pool)
    assert (batch.examples, len(batch.keys), batch.offsets.tolist()) == (0, 0, [0])
    assert batch.dense is not None
    assert batch.dense.shape == (0, 3)
    assert all(map(math.isnan, MIXED.best(7, 7)))
    assert len(MIXED.truth(1000, 1000)[0]) == 0


def test_without_both_labels_there_is_no_auc_but_a_loss() -> None:
    best = Synthetic(20, bias=-60.0).best(0, 20)
    assert math.isnan(best.auc)
    assert best.log_loss == pytest.approx(math.exp(-40), rel=1e-6)


@pytest.mark.parametrize("examples", [(-1, 3), (5, 4), (0, 1001)])
def test_examples_outside_are_refused(examples: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="not within the 1000 examples"):
        MIXED.read(*examples)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "at least one slot"),
        ({"drift_rows": -1}, "drift_rows must not be negative, got -1"),
        ({"seed": 2**64}, "64-bit"),
        ({"keys_per_slot": 0}, "1 to 2\\*\\*64 keys"),
        ({"keys_per_slot": 2**64 + 1}, "1 to 2\\*\\*64 keys"),
        ({"zipf_exponent": -0.1}, "lies in 0 .. 16, got -0.1"),
        ({"zipf_exponent": math.nan}, "lies in 0 .. 16, got nan"),
        ({"keys_per_bag": (1, 2)}, "names 2 slots, but there are 16"),
        ({"keys_per_bag": ((3, 2),) * 16}, r"got \(3, 2\)"),
        ({"weight_scale": -1.0}, "scales not negative"),
        ({"bias": math.inf}, "must be finite"),
    ],
)
def test_impossible_descriptions_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Synthetic(10, **settings)  # type: ignore[arg-type]


def test_lists_from_a_job_file_are_taken_as_tuples() -> None:
    config = Synthetic(5, slots=2, keys_per_bag=[1, [2, 3]], keys_per_slot=[5, 6])  # type: ignore[arg-type]
    assert config == Synthetic(5, slots=2, keys_per_bag=(1, (2, 3)), keys_per_slot=(5, 6))
    assert hash(config) == hash(dataclasses.replace(config))


# --- Parquet ---


def test_parquet_holds_every_example(tmp_path: Path, pool: ComputePool) -> None:
    path = tmp_path / "synthetic.parquet"
    MIXED.write_parquet(path, row_group_rows=300, pool=pool)
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [300, 300, 300, 100]
    columns = file.read().to_pydict()
    batch = MIXED.read(0, 1000, pool)
    assert columns["label"] == batch.labels.tolist()
    for slot in range(5):
        bags = [batch.keys[batch.offsets[i * 5 + slot] : batch.offsets[i * 5 + slot + 1]].tolist() for i in range(1000)]
        single = MIXED.bag_sizes[slot] == (1, 1)
        assert columns[f"slot{slot}"] == ([bag[0] for bag in bags] if single else bags)
    assert batch.dense is not None
    for feature in range(3):
        assert columns[f"dense{feature}"] == batch.dense[:, feature].tolist()


def test_parquet_of_no_examples_has_its_columns(tmp_path: Path) -> None:
    Synthetic(0, slots=2).write_parquet(tmp_path / "empty.parquet")
    assert pq.read_table(tmp_path / "empty.parquet").column_names == ["label", "slot0", "slot1"]


def test_an_example_group_needs_examples(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one example"):
        MIXED.write_parquet(tmp_path / "x.parquet", row_group_rows=0)
