// CRC-32C of a whole buffer, or of each of its blocks.
#include "crc32c.cuh"

// Return the CRC-32C of some bytes followed by these n bytes; `before` is the CRC-32C of the former (0 for none).
// google-crc32c gives the same numbers.
NATIVE(uint32_t, ssd_crc32c, const void* data, int64_t n, uint32_t before) {
    return ~(uint32_t)crc_run((uint32_t)~before, (const uint8_t*)data, n);
}

// Write the CRC-32C of each block of a chunk of `total` bytes: n bytes of data, then zeros, which are not in memory.
NATIVE(void, ssd_block_sums, const void* data, int64_t n, int64_t total, int64_t block_bytes, uint32_t* sums) {
    const uint8_t* bytes = (const uint8_t*)data;
    const int64_t whole = n / block_bytes;
    crc_blocks(bytes, whole * block_bytes, block_bytes, sums);
    uint64_t state = crc_run(0xffffffffu, bytes + whole * block_bytes, n - whole * block_bytes);
    int64_t filled = n - whole * block_bytes;
    for (int64_t k = whole; k * block_bytes < total; ++k, filled = 0, state = 0xffffffffu) {
        const int64_t size = total - k * block_bytes < block_bytes ? total - k * block_bytes : block_bytes;
        if (k > whole + 1 && size == block_bytes)
            sums[k] = sums[k - 1];  // a whole block of zeros, like the one before
        else
            sums[k] = ~(uint32_t)crc_zeros(state, size - filled);
    }
}
