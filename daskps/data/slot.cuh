// What a slot does with the text of one value, shared by the text parsers.
#pragma once
#include "numbers.cuh"

enum Kind { HASHED = 0, RAW = 1, BUCKETS = 2 };

// daskps/data/slots.py builds these as a structured array of the same shape.
struct SlotPlan {
    int32_t column;
    int32_t kind;
    int32_t missing_key;  // 1: an absent value is a key of its own; 0: it is an empty bag
    int32_t separator;    // byte between the values of a multi-valued field, or -1
    uint64_t seed;
    int64_t bucket_keys;  // where this slot's keys of buckets begin
};

// A bad row: why, and in which column (from 1; 0 is the whole line), packed as daskps/data/bad.py unpacks it.
DEVICE int32_t status_of(Reason reason, int64_t column) {
    const int64_t most = (1 << 23) - 1;
    return (int32_t)reason | (int32_t)(column < most ? column : most) << 8;
}

DEVICE Reason key_of(
    const uint8_t* p, const uint8_t* end, const SlotPlan& slot, const Buckets& buckets, uint64_t* key) {
    if (slot.kind == HASHED) {
        *key = xxh64(p, end - p, slot.seed);
        return FINE;
    }
    if (slot.kind == RAW) {
        bool negative;
        return read_integer(p, end, key, &negative);
    }
    int64_t value = 0;
    Reason reason = read_int64(p, end, &value);
    if (reason == FINE) *key = bucket_key(value, buckets, buckets.keys + slot.bucket_keys, slot.seed);
    return reason;
}
