// Gradient sums of rows that two nodes hold, packed into bytes and added from them; and rows moved by position.
//
// Both nodes have the rows that they share in the same order. A message says by one bit each which of them were touched,
// then for every touched row how many bytes a value of it takes (1 to 8: sums are fixed-point integers, most of them
// small, so 8-byte values would double what is sent), then the values, the lower bytes of 64-bit integers.
#include "dialect.cuh"

enum : int64_t { WORD_BITS = 64 };
enum : int64_t { MALFORMED = -1, TOO_LARGE = -2 };

static inline int bytes_of(const int64_t* values, int64_t dim) {
    uint64_t magnitude = 0;
    for (int64_t d = 0; d < dim; ++d) magnitude |= (uint64_t)(values[d] ^ (values[d] >> 63));
    return magnitude ? (72 - __builtin_clzll(magnitude)) / 8 : 1;  // one more bit for the sign, rounded up
}

// place[rows[i]] = i, or -1 with forget = 1
NATIVE(void, link_place, const int32_t* rows, int64_t n, int32_t forget, int32_t* place) {
    for (int64_t i = 0; i < n; ++i) place[rows[i]] = forget ? -1 : (int32_t)i;
}

// shared (n,): rows held together with the peer. place (U,): where a row's sums are, -1 if it was not touched.
// marks (ceil(n / 64),), widths (n,), bytes (n * dim * 8 + 8,) are written. Returns bytes; *count is the rows.
NATIVE(int64_t, link_pack, const int32_t* shared, int64_t n, const int32_t* place, const int64_t* sums, int64_t dim,
    uint64_t* marks, uint8_t* widths, uint8_t* bytes, int64_t* count) {
    uint8_t* at = bytes;
    int64_t rows = 0;
    for (int64_t first = 0; first < n; first += WORD_BITS) {
        const int64_t here = n - first < WORD_BITS ? n - first : WORD_BITS;
        int32_t places[WORD_BITS];
        uint64_t word = 0;
        for (int64_t j = 0; j < here; ++j) {
            places[j] = place[shared[first + j]];
            word |= (uint64_t)(places[j] >= 0) << j;
        }
        marks[first / WORD_BITS] = word;
        for (uint64_t left = word; left; left &= left - 1) {
            const int64_t* values = sums + (int64_t)places[__builtin_ctzll(left)] * dim;
            PREFETCH_RUN(values, 2 * dim);  // of 4 bytes
        }
        for (uint64_t left = word; left; left &= left - 1) {
            const int64_t* values = sums + (int64_t)places[__builtin_ctzll(left)] * dim;
            const int width = bytes_of(values, dim);
            widths[rows++] = (uint8_t)width;
            for (int64_t d = 0; d < dim; ++d, at += width) __builtin_memcpy(at, values + d, 8);
        }
    }
    *count = rows;
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
NATIVE(int64_t, link_add, const int32_t* shared, int64_t n, const uint64_t* marks, const uint8_t* widths, int64_t count,
    const uint8_t* bytes, int64_t size, int64_t dim, int32_t* place, int64_t own, int64_t* sums, int32_t* fresh_rows,
    int64_t* fresh, int64_t fresh_count) {
    const uint8_t* at = bytes;
    const uint8_t* end = bytes + size;
    int64_t taken = 0;
    bool wrong = false;
    for (int64_t first = 0; first < n; first += WORD_BITS) {
        const uint64_t word = marks[first / WORD_BITS];
        const int64_t here = __builtin_popcountll(word);
        if (taken + here > count) return MALFORMED;
        if (n - first < WORD_BITS && word >> (n - first)) return MALFORMED;
        int64_t* targets[WORD_BITS];
        int64_t j = 0;
        for (uint64_t left = word; left; left &= left - 1, ++j) {
            const int32_t row = shared[first + __builtin_ctzll(left)];
            if (place[row] < 0) {
                place[row] = (int32_t)(own + fresh_count);
                fresh_rows[fresh_count] = row;
                for (int64_t d = 0; d < dim; ++d) fresh[fresh_count * dim + d] = 0;
                ++fresh_count;
            }
            targets[j] = place[row] < own ? sums + place[row] * dim : fresh + (place[row] - own) * dim;
            PREFETCH_RUN(targets[j], 2 * dim);
        }
        for (j = 0; j < here; ++j) {
            const int width = widths[taken++];
            const int64_t length = width * dim;
            if (width < 1 || width > 8 || length > end - at) return MALFORMED;
            if (end - at >= length + 8) {
                wrong |= add_values(at, width, dim, targets[j]);
            } else {  // the last rows of a message: reading 8 bytes for each value would pass its end
                for (int64_t d = 0; d < dim; ++d) {
                    uint8_t value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
                    __builtin_memcpy(value, at + d * width, (size_t)width);
                    wrong |= add_values(value, width, 1, targets[j] + d);
                }
            }
            at += length;
        }
    }
    if (taken != count || at != end) return MALFORMED;
    return wrong ? (int64_t)TOO_LARGE : fresh_count;
}

// out[i] = rows[positions[i]] with gather = 1, else rows[positions[i]] = out[i]; rows (U, width)
NATIVE(void, link_move, int32_t gather, float* rows, int64_t width, const int64_t* positions, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
        if (i + 16 < n) {
            const float* ahead = rows + positions[i + 16] * width;
            PREFETCH_RUN(ahead, width);
        }
        uint32_t* one = (uint32_t*)(rows + positions[i] * width);
        uint32_t* other = (uint32_t*)(out + i * width);
        if (gather) for (int64_t w = 0; w < width; ++w) other[w] = one[w];
        else for (int64_t w = 0; w < width; ++w) one[w] = other[w];
    }
}
