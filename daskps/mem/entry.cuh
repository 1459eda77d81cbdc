// Shared by the native functions of MEM-PS: the entry of a cached row, the arrays of the cache, copying and prefetching rows.
#pragma once
#include "dialect.cuh"

// One cached row; 16 bytes. Batch numbers are stored modulo 65536.
struct Entry {
    uint64_t key;         // of a free entry: the number of the next free entry + 1
    uint16_t last_batch;  // the newest batch that pulled the row
    uint16_t next_use;    // the batch that needs the row next; known only if it is 1 to MOST_AHEAD batches ahead
    uint16_t holds;       // bit (batch % 16) is set while that batch pins the row
    uint8_t visits;       // pulls in units of 1/ONE_VISIT; older pulls count less, see visited()
    uint8_t flags;
};

enum : uint8_t { OCCUPIED = 1, DIRTY = 2, PENDING = 4, CLAIMED = 8 };
enum : uint32_t { NONE = 0xffffffffu };  // in place of an entry's number: the key is not cached
enum : int64_t { LOOKAHEAD_BLOCK = 32 };

// Arrays and state of one cache, in 8-byte words. cache.py allocates the arrays and binds the struct once (CACHE_STATE).
struct CacheState {
    uint64_t* buckets;  // hash index: 32 bits of the key's hash, entry number + 1; 0 is an empty bucket
    uint64_t bucket_count;
    Entry* entries;
    float* rows;  // (entries, width)
    int64_t width;
    int64_t free_entry;      // head of the list of free entries (number + 1), 0 if there is none
    int64_t used_entries;    // entries from this one on have never been used
    const uint16_t* scores;  // (AGE_LEVELS, VISIT_LEVELS) score of an evictable row; the smallest is evicted first
    const uint8_t* decay;    // (AGE_LEVELS) factor of older visits, in units of 1/256
    uint64_t overdue;        // a row is overdue if age * visits is larger
};

// The same figures stand in eviction.py.
enum : uint32_t { ONE_VISIT = 4, VISIT_LEVELS = 64, AGE_LEVELS = 112, SCORES = 512, MOST_AHEAD = 255 };

// Batches since the last pull.
static inline uint32_t age_of(const Entry& entry, uint32_t batch) { return (uint16_t)(batch - entry.last_batch); }

// The row of the tables for an age: exact up to 15 batches, then 8 levels for each power of two.
static inline uint32_t age_level(uint32_t age) {
    if (age < 16) return age;
    uint32_t shift = 28 - (uint32_t)__builtin_clz(age);
    return (age >> shift) + 8 * shift;
}

// `entry` is pulled by `batch`: one more visit; those before have lost weight since the last pull.
static inline uint8_t visited(const CacheState& cache, const Entry& entry, uint32_t batch) {
    uint32_t kept = (entry.visits * (uint32_t)cache.decay[age_level(age_of(entry, batch))] + 128) >> 8;
    uint32_t visits = kept + ONE_VISIT;
    return (uint8_t)(visits < VISIT_LEVELS ? visits : VISIT_LEVELS - 1);
}

static inline bool is_overdue(const CacheState& cache, const Entry& entry, uint32_t batch) {
    return (uint64_t)age_of(entry, batch) * entry.visits > cache.overdue;
}

// Visits in units of 1/(256 * ONE_VISIT), with the weight that they have now.
static inline uint32_t decayed_visits(const CacheState& cache, const Entry& entry, uint32_t batch) {
    return entry.visits * (uint32_t)cache.decay[age_level(age_of(entry, batch))];
}

// The hash is salted because dedup returns keys in the order of mix64. Without a salt, a batch would fill one region of
// the buckets after the other while evicted rows leave other regions, and searches in a full region are long.
static const uint64_t TAG_SALT = 0xd6e8feb86659fd93ull;
static inline uint32_t tag_of(uint64_t key) { return (uint32_t)(mix64(key ^ TAG_SALT) >> 32); }
static inline uint64_t home_of(uint32_t tag, uint64_t buckets) { return (uint64_t)tag * buckets >> 32; }

static inline void prefetch_row(const float* row, int64_t width) {
    const char* byte = (const char*)row;
    const char* end = byte + 4 * width;
    for (; byte < end; byte += 64) __builtin_prefetch(byte);
    __builtin_prefetch(end - 1);
}
