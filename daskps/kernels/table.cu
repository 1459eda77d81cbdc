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
        if (i + AHEAD < i_end) PREFETCH(slots + home_slot(keys[i + AHEAD], capacity));
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
// A block's keys in one shard: mixed in whole vectors, their home slots asked for AHEAD of the probes.
DEVICE void find_block(const uint64_t* keys, int64_t count, const Shard shard, int32_t* rows) {
    uint64_t home[BLOCK];
    const Slot* slots = (const Slot*)shard.slots;
    mix_block(keys, count, SLOT_SALT, home);
    for (int64_t j = 0; j < count; ++j) home[j] = (uint64_t)home_slot_of(home[j], shard.capacity);
    for (int64_t j = 0; j < AHEAD && j < count; ++j) PREFETCH(slots + home[j]);
    for (int64_t j = 0; j < count; ++j) {
        PREFETCH(slots + home[j + AHEAD < count ? j + AHEAD : j]);
        rows[j] = find_row(shard, keys[j], (int64_t)home[j]);
    }
}
#endif

// rows[i] is the row of keys[i], -1 where no shard holds it.
KERNEL(table_find, const uint64_t* keys, int64_t n, const Shard* shards, int32_t shard_count, int32_t* rows) {
#if ON_CPU
    if (shard_count == 1) {
        FOR_BLOCKS(start, count, n) find_block(keys + start, count, *shards, rows + start);
        return;
    }
#endif
    FOR_ITEMS(i, n) {
        const Shard& shard = shards[shard_of(keys[i], shard_count)];
        rows[i] = find_row(shard, keys[i], home_slot(keys[i], shard.capacity));
    }
}
