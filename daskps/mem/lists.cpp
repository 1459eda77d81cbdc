// The two lists of MEM-PS's cache, by which rows leave it.
//
// The recent list (LRU) is a ring of slots: a visit writes the slot at the ring's head, and the entry remembers that
// place; a cell whose slot remembers another place is stale and is skipped at the tail. That keeps exact LRU order with
// sequential writes only, where a linked list costs two more cache misses a visit. The frequent list (LFU) is the entries
// marked FREQUENT: victims are picked by visits in a window of entries that a clock hand moves over.
#include "entry.cuh"

// Move what the ring's cells from tail + first on still hold to the frequent list, until `wanted` rows have moved or cell
// tail + last is reached. counts: rows moved, cells passed.
NATIVE(void, mem_demote, void* entries, const uint32_t* ring, int64_t ring_cells, int64_t tail, int64_t first,
    int64_t last, int64_t wanted, int64_t* counts) {
    Entry* table = (Entry*)entries;
    int64_t moved = 0, i = first;
    for (; i < last && moved < wanted; ++i) {
        int64_t cell = tail + i < ring_cells ? tail + i : tail + i - ring_cells;
        int64_t ahead = cell + 24 < ring_cells ? cell + 24 : cell + 24 - ring_cells;
        if (ring[ahead] != NONE) __builtin_prefetch(&table[ring[ahead]], 1);
        if (ring[cell] == NONE) continue;
        Entry& entry = table[ring[cell]];
        if (entry.place != (uint32_t)cell || (entry.flags & (OCCUPIED | FREQUENT)) != OCCUPIED) continue;
        entry.flags |= FREQUENT;
        ++moved;
    }
    counts[0] += moved;
    counts[1] += i - first;
}

// May this entry leave? While a snapshot is being written (`flushing`), rows pushed after it must stay in memory.
static inline bool evictable(const Entry& entry, bool flushing) {
    if ((entry.flags & (OCCUPIED | FREQUENT)) != (OCCUPIED | FREQUENT) || entry.holds) return false;
    return !(flushing && (entry.flags & (DIRTY | PENDING)) == DIRTY);
}

// histogram[v] += evictable entries of slots [first, last) with v visits.
NATIVE(void, mem_census, const void* entries, int64_t first, int64_t last, uint32_t flushing, int64_t* histogram) {
    const Entry* table = (const Entry*)entries;
    for (int64_t slot = first; slot < last; ++slot)
        if (evictable(table[slot], flushing)) ++histogram[table[slot].visits];
}

// The evictable entries of [first, last) with fewer than `visits` visits, and `allowed` more that have just as many.
NATIVE(int64_t, mem_choose, const void* entries, int64_t first, int64_t last, uint32_t flushing, uint32_t visits,
    int64_t allowed, uint32_t* victims) {
    const Entry* table = (const Entry*)entries;
    int64_t chosen = 0;
    for (int64_t slot = first; slot < last; ++slot) {
        if (table[slot].visits > visits || !evictable(table[slot], flushing)) continue;
        if (table[slot].visits == visits && allowed-- <= 0) continue;
        victims[chosen++] = (uint32_t)slot;
    }
    return chosen;
}

// Halve the visits of slots [first, last), so that what was popular once does not stay for ever.
NATIVE(void, mem_age, void* entries, int64_t first, int64_t last) {
    Entry* table = (Entry*)entries;
    for (int64_t slot = first; slot < last; ++slot) table[slot].visits >>= 1;
}
