// Distinct keys, and for each occurrence the number of its key, on the CPU (on a GPU cuDF finds the distinct keys, and a
// hash table the numbers). A radix partition by the mixed bits makes 2^bits parts, whose small hash tables stay in cache.
// The order of the distinct keys is (part, first occurrence) for any number of threads. Memory is accessed in long runs:
//   unique_count    counts the keys of each share in each part
//   unique_deal     writes the mixed keys part by part; mixing is a bijection, so the keys need not be kept
//   unique_parts    moves the distinct keys of each part to its front, and numbers the occurrences within the part
//   unique_number   reads the keys again in their original order; each part is then a stream of local numbers
#include "dialect.cuh"

#if ON_CPU
DEVICE uint64_t unmix64(uint64_t x) {  // the inverse of mix64
    x ^= x >> 31 ^ x >> 62;
    x *= 0x319642b2d24d8ec3ull;
    x ^= x >> 27 ^ x >> 54;
    x *= 0x96de1b173f119089ull;
    x ^= x >> 30 ^ x >> 60;
    return x;
}

DEVICE int64_t top_bits(uint64_t mixed, int32_t bits) { return (int64_t)(mixed >> 1 >> (63 - bits)); }

// counts (shares, parts), zeroed
CPU_KERNEL(unique_count, const uint64_t* keys, int64_t n, int32_t bits, int32_t* counts) {
    int32_t* mine = counts + (share_index << bits);
    uint64_t block[BLOCK];
    FOR_BLOCKS(start, count, n) {
        mix_block(keys + start, count, 0, block);
        for (int64_t j = 0; j < count; ++j) ++mine[top_bits(block[j], bits)];
    }
}

// Turns counts into each share's first position in each part; part_starts (parts + 1). Returns the size of the largest part.
NATIVE(int64_t, unique_places, int32_t* counts, int64_t shares, int32_t bits, int32_t* part_starts) {
    const int64_t parts = (int64_t)1 << bits;
    int32_t place = 0;
    int64_t largest = 0;
    for (int64_t part = 0; part < parts; ++part) {
        part_starts[part] = place;
        for (int64_t share = 0; share < shares; ++share) {
            int32_t* count = counts + share * parts + part;
            const int32_t size = *count;
            *count = place;
            place += size;
        }
        if (place - part_starts[part] > largest) largest = place - part_starts[part];
    }
    part_starts[parts] = place;
    return largest;
}

// places (shares, parts) stay unchanged, because unique_number needs them again
CPU_KERNEL(unique_deal, const uint64_t* keys, int64_t n, int32_t bits, const int32_t* places, int32_t* cursors,
           uint64_t* mixed) {
    const int64_t parts = (int64_t)1 << bits;
    int32_t* next = cursors + share_index * parts;
    for (int64_t part = 0; part < parts; ++part) next[part] = places[share_index * parts + part];
    uint64_t block[BLOCK];
    FOR_BLOCKS(start, count, n) {
        mix_block(keys + start, count, 0, block);
        for (int64_t j = 0; j < count; ++j) mixed[next[top_bits(block[j], bits)]++] = block[j];
    }
}

DEVICE void fill_table(int32_t* table, uint64_t mask, const uint64_t* distinct, int32_t count) {
    __builtin_memset(table, 0, (mask + 1) * sizeof *table);
    for (int32_t number = 1; number <= count; ++number) {
        uint64_t cell = distinct[number - 1] & mask;
        while (table[cell]) cell = (cell + 1) & mask;
        table[cell] = number;
    }
}

// Returns the number of `key`, counted from 1, or 0 if it is new; *cell is then the free cell for it.
DEVICE int32_t probe(const int32_t* table, uint64_t mask, const uint64_t* distinct, uint64_t key, uint64_t* cell) {
    int32_t number;
    while ((number = table[*cell]) && distinct[number - 1] != key) *cell = (*cell + 1) & mask;
    return number;
}

// tables (shares, table_cells) with table_cells a power of two of at least four times the largest part. A table starts
// at half its part's keys and grows when it is more than half full, so that no memory is cleared for repeated keys.
// Whether a key is new cannot be predicted, so there is no branch on it: the key is always written behind the distinct
// keys, where the input has been read already, and counted if its cell was free. Only a collision branches.
CPU_KERNEL(unique_parts, uint64_t* mixed, const int32_t* part_starts, int32_t bits, int64_t table_cells,
           int32_t* tables, int64_t* next_part, int32_t* local, int32_t* distinct_counts) {
    int32_t* table = tables + share_index * table_cells;
    for (int64_t part; (part = ATOMIC_NEXT(next_part)) < (int64_t)1 << bits;) {
        uint64_t* const keys = mixed + part_starts[part];
        int32_t* const numbers = local + part_starts[part];
        const int32_t n = part_starts[part + 1] - part_starts[part];
        uint64_t mask = 63;
        while (mask < (uint64_t)n) mask = 2 * mask + 1;
        int32_t count = 0;
        fill_table(table, mask, keys, 0);
        for (int32_t i = 0; i < n; ++i) {
            const uint64_t key = keys[i];
            uint64_t cell = key & mask;
            int32_t number = table[cell];
            if (number && keys[number - 1] != key) number = probe(table, mask, keys, key, &cell);
            const bool fresh = number == 0;
            keys[count] = key;
            count += fresh;
            number = fresh ? count : number;
            table[cell] = number;
            numbers[i] = number - 1;
            if ((uint64_t)count * 2 > mask) {
                mask = 2 * mask + 1;
                fill_table(table, mask, keys, count);
            }
        }
        distinct_counts[part] = count;
    }
}

// bases (parts + 1): the sums of distinct_counts before each part
NATIVE(int64_t, unique_bases, const int32_t* distinct_counts, int32_t bits, int32_t* bases) {
    int32_t base = 0;
    for (int64_t part = 0; part < (int64_t)1 << bits; ++part) {
        bases[part] = base;
        base += distinct_counts[part];
    }
    bases[(int64_t)1 << bits] = base;
    return base;
}

// cursors are reset to the places of this share; distinct (bases[parts],), row_of (n,)
CPU_KERNEL(unique_number, const uint64_t* keys, int64_t n, int32_t bits, const int32_t* places, int32_t* cursors,
           const uint64_t* mixed, const int32_t* part_starts, const int32_t* local, const int32_t* bases,
           uint64_t* distinct, int32_t* row_of) {
    const int64_t parts = (int64_t)1 << bits;
    int32_t* next = cursors + share_index * parts;
    for (int64_t part = 0; part < parts; ++part) next[part] = places[share_index * parts + part];
    uint64_t block[BLOCK];
    FOR_BLOCKS(start, count, n) {
        mix_block(keys + start, count, 0, block);
        for (int64_t j = 0; j < count; ++j) {
            const int64_t part = top_bits(block[j], bits);
            const int32_t* from = local + next[part]++;
            PREFETCH(from + 16);  // hardware prefetchers do not follow 512 streams
            row_of[start + j] = bases[part] + *from;
        }
    }
    FOR_ITEMS(part, parts) {
        const uint64_t* from = mixed + part_starts[part];
        for (int32_t row = bases[part]; row < bases[part + 1]; ++row) distinct[row] = unmix64(*from++);
    }
}
#endif
