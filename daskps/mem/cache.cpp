// The hash index of MEM-PS's cache: from a key to the entry of its row.
//
// Entry number e has entries[e] and rows[e]. The index uses open addressing with buckets of 8 bytes: the upper half is the
// tag (32 bits of the key's hash), the lower half is e + 1, so every key is legal and 0 is an empty bucket. The home of a
// bucket follows from its tag, so deletion needs no access to the entries.
//
// Functions with (first, last) process that part of the items, so that several threads can share a call. The parts use
// different entries, because keys are distinct.
#include "entry.cuh"

// Entry of the next bucket from `at` on that has this tag, or NONE at an empty bucket.
static inline uint32_t probe(const CacheState& cache, uint32_t tag, uint64_t* at) {
    for (uint64_t i = *at;; i = i + 1 == cache.bucket_count ? 0 : i + 1) {
        uint64_t bucket = cache.buckets[i];
        if (bucket == 0 || (uint32_t)(bucket >> 32) == tag) {
            *at = i;
            return (uint32_t)bucket - 1;
        }
    }
}

static uint32_t find_one(const CacheState& cache, uint64_t key, uint32_t tag) {
    uint64_t at = home_of(tag, cache.bucket_count);
    for (;;) {
        uint32_t id = probe(cache, tag, &at);
        if (id == NONE || cache.entries[id].key == key) return id;
        at = at + 1 == cache.bucket_count ? 0 : at + 1;
    }
}

// Bucket that holds entry `id` of a key with this tag. It must exist.
static inline uint64_t bucket_of(const CacheState& cache, uint32_t tag, uint32_t id) {
    uint64_t at = home_of(tag, cache.bucket_count);
    while (cache.buckets[at] != ((uint64_t)tag << 32 | (id + 1))) at = at + 1 == cache.bucket_count ? 0 : at + 1;
    return at;
}

// Calls use(i, entry number or NONE) for every key of [first, last). Works on three blocks of 32 keys at once: the first
// prefetches buckets, the second entries (and rows, if wanted), the third is used. A cache miss of about 100 ns is thereby
// shared by 32 keys.
template <class Use>
static inline void each_found(
    const CacheState& cache, bool with_rows, const uint64_t* keys, int64_t first, int64_t last, Use use) {
    uint32_t tags[3][LOOKAHEAD_BLOCK];
    uint32_t ids[3][LOOKAHEAD_BLOCK];
    int64_t blocks = (last - first + LOOKAHEAD_BLOCK - 1) / LOOKAHEAD_BLOCK;
    for (int64_t step = 0; step < blocks + 2; ++step) {
        if (step < blocks) {
            int64_t start = first + step * LOOKAHEAD_BLOCK, n = last - start < LOOKAHEAD_BLOCK ? last - start : LOOKAHEAD_BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t tag = tags[step % 3][j] = tag_of(keys[start + j]);
                const uint64_t* home = &cache.buckets[home_of(tag, cache.bucket_count)];
                __builtin_prefetch(home);
                __builtin_prefetch(home + 6);  // a missing key reads 8 buckets at load 0.75: 22 ns, without this 34 ns
            }
        }
        if (step >= 1 && step - 1 < blocks) {
            int64_t start = first + (step - 1) * LOOKAHEAD_BLOCK, n = last - start < LOOKAHEAD_BLOCK ? last - start : LOOKAHEAD_BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t tag = tags[(step - 1) % 3][j];
                uint64_t at = home_of(tag, cache.bucket_count);
                uint32_t id = ids[(step - 1) % 3][j] = probe(cache, tag, &at);
                if (id == NONE) continue;
                __builtin_prefetch(&cache.entries[id]);
                if (with_rows) prefetch_row(cache.rows + id * cache.width, cache.width);
            }
        }
        if (step >= 2) {
            int64_t start = first + (step - 2) * LOOKAHEAD_BLOCK, n = last - start < LOOKAHEAD_BLOCK ? last - start : LOOKAHEAD_BLOCK;
            for (int64_t j = 0; j < n; ++j) {
                uint32_t id = ids[(step - 2) % 3][j];
                uint64_t key = keys[start + j];
                if (id != NONE && cache.entries[id].key != key) id = find_one(cache, key, tags[(step - 2) % 3][j]);
                use(start + j, id);
            }
        }
    }
}

// Writes the entry of each key to ids, NONE where it is not cached, and its row to out[i] unless out is null. Returns the
// number of keys found.
NATIVE(int64_t, mem_find, const CacheState* state, const uint64_t* keys, int64_t first, int64_t last, uint32_t* ids,
    float* out) {
    const CacheState cache = *state;
    int64_t found = 0;
    each_found(cache, out, keys, first, last, [&](int64_t i, uint32_t id) {
        ids[i] = id;
        if (id == NONE) return;
        ++found;
        if (out) copy_row(out + i * cache.width, cache.rows + id * cache.width, cache.width);
    });
    return found;
}

// Returns how many of the keys are pinned now.
NATIVE(int64_t, mem_count_pinned, const CacheState* state, const uint64_t* keys, int64_t first, int64_t last) {
    const CacheState cache = *state;
    int64_t pinned = 0;
    each_found(cache, false, keys, first, last,
        [&](int64_t i, uint32_t id) { pinned += id != NONE && cache.entries[id].holds != 0; });
    return pinned;
}

// Distance from `batch` to the latest earlier batch that pins the row: 1..15, or 0 if none does.
static inline uint8_t distance(uint16_t holds, uint32_t batch) {
    uint32_t turn = (batch - 1) % 16;  // rotate the bit of batch - 1 to the top
    uint32_t turned = (uint16_t)((uint32_t)holds << (15 - turn) | (uint32_t)holds >> (turn + 1));
    return turned ? (uint8_t)(1 + __builtin_clz(turned) - 16) : 0;
}

// Pins the cached rows of the keys for `batch`, counts the visit, and copies rows that no earlier batch pins to out (unless
// null). ids[i] is NONE where the key is not cached. distances[i] is the distance to the latest earlier batch that pins the
// row: it is deferred; 0 if there is none.
// counts (6): found; deferred; pinned now but not before; overdue rows found; their decayed visits; keys that occur twice.
NATIVE(void, mem_visit, const CacheState* state, const uint64_t* keys, int64_t first, int64_t last, uint32_t batch,
    uint32_t* ids, uint8_t* distances, float* out, int64_t* counts) {
    const CacheState cache = *state;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t found = 0, deferred = 0, pinned = 0, overdue = 0, overdue_visits = 0, repeated = 0;
    each_found(cache, out, keys, first, last, [&](int64_t i, uint32_t id) {
        ids[i] = id;
        distances[i] = 0;
        if (id == NONE) return;
        Entry& entry = cache.entries[id];
        if (entry.holds & bit) {
            ++repeated;
            return;
        }
        ++found;
        if (is_overdue(cache, entry, batch)) {
            ++overdue;
            overdue_visits += decayed_visits(cache, entry, batch);
        }
        entry.visits = visited(cache, entry, batch);
        entry.last_batch = entry.next_use = (uint16_t)batch;
        if (entry.holds) {
            ++deferred;
            distances[i] = distance(entry.holds, batch);
        } else {
            ++pinned;
            if (out) copy_row(out + i * cache.width, cache.rows + id * cache.width, cache.width);
        }
        entry.holds |= bit;
    });
    counts[0] += found;
    counts[1] += deferred;
    counts[2] += pinned;
    counts[3] += overdue;
    counts[4] += overdue_visits;
    counts[5] += repeated;
}

// Removes the pins of `batch` from the entries that are not NONE. Returns how many rows are not pinned any more.
NATIVE(int64_t, mem_unpin, const CacheState* state, const uint32_t* ids, int64_t n, uint32_t batch) {
    Entry* entries = state->entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t freed = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] == NONE || !(entries[ids[i]].holds & bit)) continue;
        freed += (entries[ids[i]].holds &= (uint16_t)~bit) == 0;
    }
    return freed;
}

// Adds an entry, pinned by `batch`, for each key at positions[0..n), and writes its number to ids at that position. Returns
// the number of entries added: less than n if the key at positions[that] occurs twice.
NATIVE(int64_t, mem_insert, CacheState* state, const uint64_t* keys, const uint32_t* positions, int64_t n, uint32_t batch,
    uint32_t* ids) {
    CacheState cache = *state;
    const uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t j = 0;
    for (; j < n; ++j) {
        if (j + 16 < n) __builtin_prefetch(&cache.buckets[home_of(tag_of(keys[positions[j + 16]]), cache.bucket_count)], 1);
        uint64_t key = keys[positions[j]];
        uint32_t tag = tag_of(key);
        uint64_t at = home_of(tag, cache.bucket_count);
        while (cache.buckets[at] &&
               !(cache.buckets[at] >> 32 == tag && cache.entries[(uint32_t)cache.buckets[at] - 1].key == key))
            at = at + 1 == cache.bucket_count ? 0 : at + 1;
        if (cache.buckets[at]) break;
        uint32_t id = (uint32_t)cache.free_entry - 1;
        if (id != NONE)
            cache.free_entry = (int64_t)cache.entries[id].key;
        else
            id = (uint32_t)cache.used_entries++;
        cache.entries[id] = Entry{key, (uint16_t)batch, (uint16_t)batch, bit, ONE_VISIT, OCCUPIED};
        ids[positions[j]] = id;
        cache.buckets[at] = (uint64_t)tag << 32 | (id + 1);
    }
    state->free_entry = cache.free_entry;
    state->used_entries = cache.used_entries;
    return j;
}

// Removes the entries from the index and adds them to the list of free entries.
NATIVE(void, mem_remove, CacheState* state, const uint32_t* ids, int64_t n) {
    CacheState cache = *state;
    uint64_t* buckets = cache.buckets;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 32 < n) __builtin_prefetch(&cache.entries[ids[i + 32]], 1);
        if (i + 16 < n)
            __builtin_prefetch(&buckets[home_of(tag_of(cache.entries[ids[i + 16]].key), cache.bucket_count)], 1);
        uint64_t hole = bucket_of(cache, tag_of(cache.entries[ids[i]].key), ids[i]);
        for (uint64_t at = hole;;) {  // move later buckets back into the hole, so that no search stops at it
            at = at + 1 == cache.bucket_count ? 0 : at + 1;
            if (buckets[at] == 0) break;
            uint64_t home = home_of((uint32_t)(buckets[at] >> 32), cache.bucket_count);
            uint64_t from_home = at >= home ? at - home : at + cache.bucket_count - home;
            uint64_t from_hole = at >= hole ? at - hole : at + cache.bucket_count - hole;
            if (from_home < from_hole) continue;
            buckets[hole] = buckets[at];
            hole = at;
        }
        buckets[hole] = 0;
        cache.entries[ids[i]] = Entry{(uint64_t)cache.free_entry, 0, 0, 0, 0, 0};
        cache.free_entry = (int64_t)ids[i] + 1;
    }
    state->free_entry = cache.free_entry;
}

// Moves rows from the entries `from` to the free entries `to`, before the cache shrinks.
NATIVE(void, mem_move, const CacheState* state, const uint32_t* from, const uint32_t* to, int64_t n) {
    const CacheState cache = *state;
    for (int64_t i = 0; i < n; ++i) {
        Entry& entry = cache.entries[from[i]];
        uint32_t tag = tag_of(entry.key);
        cache.buckets[bucket_of(cache, tag, from[i])] = (uint64_t)tag << 32 | (to[i] + 1);
        copy_row(cache.rows + to[i] * cache.width, cache.rows + from[i] * cache.width, cache.width);
        cache.entries[to[i]] = entry;
        entry = Entry{0, 0, 0, 0, 0, 0};
    }
}

// Makes the list of free entries anew: all free ones below used_entries, in order.
NATIVE(void, mem_list_free, CacheState* state) {
    state->free_entry = 0;
    for (int64_t id = state->used_entries - 1; id >= 0; --id) {
        Entry& entry = state->entries[id];
        if (entry.flags & OCCUPIED) continue;
        entry.key = (uint64_t)state->free_entry;
        state->free_entry = id + 1;
    }
}
