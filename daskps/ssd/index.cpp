// The index from key to place: 256 groups by the hash's first byte, each an ordered linear-probing table of 10-byte slots.
//
// The hash is a bijection of the key, and nothing of it is lost: 8 bits name the group, 8 bits the bucket (the group's
// slots are in hash order, and `starts` says where each bucket begins), 48 bits stand in the slot beside the 32-bit place.
// So two keys never look alike, an absent key is known to be absent, and no key is read from disk to be sure.
//
// A group: capacity slots + TAIL; an entry stands at or after home = rest * capacity / 2^56, and every slot from its home
// to it is taken. starts (257 a group): entries of bucket b, and no others, are in [starts[b], starts[b + 1]).
#include "dialect.cuh"
#include <string.h>

static const int64_t SLOT = 10, TAIL = 64, GROUPS = 256, BUCKETS = 256, STARTS = 257, AHEAD = 12;
static const uint32_t EMPTY = 0xffffffffu, DEAD = 0xfffffffeu;
static const uint64_t SEED = 0x9e3779b97f4a7c15ull, LOW48 = 0xffffffffffffull;

DEVICE uint64_t hash_of(uint64_t key) { return mix64(key ^ SEED); }
DEVICE int64_t group_of(uint64_t hash) { return (int64_t)(hash >> 56); }
DEVICE int64_t bucket_of(uint64_t hash) { return (int64_t)(hash >> 48) & 255; }
DEVICE int64_t home_of(uint64_t hash, int64_t capacity) {
    return (int64_t)(((hash >> 24) & 0xffffffffu) * (uint64_t)capacity >> 32);
}

// A slot is 6 bytes of hash and 4 of place, little-endian. It is read and written as 8 + 2 bytes: loads that straddle two
// earlier stores would wait for both to reach the cache.
DEVICE uint64_t word_of(const uint8_t* slot) {
    uint64_t word;
    memcpy(&word, slot, 8);
    return word;
}
DEVICE uint64_t rest_at(const uint8_t* slot) { return word_of(slot) & LOW48; }
DEVICE uint32_t place_at(const uint8_t* slot) {
    uint16_t high;
    memcpy(&high, slot + 8, 2);
    return (uint32_t)high << 16 | (uint32_t)(word_of(slot) >> 48);
}
DEVICE void put(uint8_t* slot, uint64_t rest, uint32_t place) {
    const uint64_t word = rest | (uint64_t)place << 48;
    const uint16_t high = (uint16_t)(place >> 16);
    memcpy(slot, &word, 8);
    memcpy(slot + 8, &high, 2);
}

struct Group {
    uint8_t* slots;
    uint32_t* starts;
    int64_t capacity;
};
DEVICE Group group_at(const uint64_t* tables, const int64_t* capacities, const uint32_t* starts, int64_t g) {
    return {(uint8_t*)tables[g], (uint32_t*)starts + g * STARTS, capacities[g]};
}

// The slot of `hash`, or where it would be put; `found` tells which.
DEVICE int64_t seek(const Group& group, uint64_t hash, bool* found) {
    const int64_t bucket = bucket_of(hash), home = home_of(hash, group.capacity), end = group.starts[bucket + 1];
    const uint64_t rest = hash & LOW48;
    int64_t p = group.starts[bucket] > home ? group.starts[bucket] : home;
    *found = false;
    for (; p < end; ++p) {
        const uint8_t* slot = group.slots + p * SLOT;
        if (place_at(slot) == EMPTY) break;
        const uint64_t other = rest_at(slot);
        if (other < rest) continue;
        *found = other == rest;
        break;
    }
    return p;
}

DEVICE void prefetch_home(const Group& group, uint64_t hash) {
    const uint8_t* home = group.slots + home_of(hash, group.capacity) * SLOT;
    __builtin_prefetch(home);
    __builtin_prefetch(home + 64);  // at 94% load an entry is 8 slots from home, on average
}

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

// Places of keys [first, last); EMPTY where a key is absent.
NATIVE(void, ssd_index_find, const uint64_t* tables, const int64_t* capacities, const uint32_t* starts,
       const uint64_t* keys, int64_t first, int64_t last, uint32_t* places) {
    uint64_t ring[AHEAD];
    for (int64_t i = first; i < last + AHEAD; ++i) {
        const int64_t done = i - AHEAD;
        if (done >= first) {
            bool found;
            const uint64_t hash = ring[done % AHEAD];
            const Group group = group_at(tables, capacities, starts, group_of(hash));
            const int64_t p = seek(group, hash, &found);
            const uint32_t place = found ? place_at(group.slots + p * SLOT) : EMPTY;
            places[done] = place == DEAD ? EMPTY : place;
        }
        if (i < last) {
            const uint64_t hash = ring[i % AHEAD] = hash_of(keys[i]);
            prefetch_home(group_at(tables, capacities, starts, group_of(hash)), hash);
        }
    }
}

// Requests (place << 32 | position) of the partitioned keys [first, last) that are there, packed from requests[first] on;
// found gets a 1 at their positions. Returns how many.
NATIVE(int64_t, ssd_index_request, const uint64_t* tables, const int64_t* capacities, const uint32_t* starts,
       const uint64_t* hashes, const uint32_t* positions, int64_t first, int64_t last, uint64_t* requests,
       uint8_t* found) {
    int64_t count = 0;
    for (int64_t i = first; i < last; ++i) {
        if (i + AHEAD < last) {
            const uint64_t next = hashes[i + AHEAD];
            prefetch_home(group_at(tables, capacities, starts, group_of(next)), next);
        }
        bool there;
        const Group group = group_at(tables, capacities, starts, group_of(hashes[i]));
        const uint8_t* slot = group.slots + seek(group, hashes[i], &there) * SLOT;
        const uint32_t place = there ? place_at(slot) : EMPTY;
        requests[first + count] = (uint64_t)place << 32 | positions[i];
        count += place < DEAD;
        found[positions[i]] = place < DEAD;
    }
    return count;
}

// Make room at slot p of bucket b by moving the run that starts there; false when the group's end is reached.
DEVICE bool open_slot(const Group& group, int64_t p, int64_t bucket, int64_t* dead) {
    int64_t e = p;
    const int64_t slots = group.capacity + TAIL;
    while (e < slots && place_at(group.slots + e * SLOT) < DEAD) ++e;
    if (e == slots) return false;
    *dead -= place_at(group.slots + e * SLOT) == DEAD;
    memmove(group.slots + (p + 1) * SLOT, group.slots + p * SLOT, (e - p) * SLOT);
    for (int64_t b = bucket + 1; b < BUCKETS && (int64_t)group.starts[b] <= e; ++b) ++group.starts[b];
    return true;
}

// Insert or replace the partitioned keys of groups [first, last): hashes, places and, out, the replaced places (EMPTY for new
// keys) are all in group order. cursors (256) say how far each group has come, ends (256) where it stops. Returns the
// group that must grow before going on, or -1 when all is done.
NATIVE(int64_t, ssd_index_insert, const uint64_t* tables, const int64_t* capacities, const int64_t* limits,
       uint32_t* starts, int64_t* counts, int64_t* dead, int64_t first, int64_t last, int64_t* cursors,
       const int64_t* ends, const uint64_t* hashes, const uint32_t* places, uint32_t* previous) {
    for (int64_t g = first; g < last; ++g) {
        const Group group = group_at(tables, capacities, starts, g);
        for (int64_t& i = cursors[g]; i < ends[g]; ++i) {
            if (i + AHEAD < ends[g]) prefetch_home(group, hashes[i + AHEAD]);
            bool found;
            const int64_t p = seek(group, hashes[i], &found);
            uint8_t* slot = group.slots + p * SLOT;
            if (found) {
                const uint32_t old = place_at(slot);
                counts[g] += old == DEAD;
                dead[g] -= old == DEAD;
                previous[i] = old == DEAD ? EMPTY : old;
            } else {
                if (counts[g] + dead[g] >= limits[g] || !open_slot(group, p, bucket_of(hashes[i]), dead + g)) return g;
                ++counts[g];
                previous[i] = EMPTY;
            }
            put(slot, hashes[i] & LOW48, places[i]);
        }
    }
    return -1;
}

// Take keys out: previous gets their places, EMPTY where a key was absent. Slots stay taken until the group is rehashed.
NATIVE(void, ssd_index_remove, const uint64_t* tables, const int64_t* capacities, const uint32_t* starts,
       int64_t* counts, int64_t* dead, const uint64_t* keys, int64_t n, uint32_t* previous) {
    for (int64_t i = 0; i < n; ++i) {
        bool found;
        const uint64_t hash = hash_of(keys[i]);
        const int64_t g = group_of(hash);
        const Group group = group_at(tables, capacities, starts, g);
        uint8_t* slot = group.slots + seek(group, hash, &found) * SLOT;
        const uint32_t old = found ? place_at(slot) : EMPTY;
        previous[i] = old >= DEAD ? EMPTY : old;
        if (old >= DEAD) continue;
        put(slot, hash & LOW48, DEAD);
        --counts[g];
        ++dead[g];
    }
}

// An empty group: every slot free, bucket b begins at its home.
DEVICE void clear(void* slots, int64_t capacity, uint32_t* starts) {
    memset(slots, 0xff, (capacity + TAIL) * SLOT);
    for (int64_t b = 0; b < BUCKETS; ++b) starts[b] = (uint32_t)home_of((uint64_t)b << 48, capacity);
    starts[BUCKETS] = (uint32_t)(capacity + TAIL);
}

NATIVE(void, ssd_index_clear, void* slots, int64_t capacity, uint32_t* starts) { clear(slots, capacity, starts); }

// Copy a group's live entries, in order, into a new group of another capacity. Returns their number, or -1 when the
// run at the end does not fit (then more capacity is wanted).
NATIVE(int64_t, ssd_index_rehash, const void* old_slots, const uint32_t* old_starts, void* new_slots,
       int64_t capacity, uint32_t* new_starts) {
    const uint8_t* from = (const uint8_t*)old_slots;
    uint8_t* to = (uint8_t*)new_slots;
    int64_t next = 0, moved = 0;
    clear(new_slots, capacity, new_starts);
    for (int64_t b = 0; b < BUCKETS; ++b) {
        if (next > (int64_t)new_starts[b]) new_starts[b] = (uint32_t)next;
        for (int64_t p = old_starts[b]; p < (int64_t)old_starts[b + 1]; ++p) {
            const uint32_t place = place_at(from + p * SLOT);
            if (place >= DEAD) continue;
            const uint64_t rest = rest_at(from + p * SLOT);
            const int64_t home = home_of((uint64_t)b << 48 | rest, capacity);
            if (home > next) next = home;
            if (next >= capacity + TAIL) return -1;
            put(to + next++ * SLOT, rest, place);
            ++moved;
        }
    }
    return moved;
}

// Clear the live bits of rows that were replaced (EMPTY entries are none), and count them off their file.
NATIVE(void, ssd_clear_live, const uint32_t* places, int64_t n, int64_t file_rows, uint8_t* live, int64_t* live_rows) {
    for (int64_t i = 0; i < n; ++i) {
        if (places[i] == EMPTY) continue;
        live[places[i] >> 3] &= (uint8_t)~(1u << (places[i] & 7));
        --live_rows[places[i] / file_rows];
    }
}
