// Copies of whole rows by row number. Their bits are opaque, so they are copied as integers. Negative numbers are skipped.
#include "shard.cuh"

DEVICE void copy_words(const uint32_t* from, uint32_t* to, int32_t width) {
    for (int32_t c = LANE; c < width; c += LANES) to[c] = from[c];
}

// out[i] = rows[index[i]]
KERNEL(rows_gather, const float* rows, int32_t width, const int32_t* index, int64_t n, float* out) {
    FOR_TILES(i, n) {
#if ON_CPU
        if (i + PREFETCH_AHEAD < i_end) {
            PREFETCH_RUN(rows + (int64_t)index[i + PREFETCH_AHEAD] * width, width);
        }
#endif
        if (index[i] < 0) continue;
        copy_words((const uint32_t*)rows + (int64_t)index[i] * width, (uint32_t*)out + i * width, width);
    }
}

// rows[index[i]] = values[i]; each number at most once
KERNEL(rows_scatter, const float* values, int32_t width, const int32_t* index, int64_t n, float* rows) {
    FOR_TILES(i, n) {
#if ON_CPU
        if (i + PREFETCH_AHEAD < i_end) {
            PREFETCH_RUN(rows + (int64_t)index[i + PREFETCH_AHEAD] * width, width);
        }
#endif
        if (index[i] < 0) continue;
        copy_words((const uint32_t*)values + i * width, (uint32_t*)rows + (int64_t)index[i] * width, width);
    }
}

// rows[to[i]] = row number from[i] of the shards of another table; each to[i] at most once
KERNEL(rows_copy, const Shard* shards, int32_t shard_count, const int32_t* from, const int32_t* to, int64_t n,
       int32_t width, float* rows) {
    FOR_TILES(i, n) {
        if (from[i] < 0) continue;
        copy_words((const uint32_t*)row_address(shards, shard_count, from[i], width),
                 (uint32_t*)rows + (int64_t)to[i] * width, width);
    }
}
