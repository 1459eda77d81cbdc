// CRC-32C (Castagnoli), as google-crc32c, iSCSI and Zarr's own codec compute it. It detects every error within 32
// consecutive bits, so a single wrong byte is always detected.
#pragma once
#include "dialect.cuh"
#include <string.h>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
DEVICE uint64_t crc_word(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
DEVICE uint64_t crc_byte(uint64_t crc, uint8_t byte) { return _mm_crc32_u8((uint32_t)crc, byte); }
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
DEVICE uint64_t crc_word(uint64_t crc, uint64_t word) { return __crc32cd((uint32_t)crc, word); }
DEVICE uint64_t crc_byte(uint64_t crc, uint8_t byte) { return __crc32cb((uint32_t)crc, byte); }
#else
struct CrcTable {
    uint32_t at[8][256];
    constexpr CrcTable() : at() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
            at[0][i] = crc;
        }
        for (int k = 1; k < 8; ++k)
            for (uint32_t i = 0; i < 256; ++i) at[k][i] = (at[k - 1][i] >> 8) ^ at[0][at[k - 1][i] & 255];
    }
};
static constexpr CrcTable CRC_TABLE;
DEVICE uint64_t crc_byte(uint64_t crc, uint8_t byte) { return (crc >> 8) ^ CRC_TABLE.at[0][(crc ^ byte) & 255]; }
DEVICE uint64_t crc_word(uint64_t crc, uint64_t word) {
    word ^= crc;
    uint32_t next = 0;
    for (int k = 0; k < 8; ++k) next ^= CRC_TABLE.at[7 - k][(word >> (8 * k)) & 255];
    return next;
}
#endif

DEVICE uint64_t word_at(const uint8_t* bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

// Continue a CRC over n more bytes. `state` and the result are the CRC before its final inversion.
DEVICE uint64_t crc_run(uint64_t state, const uint8_t* bytes, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) state = crc_word(state, word_at(bytes + i));
    for (; i < n; ++i) state = crc_byte(state, bytes[i]);
    return state;
}

DEVICE uint64_t crc_zeros(uint64_t state, int64_t n) {
    for (; n >= 8; n -= 8) state = crc_word(state, 0);
    for (; n > 0; --n) state = crc_byte(state, 0);
    return state;
}

// Write the checksums of four blocks. The CRC instruction has a latency of 3 cycles, but one can start every cycle: one
// block at a time would have a third of the speed.
DEVICE void crc_four(const uint8_t* bytes, int64_t block_bytes, uint32_t* sums) {
    const uint8_t *a = bytes, *b = a + block_bytes, *c = b + block_bytes, *d = c + block_bytes;
    uint64_t p = 0xffffffffu, q = p, r = p, s = p;
    int64_t i = 0;
    for (; i + 8 <= block_bytes; i += 8) {
        p = crc_word(p, word_at(a + i));
        q = crc_word(q, word_at(b + i));
        r = crc_word(r, word_at(c + i));
        s = crc_word(s, word_at(d + i));
    }
    const int64_t rest = block_bytes - i;
    sums[0] = ~(uint32_t)crc_run(p, a + i, rest);
    sums[1] = ~(uint32_t)crc_run(q, b + i, rest);
    sums[2] = ~(uint32_t)crc_run(r, c + i, rest);
    sums[3] = ~(uint32_t)crc_run(s, d + i, rest);
}

// Write the checksums of consecutive blocks, n bytes in all; the last block may be shorter.
DEVICE void crc_blocks(const uint8_t* bytes, int64_t n, int64_t block_bytes, uint32_t* sums) {
    const int64_t whole = n / block_bytes;
    int64_t k = 0;
    for (; k + 4 <= whole; k += 4) crc_four(bytes + k * block_bytes, block_bytes, sums + k);
    for (; k * block_bytes < n; ++k) {
        const int64_t left = n - k * block_bytes;
        const uint8_t* start = bytes + k * block_bytes;
        sums[k] = ~(uint32_t)crc_run(0xffffffffu, start, left < block_bytes ? left : block_bytes);
    }
}

// Return the number of the first block whose checksum differs from `sums`, or -1.
DEVICE int64_t crc_mismatch(const uint8_t* bytes, int64_t n, int64_t block_bytes, const uint32_t* sums) {
    const int64_t whole = n / block_bytes;
    int64_t k = 0;
    uint32_t four[4];
    for (; k + 4 <= whole; k += 4) {
        crc_four(bytes + k * block_bytes, block_bytes, four);
        for (int j = 0; j < 4; ++j)
            if (four[j] != sums[k + j]) return k + j;
    }
    for (; k * block_bytes < n; ++k) {
        crc_blocks(bytes + k * block_bytes, n - k * block_bytes < block_bytes ? n - k * block_bytes : block_bytes,
                   block_bytes, four);
        if (four[0] != sums[k]) return k;
    }
    return -1;
}
