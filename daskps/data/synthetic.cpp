// Synthetic CTR examples. Example i is a function of (seed, i): random numbers are hashes of counters, and the arithmetic
// uses only + - * /. So the bits are the same on every machine, for any number of threads and any division of the examples.
#include "portable.cuh"

#define GOLDEN 0x9e3779b97f4a7c15ull   // the increment of SplitMix64
#define STREAMS 0xd1342543de82ef95ull  // an odd factor that separates the streams of one example
#define OCTAVES 65                     // ranks 1 .. 2^64 lie in octaves [2^j, 2^(j+1)), j = 0 .. 64
#define VECTOR 4                       // dimensions of a hidden vector: one hash holds four 16-bit numbers

struct Stream {
    uint64_t state;
    uint64_t next() {
        state += GOLDEN;
        return mix64(state);
    }
};

DEVICE uint64_t example_base(uint64_t seed, uint64_t example) { return mix64(mix64(seed + GOLDEN) + example * GOLDEN); }
DEVICE Stream example_stream(uint64_t base, uint64_t id) { return Stream{mix64(base + (id + 1) * STREAMS)}; }
DEVICE double unit_interval(uint64_t bits) { return (double)(bits >> 11) * 1.1102230246251565e-16; }

// Returns the sum of four uniform 16-bit numbers, scaled to mean 0 and variance 1: bell-shaped, within +-3.47.
DEVICE double normal_like(uint64_t bits) {
    const int64_t sum = (int64_t)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return (double)(sum - 131070) * 2.6428997921303014e-05;
}

// Returns the d-th uniform 16-bit number, scaled to mean 0 and variance 1.
DEVICE double uniform_like(uint64_t bits, int d) {
    return ((double)(int64_t)(bits >> 16 * d & 0xffff) - 32767.5) * 5.285799584260603e-05;
}

// Tests u < (1 + f)^-exponent for f in [0, 1). The power is convex: its chord lies above it and its tangent at 1/2 below.
// At exponent 1 these two lines decide 9 of 10 tests; the margin of 1e-9 makes them decide as the power would.
struct Fall {
    double exponent, chord, middle, slope;

    explicit Fall(double exponent) : exponent(exponent) {
        chord = 1.0 - portable_exp(-exponent * 0.6931471805599453);
        middle = portable_exp(-exponent * 0.4054651081081644);
        slope = middle * exponent / 1.5;
    }

    bool keeps(double u, double f) const {
        if (u < middle - slope * (f - 0.5) - 1e-9) return true;
        if (u > 1.0 - chord * f + 1e-9) return false;
        return u < portable_exp(-exponent * portable_log_mantissa(1.0 + f));
    }
};

// Zipf sampler of one slot, with the tables of `ZipfTable` (synthetic.py): P(rank) ~ rank^-exponent for ranks 1 .. n.
struct Zipf {
    const uint64_t* upper;  // (OCTAVES) 2^64 * P(octave <= j)
    const uint8_t* guide;   // (256) lowest octave that a draw with these top 8 bits can fall into
    int last;               // the last octave; it has `last_ranks` ranks
    uint64_t last_ranks;
    Fall fall;

    // Draws a rank and returns rank - 1: the octave by inversion, in it a uniform rank 2^j (1 + f), which is accepted with
    // probability (1 + f)^-exponent.
    uint64_t draw(Stream& stream) const {
        const uint64_t u = stream.next();
        int octave = guide[u >> 56];
        while (octave < last && u >= upper[octave]) ++octave;
        const uint64_t first = octave < 64 ? 1ull << octave : 0;  // octave 64 has only rank 2^64, whose index is 0 - 1
        const uint64_t ranks = octave < last ? first : last_ranks;
        if (ranks == 1) return first - 1;
        const int shift = __builtin_clzll(ranks - 1);
        const double scale = BITS_DOUBLE((uint64_t)(1023 - octave) << 52);
        for (;;) {
            const uint64_t offset = stream.next() >> shift;
            if (offset >= ranks) continue;  // happens only in an incomplete last octave, for less than half of the draws
            if (fall.keeps(unit_interval(stream.next()), (double)offset * scale)) return first - 1 + offset;
        }
    }
};

DEVICE int octave_of(uint64_t index) { return index == ~0ull ? 64 : 63 - __builtin_clzll(index + 1); }

DEVICE int64_t bag_size(Stream& stream, int32_t low, int32_t high) {
    return low == high ? low : low + (int64_t)MULTIPLY_HIGH(stream.next(), (uint64_t)(high - low) + 1);
}

// Drift: the true weight of a key at an example is cosine * w(key) + sine * w'(key), with a period of
// 1 / turns_per_example examples.
struct Turn {
    double cosine, sine;
};

DEVICE Turn turn_at(uint64_t example, double turns_per_example) {
    const double turns = (double)example * turns_per_example;
    const double quarters = (turns - (double)(int64_t)turns) * 4.0;
    const int quarter = (int)quarters;
    const double up = portable_quarter_sine(quarters - quarter);
    const double down = portable_quarter_sine(1.0 - (quarters - quarter));
    if (quarter == 0) return Turn{down, up};
    if (quarter == 1) return Turn{-up, down};
    if (quarter == 2) return Turn{-down, -up};
    return Turn{up, -down};
}

// counts (examples * slots): keys in each bag.
NATIVE(void, synth_count, uint64_t seed, uint64_t first_example, int64_t examples, int64_t slots, const int32_t* low,
       const int32_t* high, int64_t* counts) {
    for (int64_t i = 0; i < examples; ++i) {
        const uint64_t base = example_base(seed, first_example + (uint64_t)i);
        for (int64_t s = 0; s < slots; ++s) {
            Stream stream = example_stream(base, (uint64_t)s);
            counts[i * slots + s] = bag_size(stream, low[s], high[s]);
        }
    }
}

// Sums of the true weights and of the hidden vectors of one bag.
struct BagTruth {
    double linear;
    double vector[VECTOR];
};

struct Truth {
    uint64_t weight_seed, turn_seed, vector_seed;
    bool turning, pairs;

    void add(BagTruth& bag, uint64_t key, double strength, Turn turn) const {
        double weight = normal_like(mix64(key ^ weight_seed));
        if (turning) weight = turn.cosine * weight + turn.sine * normal_like(mix64(key ^ turn_seed));
        bag.linear += strength * weight;
        if (!pairs) return;
        const uint64_t bits = mix64(key ^ vector_seed);
        for (int d = 0; d < VECTOR; ++d) bag.vector[d] += strength * uniform_like(bits, d);
    }
};

// Generates examples. `offsets` (examples * slots + 1,) says where the keys of each bag go in `keys`; both, and `dense`,
// may be null. Labels (examples,) are drawn with the true `probabilities` (examples,).
NATIVE(void, synth_fill, uint64_t seed, uint64_t first_example, int64_t examples, int64_t slots, const int32_t* low,
       const int32_t* high, const uint64_t* upper, const uint8_t* guide, const int32_t* last, const uint64_t* last_ranks,
       const double* strength, double exponent, int32_t raw, double bias, double weight_scale, double pair_scale,
       double turns_per_example, int64_t dense_features, const double* dense_weights, const int64_t* offsets, uint64_t* keys, float* dense,
       float* labels, double* probabilities) {
    const Truth truth{mix64(seed + 2 * GOLDEN), mix64(seed + 3 * GOLDEN), mix64(seed + 4 * GOLDEN), turns_per_example != 0.0,
                      pair_scale != 0.0};
    const Fall fall(exponent);
    for (int64_t i = 0; i < examples; ++i) {
        const uint64_t example = first_example + (uint64_t)i;
        const uint64_t base = example_base(seed, example);
        const Turn turn = truth.turning ? turn_at(example, turns_per_example) : Turn{1.0, 0.0};
        double linear = 0.0, total[VECTOR] = {}, within = 0.0;
        for (int64_t s = 0; s < slots; ++s) {
            Stream stream = example_stream(base, (uint64_t)s);
            const int64_t count = bag_size(stream, low[s], high[s]);
            const Zipf zipf{upper + s * OCTAVES, guide + s * 256, last[s], last_ranks[s], fall};
            const uint64_t slot_seed = mix64((uint64_t)(s + 1) * STREAMS);
            uint64_t* out = keys ? keys + offsets[i * slots + s] : nullptr;
            BagTruth bag{};
            for (int64_t k = 0; k < count; ++k) {
                const uint64_t index = zipf.draw(stream);
                const uint64_t key = raw ? index : mix64(mix64(index + GOLDEN) ^ slot_seed);
                if (out) out[k] = key;
                truth.add(bag, key, strength[s * OCTAVES + octave_of(index)], turn);
            }
            linear += bag.linear;
            for (int d = 0; d < VECTOR; ++d) {
                total[d] += bag.vector[d];
                within += bag.vector[d] * bag.vector[d];
            }
        }
        double all = 0.0;  // |sum of vectors|^2 - sum of |vector|^2 = twice the inner products over pairs of slots
        for (int d = 0; d < VECTOR; ++d) all += total[d] * total[d];
        double logit = bias + weight_scale * linear + pair_scale * (0.5 * (all - within));
        Stream rest = example_stream(base, (uint64_t)slots);
        for (int64_t j = 0; j < dense_features; ++j) {
            const float value = (float)normal_like(rest.next());
            if (dense) dense[i * dense_features + j] = value;
            logit += dense_weights[j] * (double)value;
        }
        const double bounded = logit < -40.0 ? -40.0 : logit > 40.0 ? 40.0 : logit;
        probabilities[i] = 1.0 / (1.0 + portable_exp(-bounded));
        labels[i] = unit_interval(rest.next()) < probabilities[i] ? 1.0f : 0.0f;
    }
}

// normals (count): bell-shaped, mean 0 and variance 1; the true weights of the dense features.
NATIVE(void, synth_normals, uint64_t seed, int64_t count, double* normals) {
    for (int64_t i = 0; i < count; ++i) normals[i] = normal_like(mix64(mix64(seed + 5 * GOLDEN) + (uint64_t)i * GOLDEN));
}
