// Shuffled order: a permutation that is the same on every machine, and the gathering of examples by it.
#include "dialect.cuh"

// Fisher-Yates with a counter-based hash: `order` becomes a permutation of 0 .. n - 1 that depends on `seed` alone.
NATIVE(void, data_permutation, uint64_t seed, int64_t n, int64_t* order) {
    for (int64_t i = 0; i < n; ++i) order[i] = i;
    for (int64_t i = n - 1; i > 0; --i) {
        uint64_t bits = mix64(seed + (uint64_t)i * 0x9e3779b97f4a7c15ull);
        int64_t j = (int64_t)(((unsigned __int128)bits * (uint64_t)(i + 1)) >> 64);
        int64_t kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

// Writes the ends of the bags of examples order[0], order[1], ..., concatenated. Returns the number of keys.
NATIVE(int64_t, data_gather_ends, const int64_t* order, int64_t n, int64_t slots, const int64_t* offsets, int64_t* ends) {
    int64_t end = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t* bags = offsets + order[i] * slots;
        for (int64_t s = 0; s < slots; ++s) ends[i * slots + s] = end + bags[s + 1] - bags[0];
        end += bags[slots] - bags[0];
    }
    return end;
}

// Copies the keys of examples order[start : stop], and their weights if there are any, to `new_offsets`.
NATIVE(void, data_gather_keys, const int64_t* order, int64_t start, int64_t stop, int64_t slots, const int64_t* offsets,
       const uint64_t* keys, const float* weights, const int64_t* new_offsets, uint64_t* new_keys, float* new_weights) {
    for (int64_t i = start; i < stop; ++i) {
        int64_t from = offsets[order[i] * slots], to = new_offsets[i * slots];
        int64_t count = offsets[(order[i] + 1) * slots] - from;
        if (i + 8 < stop) __builtin_prefetch(keys + offsets[order[i + 8] * slots]);
        for (int64_t k = 0; k < count; ++k) new_keys[to + k] = keys[from + k];
        if (!weights) continue;
        for (int64_t k = 0; k < count; ++k) new_weights[to + k] = weights[from + k];
    }
}
