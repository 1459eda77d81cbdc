// Rows of MEM-PS's cache by slot: copied out, taken back when trained, marked for snapshots.
#include "entry.cuh"

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

// out[i], or out[positions[i]] unless positions is null, = row of slots[i]; keys[i] its key, unless keys is null.
NATIVE(void, mem_gather, const void* entries, const float* rows, int64_t width, const uint32_t* slots, int64_t first,
    int64_t last, float* out, const uint32_t* positions, uint64_t* keys) {
    const Entry* table = (const Entry*)entries;
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            prefetch_row(rows + slots[i + 16] * width, width);
            if (keys) __builtin_prefetch(&table[slots[i + 16]]);
        }
        copy_row(out + (positions ? positions[i] : i) * width, rows + slots[i] * width, width);
        if (keys) keys[i] = table[slots[i]].key;
    }
}

// Row i of source into the cache at slots[positions[i]], and into out[positions[i]] unless out is null.
NATIVE(void, mem_fill, float* rows, int64_t width, const uint32_t* slots, const uint32_t* positions, int64_t first,
    int64_t last, const float* source, float* out) {
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last) {
            prefetch_row(rows + slots[positions[i + 16]] * width, width);
            if (out) prefetch_row(out + positions[i + 16] * width, width);
        }
        copy_row(rows + slots[positions[i]] * width, source + i * width, width);
        if (out) copy_row(out + positions[i] * width, source + i * width, width);
    }
}

// May `batch` push these keys to these slots? The first i in [first, last) where the slot is not the key's, the batch does
// not hold the row (any more), or the key repeats; else -1.
// Repeats are looked for only with claims = 1; then each slot stays CLAIMED until it is pushed or released.
NATIVE(int64_t, mem_check, void* entries, const uint64_t* keys, const uint32_t* slots, int64_t first, int64_t last,
    uint32_t batch, uint32_t claims) {
    Entry* table = (Entry*)entries;
    uint16_t bit = (uint16_t)(1u << (batch % 16));
    for (int64_t i = first; i < last; ++i) {
        if (i + 16 < last && slots[i + 16] != NONE) __builtin_prefetch(&table[slots[i + 16]]);
        if (slots[i] == NONE) return i;
        Entry& entry = table[slots[i]];
        if (entry.key != keys[i] || !(entry.holds & bit)) return i;
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

// The rows of these slots are in the store, unless they were pushed or removed since they were listed as pending.
NATIVE(void, mem_mark_stored, void* entries, const uint32_t* slots, int64_t n) {
    Entry* table = (Entry*)entries;
    for (int64_t i = 0; i < n; ++i)
        if (table[slots[i]].flags & PENDING) table[slots[i]].flags &= (uint8_t)~(DIRTY | PENDING);
}
