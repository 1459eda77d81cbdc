// The hash table: key to row number. Open addressing, slot after slot from a key's bucket on; a slot is taken when its
// row is not negative, so every 64-bit key is legal. One table per device; a launch reaches all of them through the
// array of shards, and the shard of a key is a function of the key alone.
#include "shard.cuh"

KERNEL(table_clear, Slot* slots, int64_t capacity) {
    FOR_ITEMS(i, capacity) {
        slots[i].key = 0;
        slots[i].row = -1;
        slots[i].unused = 0;
    }
}

// Keys must be distinct: a slot is claimed by its row alone, so no thread ever looks at a key that another one writes.
KERNEL(table_build, const uint64_t* keys, int64_t n, int32_t first_row, Slot* slots, int64_t capacity, int32_t* failed) {
    FOR_ITEMS(i, n) {
#if ON_CPU
        if (i + PREFETCH_AHEAD < i_end) PREFETCH(slots + home_slot(keys[i + PREFETCH_AHEAD], capacity));
#endif
        int64_t slot = home_slot(keys[i], capacity), probes = 0;
        while (probes < capacity && ATOMIC_CAS(&slots[slot].row, -1, first_row + (int32_t)i) != -1) {
            slot = slot + 1 == capacity ? 0 : slot + 1;
            ++probes;
        }
        if (probes == capacity) {
            ATOMIC_OR(failed, 1);
            continue;
        }
        slots[slot].key = keys[i];
    }
}

#if ON_CPU
typedef uint64_t Pair __attribute__((vector_size(16)));  // a slot in one register: key, row

// The row of `key` within a bucket, -1 if it is not there. No branch: where a key stands cannot be guessed.
DEVICE int32_t find_in_bucket(const Slot* bucket, uint64_t key) {
    Pair found = {0, 0};
    for (int s = 0; s < BUCKET; ++s) {
        Pair slot;
        __builtin_memcpy(&slot, bucket + s, sizeof slot);
        const Pair same = (Pair)(slot == Pair{key, key});
        found |= Pair{same[0], same[0]} & (slot + Pair{0, 1});  // the row of a free slot is -1, so it adds nothing
    }
    return (int32_t)found[1] - 1;
}

// `count` of the `known` keys in one shard: mixed in whole vectors, home buckets asked for ahead, beyond this block too
// (`first`: nobody has asked for those of its start). Keys that may be further on are kept for a second round, so that
// their lines come together.
DEVICE void find_block(const uint64_t* keys, int64_t count, int64_t known, bool first, const Shard shard, int32_t* rows) {
    uint64_t home[BLOCK + PREFETCH_AHEAD];
    int32_t further[BLOCK];
    int64_t left = 0;
    const Slot* slots = (const Slot*)shard.slots;
    if (known > count + PREFETCH_AHEAD) known = count + PREFETCH_AHEAD;
    mix_block(keys, known, SLOT_SALT, home);
    for (int64_t j = 0; j < known; ++j) home[j] = (uint64_t)home_slot_of(home[j], shard.capacity);
    for (int64_t j = known; j < count + PREFETCH_AHEAD; ++j) home[j] = home[0];
    for (int64_t j = 0; first && j < PREFETCH_AHEAD; ++j) PREFETCH(slots + home[j]);
    for (int64_t j = 0; j < count; ++j) {
        PREFETCH(slots + home[j + PREFETCH_AHEAD]);
        const Slot* bucket = slots + home[j];
        rows[j] = find_in_bucket(bucket, keys[j]);
        further[left] = (int32_t)j;
        left += rows[j] < 0 && bucket[BUCKET - 1].row >= 0;
    }
    for (int64_t i = 0; i < left; ++i) PREFETCH(slots + home[further[i]] + BUCKET);
    for (int64_t i = 0; i < left; ++i) {
        const int32_t j = further[i];
        rows[j] = find_row(shard, keys[j], (int64_t)home[j]);
    }
}
#endif

// rows[i] is the row of keys[i], -1 where no shard holds it.
KERNEL(table_find, const uint64_t* keys, int64_t n, const Shard* shards, int32_t shard_count, int32_t* rows) {
#if ON_CPU
    if (shard_count == 1) {
        const int64_t first = n * share_index / share_count;
        FOR_BLOCKS(start, count, n) {
            find_block(keys + start, count, start_end - start, start == first, *shards, rows + start);
        }
        return;
    }
#endif
    FOR_ITEMS(i, n) {
        const Shard& shard = shards[shard_of(keys[i], shard_count)];
        rows[i] = find_row(shard, keys[i], home_slot(keys[i], shard.capacity));
    }
}
