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

// before[i] = who holds keys[i] in the batch of this table, where distances[i] is 1: it is out with the row; else nobody.
NATIVE(void, mem_union_before, const uint64_t* buckets, uint64_t bucket_count, const uint64_t* known,
    const uint64_t* holders, const uint64_t* keys, int64_t n, const uint8_t* distances, uint64_t* before) {
    for (int64_t i = 0; i < n; ++i) {
        if (i + 32 < n && distances[i + 32] == 1) prefetch_home(buckets, bucket_count, keys[i + 32]);
        before[i] = 0;
        if (distances[i] != 1) continue;
        const uint64_t bucket = buckets[bucket_of(buckets, bucket_count, known, keys[i])];
        if (bucket) before[i] = holders[(uint32_t)bucket - 1];
    }
}

// What node `rank` gets of a batch. indices (n,): places of its keys among the U known ones; holders, distances (0: free,
// else how many batches ago the row went out), before and slots are of those (U,). Positions of the node's keys go to
// free, copied (the node itself has the row from the batch before) and late, and with them slots and distances; to shared
// go those that others hold too, with their holders, in the order of the known keys, which is the same for all nodes.
// place (U,) is scratch. counts (4,): of free, copied, late and shared.
NATIVE(void, mem_union_deal, const uint32_t* indices, int64_t n, uint32_t rank, const uint64_t* holders,
    const uint8_t* distances, const uint64_t* before, const uint32_t* slots, int64_t known_count, uint32_t* place,
    uint32_t* free, uint32_t* free_slots, uint32_t* copied, uint32_t* late, uint32_t* late_slots,
    uint8_t* late_distances, uint32_t* shared, uint64_t* shared_holders, int64_t* counts) {
    int64_t frees = 0, copies = 0, lates = 0, shares = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t index = indices[i];
        place[index] = (uint32_t)i;
        if (distances[index] == 0) {
            free[frees] = (uint32_t)i;
            free_slots[frees++] = slots[index];
        } else if (before[index] >> rank & 1) {
            copied[copies++] = (uint32_t)i;
        } else {
            late[lates] = (uint32_t)i;
            late_distances[lates] = distances[index];
            late_slots[lates++] = slots[index];
        }
    }
    for (int64_t index = 0; index < known_count; ++index) {
        const uint64_t held = holders[index];
        if (!(held >> rank & 1) || !(held & (held - 1))) continue;
        shared[shares] = place[index];
        shared_holders[shares++] = held;
    }
    counts[0] = frees, counts[1] = copies, counts[2] = lates, counts[3] = shares;
}
