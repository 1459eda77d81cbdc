// What a device holds of a table: its slots and its rows. Kernels take an array of shards, one per device of the node.
#pragma once
#include "dialect.cuh"

#define SLOT_SALT 0ull  // slots go by the bits that order `unique`'s keys, so these walk through a table from end to end
#define BUCKET 4        // slots of a cache line: a key's search begins with a line of its own
#define SHARD_SALT 0xd1b54a32d192ed03ull

struct Slot {
    uint64_t key;
    int32_t row;  // global row number, -1: free
    int32_t unused;
};

struct Shard {
    uint64_t slots;  // address of Slot[capacity]
    int64_t capacity;
    uint64_t rows;      // address of float[row_count][width]
    int64_t first_row;  // global number of its first row; shards are in this order
    int64_t row_count;
};

// The first slot of a key's bucket; probing goes on from there slot by slot. Capacity is a multiple of BUCKET.
DEVICE int64_t home_slot_of(uint64_t mixed, int64_t capacity) {
    return (int64_t)MULTIPLY_HIGH(mixed, (uint64_t)(capacity / BUCKET)) * BUCKET;
}
DEVICE int64_t home_slot(uint64_t key, int64_t capacity) { return home_slot_of(mix64(key ^ SLOT_SALT), capacity); }

DEVICE int64_t shard_of(uint64_t key, int32_t shard_count) {
    return shard_count == 1 ? 0 : part_of(mix64(key ^ SHARD_SALT), shard_count);
}

DEVICE int32_t find_row(const Shard& shard, uint64_t key, int64_t slot) {
    const Slot* slots = (const Slot*)shard.slots;
    for (int64_t probes = 0; probes < shard.capacity; ++probes) {
        if (slots[slot].row < 0) return -1;
        if (slots[slot].key == key) return slots[slot].row;
        slot = slot + 1 == shard.capacity ? 0 : slot + 1;
    }
    return -1;
}

// The address of a row on whichever device holds it.
DEVICE float* row_address(const Shard* shards, int32_t shard_count, int64_t row, int64_t width) {
    int32_t shard = 0;
    while (shard + 1 < shard_count && row >= shards[shard + 1].first_row) ++shard;
    return (float*)shards[shard].rows + (row - shards[shard].first_row) * width;
}
