// The cache of MEM-PS: rows in slots, found by key, in two lists (recent, then frequent), with pins and dirty marks.
//
// All memory is NumPy's. A slot s has entries[s] (16 bytes) and rows[s] (width values). The index is open addressing over
// 8-byte buckets: the upper half is the tag (32 bits of the key's hash), the lower half is slot + 1, so every key is legal
// and 0 is an empty bucket. A bucket's home follows from its tag alone, so deleting never touches the entries.
//
// The recent list (LRU) is a ring of slots: a visit writes the slot at the ring's head, and the entry remembers that
// place; a ring cell whose slot remembers another place is stale and is skipped at the tail. That keeps exact LRU order
// with sequential writes only, where a linked list costs two more cache misses a visit. The frequent list (LFU) is the
// entries marked FREQUENT: victims are picked by visits in a window of entries that a clock hand moves over.
//
// Calls that take (first, last) work on that share of the items; shares touch different slots, because keys are distinct.
#include "dialect.cuh"

struct Entry {
    uint64_t key;
    uint32_t place;  // occupied: its cell in the ring; free: the next free slot + 1
    uint16_t holds;  // bit (batch % 16) is set while that batch is out with this row
    uint8_t visits;  // pulls that asked for it, saturating, halved now and then
    uint8_t flags;
};

enum : uint8_t { OCCUPIED = 1, DIRTY = 2, PENDING = 4, FREQUENT = 8, CLAIMED = 16 };
enum : uint32_t { NONE = 0xffffffffu };
enum : int64_t { BLOCK = 32 };

static inline uint32_t tag_of(uint64_t key) { return (uint32_t)(mix64(key) >> 32); }
static inline uint64_t home_of(uint32_t tag, uint64_t buckets) { return (uint64_t)tag * buckets >> 32; }

static inline void prefetch_row(const float* row, int64_t width) {
    const char* byte = (const char*)row;
    const char* end = byte + 4 * width;
    for (; byte < end; byte += 64) __builtin_prefetch(byte);
    __builtin_prefetch(end - 1);
}

// Rows are opaque bits: 16-byte pieces, the last one overlapping. libc's memcpy costs about 10 ns a call at this size.
static inline void copy_row(float* to, const float* from, int64_t width) {
    if (width < 4) {
        for (int64_t i = 0; i < width; ++i) __builtin_memcpy(to + i, from + i, 4);
        return;
    }
    for (int64_t i = 0; i + 4 <= width; i += 4) __builtin_memcpy(to + i, from + i, 16);
    __builtin_memcpy(to + width - 4, from + width - 4, 16);
}

// The slot of the next bucket from `at` on whose tag is equal, or NONE at an empty bucket.
static inline uint32_t probe(const uint64_t* buckets, uint64_t bucket_count, uint32_t tag, uint64_t* at) {
    for (uint64_t i = *at;; i = i + 1 == bucket_count ? 0 : i + 1) {
        uint64_t bucket = buckets[i];
        if (bucket == 0 || (uint32_t)(bucket >> 32) == tag) {
            *at = i;
            return (uint32_t)bucket - 1;
        }
    }
}

static uint32_t find_one(
    const uint64_t* buckets, uint64_t bucket_count, const Entry* entries, uint64_t key, uint32_t tag) {
    uint64_t at = home_of(tag, bucket_count);
    for (;;) {
        uint32_t slot = probe(buckets, bucket_count, tag, &at);
        if (slot == NONE || entries[slot].key == key) return slot;
        at = at + 1 == bucket_count ? 0 : at + 1;
    }
}

// use(i, slot) for every key of [first, last). Three blocks are in the air: one fetches buckets, one fetches entries and
// rows, one is used; a miss in the cache of the CPU costs about 100 ns, which 32 keys share.
template <class Use>
static inline void each_found(const uint64_t* buckets, uint64_t bucket_count, const Entry* entries, const float* rows,
    int64_t width, const uint64_t* keys, int64_t first, int64_t last, Use use) {
    uint32_t tags[3][BLOCK];
    uint32_t slots[3][BLOCK];
    int64_t blocks = (last - first + BLOCK - 1) / BLOCK;
    for (int64_t step = 0; step < blocks + 2; ++step) {
        if (step < blocks) {
            int64_t start = first + step * BLOCK, n = last - start < BLOCK ? last - start : BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t tag = tags[step % 3][j] = tag_of(keys[start + j]);
                __builtin_prefetch(&buckets[home_of(tag, bucket_count)]);
            }
        }
        if (step >= 1 && step - 1 < blocks) {
            int64_t start = first + (step - 1) * BLOCK, n = last - start < BLOCK ? last - start : BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t tag = tags[(step - 1) % 3][j];
                uint64_t at = home_of(tag, bucket_count);
                uint32_t slot = slots[(step - 1) % 3][j] = probe(buckets, bucket_count, tag, &at);
                if (slot == NONE) continue;
                __builtin_prefetch(&entries[slot]);
                if (rows) prefetch_row(rows + slot * width, width);
            }
        }
        if (step >= 2) {
            int64_t start = first + (step - 2) * BLOCK, n = last - start < BLOCK ? last - start : BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t slot = slots[(step - 2) % 3][j];
                uint64_t key = keys[start + j];
                if (slot != NONE && entries[slot].key != key)
                    slot = find_one(buckets, bucket_count, entries, key, tags[(step - 2) % 3][j]);
                use(start + j, slot);
            }
        }
    }
}

// slots[i] of every key, NONE where it is not cached; its row to out[i] unless out is null. Returns the number found.
NATIVE(int64_t, mem_find, const uint64_t* buckets, uint64_t bucket_count, const void* entries, const float* rows,
    int64_t width, const uint64_t* keys, int64_t first, int64_t last, uint32_t* slots, float* out) {
    int64_t found = 0;
    each_found((const uint64_t*)buckets, bucket_count, (const Entry*)entries, out ? rows : nullptr, width, keys, first,
        last, [&](int64_t i, uint32_t slot) {
            slots[i] = slot;
            if (slot == NONE) return;
            ++found;
            if (out) copy_row(out + i * width, rows + slot * width, width);
        });
    return found;
}

// How many of the keys are pinned now.
NATIVE(int64_t, mem_count_pinned, const uint64_t* buckets, uint64_t bucket_count, const void* entries,
    const uint64_t* keys, int64_t first, int64_t last) {
    int64_t pinned = 0;
    const Entry* table = (const Entry*)entries;
    each_found(buckets, bucket_count, table, nullptr, 0, keys, first, last,
        [&](int64_t i, uint32_t slot) { pinned += slot != NONE && table[slot].holds != 0; });
    return pinned;
}

// Distance from batch to the latest earlier batch that is out with the row: 1..15, or 0 if none is.
static inline uint8_t distance(uint16_t holds, uint32_t batch) {
    uint32_t turn = (batch - 1) % 16;  // bring the bit of batch - 1 to the top
    uint32_t turned = (uint16_t)((uint32_t)holds << (15 - turn) | (uint32_t)holds >> (turn + 1));
    return turned ? (uint8_t)(1 + __builtin_clz(turned) - 16) : 0;
}

// Visit the keys for `batch`: pin what is cached, move it to the head of the recent list, copy free rows to out (unless
// null). late[i - base] is the distance to the batch that is out with the row; slots[i] is NONE where the key is not
// cached. Key `base` takes the ring's head.
// counts: found, late, pinned now but not before, taken from the frequent list, repeated keys.
NATIVE(void, mem_visit, const uint64_t* buckets, uint64_t bucket_count, void* entries, const float* rows, int64_t width,
    const uint64_t* keys, int64_t first, int64_t last, uint32_t batch, uint32_t* ring, int64_t ring_cells,
    int64_t ring_head, int64_t base, uint32_t* slots, uint8_t* late, float* out, int64_t* counts) {
    Entry* table = (Entry*)entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t found = 0, late_rows = 0, pinned = 0, from_frequent = 0, repeated = 0;
    each_found(
        buckets, bucket_count, table, out ? rows : nullptr, width, keys, first, last, [&](int64_t i, uint32_t slot) {
            int64_t cell = ring_head + (i - base);
            if (cell >= ring_cells) cell -= ring_cells;
            slots[i] = ring[cell] = slot;
            late[i - base] = 0;
            if (slot == NONE) return;
            Entry& entry = table[slot];
            if (entry.holds & bit) {
                ++repeated;
                return;
            }
            ++found;
            from_frequent += (entry.flags & FREQUENT) != 0;
            entry.flags &= (uint8_t)~FREQUENT;
            entry.place = (uint32_t)cell;
            entry.visits += entry.visits != 255;
            if (entry.holds) {
                ++late_rows;
                late[i - base] = distance(entry.holds, batch);
            } else {
                ++pinned;
                if (out) copy_row(out + i * width, rows + slot * width, width);
            }
            entry.holds |= bit;
        });
    counts[0] += found;
    counts[1] += late_rows;
    counts[2] += pinned;
    counts[3] += from_frequent;
    counts[4] += repeated;
}

// Undo the pins of a visit: those of slots that are not NONE. Returns how many rows no batch holds any more.
NATIVE(int64_t, mem_unpin, void* entries, const uint32_t* slots, int64_t n, uint32_t batch) {
    Entry* table = (Entry*)entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t freed = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] == NONE || !(table[slots[i]].holds & bit)) continue;
        freed += (table[slots[i]].holds &= (uint16_t)~bit) == 0;
    }
    return freed;
}

static void put_bucket(uint64_t* buckets, uint64_t bucket_count, uint32_t tag, uint32_t slot) {
    uint64_t at = home_of(tag, bucket_count);
    while (buckets[at]) at = at + 1 == bucket_count ? 0 : at + 1;
    buckets[at] = (uint64_t)tag << 32 | (slot + 1);
}

// Give a slot to each key at positions[0..n), pinned by `batch`, at the head of the recent list. heads: free list, first
// slot never used. Returns how many were inserted: less than n where positions[that] repeats an earlier key.
NATIVE(int64_t, mem_insert, uint64_t* buckets, uint64_t bucket_count, void* entries, const uint64_t* keys,
    const uint32_t* positions, int64_t n, uint32_t batch, uint32_t* ring, int64_t ring_cells, int64_t ring_head,
    uint32_t* slots, int64_t* heads) {
    Entry* table = (Entry*)entries;
    for (int64_t j = 0; j < n; ++j) {
        if (j + 16 < n) __builtin_prefetch(&buckets[home_of(tag_of(keys[positions[j + 16]]), bucket_count)], 1);
        uint64_t key = keys[positions[j]];
        uint32_t tag = tag_of(key);
        if (find_one(buckets, bucket_count, table, key, tag) != NONE) return j;
        uint32_t slot = (uint32_t)heads[0] - 1;
        if (slot != NONE)
            heads[0] = table[slot].place;
        else
            slot = (uint32_t)heads[1]++;
        int64_t cell = ring_head + j < ring_cells ? ring_head + j : ring_head + j - ring_cells;
        table[slot] = Entry{key, (uint32_t)cell, (uint16_t)(1u << (batch % 16)), 1, OCCUPIED};
        slots[positions[j]] = ring[cell] = slot;
        put_bucket(buckets, bucket_count, tag, slot);
    }
    return n;
}

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

// Those of the slots whose flags have all of `wanted`, in order.
NATIVE(int64_t, mem_select, const void* entries, const uint32_t* slots, int64_t n, uint32_t wanted, uint32_t* selected) {
    const Entry* table = (const Entry*)entries;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 16 < n) __builtin_prefetch(&table[slots[i + 16]]);
        if ((table[slots[i]].flags & wanted) == wanted) selected[count++] = slots[i];
    }
    return count;
}

// Take the slots out of the index and put them on the free list (heads[0]).
NATIVE(void, mem_remove, uint64_t* buckets, uint64_t bucket_count, void* entries, const uint32_t* slots, int64_t n,
    int64_t* heads) {
    Entry* table = (Entry*)entries;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 32 < n) __builtin_prefetch(&table[slots[i + 32]], 1);
        if (i + 16 < n) __builtin_prefetch(&buckets[home_of(tag_of(table[slots[i + 16]].key), bucket_count)], 1);
        uint32_t slot = slots[i];
        uint32_t tag = tag_of(table[slot].key);
        uint64_t hole = home_of(tag, bucket_count);
        while (buckets[hole] != ((uint64_t)tag << 32 | (slot + 1))) hole = hole + 1 == bucket_count ? 0 : hole + 1;
        for (uint64_t at = hole;;) {  // close the hole: move back what may live there
            at = at + 1 == bucket_count ? 0 : at + 1;
            if (buckets[at] == 0) break;
            uint64_t home = home_of((uint32_t)(buckets[at] >> 32), bucket_count);
            uint64_t from_home = at >= home ? at - home : at + bucket_count - home;
            uint64_t from_hole = at >= hole ? at - hole : at + bucket_count - hole;
            if (from_home < from_hole) continue;
            buckets[hole] = buckets[at];
            hole = at;
        }
        buckets[hole] = 0;
        table[slot] = Entry{0, (uint32_t)heads[0], 0, 0, 0};
        heads[0] = (int64_t)slot + 1;
    }
}

// Halve the visits of slots [first, last), so that what was popular once does not stay for ever.
NATIVE(void, mem_age, void* entries, int64_t first, int64_t last) {
    Entry* table = (Entry*)entries;
    for (int64_t slot = first; slot < last; ++slot) table[slot].visits >>= 1;
}

// out[i] = row of slots[i]; keys[i] its key, unless keys is null.
NATIVE(void, mem_gather, const void* entries, const float* rows, int64_t width, const uint32_t* slots, int64_t first,
    int64_t last, float* out, uint64_t* keys) {
    const Entry* table = (const Entry*)entries;
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            prefetch_row(rows + slots[i + 16] * width, width);
            if (keys) __builtin_prefetch(&table[slots[i + 16]]);
        }
        copy_row(out + i * width, rows + slots[i] * width, width);
        if (keys) keys[i] = table[slots[i]].key;
    }
}

// Row i of source into the cache at slots[positions[i]], and into out[positions[i]] unless out is null.
NATIVE(void, mem_fill, float* rows, int64_t width, const uint32_t* slots, const uint32_t* positions, int64_t first,
    int64_t last, const float* source, float* out) {
    for (int64_t i = first; i < last; ++i) {
        copy_row(rows + slots[positions[i]] * width, source + i * width, width);
        if (out) copy_row(out + positions[i] * width, source + i * width, width);
    }
}

// May `batch` push these keys to these slots? The first i in [first, last) where the slot is not the key's, the batch does
// not hold the row (any more), one of the batches in `earlier` (bits) still holds it, or the key repeats; else -1.
// Repeats are looked for only with claims = 1; then each slot stays CLAIMED until it is pushed or released.
NATIVE(int64_t, mem_check, void* entries, const uint64_t* keys, const uint32_t* slots, int64_t first, int64_t last,
    uint32_t batch, uint32_t earlier, uint32_t claims) {
    Entry* table = (Entry*)entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last && slots[i + 16] != NONE) __builtin_prefetch(&table[slots[i + 16]]);
        if (slots[i] == NONE) return i;
        Entry& entry = table[slots[i]];
        if (entry.key != keys[i] || !(entry.holds & bit) || entry.holds & earlier) return i;
        if (claims && __atomic_fetch_or(&entry.flags, CLAIMED, __ATOMIC_RELAXED) & CLAIMED) return i;
    }
    return -1;
}

NATIVE(void, mem_release, void* entries, const uint32_t* slots, int64_t n) {
    Entry* table = (Entry*)entries;
    for (int64_t i = 0; i < n; ++i)
        if (slots[i] != NONE) table[slots[i]].flags &= (uint8_t)~CLAIMED;
}

// Rows trained by `batch` back into their slots: dirty, and no longer out with it. Returns how many no batch holds now.
NATIVE(int64_t, mem_push, void* entries, float* rows, int64_t width, const uint32_t* slots, const float* source,
    int64_t first, int64_t last, uint32_t batch) {
    Entry* table = (Entry*)entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t freed = 0;
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            __builtin_prefetch(&table[slots[i + 16]], 1);
            prefetch_row(rows + slots[i + 16] * width, width);
        }
        Entry& entry = table[slots[i]];
        freed += (entry.holds &= (uint16_t)~bit) == 0;
        entry.flags = (uint8_t)((entry.flags | DIRTY) & ~(PENDING | CLAIMED));
        copy_row(rows + slots[i] * width, source + i * width, width);
    }
    return freed;
}

// ready[i] = 1 where `batch` is no longer out with slots[i].
NATIVE(int64_t, mem_ready, const void* entries, const uint32_t* slots, int64_t n, uint32_t batch, uint8_t* ready) {
    const Entry* table = (const Entry*)entries;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += ready[i] = !(table[slots[i]].holds >> (batch % 16) & 1);
    return count;
}

// A snapshot begins: every dirty row of slots [first, last) is pending for it. Returns how many.
NATIVE(int64_t, mem_mark_pending, void* entries, int64_t first, int64_t last) {
    Entry* table = (Entry*)entries;
    int64_t count = 0;
    for (int64_t slot = first; slot < last; ++slot) {
        if (!(table[slot].flags & DIRTY)) continue;
        table[slot].flags |= PENDING;
        ++count;
    }
    return count;
}

// The first `limit` pending slots of [first, last).
NATIVE(int64_t, mem_list_pending, const void* entries, int64_t first, int64_t last, int64_t limit, uint32_t* slots) {
    const Entry* table = (const Entry*)entries;
    int64_t count = 0;
    for (int64_t slot = first; slot < last && count < limit; ++slot)
        if (table[slot].flags & PENDING) slots[count++] = (uint32_t)slot;
    return count;
}

// The rows of these slots are in the store as they are here.
NATIVE(void, mem_mark_stored, void* entries, const uint32_t* slots, int64_t n) {
    Entry* table = (Entry*)entries;
    for (int64_t i = 0; i < n; ++i) table[slots[i]].flags &= (uint8_t)~(DIRTY | PENDING);
}
