// The part, one of P, of a key: by its mixed bits, or modulo P. On the CPU a stable counting sort by part follows:
// partition_count, then running sums in Python, then partition_deal. A GPU sorts the part numbers with CuPy.
#include "dialect.cuh"

DEVICE int32_t key_part(uint64_t key, int32_t parts, uint64_t salt, int32_t modulo) {
    return modulo ? (int32_t)(key % (uint64_t)parts) : (int32_t)part_of(mix64(key ^ salt), parts);
}

KERNEL(partition_parts, const uint64_t* keys, int64_t n, int32_t parts, uint64_t salt, int32_t modulo, int32_t* part) {
    FOR_ITEMS(i, n) part[i] = key_part(keys[i], parts, salt, modulo);
}

#if ON_CPU
// counts (shares, parts), zeroed
CPU_KERNEL(partition_count, const uint64_t* keys, int64_t n, int32_t parts, uint64_t salt, int32_t modulo,
           int32_t* counts) {
    int32_t* mine = counts + share_index * parts;
    FOR_ITEMS(i, n) ++mine[key_part(keys[i], parts, salt, modulo)];
}

// next (shares, parts): position of each share's next key of a part
CPU_KERNEL(partition_deal, const uint64_t* keys, int64_t n, int32_t parts, uint64_t salt, int32_t modulo, int32_t* next,
           int32_t* order) {
    int32_t* mine = next + share_index * parts;
    FOR_ITEMS(i, n) order[mine[key_part(keys[i], parts, salt, modulo)]++] = (int32_t)i;
}
#endif
