// Gradient sums of rows that two nodes hold, packed into bytes and added from them; rows moved by position;
// and keys brought into the order of their owners.
//
// A message has for every row that was touched its number at the receiver, how many bytes a value of it takes (1 to 8:
// sums are fixed-point integers, most of them small, so 8-byte values would double what is sent), and the values, the
// lower bytes of 64-bit integers. Rows come in the order of the sender's sums, who so walks through memory from one end to
// the other.
#include "dialect.cuh"

enum : int64_t { AHEAD = 16, MALFORMED = -1, TOO_LARGE = -2 };

static inline int bytes_of(const int64_t* values, int64_t dim) {
    uint64_t magnitude = 0;
    for (int64_t d = 0; d < dim; ++d) magnitude |= (uint64_t)(values[d] ^ (values[d] >> 63));
    return magnitude ? (72 - __builtin_clzll(magnitude)) / 8 : 1;  // one more bit for the sign, rounded up
}

// place[rows[i]] = i, or -1 with forget = 1
NATIVE(void, link_place, const int32_t* rows, int64_t n, int32_t forget, int32_t* place) {
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) PREFETCH(place + rows[i + AHEAD]);
        place[rows[i]] = forget ? -1 : (int32_t)i;
    }
}

// rows (n,), sums (n, dim): what was touched. theirs (U,): the peer's numbers of this node's rows, -1 where it has none.
// numbers, widths (m,) and bytes (m * dim * 8 + 8,) are written, with m rows that both have. Returns how many bytes;
// *count is how many rows.
NATIVE(int64_t, link_pack, const int32_t* rows, int64_t n, const int32_t* theirs, const int64_t* sums, int64_t dim,
    int32_t* numbers, uint8_t* widths, uint8_t* bytes, int64_t* count) {
    uint8_t* at = bytes;
    int64_t packed = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) PREFETCH(theirs + rows[i + AHEAD]);
        const int32_t number = theirs[rows[i]];
        if (number < 0) continue;
        const int64_t* values = sums + i * dim;
        const int width = bytes_of(values, dim);
        numbers[packed] = number;
        widths[packed++] = (uint8_t)width;
        for (int64_t d = 0; d < dim; ++d, at += width) __builtin_memcpy(at, values + d, 8);
    }
    *count = packed;
    return at - bytes;
}

static inline bool add_values(const uint8_t* at, int width, int64_t dim, int64_t* sums) {
    const int unused = 64 - 8 * width;
    bool wrong = false;
    for (int64_t d = 0; d < dim; ++d, at += width) {
        uint64_t value;
        __builtin_memcpy(&value, at, 8);
        const uint64_t sum = (uint64_t)sums[d] + (uint64_t)((int64_t)(value << unused) >> unused);
        wrong |= sum + ((uint64_t)1 << 61) > (uint64_t)1 << 62;  // as sum_too_large in kernels/gradient.cuh
        sums[d] = (int64_t)sum;
    }
    return wrong;
}

// Adds a packed message. place[row] < own: sums of rows that this node touched. Others get the next place, and their row
// and sums go to fresh_rows and fresh (fresh_count of them so far). Returns how many fresh rows there are then, or what is
// wrong: MALFORMED (nothing can be said about the sums then), TOO_LARGE.
NATIVE(int64_t, link_add, const int32_t* numbers, const uint8_t* widths, int64_t count, const uint8_t* bytes, int64_t size,
    int64_t dim, int32_t* place, int64_t rows, int64_t own, int64_t* sums, int32_t* fresh_rows, int64_t* fresh,
    int64_t fresh_count) {
    const uint8_t* at = bytes;
    const uint8_t* end = bytes + size;
    bool wrong = false;
    for (int64_t i = 0; i < count; ++i) {
        if (i + 2 * AHEAD < count && (uint32_t)numbers[i + 2 * AHEAD] < rows) PREFETCH(place + numbers[i + 2 * AHEAD]);
        if (i + AHEAD < count && (uint32_t)numbers[i + AHEAD] < rows) {
            const int32_t next = place[numbers[i + AHEAD]];
            if (next >= 0 && next < own) PREFETCH_RUN(sums + next * dim, 2 * dim);  // counts 4-byte words
        }
        const int32_t row = numbers[i];
        const int width = widths[i];
        const int64_t length = width * dim;
        if ((uint32_t)row >= rows || width < 1 || width > 8 || length > end - at) return MALFORMED;
        if (place[row] < 0) {
            place[row] = (int32_t)(own + fresh_count);
            fresh_rows[fresh_count] = row;
            for (int64_t d = 0; d < dim; ++d) fresh[fresh_count * dim + d] = 0;
            ++fresh_count;
        }
        int64_t* target = place[row] < own ? sums + place[row] * dim : fresh + (place[row] - own) * dim;
        if (end - at >= length + 8) {
            wrong |= add_values(at, width, dim, target);
        } else {  // the last rows of a message: reading 8 bytes for each value would pass its end
            for (int64_t d = 0; d < dim; ++d) {
                uint8_t value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
                __builtin_memcpy(value, at + d * width, (size_t)width);
                wrong |= add_values(value, width, 1, target + d);
            }
        }
        at += length;
    }
    if (at != end) return MALFORMED;
    return wrong ? (int64_t)TOO_LARGE : fresh_count;
}

// out[i] = rows[positions[i]]; rows (U, width)
NATIVE(void, link_gather, const float* rows, int64_t width, const int64_t* positions, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) PREFETCH_RUN(rows + positions[i + AHEAD] * width, width);
        copy_row(out + i * width, rows + positions[i] * width, width);
    }
}

// rows[positions[i]] = values[i]
NATIVE(void, link_scatter, float* rows, int64_t width, const int64_t* positions, int64_t n, const float* values) {
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) PREFETCH_RUN(rows + positions[i + AHEAD] * width, width);
        copy_row(rows + positions[i] * width, values + i * width, width);
    }
}

// order (n,): positions of keys, owner by owner. ordered[i] = keys[order[i]], place[order[i]] = i.
NATIVE(void, link_order, const int64_t* order, int64_t n, const uint64_t* keys, uint64_t* ordered, int32_t* place) {
    for (int64_t i = 0; i < n; ++i) {
        ordered[i] = keys[order[i]];
        place[order[i]] = (int32_t)i;
    }
}

// row_of[i] = place[row_of[i]]
NATIVE(void, link_renumber, int64_t first, int64_t last, const int32_t* place, int32_t* row_of) {
    for (int64_t i = first; i < last; ++i) row_of[i] = place[row_of[i]];
}
