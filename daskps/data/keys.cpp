// Keys of single values and of buckets; the parsers inline the same functions.
#include "slot.cuh"

NATIVE(uint64_t, data_xxh64, const uint8_t* bytes, int64_t size, uint64_t seed) { return xxh64(bytes, size, seed); }

// Writes the text that key rule 2 hashes for a value to `room` (24,) and returns its size; returns -1 if it is the value
// itself.
NATIVE(int64_t, data_respell, const uint8_t* bytes, int64_t size, uint8_t* room) {
    const uint8_t *p = bytes, *end = bytes + size;
    uint8_t text[24];
    if (size && may_be_respelled(p, size)) respell(&p, &end, text);
    if (p == bytes) return -1;
    __builtin_memcpy(room, p, (size_t)(end - p));
    return end - p;
}

// Writes the keys of SP0, SP1, SP2 and of buckets 0 .. count - 1 of one slot, which `bucket_key` looks up.
NATIVE(void, data_bucket_keys, int64_t count, uint64_t seed, uint64_t* keys) {
    const uint8_t small[3][3] = {{'S', 'P', '0'}, {'S', 'P', '1'}, {'S', 'P', '2'}};
    for (int64_t value = 0; value < 3; ++value) keys[value] = xxh64(small[value], 3, seed);
    for (int64_t bucket = 0; bucket < count; ++bucket) keys[3 + bucket] = hash_integer((uint64_t)bucket, false, seed);
}
