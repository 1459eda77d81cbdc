// The index from key to place: 256 groups, chosen by the first byte of the key's hash. A group is a hash table with linear
// probing whose 10-byte cells are in hash order.
//
// The index is exact. The hash is a bijection of the key, and all its 64 bits are kept: 8 bits choose the group, BITS are in
// the cell, and the other bits of the 80-bit cell are the place. BITS is 56 while places fit into 24 bits. Afterwards it is
// 48, with 32-bit places; the missing 8 bits of the hash follow from the position of the cell, because `starts` says where
// each of 256 buckets begins. So two keys are never confused, an absent key is known to be absent, and no key has to be
// read from disk.
//
// A group: a key is in its home cell (rest of the hash * capacity / 2^56) or after it, and all cells between its home and it
// are used. Cells behind `capacity` take the keys that probing pushes over the end. starts (BUCKETS + 1 per group): the keys
// of bucket b, and no others, are in [starts[b], starts[b + 1]); the last item is the number of cells.
#include "dialect.cuh"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const int64_t CELL = 10;  // bytes
static const int64_t AHEAD = 12;  // keys whose cells are prefetched
static const int FIND_LINES = 2, INSERT_LINES = 8;  // cache lines that are prefetched per key
static const uint32_t ABSENT = 0xffffffffu;
static const uint64_t SEED = 0x9e3779b97f4a7c15ull;

// The arrays of an index, one item per group; KeyIndex in index.py owns them.
struct IndexGroups {
    int64_t bits;
    const uint64_t* tables;     // (256,) address of the group's cells
    const int64_t* capacities;  // (256,) cells in which a home can be
    const int64_t* limits;      // (256,) used cells (keys and removed keys) at which the group is full
    uint32_t* starts;           // (256, BUCKETS + 1)
    int64_t* counts;            // (256,) keys
    int64_t* dead;              // (256,) cells of removed keys
};

template <int BITS>
struct Cells {
    static const int64_t BUCKETS = 1ll << (56 - BITS);
    static const uint64_t REST = (1ull << BITS) - 1;
    // Two values that are no places: a free cell, and the cell of a removed key.
    static const uint32_t EMPTY = (uint32_t)((1ull << (80 - BITS)) - 1), DEAD = EMPTY - 1;
};

DEVICE uint64_t hash_of(uint64_t key) { return mix64(key ^ SEED); }
DEVICE int64_t group_of(uint64_t hash) { return (int64_t)(hash >> 56); }
DEVICE int64_t home_of(uint64_t hash, int64_t capacity) {
    return (int64_t)(((hash >> 24) & 0xffffffffu) * (uint64_t)capacity >> 32);
}
template <int BITS>
DEVICE int64_t bucket_of(uint64_t hash) {
    return (int64_t)(hash >> BITS) & (Cells<BITS>::BUCKETS - 1);
}

// A cell is BITS of hash, then the place, little-endian. It is read and written as 8 + 2 bytes, because a load that covers
// parts of two earlier stores has to wait until both have reached the cache.
DEVICE uint64_t word_of(const uint8_t* cell) {
    uint64_t word;
    memcpy(&word, cell, 8);
    return word;
}
template <int BITS>
DEVICE uint64_t rest_at(const uint8_t* cell) {
    return word_of(cell) & Cells<BITS>::REST;
}
template <int BITS>
DEVICE uint32_t place_at(const uint8_t* cell) {
    uint16_t high;
    memcpy(&high, cell + 8, 2);
    return (uint32_t)high << (64 - BITS) | (uint32_t)(word_of(cell) >> BITS);
}
template <int BITS>
DEVICE void put(uint8_t* cell, uint64_t rest, uint32_t place) {
    const uint64_t word = rest | (uint64_t)place << BITS;
    const uint16_t high = (uint16_t)(place >> (64 - BITS));
    memcpy(cell, &word, 8);
    memcpy(cell + 8, &high, 2);
}

template <int BITS>
struct Group {
    uint8_t* cells;
    uint32_t* starts;
    int64_t capacity;
    int64_t end() const { return starts[Cells<BITS>::BUCKETS]; }
};
template <int BITS>
DEVICE Group<BITS> group_at(const IndexGroups& index, int64_t g) {
    return {(uint8_t*)index.tables[g], index.starts + g * (Cells<BITS>::BUCKETS + 1), index.capacities[g]};
}

// Return the cell of `hash`, or the cell where it would be inserted; `found` says which.
template <int BITS>
DEVICE int64_t seek(const Group<BITS>& group, uint64_t hash, bool* found) {
    const int64_t bucket = bucket_of<BITS>(hash), home = home_of(hash, group.capacity), end = group.starts[bucket + 1];
    const uint64_t rest = hash & Cells<BITS>::REST;
    int64_t p = group.starts[bucket] > home ? group.starts[bucket] : home;
    *found = false;
    for (; p < end; ++p) {
        const uint8_t* cell = group.cells + p * CELL;
        if (place_at<BITS>(cell) == Cells<BITS>::EMPTY) break;
        const uint64_t other = rest_at<BITS>(cell);
        if (other < rest) continue;
        *found = other == rest;
        break;
    }
    return p;
}

// Return the place of `hash`, ABSENT if there is no such key.
template <int BITS>
DEVICE uint32_t find(const Group<BITS>& group, uint64_t hash) {
    bool found;
    const int64_t p = seek(group, hash, &found);
    const uint32_t place = found ? place_at<BITS>(group.cells + p * CELL) : Cells<BITS>::EMPTY;
    return place >= Cells<BITS>::DEAD ? ABSENT : place;
}

// Prefetch the cells at the home of `hash`. At 90% load a key is 4 cells from its home on average, and a new key moves 50
// others.
template <int BITS>
DEVICE void prefetch_home(const Group<BITS>& group, uint64_t hash, int lines) {
    const uint8_t* home = group.cells + home_of(hash, group.capacity) * CELL;
    for (int line = 0; line < lines; ++line) __builtin_prefetch(home + 64 * line);
}

// Call `call<BITS>(index, ...)` with the BITS of an index.
#define WITH_BITS(call, index, ...) \
    ((index)->bits == 56 ? call<56>(*(index), __VA_ARGS__) : call<48>(*(index), __VA_ARGS__))

// Count the keys [first, last) of each group: the first pass of a partition by group.
NATIVE(void, ssd_index_count, const uint64_t* keys, int64_t first, int64_t last, int64_t* counts) {
    for (int64_t i = first; i < last; ++i) ++counts[group_of(hash_of(keys[i]))];
}

// The second pass: write the hashes of the keys group by group, from each group's cursor on, in the order of the keys.
// `grouped` gets the value of each key, or its position if values is null.
NATIVE(void, ssd_index_scatter, const uint64_t* keys, const uint32_t* values, int64_t first, int64_t last,
       int64_t* cursors, uint64_t* hashes, uint32_t* grouped) {
    for (int64_t i = first; i < last; ++i) {
        const uint64_t hash = hash_of(keys[i]);
        const int64_t at = cursors[group_of(hash)]++;
        hashes[at] = hash;
        grouped[at] = values ? values[i] : (uint32_t)i;
    }
}

template <int BITS>
DEVICE void find_all(const IndexGroups& index, const uint64_t* keys, int64_t first, int64_t last, uint32_t* places) {
    uint64_t ring[AHEAD];
    for (int64_t i = first; i < last + AHEAD; ++i) {
        const int64_t done = i - AHEAD;
        if (done >= first) {
            const uint64_t hash = ring[done % AHEAD];
            places[done] = find(group_at<BITS>(index, group_of(hash)), hash);
        }
        if (i < last) {
            const uint64_t hash = ring[i % AHEAD] = hash_of(keys[i]);
            prefetch_home(group_at<BITS>(index, group_of(hash)), hash, FIND_LINES);
        }
    }
}

// Write the places of keys [first, last), ABSENT where there is no such key.
NATIVE(void, ssd_index_find, const IndexGroups* index, const uint64_t* keys, int64_t first, int64_t last,
       uint32_t* places) {
    WITH_BITS(find_all, index, keys, first, last, places);
}

template <int BITS>
DEVICE int64_t request_all(const IndexGroups& index, const uint64_t* hashes, const uint32_t* positions,
                           const uint32_t* targets, int64_t first, int64_t last, uint64_t* requests, uint8_t* found) {
    int64_t count = 0;
    for (int64_t i = first; i < last; ++i) {
        if (i + AHEAD < last) {
            const uint64_t next = hashes[i + AHEAD];
            prefetch_home(group_at<BITS>(index, group_of(next)), next, FIND_LINES);
        }
        const uint32_t place = find(group_at<BITS>(index, group_of(hashes[i])), hashes[i]);
        requests[first + count] = (uint64_t)place << 32 | (targets ? targets[positions[i]] : positions[i]);
        count += place != ABSENT;
        found[positions[i]] = place != ABSENT;
    }
    return count;
}

// Write a request (place << 32 | row of `out`) for each of the partitioned keys [first, last) that exists, packed from
// requests[first] on, and set found at the key's position. The row of `out` is targets[position], or the position itself
// if targets is null. Returns the number of requests.
NATIVE(int64_t, ssd_index_request, const IndexGroups* index, const uint64_t* hashes, const uint32_t* positions,
       const uint32_t* targets, int64_t first, int64_t last, uint64_t* requests, uint8_t* found) {
    return WITH_BITS(request_all, index, hashes, positions, targets, first, last, requests, found);
}

// Free cell p of `bucket` by moving the run of used cells that starts there. Returns false at the end of the group.
template <int BITS>
DEVICE bool open_cell(const Group<BITS>& group, int64_t p, int64_t bucket, int64_t* dead) {
    int64_t e = p;
    while (e < group.end() && place_at<BITS>(group.cells + e * CELL) < Cells<BITS>::DEAD) ++e;
    if (e == group.end()) return false;
    *dead -= place_at<BITS>(group.cells + e * CELL) == Cells<BITS>::DEAD;
    memmove(group.cells + (p + 1) * CELL, group.cells + p * CELL, (e - p) * CELL);
    for (int64_t b = bucket + 1; b < Cells<BITS>::BUCKETS && (int64_t)group.starts[b] <= e; ++b) ++group.starts[b];
    return true;
}

template <int BITS>
DEVICE int64_t insert_all(const IndexGroups& index, int64_t first, int64_t last, int64_t* cursors, const int64_t* ends,
                          const uint64_t* hashes, const uint32_t* places, uint32_t* previous) {
    int64_t full = 0;
    int64_t *counts = index.counts, *dead = index.dead;
    for (int64_t g = first; g < last; ++g) {
        const Group<BITS> group = group_at<BITS>(index, g);
        for (int64_t& i = cursors[g]; i < ends[g]; ++i) {
            if (i + AHEAD < ends[g]) prefetch_home(group, hashes[i + AHEAD], INSERT_LINES);
            bool found;
            const int64_t p = seek(group, hashes[i], &found);
            uint8_t* cell = group.cells + p * CELL;
            if (found) {
                const uint32_t old = place_at<BITS>(cell);
                const bool was_dead = old == Cells<BITS>::DEAD;
                counts[g] += was_dead;
                dead[g] -= was_dead;
                previous[i] = was_dead ? ABSENT : old;
            } else {
                const int64_t bucket = bucket_of<BITS>(hashes[i]);
                if (counts[g] + dead[g] >= index.limits[g] || !open_cell(group, p, bucket, dead + g)) break;
                ++counts[g];
                previous[i] = ABSENT;
            }
            put<BITS>(cell, hashes[i] & Cells<BITS>::REST, places[i]);
        }
        full += cursors[g] < ends[g];
    }
    return full;
}

// Insert or replace the partitioned keys of groups [first, last). hashes, places and the result `previous` (replaced places,
// ABSENT for new keys) are in group order; cursors (256) and ends (256) say which keys of each group are still to be done.
// Returns the number of groups that must grow before the rest of their keys can be inserted.
NATIVE(int64_t, ssd_index_insert, const IndexGroups* index, int64_t first, int64_t last, int64_t* cursors,
       const int64_t* ends, const uint64_t* hashes, const uint32_t* places, uint32_t* previous) {
    return WITH_BITS(insert_all, index, first, last, cursors, ends, hashes, places, previous);
}

template <int BITS>
DEVICE void remove_all(const IndexGroups& index, const uint64_t* keys, int64_t n, uint32_t* previous) {
    for (int64_t i = 0; i < n; ++i) {
        bool found;
        const uint64_t hash = hash_of(keys[i]);
        const int64_t g = group_of(hash);
        const Group<BITS> group = group_at<BITS>(index, g);
        uint8_t* cell = group.cells + seek(group, hash, &found) * CELL;
        const uint32_t old = found ? place_at<BITS>(cell) : Cells<BITS>::EMPTY;
        const bool exists = old < Cells<BITS>::DEAD;
        previous[i] = exists ? old : ABSENT;
        if (!exists) continue;
        put<BITS>(cell, hash & Cells<BITS>::REST, Cells<BITS>::DEAD);
        --index.counts[g];
        ++index.dead[g];
    }
}

// Remove keys; previous gets their places, ABSENT where there was no such key. Cells stay used until the group is rehashed.
NATIVE(void, ssd_index_remove, const IndexGroups* index, const uint64_t* keys, int64_t n, uint32_t* previous) {
    WITH_BITS(remove_all, index, keys, n, previous);
}

// Make a group of `cells` free cells, in which every bucket begins at its home.
template <int BITS>
DEVICE void clear(const Group<BITS>& group, int64_t cells) {
    memset(group.cells, 0xff, cells * CELL);
    for (int64_t b = 0; b < Cells<BITS>::BUCKETS; ++b)
        group.starts[b] = (uint32_t)home_of((uint64_t)b << BITS, group.capacity);
    group.starts[Cells<BITS>::BUCKETS] = (uint32_t)cells;
}

// Copy the keys of a group, in order, into a group of `cells` free cells. Returns where the last one ends, or would end if
// there were enough cells.
template <int FROM, int TO>
DEVICE int64_t rehash(const Group<FROM>& old, const Group<TO>& group, int64_t cells) {
    int64_t next = 0, opened = 0;
    clear(group, cells);
    for (int64_t b = 0; b < Cells<FROM>::BUCKETS; ++b) {
        for (int64_t p = old.starts[b]; p < (int64_t)old.starts[b + 1]; ++p) {
            const uint32_t place = place_at<FROM>(old.cells + p * CELL);
            if (place >= Cells<FROM>::DEAD) continue;
            const uint64_t hash = (uint64_t)b << FROM | rest_at<FROM>(old.cells + p * CELL);
            for (; opened <= bucket_of<TO>(hash); ++opened)
                if (next > (int64_t)group.starts[opened]) group.starts[opened] = (uint32_t)next;
            const int64_t home = home_of(hash, group.capacity);
            if (home > next) next = home;
            if (next < cells) put<TO>(group.cells + next * CELL, hash & Cells<TO>::REST, place);
            ++next;
        }
    }
    for (; opened < Cells<TO>::BUCKETS; ++opened)
        if (next > (int64_t)group.starts[opened]) group.starts[opened] = (uint32_t)next;
    return next;
}

// Copy group groups[k] of `old` to group k of `moved`, which has cells[k] cells, for k < n. ends[k] is where its last key
// ends; if that is more than cells[k], the copy is not complete and needs more cells.
NATIVE(void, ssd_index_rehash, const IndexGroups* old, const int64_t* groups, int64_t n, const IndexGroups* moved,
       const int64_t* cells, int64_t* ends) {
    for (int64_t k = 0; k < n; ++k) {
        if (moved->bits == 56)
            ends[k] = rehash<56, 56>(group_at<56>(*old, groups[k]), group_at<56>(*moved, k), cells[k]);
        else if (old->bits == 56)
            ends[k] = rehash<56, 48>(group_at<56>(*old, groups[k]), group_at<48>(*moved, k), cells[k]);
        else
            ends[k] = rehash<48, 48>(group_at<48>(*old, groups[k]), group_at<48>(*moved, k), cells[k]);
    }
}

// Return the whole pages of memory that is not needed any more, but still allocated, to the system.
NATIVE(void, ssd_release_pages, void* memory, int64_t n) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + (uintptr_t)n) / page * page;
    if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
}

// Clear the live bits of replaced rows, and subtract them from the live rows of their segment. ABSENT places are ignored.
NATIVE(void, ssd_clear_live, const uint32_t* places, int64_t n, int64_t file_rows, uint8_t* live, int64_t* live_rows) {
    for (int64_t i = 0; i < n; ++i) {
        if (places[i] == ABSENT) continue;
        live[places[i] >> 3] &= (uint8_t)~(1u << (places[i] & 7));
        --live_rows[places[i] / file_rows];
    }
}
