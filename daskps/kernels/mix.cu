// The smallest kernel: mixes every key. It shows that a build works, and names the level of partitioning by its seed.
#include "dialect.cuh"

KERNEL(mix_keys, const uint64_t* keys, int64_t n, uint64_t seed, uint64_t* mixed) {
    FOR_ITEMS(i, n) mixed[i] = mix64(keys[i] ^ mix64(seed));
}
