// Hash table from keys to row numbers: open addressing with linear probing from a key's bucket on. A cell is in use if its
// row is not negative, so every 64-bit key is legal. Each device has one table. A launch reaches all of them through the
// array of shards; the shard of a key depends only on the key.
#include "shard.cuh"

KERNEL(table_clear, Cell* cells, int64_t capacity) {
    FOR_ITEMS(i, capacity) {
        cells[i].key = 0;
        cells[i].row = -1;
        cells[i].unused = 0;
    }
}

// Keys must be distinct. A thread claims a cell by writing its row, so no thread reads a key that another one writes.
KERNEL(table_build, const uint64_t* keys, int64_t n, int32_t first_row, Cell* cells, int64_t capacity, int32_t* failed) {
    FOR_ITEMS(i, n) {
#if ON_CPU
        if (i + PREFETCH_AHEAD < i_end) PREFETCH(cells + home_cell(keys[i + PREFETCH_AHEAD], capacity));
#endif
        int64_t cell = home_cell(keys[i], capacity), probes = 0;
        while (probes < capacity && ATOMIC_CAS(&cells[cell].row, -1, first_row + (int32_t)i) != -1) {
            cell = cell + 1 == capacity ? 0 : cell + 1;
            ++probes;
        }
        if (probes == capacity) {
            ATOMIC_OR(failed, 1);
            continue;
        }
        cells[cell].key = keys[i];
    }
}

#if ON_CPU
typedef uint64_t Pair __attribute__((vector_size(16)));  // a cell in one register: key, row

// Returns the row of `key` in a bucket, -1 if it is not there. Without branches: the position of a key cannot be predicted.
DEVICE int32_t find_in_bucket(const Cell* bucket, uint64_t key) {
    Pair found = {0, 0};
    for (int s = 0; s < BUCKET; ++s) {
        Pair cell;
        __builtin_memcpy(&cell, bucket + s, sizeof cell);
        const Pair same = (Pair)(cell == Pair{key, key});
        found |= Pair{same[0], same[0]} & (cell + Pair{0, 1});  // the row of a free cell is -1, so it adds nothing
    }
    return (int32_t)found[1] - 1;
}

// Finds `count` keys in one shard; `known` keys may be read. Keys are hashed in whole vectors, and home buckets are
// prefetched, also those of the block after this one. `first`: those of this block's start have not been prefetched. Keys
// that are not in their home bucket, but may be behind it, are searched in a second pass, so that their cache misses overlap.
DEVICE void find_block(const uint64_t* keys, int64_t count, int64_t known, bool first, const Shard shard, int32_t* rows) {
    uint64_t home[BLOCK + PREFETCH_AHEAD];
    int32_t further[BLOCK];
    int64_t left = 0;
    const Cell* cells = (const Cell*)shard.cells;
    if (known > count + PREFETCH_AHEAD) known = count + PREFETCH_AHEAD;
    mix_block(keys, known, CELL_SALT, home);
    for (int64_t j = 0; j < known; ++j) home[j] = (uint64_t)home_cell_of(home[j], shard.capacity);
    for (int64_t j = known; j < count + PREFETCH_AHEAD; ++j) home[j] = home[0];
    for (int64_t j = 0; first && j < PREFETCH_AHEAD; ++j) PREFETCH(cells + home[j]);
    for (int64_t j = 0; j < count; ++j) {
        PREFETCH(cells + home[j + PREFETCH_AHEAD]);
        const Cell* bucket = cells + home[j];
        rows[j] = find_in_bucket(bucket, keys[j]);
        further[left] = (int32_t)j;
        left += rows[j] < 0 && bucket[BUCKET - 1].row >= 0;
    }
    for (int64_t i = 0; i < left; ++i) PREFETCH(cells + home[further[i]] + BUCKET);
    for (int64_t i = 0; i < left; ++i) {
        const int32_t j = further[i];
        rows[j] = find_row(shard, keys[j], (int64_t)home[j]);
    }
}
#endif

// rows[i] = the row of keys[i], -1 if no shard has the key.
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
        rows[i] = find_row(shard, keys[i], home_cell(keys[i], shard.capacity));
    }
}
