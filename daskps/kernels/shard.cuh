// A shard is the part of a table on one device: hash cells and rows. Kernels take an array of shards, one per device.
#pragma once
#include "dialect.cuh"

#define CELL_SALT 0ull  // the order of `unique`'s keys: inserted in that order, they fill a table from end to end
#define BUCKET 4        // cells per cache line: the search for a key begins at the start of a line
#define SHARD_SALT 0xd1b54a32d192ed03ull

struct Cell {
    uint64_t key;
    int32_t row;  // global row number, -1: free
    int32_t unused;
};

struct Shard {
    uint64_t cells;  // address of Cell[capacity]
    int64_t capacity;
    uint64_t rows;      // address of float[row_count][width]
    int64_t first_row;  // global number of its first row; shards are in this order
    int64_t row_count;
};

// Returns the first cell of a key's bucket, where probing begins; it goes on cell by cell. Capacity is a multiple of BUCKET.
DEVICE int64_t home_cell_of(uint64_t mixed, int64_t capacity) {
    return (int64_t)MULTIPLY_HIGH(mixed, (uint64_t)(capacity / BUCKET)) * BUCKET;
}
DEVICE int64_t home_cell(uint64_t key, int64_t capacity) { return home_cell_of(mix64(key ^ CELL_SALT), capacity); }

DEVICE int64_t shard_of(uint64_t key, int32_t shard_count) {
    return shard_count == 1 ? 0 : part_of(mix64(key ^ SHARD_SALT), shard_count);
}

DEVICE int32_t find_row(const Shard& shard, uint64_t key, int64_t cell) {
    const Cell* cells = (const Cell*)shard.cells;
    for (int64_t probes = 0; probes < shard.capacity; ++probes) {
        if (cells[cell].row < 0) return -1;
        if (cells[cell].key == key) return cells[cell].row;
        cell = cell + 1 == shard.capacity ? 0 : cell + 1;
    }
    return -1;
}

// Returns the address of a row, on the device that holds it.
DEVICE float* row_address(const Shard* shards, int32_t shard_count, int64_t row, int64_t width) {
    int32_t shard = 0;
    while (shard + 1 < shard_count && row >= shards[shard + 1].first_row) ++shard;
    return (float*)shards[shard].rows + (row - shards[shard].first_row) * width;
}
