// The gradient of a row as a sum of fixed-point numbers: 64-bit integers in units of 2^-36. Integer addition is
// associative, so the sum has the same bits for any order, any number of threads, devices and nodes.
//
// A contribution g becomes an integer by one double addition: g + 1.5 * 2^16 has g, rounded to units of 2^-36, in its low
// bits, and its upper 12 bits are 0x40f exactly if |g| < 2^15; NaN and infinity fail that test too. Up to 1024
// contributions add up to less than 2^61; a longer sum is tested after every 1024, so an overflow is always detected.
#pragma once
#include "pooling.cuh"

enum { BAD_CONTRIBUTION = 1, BAD_SUM = 2, BAD_ROW = 4 };  // bits of the status word
enum { CHUNK = 1024 };

#define FIXED_MAGIC 98304.0  // 1.5 * 2^16: a double of this size counts in units of 2^-36
#define FIXED_MAGIC_BITS 0x40f8000000000000ull
#define FIXED_RANGE_BITS 0x40f0000000000000ull
#define FIXED_SUM_LIMIT ((uint64_t)1 << 61)

// Index of the error word for register k: one word per register on the CPU, so that vector code needs no reduction; a
// single one on the GPU.
#define FOUND(k) (ON_CPU ? (k) : 0)
#define COLLECTED(dims) (ON_CPU ? (dims) : 1)

struct Source {       // the gradient of the pooled output on one device
    uint64_t values;  // address of float[examples][stride]
    int64_t first_bag;
};

struct Gradient {
    const float* values;    // if one device has all gradients, without gaps; else null
    const Source* sources;  // (source_count,) in the order of their bags
    int32_t source_count, slots;
    int64_t stride, column;
    const int32_t* starts;      // (touched + 1,)
    const int32_t* bags;        // (occurrences,) grouped by row
    const float* coefficients;  // (occurrences,) or null: all one
};

DEVICE Gradient make_gradient(const Source* sources, int32_t source_count, int32_t slots, int64_t stride, int64_t column,
                              const int32_t* starts, const int32_t* bags, const float* coefficients, int32_t D) {
    const bool plain = source_count == 1 && stride == (int64_t)slots * D;
    const float* values = plain ? (const float*)sources->values + column : (const float*)0;
    return {values, sources, source_count, slots, stride, column, starts, bags, coefficients};
}

DEVICE const float* bag_gradient(const Gradient& g, int64_t bag, int32_t D) {
    if (g.values) return g.values + bag * D;
    int32_t source = 0;
    while (source + 1 < g.source_count && bag >= g.sources[source + 1].first_bag) ++source;
    const int64_t local = bag - g.sources[source].first_bag;
    return (const float*)g.sources[source].values + bag_offset(local, g.slots, g.stride, D) + g.column;
}

DEVICE bool sum_too_large(uint64_t sum) { return sum + FIXED_SUM_LIMIT > 2 * FIXED_SUM_LIMIT; }

// Adds the contributions of occurrences [first, last), at most CHUNK of them; `wrong` collects the range test.
template <int MAX>
DEVICE void add_chunk(int32_t D, const Gradient& g, int64_t first, int64_t last, int64_t ahead_end, uint64_t* sum,
                      uint64_t* wrong) {
    const uint64_t offset = (uint64_t)(last - first) * FIXED_MAGIC_BITS;
    FOR_DIMS(d, k) sum[k] -= offset;
    for (int64_t i = first; i < last; ++i) {
#if ON_CPU
        if (i + PREFETCH_AHEAD < ahead_end) {
            const float* ahead = bag_gradient(g, g.bags[i + PREFETCH_AHEAD], D);
            PREFETCH_RUN(ahead, D);
        }
#endif
        const float* values = bag_gradient(g, g.bags[i], D);
        if (g.coefficients) {
            const float coefficient = g.coefficients[i];
            FOR_DIMS(d, k) {
                const uint64_t bits = DOUBLE_BITS((double)(coefficient * values[d]) + FIXED_MAGIC);
                sum[k] += bits;
                wrong[FOUND(k)] |= bits ^ FIXED_RANGE_BITS;
            }
        } else {
            FOR_DIMS(d, k) {
                const uint64_t bits = DOUBLE_BITS((double)values[d] + FIXED_MAGIC);
                sum[k] += bits;
                wrong[FOUND(k)] |= bits ^ FIXED_RANGE_BITS;
            }
        }
    }
}

// Errors in the rows of one thread: collected without branches, evaluated once by `status_of`.
template <int MAX>
struct Findings {
    uint64_t wrong[COLLECTED(MAX)];    // range test of the contributions: an upper bit is set if one is out of range
    uint32_t largest[COLLECTED(MAX)];  // largest magnitude of new embeddings, as bits; infinity and NaN are the largest
    int32_t status;
};

template <int MAX>
DEVICE void clear_findings(Findings<MAX>& f) {
    for (int k = 0; k < COLLECTED(MAX); ++k) f.wrong[k] = 0;
    for (int k = 0; k < COLLECTED(MAX); ++k) f.largest[k] = 0;
    f.status = 0;
}

template <int MAX>
DEVICE int32_t status_of(const Findings<MAX>& f) {
    uint64_t wrong = 0;
    uint32_t largest = 0;
    for (int k = 0; k < COLLECTED(MAX); ++k) wrong |= f.wrong[k];
    for (int k = 0; k < COLLECTED(MAX); ++k) largest = f.largest[k] > largest ? f.largest[k] : largest;
    return f.status | (wrong >> 52 ? BAD_CONTRIBUTION : 0) | (largest >= 0x7f800000u ? BAD_ROW : 0);
}

// Writes the sum over occurrences [first, last) to `sum`.
template <int MAX>
DEVICE void sum_occurrences(int32_t D, const Gradient& g, int64_t first, int64_t last, int64_t ahead_end, uint64_t* sum,
                            Findings<MAX>& findings) {
    FOR_DIMS(d, k) sum[k] = 0;
    for (int64_t chunk = first; chunk < last; chunk += CHUNK) {
        const int64_t end = chunk + CHUNK < last ? chunk + CHUNK : last;
        add_chunk<MAX>(D, g, chunk, end, ahead_end, sum, findings.wrong);
        if (last - first > CHUNK) FOR_DIMS_IN_TURN(d, k) if (sum_too_large(sum[k])) findings.status = BAD_SUM;
    }
}
