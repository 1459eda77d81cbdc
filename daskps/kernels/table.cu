// The hash table: key to row number. Open addressing with linear probing over any number of slots; a slot is taken when
// its row is not negative, so every 64-bit key is legal. One table per device; a launch reaches all of them through the
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

// rows[i] is the row of keys[i], -1 where no shard holds it.
KERNEL(table_find, const uint64_t* keys, int64_t n, const Shard* shards, int32_t shard_count, int32_t* rows) {
    FOR_ITEMS(i, n) {
#if ON_CPU
        if (i + AHEAD < i_end) {
            const Shard& ahead = shards[shard_of(keys[i + AHEAD], shard_count)];
            PREFETCH((const Slot*)ahead.slots + home_slot(keys[i + AHEAD], ahead.capacity));
        }
#endif
        rows[i] = find_row(shards[shard_of(keys[i], shard_count)], keys[i]);
    }
}
