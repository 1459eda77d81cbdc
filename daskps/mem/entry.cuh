// What the natives of MEM-PS share: the entry of a slot, and how rows are copied and fetched ahead.
#pragma once
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
enum : int64_t { LOOKAHEAD_BLOCK = 32 };

// Salted, because dedup hands keys over in the order of mix64: a batch would fill one region of the buckets after the
// other while the rows it replaces leave others, and a region that is over-full is searched from end to end.
static const uint64_t TAG_SALT = 0xd6e8feb86659fd93ull;
static inline uint32_t tag_of(uint64_t key) { return (uint32_t)(mix64(key ^ TAG_SALT) >> 32); }
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
