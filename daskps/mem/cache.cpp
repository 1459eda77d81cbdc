// The index of MEM-PS's cache: rows in slots, found by key.
//
// All memory is NumPy's. A slot s has entries[s] (16 bytes) and rows[s] (width values). The index is open addressing over
// 8-byte buckets: the upper half is the tag (32 bits of the key's hash), the lower half is slot + 1, so every key is legal
// and 0 is an empty bucket. A bucket's home follows from its tag alone, so deleting never touches the entries.
//
// Calls that take (first, last) work on that share of the items; shares touch different slots, because keys are distinct.
#include "entry.cuh"

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
    uint32_t tags[3][LOOKAHEAD_BLOCK];
    uint32_t slots[3][LOOKAHEAD_BLOCK];
    int64_t blocks = (last - first + LOOKAHEAD_BLOCK - 1) / LOOKAHEAD_BLOCK;
    for (int64_t step = 0; step < blocks + 2; ++step) {
        if (step < blocks) {
            int64_t start = first + step * LOOKAHEAD_BLOCK, n = last - start < LOOKAHEAD_BLOCK ? last - start : LOOKAHEAD_BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t tag = tags[step % 3][j] = tag_of(keys[start + j]);
                const uint64_t* home = &buckets[home_of(tag, bucket_count)];
                __builtin_prefetch(home);
                __builtin_prefetch(home + 6);  // an absent key reads 8 buckets at load 0.75: 22 ns against 34 without
            }
        }
        if (step >= 1 && step - 1 < blocks) {
            int64_t start = first + (step - 1) * LOOKAHEAD_BLOCK, n = last - start < LOOKAHEAD_BLOCK ? last - start : LOOKAHEAD_BLOCK;
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
            int64_t start = first + (step - 2) * LOOKAHEAD_BLOCK, n = last - start < LOOKAHEAD_BLOCK ? last - start : LOOKAHEAD_BLOCK;
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
        uint64_t at = home_of(tag, bucket_count);
        while (buckets[at] && !(buckets[at] >> 32 == tag && table[(uint32_t)buckets[at] - 1].key == key))
            at = at + 1 == bucket_count ? 0 : at + 1;
        if (buckets[at]) return j;
        uint32_t slot = (uint32_t)heads[0] - 1;
        if (slot != NONE)
            heads[0] = table[slot].place;
        else
            slot = (uint32_t)heads[1]++;
        int64_t cell = ring_head + j < ring_cells ? ring_head + j : ring_head + j - ring_cells;
        table[slot] = Entry{key, (uint32_t)cell, (uint16_t)(1u << (batch % 16)), 1, OCCUPIED};
        slots[positions[j]] = ring[cell] = slot;
        buckets[at] = (uint64_t)tag << 32 | (slot + 1);
    }
    return n;
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

// Rows move from slots from[i] to the free slots to[i]: the cache is about to shrink.
NATIVE(void, mem_move, uint64_t* buckets, uint64_t bucket_count, void* entries, float* rows, int64_t width,
    uint32_t* ring, const uint32_t* from, const uint32_t* to, int64_t n) {
    Entry* table = (Entry*)entries;
    for (int64_t i = 0; i < n; ++i) {
        Entry& entry = table[from[i]];
        uint32_t tag = tag_of(entry.key);
        uint64_t at = home_of(tag, bucket_count);
        while (buckets[at] != ((uint64_t)tag << 32 | (from[i] + 1))) at = at + 1 == bucket_count ? 0 : at + 1;
        buckets[at] = (uint64_t)tag << 32 | (to[i] + 1);
        if (!(entry.flags & FREQUENT)) ring[entry.place] = to[i];
        copy_row(rows + to[i] * width, rows + from[i] * width, width);
        table[to[i]] = entry;
        entry = Entry{0, 0, 0, 0, 0};
    }
}

// Put every free slot of [0, heads[1]) on the free list, in order.
NATIVE(void, mem_relink, void* entries, int64_t* heads) {
    Entry* table = (Entry*)entries;
    heads[0] = 0;
    for (int64_t slot = heads[1] - 1; slot >= 0; --slot) {
        if (table[slot].flags & OCCUPIED) continue;
        table[slot].place = (uint32_t)heads[0];
        heads[0] = slot + 1;
    }
}
