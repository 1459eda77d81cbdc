// The working sets of several nodes for one batch, made one: distinct keys in rank order, and who holds each.
// A small open-addressing table, as in cache.cpp: the upper half of a bucket is 32 bits of hash, the lower index + 1.
#include "dialect.cuh"

static inline void prefetch_home(const uint64_t* buckets, uint64_t bucket_count, uint64_t key) {
    __builtin_prefetch(&buckets[(mix64(key) >> 32) * bucket_count >> 32]);
}

// The bucket of `key`, or the empty one where it belongs.
static uint64_t bucket_of(const uint64_t* buckets, uint64_t bucket_count, const uint64_t* known, uint64_t key) {
    uint64_t tag = mix64(key) >> 32;
    uint64_t at = tag * bucket_count >> 32;
    while (buckets[at] && !(buckets[at] >> 32 == tag && known[(uint32_t)buckets[at] - 1] == key))
        at = at + 1 == bucket_count ? 0 : at + 1;
    return at;
}

// Add node `rank`'s keys: indices[i] is the place of keys[i] in `known`, holders[that] gets the node's bit, *count grows.
// Returns n, or the first i whose key this node named before.
NATIVE(int64_t, mem_union_add, uint64_t* buckets, uint64_t bucket_count, const uint64_t* keys, int64_t n, uint32_t rank,
    uint64_t* known, uint64_t* holders, int64_t* count, uint32_t* indices) {
    uint64_t bit = 1ull << rank;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 16 < n) prefetch_home(buckets, bucket_count, keys[i + 16]);
        uint64_t at = bucket_of(buckets, bucket_count, known, keys[i]);
        if (!buckets[at]) {
            known[*count] = keys[i];
            holders[*count] = 0;
            buckets[at] = mix64(keys[i]) >> 32 << 32 | (uint64_t)++*count;
        }
        uint32_t index = (uint32_t)buckets[at] - 1;
        if (holders[index] & bit) return i;
        holders[index] |= bit;
        indices[i] = index;
    }
    return n;
}

// Node `rank` pushes these keys: mark them in `pushed` (U,), and slots[i] = where they go. Returns n, or the first i that
// may not be pushed, and then nothing is marked; *reason says why: 1 nobody pulls it, 2 another node pushes it, 3 it has
// been pushed, 4 it is named twice.
NATIVE(int64_t, mem_union_claim, const uint64_t* buckets, uint64_t bucket_count, const uint64_t* known,
    const uint64_t* holders, const uint32_t* slots_of, const uint64_t* keys, int64_t n, uint32_t rank, uint8_t* pushed,
    uint32_t* slots, int64_t* reason) {
    *reason = 0;
    int64_t i = 0;
    for (; i < n && !*reason; ++i) {
        if (i + 16 < n) prefetch_home(buckets, bucket_count, keys[i + 16]);
        uint32_t index = (uint32_t)buckets[bucket_of(buckets, bucket_count, known, keys[i])] - 1;
        slots[i] = index;
        if (index == 0xffffffffu)
            *reason = 1;
        else if ((holders[index] & (~holders[index] + 1)) != 1ull << rank)
            *reason = 2;
        else if (pushed[index])
            *reason = pushed[index] == 1 ? 3 : 4;
        else
            pushed[index] = 2;  // by this very push
    }
    int64_t taken = *reason ? i - 1 : n;
    for (int64_t j = 0; j < taken; ++j) {
        pushed[slots[j]] = *reason ? 0 : 1;
        slots[j] = slots_of[slots[j]];
    }
    return taken;
}

// indices[i] = place of keys[i] in `known`, or 2^32 - 1. Returns the first i that is not there, else -1.
NATIVE(int64_t, mem_union_find, const uint64_t* buckets, uint64_t bucket_count, const uint64_t* known,
    const uint64_t* keys, int64_t n, uint32_t* indices) {
    int64_t missing = -1;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 16 < n) prefetch_home(buckets, bucket_count, keys[i + 16]);
        indices[i] = (uint32_t)buckets[bucket_of(buckets, bucket_count, known, keys[i])] - 1;
        if (indices[i] == 0xffffffffu && missing < 0) missing = i;
    }
    return missing;
}
