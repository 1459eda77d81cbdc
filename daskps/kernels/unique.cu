// Distinct keys and the number of each occurrence, on the CPU (the GPU asks cuDF, then finds the numbers in a table).
// Keys are dealt by their mixed bits into 2^bits parts whose small tables stay in cache. The order of the distinct keys
// is (part, first occurrence), whatever the number of threads. Everything is read and written in long runs:
//   unique_count    how many keys of each share go to each part
//   unique_deal     mixed keys, part by part (the mix is a bijection: no need to carry the key)
//   unique_parts    within a part: distinct ones to the front, and the local number of each occurrence
//   unique_number   walk the keys again in their first order; every part is then one stream of local numbers
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

// counts become each share's next place in each part; part_starts (parts + 1)
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

// places (shares, parts) is copied, because unique_number walks the same places again
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
        uint64_t slot = distinct[number - 1] & mask;
        while (table[slot]) slot = (slot + 1) & mask;
        table[slot] = number;
    }
}

// The number of `key`, counted from 1, or of the free slot where it belongs: 0.
DEVICE int32_t probe(const int32_t* table, uint64_t mask, const uint64_t* distinct, uint64_t key, uint64_t* slot) {
    int32_t number;
    while ((number = table[*slot]) && distinct[number - 1] != key) *slot = (*slot + 1) & mask;
    return number;
}

// tables (shares, table_slots) with table_slots a power of two of at least four times the largest part. A table starts
// at half its part's keys and grows while it is more than half full, so repeated keys do not cost cleared memory.
// Whether a key is new cannot be guessed, so it is no branch: the key is written behind the distinct ones in any case
// (what stands there has been read), and counted if its slot was free. Only a collision branches.
CPU_KERNEL(unique_parts, uint64_t* mixed, const int32_t* part_starts, int32_t bits, int64_t table_slots,
           int32_t* tables, int64_t* next_part, int32_t* local, int32_t* distinct_counts) {
    int32_t* table = tables + share_index * table_slots;
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
            uint64_t slot = key & mask;
            int32_t number = table[slot];
            if (number && keys[number - 1] != key) number = probe(table, mask, keys, key, &slot);
            const bool fresh = number == 0;
            keys[count] = key;
            count += fresh;
            number = fresh ? count : number;
            table[slot] = number;
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

// cursors are spent: places of this share again; distinct (bases[parts],), row_of (n,)
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
            PREFETCH(from + 16);  // no hardware follows 512 streams
            row_of[start + j] = bases[part] + *from;
        }
    }
    FOR_ITEMS(part, parts) {
        const uint64_t* from = mixed + part_starts[part];
        for (int32_t row = bases[part]; row < bases[part + 1]; ++row) distinct[row] = unmix64(*from++);
    }
}
#endif
