// XXH64 by its published specification: the hash that turns the bytes of a value into its key, the same on any machine.
// Own text because the library (which the tests compare with) cannot be called per field from inside a parser.
#pragma once
#include "dialect.cuh"

static const uint64_t XXH_PRIME_1 = 0x9e3779b185ebca87ull;
static const uint64_t XXH_PRIME_2 = 0xc2b2ae3d27d4eb4full;
static const uint64_t XXH_PRIME_3 = 0x165667b19e3779f9ull;
static const uint64_t XXH_PRIME_4 = 0x85ebca77c2b2ae63ull;
static const uint64_t XXH_PRIME_5 = 0x27d4eb2f165667c5ull;

// Unaligned little-endian reads; every machine we build for is little-endian.
DEVICE uint64_t read64(const uint8_t* p) {
    uint64_t x;
    __builtin_memcpy(&x, p, 8);
    return x;
}

DEVICE uint32_t read32(const uint8_t* p) {
    uint32_t x;
    __builtin_memcpy(&x, p, 4);
    return x;
}

DEVICE uint64_t rotate_left(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

DEVICE uint64_t xxh64_round(uint64_t lane, uint64_t input) {
    return rotate_left(lane + input * XXH_PRIME_2, 31) * XXH_PRIME_1;
}

DEVICE uint64_t xxh64_merge(uint64_t hash, uint64_t lane) {
    return (hash ^ xxh64_round(0, lane)) * XXH_PRIME_1 + XXH_PRIME_4;
}

DEVICE uint64_t xxh64_stripes(const uint8_t** p, const uint8_t* end, uint64_t seed) {
    uint64_t a = seed + XXH_PRIME_1 + XXH_PRIME_2, b = seed + XXH_PRIME_2, c = seed, d = seed - XXH_PRIME_1;
    for (; end - *p >= 32; *p += 32) {
        a = xxh64_round(a, read64(*p));
        b = xxh64_round(b, read64(*p + 8));
        c = xxh64_round(c, read64(*p + 16));
        d = xxh64_round(d, read64(*p + 24));
    }
    uint64_t hash = rotate_left(a, 1) + rotate_left(b, 7) + rotate_left(c, 12) + rotate_left(d, 18);
    return xxh64_merge(xxh64_merge(xxh64_merge(xxh64_merge(hash, a), b), c), d);
}

DEVICE uint64_t xxh64(const uint8_t* p, int64_t size, uint64_t seed) {
    const uint8_t* end = p + size;
    uint64_t hash = size >= 32 ? xxh64_stripes(&p, end, seed) : seed + XXH_PRIME_5;
    hash += (uint64_t)size;
    for (; end - p >= 8; p += 8)
        hash = rotate_left(hash ^ xxh64_round(0, read64(p)), 27) * XXH_PRIME_1 + XXH_PRIME_4;
    if (end - p >= 4) {
        hash = rotate_left(hash ^ (read32(p) * XXH_PRIME_1), 23) * XXH_PRIME_2 + XXH_PRIME_3;
        p += 4;
    }
    for (; p < end; ++p) hash = rotate_left(hash ^ (*p * XXH_PRIME_5), 11) * XXH_PRIME_1;
    hash = (hash ^ (hash >> 33)) * XXH_PRIME_2;
    hash = (hash ^ (hash >> 29)) * XXH_PRIME_3;
    return hash ^ (hash >> 32);
}
