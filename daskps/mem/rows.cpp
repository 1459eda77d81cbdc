// Rows of MEM-PS's cache by entry number: copying them out, storing pushed rows, marking them for snapshots.
#include "entry.cuh"

// Writes those of the entries whose flags include all of `wanted` to `selected`, in order, and returns their number.
NATIVE(int64_t, mem_select, const CacheState* state, const uint32_t* ids, int64_t n, uint32_t wanted, uint32_t* selected) {
    const Entry* entries = state->entries;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (i + 16 < n) __builtin_prefetch(&entries[ids[i + 16]]);
        if ((entries[ids[i]].flags & wanted) == wanted) selected[count++] = ids[i];
    }
    return count;
}

// Copies the row of ids[i] to out[i], or to out[positions[i]] unless positions is null, and its key to keys[i] unless keys
// is null.
NATIVE(void, mem_gather, const CacheState* state, const uint32_t* ids, int64_t first, int64_t last, float* out,
    const uint32_t* positions, uint64_t* keys) {
    const CacheState cache = *state;
    const int64_t width = cache.width;
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            prefetch_row(cache.rows + ids[i + 16] * width, width);
            if (keys) __builtin_prefetch(&cache.entries[ids[i + 16]]);
        }
        copy_row(out + (positions ? positions[i] : i) * width, cache.rows + ids[i] * width, width);
        if (keys) keys[i] = cache.entries[ids[i]].key;
    }
}

// Copies row i of source to the entry ids[positions[i]], and to out[positions[i]] unless out is null.
NATIVE(void, mem_fill, const CacheState* state, const uint32_t* ids, const uint32_t* positions, int64_t first, int64_t last,
    const float* source, float* out) {
    const CacheState cache = *state;
    const int64_t width = cache.width;
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            prefetch_row(cache.rows + ids[positions[i + 16]] * width, width);
            if (out) prefetch_row(out + positions[i + 16] * width, width);
        }
        copy_row(cache.rows + ids[positions[i]] * width, source + i * width, width);
        if (out) copy_row(out + positions[i] * width, source + i * width, width);
    }
}

// Checks that `batch` may push these keys to these entries. Returns the first i in [first, last) where the entry is not that
// of the key, the batch does not pin the row (any more), or the key occurs twice; -1 if there is none.
// Keys that occur twice are noticed only with claims = 1; then each entry stays CLAIMED until it is pushed or released.
NATIVE(int64_t, mem_check, const CacheState* state, const uint64_t* keys, const uint32_t* ids, int64_t first, int64_t last,
    uint32_t batch, uint32_t claims) {
    Entry* entries = state->entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last && ids[i + 16] != NONE) __builtin_prefetch(&entries[ids[i + 16]]);
        if (ids[i] == NONE) return i;
        Entry& entry = entries[ids[i]];
        if (entry.key != keys[i] || !(entry.holds & bit)) return i;
        if (claims && __atomic_fetch_or(&entry.flags, CLAIMED, __ATOMIC_RELAXED) & CLAIMED) return i;
    }
    return -1;
}

// Removes the marks that mem_check with claims = 1 has set.
NATIVE(void, mem_release, const CacheState* state, const uint32_t* ids, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (ids[i] != NONE) state->entries[ids[i]].flags &= (uint8_t)~CLAIMED;
}

// Stores rows trained by `batch` in their entries: they are dirty, and `batch` pins them no longer. Returns the number of
// rows that no batch pins now.
NATIVE(int64_t, mem_push, const CacheState* state, const uint32_t* ids, const float* source, int64_t first, int64_t last,
    uint32_t batch) {
    const CacheState cache = *state;
    const int64_t width = cache.width;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    int64_t freed = 0;
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            __builtin_prefetch(&cache.entries[ids[i + 16]], 1);
            prefetch_row(cache.rows + ids[i + 16] * width, width);
        }
        Entry& entry = cache.entries[ids[i]];
        freed += (entry.holds &= (uint16_t)~bit) == 0;
        entry.flags = (uint8_t)((entry.flags | DIRTY) & ~(PENDING | CLAIMED));
        copy_row(cache.rows + ids[i] * width, source + i * width, width);
    }
    return freed;
}

// Writes 1 to ready[i] where `batch` does not pin entry ids[i] any more, else 0. Returns the number of ones.
NATIVE(int64_t, mem_ready, const CacheState* state, const uint32_t* ids, int64_t n, uint32_t batch, uint8_t* ready) {
    const Entry* entries = state->entries;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += ready[i] = !(entries[ids[i]].holds >> (batch % 16) & 1);
    return count;
}

// Marks every dirty row of the entries [first, last) as pending for the snapshot that begins. Returns their number.
NATIVE(int64_t, mem_mark_pending, const CacheState* state, int64_t first, int64_t last) {
    int64_t count = 0;
    for (int64_t id = first; id < last; ++id) {
        Entry& entry = state->entries[id];
        if (!(entry.flags & DIRTY)) continue;
        entry.flags |= PENDING;
        ++count;
    }
    return count;
}

// Writes the first `limit` pending entries of [first, last) to ids and returns their number.
NATIVE(int64_t, mem_list_pending, const CacheState* state, int64_t first, int64_t last, int64_t limit, uint32_t* ids) {
    const Entry* entries = state->entries;
    int64_t count = 0;
    for (int64_t id = first; id < last && count < limit; ++id)
        if (entries[id].flags & PENDING) ids[count++] = (uint32_t)id;
    return count;
}

// Marks rows as equal to those in the store, unless they were pushed or removed since they were listed as pending.
NATIVE(void, mem_mark_stored, const CacheState* state, const uint32_t* ids, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        Entry& entry = state->entries[ids[i]];
        if (entry.flags & PENDING) entry.flags &= (uint8_t)~(DIRTY | PENDING);
    }
}
