// Sorting of keys by partition in two passes: count the keys of each partition, then write their positions partition by
// partition. Several threads do a share of the keys each.
#include "dialect.cuh"

// Return the partition of a key, as Placement.of does: by the upper half of a hash (MIXED), or key % partitions.
template <bool MIXED>
DEVICE int64_t partition_of(uint64_t key, int64_t partitions, uint64_t salt) {
    return MIXED ? part_of(mix64(key ^ salt), partitions) : (int64_t)(key % (uint64_t)partitions);
}

template <bool MIXED>
DEVICE void count_keys(const uint64_t* keys, int64_t first, int64_t last, int64_t partitions, uint64_t salt,
                       int64_t* counts) {
    for (int64_t i = first; i < last; ++i) ++counts[partition_of<MIXED>(keys[i], partitions, salt)];
}

template <bool MIXED>
DEVICE void order_keys(const uint64_t* keys, int64_t first, int64_t last, int64_t partitions, uint64_t salt,
                       int64_t* cursors, int64_t* order) {
    for (int64_t i = first; i < last; ++i) order[cursors[partition_of<MIXED>(keys[i], partitions, salt)]++] = i;
}

// Count the keys [first, last) of each partition.
NATIVE(void, storage_partition_count, const uint64_t* keys, int64_t first, int64_t last, int64_t partitions, int32_t mixed,
       uint64_t seed, int64_t* counts) {
    if (mixed)
        count_keys<true>(keys, first, last, partitions, mix64(seed), counts);
    else
        count_keys<false>(keys, first, last, partitions, 0, counts);
}

// Write the positions of keys [first, last) to `order`, each from the cursor of its partition on.
NATIVE(void, storage_partition_order, const uint64_t* keys, int64_t first, int64_t last, int64_t partitions, int32_t mixed,
       uint64_t seed, int64_t* cursors, int64_t* order) {
    if (mixed)
        order_keys<true>(keys, first, last, partitions, mix64(seed), cursors, order);
    else
        order_keys<false>(keys, first, last, partitions, 0, cursors, order);
}
