// Pooled forward: out[bag] = scale(bag) * sum over the bag's occurrences of weight * embedding. Occurrences are added in
// their order, so the bits are the same for any number of threads. An absent row (-1) adds nothing.
#include "pooling.cuh"
#include "shard.cuh"

struct PoolArguments {
    const float* rows;  // if one shard has all rows, else null
    const Shard* shards;
    int32_t shard_count, width, slots, pooling;
    const int32_t* row_of;
    const int64_t* offsets;
    int64_t bags;
    const float* weights;
    float* out;
    int64_t stride;
};

DEVICE const float* pool_row(const PoolArguments& a, int32_t row) {
    return a.rows ? a.rows + (int64_t)row * a.width : row_address(a.shards, a.shard_count, row, a.width);
}

template <int MAX>
DEVICE void pool_bag(int32_t D, const PoolArguments& a, int64_t bag, int64_t last_occurrence) {
    float sum[REGISTERS(MAX)];
    FOR_DIMS(d, k) sum[k] = 0;
    const int64_t first = a.offsets[bag], last = a.offsets[bag + 1];
    for (int64_t i = first; i < last; ++i) {
#if ON_CPU
        if (i + PREFETCH_AHEAD < last_occurrence && a.row_of[i + PREFETCH_AHEAD] >= 0) {
            const float* ahead = pool_row(a, a.row_of[i + PREFETCH_AHEAD]);
            PREFETCH_RUN(ahead, D);
        }
#endif
        if (a.row_of[i] < 0) continue;
        const float* row = pool_row(a, a.row_of[i]);
        if (a.weights) {
            const float weight = a.weights[i];
            FOR_DIMS(d, k) sum[k] += weight * row[d];
        } else {
            FOR_DIMS(d, k) sum[k] += row[d];
        }
    }
    const float scale = pooling_scale(a.pooling, last - first);
    float* out = a.out + bag_offset(bag, a.slots, a.stride, D);
    FOR_DIMS(d, k) out[d] = a.pooling == SUM ? sum[k] : sum[k] * scale;
}

template <int MAX>
DEVICE void pool_bags(int32_t D, const PoolArguments& a SHARE_PARAMETERS) {
#if ON_CPU
    const int64_t last_occurrence = a.offsets[a.bags * (share_index + 1) / share_count];
#else
    const int64_t last_occurrence = 0;
#endif
    FOR_TILES(bag, a.bags) pool_bag<MAX>(D, a, bag, last_occurrence);
}

// row_of (occurrences), offsets (bags + 1), weights (occurrences) or null, out (examples, stride) from its first column
KERNEL(pool_forward, const Shard* shards, int32_t shard_count, int32_t width, int32_t dim, const int32_t* row_of,
       const int64_t* offsets, int64_t bags, int32_t slots, const float* weights, int32_t pooling, float* out,
       int64_t stride, int64_t column) {
    const float* rows = shard_count == 1 ? (const float*)shards->rows : (const float*)0;
    const PoolArguments arguments = {rows,   shards,  shard_count, width,   slots,        pooling,
                                     row_of, offsets, bags,        weights, out + column, stride};
    WITH_DIMENSION(dim, pool_bags, arguments SHARE);
}
