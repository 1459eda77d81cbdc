// OP+OSRP (one permutation, one sign random projection): adds up the signed values of a bag in each of k bins of columns
// and keeps the signs of the sums. Sums are exact, so the result does not depend on the order of the keys.
#include "dialect.cuh"

#define ROUNDS 4
#define LIMBS 11  // of 32 bits: floats range from 2^-149 to 2^128, and 2^31 of them may be added

// A keyed bijection of [0, columns): rounds of add, multiply and xor-shift modulo the next power of two, repeated until the
// result is below `columns` (cycle walking).
struct Permutation {
    uint64_t last_column, mask;  // columns - 1, and the smallest 2^bits - 1 that is not below it
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
        do {  // fewer than two repetitions on average
            for (int round = 0; round < ROUNDS; ++round) {
                column = (column + add[round]) * multiply[round] & mask;
                column ^= column >> fold;
            }
        } while (column > last_column);
        return column;
    }
};

// Returns floor(place * bins / columns). All bins have the same width, or differ by one column.
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

// Returns the sign of the exact sum of floats: every float is an integer times 2^-149.
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
        carry = total >> 32;  // rounds down, so the rest is in [0, 2^32)
        any |= (total & 0xffffffff) != 0;
    }
    return carry < 0 ? -1 : any ? 1 : 0;
}

DEVICE int sum_sign(const Entry* entries, int64_t count) {
    double sum = entries[0].value;
    if (count > 2) return exact_sign(entries, count);
    if (count == 2) sum += entries[1].value;  // the rounded sum of two floats has the sign of the exact one
    return sum > 0 ? 1 : sum < 0 ? -1 : 0;
}

// Sorts entries by bin: a bucket sort, after which they are almost in order (permuted bins are uniform), then an insertion
// sort. `heads` (2^head_bits + 1) is scratch.
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

// Hashes bags. Bag b has keys[offsets[b * stride] .. offsets[(b + 1) * stride]); its dimensions begin at
// 2 * bins * ((first_bag + b) % groups). Writes the keys of all bags to `hashed` (as large as the input) and their numbers
// to counts (bags,). `scratch` has 32 bytes per key of the largest bag, `heads` 2^head_bits + 1 entries. Returns -1, or the
// position of a key that is not below `columns`.
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
