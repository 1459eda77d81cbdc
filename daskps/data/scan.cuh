// Finds bytes in text, 64 at a time: a 64-bit mask has a bit for each position of a wanted byte.
#pragma once
#include "dialect.cuh"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
DEVICE uint64_t equal64(const uint8_t* p, uint8_t byte) {
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512((const void*)p), _mm512_set1_epi8((char)byte));
}
#elif defined(__AVX2__)
DEVICE uint64_t equal32(const uint8_t* p, __m256i byte) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i*)p), byte));
}
DEVICE uint64_t equal64(const uint8_t* p, uint8_t byte) {
    __m256i wanted = _mm256_set1_epi8((char)byte);
    return equal32(p, wanted) | equal32(p + 32, wanted) << 32;
}
#elif defined(__SSE2__)
DEVICE uint64_t equal16(const uint8_t* p, __m128i byte) {
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i*)p), byte));
}
DEVICE uint64_t equal64(const uint8_t* p, uint8_t byte) {
    __m128i wanted = _mm_set1_epi8((char)byte);
    return equal16(p, wanted) | equal16(p + 16, wanted) << 16 | equal16(p + 32, wanted) << 32 |
           equal16(p + 48, wanted) << 48;
}
#else
DEVICE uint64_t equal64(const uint8_t* p, uint8_t byte) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= (uint64_t)(p[i] == byte) << i;
    return bits;
}
#endif

// Iterates over the positions of N wanted byte values. `text` must be readable 64 bytes past `size`.
template <int N>
struct Scanner {
    const uint8_t* text;
    int64_t size;
    int64_t line_start;  // where the current line begins; set by the caller
    int64_t base;        // position of the 64 bytes that `bits` describes
    uint64_t bits;
    uint8_t wanted[N];

    template <typename... Bytes>
    Scanner(const uint8_t* text, int64_t size, int64_t start, Bytes... bytes)
        : text(text), size(size), line_start(start), base(start), bits(0), wanted{bytes...} {
        if (base < size) bits = look();
    }

    uint64_t look() const {
        uint64_t found = 0;
        for (int k = 0; k < N; ++k) found |= equal64(text + base, wanted[k]);
        int64_t left = size - base;
        return left < 64 ? found & ((1ull << left) - 1) : found;
    }

    // Returns the next position of a wanted byte, or `size` at the end.
    int64_t next() {
        while (!bits) {
            base += 64;
            if (base >= size) return size;
            bits = look();
        }
        int64_t place = base + __builtin_ctzll(bits);
        bits &= bits - 1;
        return place;
    }
};

// Returns where line number `lines` (from 0) begins, or `size` if the text has fewer lines.
DEVICE int64_t skip_lines(const uint8_t* text, int64_t size, int64_t lines) {
    if (lines <= 0) return 0;
    for (int64_t base = 0; base < size; base += 64) {
        uint64_t bits = equal64(text + base, '\n');
        if (size - base < 64) bits &= (1ull << (size - base)) - 1;
        int64_t here = __builtin_popcountll(bits);
        if (here < lines) {
            lines -= here;
            continue;
        }
        while (--lines) bits &= bits - 1;
        return base + __builtin_ctzll(bits) + 1;
    }
    return size;
}
