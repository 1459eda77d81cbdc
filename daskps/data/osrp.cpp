// One permutation + one sign random projection: a bag of columns becomes the signs of its sums over k bins of columns.
// Sums are exact, so a bag's result does not depend on the order of its keys.
#include "dialect.cuh"

#define ROUNDS 4
#define LIMBS 11  // 32 bits each: floats reach from 2^-149 to 2^128, and 2^31 of them may be added

// A keyed bijection of [0, columns): rounds of add, multiply, fold on the next power of two, walked until inside.
struct Permutation {
    uint64_t last_column, mask;  // columns - 1, and 2^bits - 1 with the fewest bits
    int fold;
    uint64_t add[ROUNDS], multiply[ROUNDS];

    Permutation(uint64_t last_column, uint64_t seed) : last_column(last_column) {
        const int bits = last_column ? 64 - __builtin_clzll(last_column) : 0;
        mask = bits ? ~0ull >> (64 - bits) : 0;
        fold = bits > 1 ? (bits + 1) / 2 : 1;
        for (int round = 0; round < ROUNDS; ++round) {
            add[round] = mix64(seed + (uint64_t)(2 * round + 1) * 0x9e3779b97f4a7c15ull);
            multiply[round] = mix64(seed + (uint64_t)(2 * round + 2) * 0x9e3779b97f4a7c15ull) | 1;
        }
    }

    uint64_t place(uint64_t column) const {
        do {  // less than two walks on average
            for (int round = 0; round < ROUNDS; ++round) {
                column = (column + add[round]) * multiply[round] & mask;
                column ^= column >> fold;
            }
        } while (column > last_column);
        return column;
    }
};

// floor(place * bins / columns): bins of equal width, to within one column where bins does not divide columns.
DEVICE uint64_t bin_of(uint64_t place, uint64_t bins, uint64_t last_column) {
    const unsigned __int128 product = (unsigned __int128)place * bins;
    if (last_column == ~0ull) return (uint64_t)(product >> 64);
    if (product >> 64 == 0) return (uint64_t)product / (last_column + 1);
    return (uint64_t)(product / (last_column + 1));
}

struct Entry {
    uint64_t bin;
    float value;
};

// The sign of a sum of floats, without any rounding: every float is an integer times 2^-149.
DEVICE int exact_sign(const Entry* entries, int64_t count) {
    int64_t limbs[LIMBS] = {};
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, &entries[i].value, sizeof bits);
        const int exponent = (int)(bits >> 23 & 0xff);
        const uint64_t mantissa = (bits & 0x7fffff) | (exponent ? 0x800000 : 0);
        const int place = exponent ? exponent - 1 : 0;  // of the mantissa's lowest bit
        const uint64_t shifted = mantissa << (place & 31);
        const int64_t sign = bits >> 31 ? -1 : 1;
        limbs[place >> 5] += sign * (int64_t)(shifted & 0xffffffff);
        limbs[(place >> 5) + 1] += sign * (int64_t)(shifted >> 32);
    }
    int64_t carry = 0;
    bool any = false;
    for (int limb = 0; limb < LIMBS; ++limb) {
        const int64_t total = limbs[limb] + carry;
        carry = total >> 32;  // rounds down, so what stays is in [0, 2^32)
        any |= (total & 0xffffffff) != 0;
    }
    return carry < 0 ? -1 : any ? 1 : 0;
}

DEVICE int sum_sign(const Entry* entries, int64_t count) {
    double sum = entries[0].value;
    if (count > 2) return exact_sign(entries, count);
    if (count == 2) sum += entries[1].value;  // two terms: the rounded sum has the exact one's sign, and its zero
    return sum > 0 ? 1 : sum < 0 ? -1 : 0;
}

// Sort by bin into `sorted`: first by where the bin should about lie, which leaves bins (uniform, being permuted) almost in
// order, then by insertion. `heads` has room for 2^head_bits + 1 counts.
DEVICE void sort_entries(const Entry* entries, int64_t count, uint64_t bins, Entry* sorted, uint32_t* heads, int head_bits) {
    const int64_t buckets = 1ll << head_bits;
    const double scale = (double)buckets / (double)bins * 0.9999999;
    for (int64_t i = 0; i <= buckets; ++i) heads[i] = 0;
    for (int64_t i = 0; i < count; ++i) ++heads[(int64_t)((double)entries[i].bin * scale) + 1];
    for (int64_t i = 0; i < buckets; ++i) heads[i + 1] += heads[i];
    for (int64_t i = 0; i < count; ++i) sorted[heads[(int64_t)((double)entries[i].bin * scale)]++] = entries[i];
    for (int64_t i = 1; i < count; ++i) {
        const Entry entry = sorted[i];
        int64_t place = i;
        for (; place > 0 && sorted[place - 1].bin > entry.bin; --place) sorted[place] = sorted[place - 1];
        sorted[place] = entry;
    }
}

// Bag b holds keys[offsets[b * stride] .. offsets[(b + 1) * stride]) and goes to the dimensions from 2 * bins * ((first_bag + b) % groups).
// counts (bags) keys come out of each bag, one after the other from hashed[0]; there is room for as many as went in.
// scratch has 32 bytes a key of the largest bag, heads 2^head_bits + 1. Returns -1, or the place of a key outside [0, columns).
NATIVE(int64_t, osrp_hash, const uint64_t* keys, const float* weights, const int64_t* offsets, int64_t stride, int64_t first_bag,
       int64_t bags, int64_t groups, uint64_t last_column, uint64_t bins, uint64_t seed, void* scratch, int64_t scratch_keys,
       uint32_t* heads, uint64_t* hashed, int64_t* counts) {
    const Permutation permutation(last_column, mix64(seed + 0x9e3779b97f4a7c15ull));
    const uint64_t sign_seed = mix64(seed + 2 * 0x9e3779b97f4a7c15ull);
    Entry* const entries = (Entry*)scratch;
    Entry* const sorted = entries + scratch_keys;
    uint64_t* out = hashed;
    for (int64_t b = 0; b < bags; ++b) {
        const int64_t first = offsets[b * stride], count = offsets[(b + 1) * stride] - first;
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t column = keys[first + i];
            if (column > last_column) return first + i;
            const float value = weights ? weights[first + i] : 1.0f;
            const bool minus = mix64(column ^ sign_seed) >> 63;
            entries[i] = Entry{bin_of(permutation.place(column), bins, last_column), minus ? -value : value};
        }
        int head_bits = 0;
        while ((1ll << head_bits) < count) ++head_bits;
        sort_entries(entries, count, bins, sorted, heads, head_bits);
        const uint64_t dimension = 2 * bins * (uint64_t)((first_bag + b) % groups);
        uint64_t* const begin = out;
        for (int64_t i = 0, next; i < count; i = next) {
            for (next = i + 1; next < count && sorted[next].bin == sorted[i].bin;) ++next;
            const int sign = sum_sign(sorted + i, next - i);
            if (sign) *out++ = dimension + 2 * sorted[i].bin + (sign > 0);
        }
        counts[b] = out - begin;
    }
    return -1;
}
