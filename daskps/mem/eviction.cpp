// Choice of the rows to evict: those with the smallest scores among the entries of a window. The scores of a policy are a
// table over age and visits, made by eviction.py; nothing here depends on the policy.
#include "entry.cuh"

// Returns true if the row may be evicted. While a snapshot is written (`flushing`), rows pushed after it began must stay in
// memory: the store would mix them with the snapshot.
static inline bool evictable(const Entry& entry, bool flushing) {
    if (!(entry.flags & OCCUPIED) || entry.holds) return false;
    return !(flushing && (entry.flags & (DIRTY | PENDING)) == DIRTY);
}

// Score of a row. A row with a known next use is kept longer than all others, the nearest use longest.
static inline uint32_t score(const CacheState& cache, const Entry& entry, uint32_t batch) {
    uint32_t ahead = (uint16_t)(entry.next_use - batch);
    if (ahead - 1 < MOST_AHEAD) return SCORES + MOST_AHEAD - ahead;
    return cache.scores[age_level(age_of(entry, batch)) * VISIT_LEVELS + entry.visits];
}

// Counts the evictable entries of [first, last) by score: histogram (SCORES + MOST_AHEAD). Returns the decayed visits of
// those that are overdue.
NATIVE(int64_t, mem_count_scores, const CacheState* state, int64_t first, int64_t last, uint32_t batch, uint32_t flushing,
    int64_t* histogram) {
    const CacheState cache = *state;
    int64_t overdue_visits = 0;
    for (int64_t id = first; id < last; ++id) {
        const Entry& entry = cache.entries[id];
        if (!evictable(entry, flushing)) continue;
        ++histogram[score(cache, entry, batch)];
        if (is_overdue(cache, entry, batch)) overdue_visits += decayed_visits(cache, entry, batch);
    }
    return overdue_visits;
}

// Writes the evictable entries of [first, last) with a score below `limit`, and the first `ties` ones with that score.
NATIVE(int64_t, mem_choose, const CacheState* state, int64_t first, int64_t last, uint32_t batch, uint32_t flushing,
    uint32_t limit, int64_t ties, uint32_t* chosen) {
    const CacheState cache = *state;
    int64_t count = 0;
    for (int64_t id = first; id < last; ++id) {
        const Entry& entry = cache.entries[id];
        if (!evictable(entry, flushing)) continue;
        uint32_t one = score(cache, entry, batch);
        if (one > limit || (one == limit && ties-- <= 0)) continue;
        chosen[count++] = (uint32_t)id;
    }
    return count;
}
