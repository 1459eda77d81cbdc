// Keys from the text of values, by the rules of a slot.
#pragma once
#include "numbers.cuh"

enum Kind { HASHED = 0, RAW = 1, BUCKETS = 2 };

// A slot. daskps/data/schema.py has a structured dtype with the same fields.
struct SlotPlan {
    int32_t column;
    int32_t kind;
    int32_t missing_key;  // 1: a missing value is a key of its own; 0: its bag is empty
    int32_t separator;    // byte between the values of a multi slot, else -1
    int32_t key_rule;     // 1 or 2; see daskps/data/schema.py
    uint64_t seed;
    int64_t bucket_keys;  // index of this slot's first key in Buckets.keys
};

// Packs reason and column (from 1; 0 is the whole line) of a bad example, as daskps/data/bad.py unpacks them.
DEVICE int32_t status_of(Reason reason, int64_t column) {
    const int64_t most = (1 << 23) - 1;
    return (int32_t)reason | (int32_t)(column < most ? column : most) << 8;
}

// Returns 8 bytes that contain every byte of a value of 1 to 8 bytes; the rest repeats bytes of it or is '0'. Reads
// nothing beyond the value.
DEVICE uint64_t bytes_of(const uint8_t* p, int64_t size) {
    if (size == 8) return read64(p);
    if (size >= 4) return read32(p) | (uint64_t)read32(p + size - 4) << 32;
    return 0x3030303030000000ull | p[0] | (uint64_t)p[size >> 1] << 8 | (uint64_t)p[size - 1] << 16;
}

static const int64_t LONGEST_WHOLE_FLOAT = 32;  // characters; no library writes longer ones

// Returns a number that is not 0 if one of eight bytes is below '0', as '.', '+' and '-' are.
DEVICE uint64_t has_sign(uint64_t bytes) {
    const uint64_t ones = 0x0101010101010101ull;
    return (bytes - ones * '0') & ~bytes & ones << 7;
}

// Returns true if key rule 2 may respell the value as an integer. A fast filter: seldom true for other values.
DEVICE bool may_be_respelled(const uint8_t* p, int64_t size) {
    uint64_t found = 0;
    if (size > 8) {
        if (size > LONGEST_WHOLE_FLOAT) return false;
        for (; size > 8; p += 8, size -= 8) found |= has_sign(read64(p));
        return found | has_sign(bytes_of(p, size));
    }
    uint64_t bytes = bytes_of(p, size);
    if ((size | 1) == 5) {
        uint32_t letters = (uint32_t)bytes | 0x20202020u;
        found = letters == 0x65757274u || letters == 0x736c6166u;  // "true", "fals"
    }
    return found | has_sign(bytes);
}

DEVICE bool is_spelled(const uint8_t* p, int64_t size, const char* word) {
    int64_t at = 0;
    while (at < size && word[at] && p[at] == (uint8_t)word[at]) ++at;
    return at == size && !word[at];
}

// Reads a whole number below 2^53 in magnitude that is written as a float: -?(0|[1-9]d*)(.d+)?([eE]+?d+)? with a point or
// a plus sign, or "-0". Returns false for any other text.
static __attribute__((noinline)) bool read_whole_float(
    const uint8_t* p, const uint8_t* end, uint64_t* magnitude, bool* negative) {
    const uint64_t most = (1ull << 53) - 1;
    if (end - p > LONGEST_WHOLE_FLOAT) return false;
    *negative = *p == '-';
    p += *negative;
    const uint8_t* first = p;
    uint64_t x = 0;
    for (; p < end && is_digit(*p); ++p) {
        x = x * 10 + (uint64_t)(*p - '0');
        if (x > most) return false;
    }
    if (p == first || (*first == '0' && p - first > 1)) return false;
    bool marked = *negative && x == 0;
    const uint8_t *fraction = p, *fraction_end = p;
    if (p < end && *p == '.') {
        marked = true;
        fraction = ++p;
        while (p < end && is_digit(*p)) ++p;
        if (p == fraction) return false;
        fraction_end = p;
    }
    int64_t exponent = 0;
    if (p < end && (*p == 'e' || *p == 'E')) {
        ++p;
        if (p < end && *p == '+') {
            marked = true;
            ++p;
        }
        if (p == end) return false;
        for (; p < end && is_digit(*p); ++p) exponent = exponent < 1000 ? exponent * 10 + (*p - '0') : exponent;
    }
    if (p != end || !marked) return false;
    for (; fraction < fraction_end || (exponent > 0 && x); --exponent) {
        uint64_t digit = fraction < fraction_end ? (uint64_t)(*fraction++ - '0') : 0;
        if (exponent <= 0) {
            if (digit) return false;  // not whole
            continue;
        }
        x = x * 10 + digit;
        if (x > most) return false;
    }
    *magnitude = x;
    *negative = *negative && x;
    return true;
}

// Applies key rule 2: if the value is a whole float or a boolean, writes it as an integer to `room` and points [*p, *end)
// to it.
static __attribute__((noinline)) void respell(const uint8_t** p, const uint8_t** end, uint8_t* room /* 24 */) {
    int64_t size = *end - *p;
    uint64_t magnitude = 0;
    bool negative = false;
    if (is_spelled(*p, size, "true") || is_spelled(*p, size, "True") || is_spelled(*p, size, "TRUE"))
        magnitude = 1;
    else if (!is_spelled(*p, size, "false") && !is_spelled(*p, size, "False") && !is_spelled(*p, size, "FALSE") &&
             !read_whole_float(*p, *end, &magnitude, &negative))
        return;
    *p = room + write_decimal(magnitude, negative, room);
    *end = room + 24;
}

// Returns the key of a text.
DEVICE uint64_t hash_text(const uint8_t* p, const uint8_t* end, int32_t key_rule, uint64_t seed) {
    if (key_rule == 1 || p == end || !may_be_respelled(p, end - p)) return xxh64(p, end - p, seed);
    uint8_t room[24];
    respell(&p, &end, room);
    return xxh64(p, end - p, seed);
}

// Reads the key of an integer's text: the integer itself (RAW) or the hash of its bucket.
DEVICE Reason read_key(
    const uint8_t* p, const uint8_t* end, const SlotPlan& slot, const Buckets& buckets, uint64_t* key) {
    if (slot.kind == RAW) {
        bool negative;
        return read_integer(p, end, key, &negative);
    }
    int64_t value = 0;
    Reason reason = read_int64(p, end, &value);
    if (reason == FINE) *key = bucket_key(value, buckets, buckets.keys + slot.bucket_keys, slot.seed);
    return reason;
}

// Reads the key of a value, which must not be empty.
DEVICE Reason key_of(
    const uint8_t* p, const uint8_t* end, const SlotPlan& slot, const Buckets& buckets, uint64_t* key) {
    if (slot.kind == HASHED) {
        *key = hash_text(p, end, slot.key_rule, slot.seed);
        return FINE;
    }
    Reason reason = read_key(p, end, slot, buckets, key);
    if (reason != NOT_AN_INTEGER || slot.key_rule == 1) return reason;
    uint8_t room[24];
    respell(&p, &end, room);
    return read_key(p, end, slot, buckets, key);
}
