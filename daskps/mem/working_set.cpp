// The keys of several nodes for one batch, united: distinct keys in order of rank, and the holders of each.
// The hash table has the form of that in cache.cpp: the upper half of a bucket is 32 bits of hash, the lower index + 1.
#include "dialect.cuh"

// The united keys of one batch, in 8-byte words; inflight.py binds it (UNITED_KEYS).
struct KeyUnion {
    uint64_t* buckets;
    uint64_t bucket_count;
    uint64_t* keys;     // (count)
    uint64_t* holders;  // (count) bit r is set if node r holds the key
    int64_t count;
};

// One node's share of a batch, in 8-byte words; inflight.py binds it (NODE_SHARE). Positions are indices into the node's
// keys. The arrays have room for all its keys; the counts say how much of them is used.
struct NodeShare {
    uint32_t* free;  // positions of the rows that the node gets at once
    uint32_t* free_ids;
    uint32_t* forwarded;  // positions of the rows that the node's own table of the previous batch has
    uint32_t* deferred;   // positions of the rows that the owner sends later
    uint32_t* deferred_ids;
    uint8_t* deferred_distances;
    uint32_t* shared;  // positions of the rows that other nodes hold too, in the order of the united keys
    uint64_t* shared_holders;
    int64_t free_count, forwarded_count, deferred_count, shared_count;
};

static inline void prefetch_home(const KeyUnion& united, uint64_t key) {
    __builtin_prefetch(&united.buckets[(mix64(key) >> 32) * united.bucket_count >> 32]);
}

// Bucket of `key`, or the empty one where it belongs.
static uint64_t bucket_of(const KeyUnion& united, uint64_t key) {
    uint64_t tag = mix64(key) >> 32;
    uint64_t at = tag * united.bucket_count >> 32;
    while (united.buckets[at] && !(united.buckets[at] >> 32 == tag && united.keys[(uint32_t)united.buckets[at] - 1] == key))
        at = at + 1 == united.bucket_count ? 0 : at + 1;
    return at;
}

// Adds the keys of node `rank`: indices[i] becomes the index of keys[i] among the united keys.
// Returns n, or the first i whose key occurs twice in `keys`.
NATIVE(int64_t, mem_union_add, KeyUnion* state, const uint64_t* keys, int64_t n, uint32_t rank, uint32_t* indices) {
    KeyUnion united = *state;
    uint64_t bit = 1ull << rank;
    int64_t i = 0;
    for (; i < n; ++i) {
        if (i + 16 < n) prefetch_home(united, keys[i + 16]);
        uint64_t at = bucket_of(united, keys[i]);
        if (!united.buckets[at]) {
            united.keys[united.count] = keys[i];
            united.holders[united.count] = 0;
            united.buckets[at] = mix64(keys[i]) >> 32 << 32 | (uint64_t)++united.count;
        }
        uint32_t index = (uint32_t)united.buckets[at] - 1;
        if (united.holders[index] & bit) break;
        united.holders[index] |= bit;
        indices[i] = index;
    }
    state->count = united.count;
    return i;
}

// Marks the keys that node `rank` pushes in `pushed` (U,) and writes their entries to ids. Returns n, or the first i that
// may not be pushed; then nothing is marked, and *reason is 1: no node pulls the key, 2: another node pushes it, 3: it has
// been pushed, 4: it occurs twice.
NATIVE(int64_t, mem_union_claim, const KeyUnion* state, const uint32_t* entry_ids, const uint64_t* keys, int64_t n,
    uint32_t rank, uint8_t* pushed, uint32_t* ids, int64_t* reason) {
    const KeyUnion united = *state;
    *reason = 0;
    int64_t i = 0;
    for (; i < n && !*reason; ++i) {
        if (i + 16 < n) prefetch_home(united, keys[i + 16]);
        uint32_t index = (uint32_t)united.buckets[bucket_of(united, keys[i])] - 1;
        ids[i] = index;
        if (index == 0xffffffffu)
            *reason = 1;
        else if ((united.holders[index] & (~united.holders[index] + 1)) != 1ull << rank)
            *reason = 2;
        else if (pushed[index])
            *reason = pushed[index] == 1 ? 3 : 4;
        else
            pushed[index] = 2;  // claimed by this call
    }
    int64_t taken = *reason ? i - 1 : n;
    for (int64_t j = 0; j < taken; ++j) {
        pushed[ids[j]] = *reason ? 0 : 1;
        ids[j] = entry_ids[ids[j]];
    }
    return taken;
}

// Writes the index of each key among the united keys to `indices`, 2^32 - 1 where no node pulls it.
NATIVE(void, mem_union_find, const KeyUnion* state, const uint64_t* keys, int64_t n, uint32_t* indices) {
    const KeyUnion united = *state;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 16 < n) prefetch_home(united, keys[i + 16]);
        indices[i] = (uint32_t)united.buckets[bucket_of(united, keys[i])] - 1;
    }
}

// Writes to before[i] the holders of keys[i] in the previous batch, whose united keys these are, where that batch has not
// pushed the row yet (distances[i] is 1), else 0.
NATIVE(void, mem_union_before, const KeyUnion* previous, const uint64_t* keys, int64_t n, const uint8_t* distances,
    uint64_t* before) {
    const KeyUnion united = *previous;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 32 < n && distances[i + 32] == 1) prefetch_home(united, keys[i + 32]);
        before[i] = 0;
        if (distances[i] != 1) continue;
        const uint64_t bucket = united.buckets[bucket_of(united, keys[i])];
        if (bucket) before[i] = united.holders[(uint32_t)bucket - 1];
    }
}

// Divides the rows of node `rank` into free, forwarded and deferred ones, and lists those that other nodes hold too.
// indices (n) are those of the node's keys among the U united keys. distances (0: free, else batches since the row was
// pinned), before (holders in the previous batch) and ids are given for all U. position (U) is scratch memory.
NATIVE(void, mem_union_share, const KeyUnion* state, const uint32_t* indices, int64_t n, uint32_t rank,
    const uint8_t* distances, const uint64_t* before, const uint32_t* ids, uint32_t* position, NodeShare* share) {
    const KeyUnion united = *state;
    NodeShare to = *share;
    to.free_count = to.forwarded_count = to.deferred_count = to.shared_count = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t index = indices[i];
        position[index] = (uint32_t)i;
        if (distances[index] == 0) {
            to.free[to.free_count] = (uint32_t)i;
            to.free_ids[to.free_count++] = ids[index];
        } else if (before[index] >> rank & 1) {
            to.forwarded[to.forwarded_count++] = (uint32_t)i;
        } else {
            to.deferred[to.deferred_count] = (uint32_t)i;
            to.deferred_distances[to.deferred_count] = distances[index];
            to.deferred_ids[to.deferred_count++] = ids[index];
        }
    }
    for (int64_t index = 0; index < united.count; ++index) {
        const uint64_t held = united.holders[index];
        if (!(held >> rank & 1) || !(held & (held - 1))) continue;
        to.shared[to.shared_count] = position[index];
        to.shared_holders[to.shared_count++] = held;
    }
    *share = to;
}
