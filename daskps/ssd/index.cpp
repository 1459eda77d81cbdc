// The index from key to place: 256 groups by the hash's first byte, each an ordered linear-probing table of 10-byte slots.
//
// The hash is a bijection of the key, and nothing of it is lost: 8 bits name the group, BITS stand in the slot, and what is
// left of the 80 bits of a slot is the place. BITS is 56 while places fit 24 bits. From then on it is 48: 32 bits of place,
// and 8 bits of the hash follow from where the entry stands (the group's slots are in hash order, and `starts` says where
// each of 256 buckets begins). So two keys never look alike, an absent key is known to be absent, and no key is read from
// disk to be sure.
//
// A group: an entry stands at or after home = rest * capacity / 2^56, and every slot from its home to it is taken; the
// slots behind `capacity` take what the end pushes over it. starts (BUCKETS + 1 a group): entries of bucket b, and no
// others, are in [starts[b], starts[b + 1]); the last one is the number of slots.
#include "dialect.cuh"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const int64_t SLOT = 10, AHEAD = 12;
static const int FIND_LINES = 2, INSERT_LINES = 8;
static const uint32_t ABSENT = 0xffffffffu;
static const uint64_t SEED = 0x9e3779b97f4a7c15ull;

template <int BITS>
struct Slots {
    static const int64_t BUCKETS = 1ll << (56 - BITS);
    static const uint64_t REST = (1ull << BITS) - 1;
    static const uint32_t EMPTY = (uint32_t)((1ull << (80 - BITS)) - 1), DEAD = EMPTY - 1;  // not places
};

DEVICE uint64_t hash_of(uint64_t key) { return mix64(key ^ SEED); }
DEVICE int64_t group_of(uint64_t hash) { return (int64_t)(hash >> 56); }
DEVICE int64_t home_of(uint64_t hash, int64_t capacity) {
    return (int64_t)(((hash >> 24) & 0xffffffffu) * (uint64_t)capacity >> 32);
}
template <int BITS>
DEVICE int64_t bucket_of(uint64_t hash) {
    return (int64_t)(hash >> BITS) & (Slots<BITS>::BUCKETS - 1);
}

// A slot is BITS of hash, then the place, little-endian. It is read and written as 8 + 2 bytes: loads that straddle two
// earlier stores would wait for both to reach the cache.
DEVICE uint64_t word_of(const uint8_t* slot) {
    uint64_t word;
    memcpy(&word, slot, 8);
    return word;
}
template <int BITS>
DEVICE uint64_t rest_at(const uint8_t* slot) {
    return word_of(slot) & Slots<BITS>::REST;
}
template <int BITS>
DEVICE uint32_t place_at(const uint8_t* slot) {
    uint16_t high;
    memcpy(&high, slot + 8, 2);
    return (uint32_t)high << (64 - BITS) | (uint32_t)(word_of(slot) >> BITS);
}
template <int BITS>
DEVICE void put(uint8_t* slot, uint64_t rest, uint32_t place) {
    const uint64_t word = rest | (uint64_t)place << BITS;
    const uint16_t high = (uint16_t)(place >> (64 - BITS));
    memcpy(slot, &word, 8);
    memcpy(slot + 8, &high, 2);
}

template <int BITS>
struct Group {
    uint8_t* slots;
    uint32_t* starts;
    int64_t capacity;
    int64_t end() const { return starts[Slots<BITS>::BUCKETS]; }
};
template <int BITS>
DEVICE Group<BITS> group_at(const uint64_t* tables, const int64_t* capacities, const uint32_t* starts, int64_t g) {
    return {(uint8_t*)tables[g], (uint32_t*)starts + g * (Slots<BITS>::BUCKETS + 1), capacities[g]};
}

// The slot of `hash`, or where it would be put; `found` tells which.
template <int BITS>
DEVICE int64_t seek(const Group<BITS>& group, uint64_t hash, bool* found) {
    const int64_t bucket = bucket_of<BITS>(hash), home = home_of(hash, group.capacity), end = group.starts[bucket + 1];
    const uint64_t rest = hash & Slots<BITS>::REST;
    int64_t p = group.starts[bucket] > home ? group.starts[bucket] : home;
    *found = false;
    for (; p < end; ++p) {
        const uint8_t* slot = group.slots + p * SLOT;
        if (place_at<BITS>(slot) == Slots<BITS>::EMPTY) break;
        const uint64_t other = rest_at<BITS>(slot);
        if (other < rest) continue;
        *found = other == rest;
        break;
    }
    return p;
}

// The place of `hash`, ABSENT if it has none.
template <int BITS>
DEVICE uint32_t find(const Group<BITS>& group, uint64_t hash) {
    bool found;
    const int64_t p = seek(group, hash, &found);
    const uint32_t place = found ? place_at<BITS>(group.slots + p * SLOT) : Slots<BITS>::EMPTY;
    return place >= Slots<BITS>::DEAD ? ABSENT : place;
}

// At 90% load an entry is 4 slots from home on average, and a new one moves 50 others: `lines` of 64 bytes are wanted.
template <int BITS>
DEVICE void prefetch_home(const Group<BITS>& group, uint64_t hash, int lines) {
    const uint8_t* home = group.slots + home_of(hash, group.capacity) * SLOT;
    for (int line = 0; line < lines; ++line) __builtin_prefetch(home + 64 * line);
}

// `call<BITS>(...)` for the BITS of an index.
#define WITH_BITS(bits, call, ...) ((bits) == 56 ? call<56>(__VA_ARGS__) : call<48>(__VA_ARGS__))

// Keys of each group in [first, last): the first pass of a partition by group.
NATIVE(void, ssd_index_count, const uint64_t* keys, int64_t first, int64_t last, int64_t* counts) {
    for (int64_t i = first; i < last; ++i) ++counts[group_of(hash_of(keys[i]))];
}

// The second pass: hashes of the keys, in their order within a group, from each group's cursor on; with each goes its value,
// or without values its position.
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
DEVICE void find_all(const uint64_t* tables, const int64_t* capacities, const uint32_t* starts, const uint64_t* keys,
                     int64_t first, int64_t last, uint32_t* places) {
    uint64_t ring[AHEAD];
    for (int64_t i = first; i < last + AHEAD; ++i) {
        const int64_t done = i - AHEAD;
        if (done >= first) {
            const uint64_t hash = ring[done % AHEAD];
            places[done] = find(group_at<BITS>(tables, capacities, starts, group_of(hash)), hash);
        }
        if (i < last) {
            const uint64_t hash = ring[i % AHEAD] = hash_of(keys[i]);
            prefetch_home(group_at<BITS>(tables, capacities, starts, group_of(hash)), hash, FIND_LINES);
        }
    }
}

// Places of keys [first, last); ABSENT where a key has none.
NATIVE(void, ssd_index_find, int64_t bits, const uint64_t* tables, const int64_t* capacities, const uint32_t* starts,
       const uint64_t* keys, int64_t first, int64_t last, uint32_t* places) {
    WITH_BITS(bits, find_all, tables, capacities, starts, keys, first, last, places);
}

template <int BITS>
DEVICE int64_t request_all(const uint64_t* tables, const int64_t* capacities, const uint32_t* starts,
                           const uint64_t* hashes, const uint32_t* positions, const uint32_t* targets, int64_t first,
                           int64_t last, uint64_t* requests, uint8_t* found) {
    int64_t count = 0;
    for (int64_t i = first; i < last; ++i) {
        if (i + AHEAD < last) {
            const uint64_t next = hashes[i + AHEAD];
            prefetch_home(group_at<BITS>(tables, capacities, starts, group_of(next)), next, FIND_LINES);
        }
        const uint32_t place = find(group_at<BITS>(tables, capacities, starts, group_of(hashes[i])), hashes[i]);
        requests[first + count] = (uint64_t)place << 32 | (targets ? targets[positions[i]] : positions[i]);
        count += place != ABSENT;
        found[positions[i]] = place != ABSENT;
    }
    return count;
}

// Write a request (place << 32 | row of `out`) for each of the partitioned keys [first, last) that exists, packed from
// requests[first] on, and set found at the key's position. The row of `out` is targets[position], or the position itself
// if targets is null. Returns the number of requests.
NATIVE(int64_t, ssd_index_request, int64_t bits, const uint64_t* tables, const int64_t* capacities,
       const uint32_t* starts, const uint64_t* hashes, const uint32_t* positions, const uint32_t* targets, int64_t first,
       int64_t last, uint64_t* requests, uint8_t* found) {
    return WITH_BITS(bits, request_all, tables, capacities, starts, hashes, positions, targets, first, last, requests,
                     found);
}

// Make room at slot p of bucket b by moving the run that starts there; false when the group's end is reached.
template <int BITS>
DEVICE bool open_slot(const Group<BITS>& group, int64_t p, int64_t bucket, int64_t* dead) {
    int64_t e = p;
    while (e < group.end() && place_at<BITS>(group.slots + e * SLOT) < Slots<BITS>::DEAD) ++e;
    if (e == group.end()) return false;
    *dead -= place_at<BITS>(group.slots + e * SLOT) == Slots<BITS>::DEAD;
    memmove(group.slots + (p + 1) * SLOT, group.slots + p * SLOT, (e - p) * SLOT);
    for (int64_t b = bucket + 1; b < Slots<BITS>::BUCKETS && (int64_t)group.starts[b] <= e; ++b) ++group.starts[b];
    return true;
}

template <int BITS>
DEVICE int64_t insert_all(const uint64_t* tables, const int64_t* capacities, const int64_t* limits, uint32_t* starts,
                          int64_t* counts, int64_t* dead, int64_t first, int64_t last, int64_t* cursors,
                          const int64_t* ends, const uint64_t* hashes, const uint32_t* places, uint32_t* previous) {
    int64_t full = 0;
    for (int64_t g = first; g < last; ++g) {
        const Group<BITS> group = group_at<BITS>(tables, capacities, starts, g);
        for (int64_t& i = cursors[g]; i < ends[g]; ++i) {
            if (i + AHEAD < ends[g]) prefetch_home(group, hashes[i + AHEAD], INSERT_LINES);
            bool found;
            const int64_t p = seek(group, hashes[i], &found);
            uint8_t* slot = group.slots + p * SLOT;
            if (found) {
                const uint32_t old = place_at<BITS>(slot);
                const bool was_dead = old == Slots<BITS>::DEAD;
                counts[g] += was_dead;
                dead[g] -= was_dead;
                previous[i] = was_dead ? ABSENT : old;
            } else {
                const int64_t bucket = bucket_of<BITS>(hashes[i]);
                if (counts[g] + dead[g] >= limits[g] || !open_slot(group, p, bucket, dead + g)) break;
                ++counts[g];
                previous[i] = ABSENT;
            }
            put<BITS>(slot, hashes[i] & Slots<BITS>::REST, places[i]);
        }
        full += cursors[g] < ends[g];
    }
    return full;
}

// Insert or replace the partitioned keys of groups [first, last): hashes, places and, out, the replaced places (ABSENT for
// new keys) are all in group order. cursors (256) say how far each group has come, ends (256) where it stops. Returns the
// number of groups that must grow before they can go on.
NATIVE(int64_t, ssd_index_insert, int64_t bits, const uint64_t* tables, const int64_t* capacities,
       const int64_t* limits, uint32_t* starts, int64_t* counts, int64_t* dead, int64_t first, int64_t last,
       int64_t* cursors, const int64_t* ends, const uint64_t* hashes, const uint32_t* places, uint32_t* previous) {
    return WITH_BITS(bits, insert_all, tables, capacities, limits, starts, counts, dead, first, last, cursors, ends, hashes,
                     places, previous);
}

template <int BITS>
DEVICE void remove_all(const uint64_t* tables, const int64_t* capacities, const uint32_t* starts, int64_t* counts,
                       int64_t* dead, const uint64_t* keys, int64_t n, uint32_t* previous) {
    for (int64_t i = 0; i < n; ++i) {
        bool found;
        const uint64_t hash = hash_of(keys[i]);
        const int64_t g = group_of(hash);
        const Group<BITS> group = group_at<BITS>(tables, capacities, starts, g);
        uint8_t* slot = group.slots + seek(group, hash, &found) * SLOT;
        const uint32_t old = found ? place_at<BITS>(slot) : Slots<BITS>::EMPTY;
        const bool there = old < Slots<BITS>::DEAD;
        previous[i] = there ? old : ABSENT;
        if (!there) continue;
        put<BITS>(slot, hash & Slots<BITS>::REST, Slots<BITS>::DEAD);
        --counts[g];
        ++dead[g];
    }
}

// Take keys out: previous gets their places, ABSENT where a key had none. Slots stay taken until the group is rehashed.
NATIVE(void, ssd_index_remove, int64_t bits, const uint64_t* tables, const int64_t* capacities, const uint32_t* starts,
       int64_t* counts, int64_t* dead, const uint64_t* keys, int64_t n, uint32_t* previous) {
    WITH_BITS(bits, remove_all, tables, capacities, starts, counts, dead, keys, n, previous);
}

// An empty group of `slots` slots: every one free, bucket b begins at its home.
template <int BITS>
DEVICE void clear(const Group<BITS>& group, int64_t slots) {
    memset(group.slots, 0xff, slots * SLOT);
    for (int64_t b = 0; b < Slots<BITS>::BUCKETS; ++b)
        group.starts[b] = (uint32_t)home_of((uint64_t)b << BITS, group.capacity);
    group.starts[Slots<BITS>::BUCKETS] = (uint32_t)slots;
}

// Copy a group's live entries, in order, into a group of `slots` free slots. Returns where the last one ends, or would
// end if there were slots enough.
template <int FROM, int TO>
DEVICE int64_t rehash(const Group<FROM>& old, const Group<TO>& group, int64_t slots) {
    int64_t next = 0, opened = 0;
    clear(group, slots);
    for (int64_t b = 0; b < Slots<FROM>::BUCKETS; ++b) {
        for (int64_t p = old.starts[b]; p < (int64_t)old.starts[b + 1]; ++p) {
            const uint32_t place = place_at<FROM>(old.slots + p * SLOT);
            if (place >= Slots<FROM>::DEAD) continue;
            const uint64_t hash = (uint64_t)b << FROM | rest_at<FROM>(old.slots + p * SLOT);
            for (; opened <= bucket_of<TO>(hash); ++opened)
                if (next > (int64_t)group.starts[opened]) group.starts[opened] = (uint32_t)next;
            const int64_t home = home_of(hash, group.capacity);
            if (home > next) next = home;
            if (next < slots) put<TO>(group.slots + next * SLOT, hash & Slots<TO>::REST, place);
            ++next;
        }
    }
    for (; opened < Slots<TO>::BUCKETS; ++opened)
        if (next > (int64_t)group.starts[opened]) group.starts[opened] = (uint32_t)next;
    return next;
}

// Move groups[k], k < n, of an index of `old_bits` into tables[k] of capacities[k] and slots[k], starts_k. ends[k]: where
// its last entry ends; if that is past slots[k], nothing is moved, and more slots are wanted.
NATIVE(void, ssd_index_rehash, const int64_t* groups, int64_t n, int64_t old_bits, const uint64_t* old_tables,
       const int64_t* old_capacities, const uint32_t* old_starts, int64_t bits, const uint64_t* tables,
       const int64_t* capacities, const int64_t* slots, uint32_t* starts, int64_t* ends) {
    for (int64_t k = 0; k < n; ++k) {
        if (bits == 56) {
            const Group<56> old = group_at<56>(old_tables, old_capacities, old_starts, groups[k]);
            ends[k] = rehash<56, 56>(old, group_at<56>(tables, capacities, starts, k), slots[k]);
        } else if (old_bits == 56) {
            const Group<56> old = group_at<56>(old_tables, old_capacities, old_starts, groups[k]);
            ends[k] = rehash<56, 48>(old, group_at<48>(tables, capacities, starts, k), slots[k]);
        } else {
            const Group<48> old = group_at<48>(old_tables, old_capacities, old_starts, groups[k]);
            ends[k] = rehash<48, 48>(old, group_at<48>(tables, capacities, starts, k), slots[k]);
        }
    }
}

// Give the whole pages of memory that is not needed any more back to the system, though it is still allocated.
NATIVE(void, ssd_give_back, void* memory, int64_t n) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + (uintptr_t)n) / page * page;
    if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
}

// Clear the live bits of rows that were replaced (ABSENT entries are none), and count them off their file.
NATIVE(void, ssd_clear_live, const uint32_t* places, int64_t n, int64_t file_rows, uint8_t* live, int64_t* live_rows) {
    for (int64_t i = 0; i < n; ++i) {
        if (places[i] == ABSENT) continue;
        live[places[i] >> 3] &= (uint8_t)~(1u << (places[i] & 7));
        --live_rows[places[i] / file_rows];
    }
}
