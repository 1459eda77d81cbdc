// Reads numbers from text, and makes keys of integers and of their logarithmic buckets. A reader returns a Reason, 0 if the
// value is good.
#pragma once
#include <locale.h>
#include <stdlib.h>

#include "dialect.cuh"
#include "xxh64.cuh"

// Reasons why an example is bad; daskps/data/bad.py has the same numbers.
enum Reason {
    FINE = 0,
    WRONG_COLUMN_COUNT = 1,
    BAD_LABEL = 2,
    NOT_AN_INTEGER = 3,
    NOT_A_NUMBER = 4,
    OUT_OF_RANGE = 5,
    BAD_TOKEN = 6,
    UNKNOWN_SLOT = 7,
    QUOTED = 8,
    MISSING_VALUE = 9,
    BAD_WEIGHT = 10,
    UNEVEN_WEIGHTS = 11,
    COMMENT = 12,  // a line without an example; not bad
};

DEVICE bool is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

// Reads [+-]?[0-9]+ as 64 bits: -2^63 to 2^64 - 1. `negative` tells how to interpret them.
DEVICE Reason read_integer(const uint8_t* p, const uint8_t* end, uint64_t* value, bool* negative) {
    *negative = p < end && *p == '-';
    if (p < end && (*p == '-' || *p == '+')) ++p;
    if (p == end) return NOT_AN_INTEGER;
    uint64_t x = 0;
    bool wide = false;
    for (; p < end; ++p) {
        if (!is_digit(*p)) return NOT_AN_INTEGER;
        uint64_t digit = (uint64_t)(*p - '0');
        wide |= x > (~0ull - digit) / 10;
        x = x * 10 + digit;
    }
    if (wide || (*negative && x > 1ull << 63)) return OUT_OF_RANGE;
    *value = *negative ? 0 - x : x;
    return FINE;
}

// Reads an integer within the range of int64.
DEVICE Reason read_int64(const uint8_t* p, const uint8_t* end, int64_t* value) {
    uint64_t bits = 0;
    bool negative = false;
    Reason reason = read_integer(p, end, &bits, &negative);
    if (reason == FINE && !negative && bits >> 63) return OUT_OF_RANGE;
    *value = (int64_t)bits;
    return reason;
}

static const int LONGEST_NUMBER = 511;  // characters

// Reads a number whose digits do not fit a double exactly, by the C library, in the "C" locale: the process may have
// another one.
static __attribute__((noinline)) Reason read_slowly(const uint8_t* p, int64_t size, double* value) {
    char text[LONGEST_NUMBER + 1];
    __builtin_memcpy(text, p, (size_t)size);
    text[size] = 0;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain == (locale_t)0) return NOT_A_NUMBER;
    *value = strtod_l(text, 0, plain);
    freelocale(plain);
    return FINE;
}

// Reads [+-]? digits [. digits] [e [+-]? digits] with at least one digit, correctly rounded to double, then to float.
DEVICE Reason read_float(const uint8_t* p, const uint8_t* end, float* value) {
    static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                    1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const uint8_t* start = p;
    if (end - p > LONGEST_NUMBER) return NOT_A_NUMBER;
    bool negative = p < end && *p == '-', exact = true;
    if (p < end && (*p == '-' || *p == '+')) ++p;
    uint64_t mantissa = 0;
    int64_t digits = 0, exponent = 0;
    for (bool fraction = false; p < end && (is_digit(*p) || (*p == '.' && !fraction)); ++p) {
        if (*p == '.') {
            fraction = true;
            continue;
        }
        ++digits;
        exact &= mantissa <= ((1ull << 53) - 9) / 10;
        mantissa = mantissa * 10 + (uint64_t)(*p - '0');
        exponent -= fraction;
    }
    if (!digits) return NOT_A_NUMBER;
    if (p < end && (*p == 'e' || *p == 'E')) {
        bool down = ++p < end && *p == '-';
        if (p < end && (*p == '-' || *p == '+')) ++p;
        if (p == end) return NOT_A_NUMBER;
        int64_t written = 0;
        for (; p < end && is_digit(*p); ++p) written = written < 100000 ? written * 10 + (*p - '0') : written;
        exponent += down ? -written : written;
    }
    if (p != end) return NOT_A_NUMBER;
    double x = 0;
    if (exact && exponent >= -22 && exponent <= 22) {  // both factors are exact, so there is only one rounding
        x = exponent < 0 ? (double)mantissa / POWERS[-exponent] : (double)mantissa * POWERS[exponent];
        x = negative ? -x : x;
    } else if (read_slowly(start, end - start, &x) != FINE) {
        return NOT_A_NUMBER;
    }
    float narrow = (float)x;
    if (narrow - narrow != 0) return OUT_OF_RANGE;
    *value = narrow;
    return FINE;
}

// Reads a label: 0 or 1 in any spelling of a number; with `minus_one`, -1 is 0.
DEVICE Reason read_label(const uint8_t* p, const uint8_t* end, bool minus_one, float* label) {
    if (end - p == 1 && (*p == '0' || *p == '1')) {
        *label = (float)(*p - '0');
        return FINE;
    }
    float value = 0;
    if (read_float(p, end, &value) != FINE) return BAD_LABEL;
    if (minus_one && value == -1.0f) value = 0;
    if (value != 0.0f && value != 1.0f) return BAD_LABEL;
    *label = value == 0.0f ? 0.0f : 1.0f;  // -0 is 0
    return FINE;
}

DEVICE Reason read_example_weight(const uint8_t* p, const uint8_t* end, float* weight) {
    Reason reason = read_float(p, end, weight);
    return reason == FINE && *weight < 0 ? BAD_WEIGHT : reason;
}

// Writes the decimal digits of a value right-aligned to `text` and returns the position of the first one. Integer columns
// hash this text, so that 7 in Parquet and "7" in a text file are one key.
DEVICE int write_decimal(uint64_t magnitude, bool negative, uint8_t* text /* 24 */) {
    int place = 24;
    do {
        text[--place] = (uint8_t)('0' + magnitude % 10);
        magnitude /= 10;
    } while (magnitude);
    if (negative) text[--place] = '-';
    return place;
}

DEVICE uint64_t hash_integer(uint64_t bits, bool is_signed, uint64_t seed) {
    uint8_t text[24];
    bool negative = is_signed && (int64_t)bits < 0;
    int place = write_decimal(negative ? 0 - bits : bits, negative, text);
    return xxh64(text + place, 24 - place, seed);
}

// Buckets of integers, as in Criteo models: x <= 2 is hashed as "SP" + x, a larger one as floor(log(x)^2). `least[b]` is
// the smallest integer of bucket b, computed exactly in Python, because log() differs between machines. Keys of buckets
// are computed once per slot (hashing them for every value took most of the time): SP0, SP1, SP2, bucket 0, bucket 1, ...
struct Buckets {
    const int64_t* least;  // (count,)
    const uint8_t* small;  // (65536,) the bucket of each small value
    const uint64_t* keys;  // of all slots with buckets, concatenated
    int64_t count;
};

DEVICE int64_t log_bucket(int64_t value, const Buckets& buckets) {
    if (value < 65536) return buckets.small[value];
    int64_t low = 0, high = buckets.count;  // least[low] <= value < least[high]
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (buckets.least[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

DEVICE uint64_t bucket_key(int64_t value, const Buckets& buckets, const uint64_t* slot_keys, uint64_t seed) {
    if (value > 2) return slot_keys[3 + log_bucket(value, buckets)];
    if (value >= 0) return slot_keys[value];
    uint8_t text[26];
    int place = write_decimal(0 - (uint64_t)value, true, text + 2);
    text[place] = 'S';
    text[place + 1] = 'P';
    return xxh64(text + place, 26 - place, seed);
}
