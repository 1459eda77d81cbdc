// Hashes keys. With seed 0 it is mix64 itself, because mix64(0) is 0: device/native.py calls it for that.
#include "dialect.cuh"

KERNEL(mix_keys, const uint64_t* keys, int64_t n, uint64_t seed, uint64_t* mixed) {
    FOR_ITEMS(i, n) mixed[i] = mix64(keys[i] ^ mix64(seed));
}
