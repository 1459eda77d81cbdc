// Rows out of parameter files: plan the ranges to read, read them, check every block, copy the wanted rows.
//
// A request is one 64-bit word, sorted: the place (32 bits, upper) and the row of the answer it goes to (32 bits, lower).
#include "crc32c.cuh"
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

static const int64_t PIECE_BYTES = 256 << 10;

DEVICE int64_t place_of(uint64_t request) { return (int64_t)(request >> 32); }
DEVICE int64_t answer_of(uint64_t request) { return (int64_t)(request & 0xffffffffu); }

// Sort requests by place, 11 bits a pass, over the places' lower `bits` bits; NumPy's sort takes 5 times as long here.
NATIVE(void, ssd_sort_requests, uint64_t* requests, uint64_t* scratch, int64_t n, int64_t bits) {
    const int64_t digits = 2048;
    uint64_t *from = requests, *to = scratch;
    for (int64_t shift = 32; shift < 32 + bits; shift += 11) {
        int64_t counts[digits] = {};
        for (int64_t i = 0; i < n; ++i) ++counts[(from[i] >> shift) & (digits - 1)];
        for (int64_t d = 0, sum = 0; d < digits; ++d) {
            const int64_t count = counts[d];
            counts[d] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; ++i) to[counts[(from[i] >> shift) & (digits - 1)]++] = from[i];
        uint64_t* swap = from;
        from = to;
        to = swap;
    }
    if (from != requests) memcpy(requests, from, n * sizeof(uint64_t));
}

// Ranges (offset, bytes, first request, last request) of whole blocks that hold the rows of requests [first, last) of one
// file. Blocks less than gap_bytes apart share a range; a range is cut near most_bytes, where no row or block is split if
// such a point comes before twice that. Returns the number of ranges.
NATIVE(int64_t, ssd_plan, const uint64_t* requests, int64_t first, int64_t last, int64_t base, int64_t row_bytes,
       int64_t block_bytes, int64_t gap_bytes, int64_t most_bytes, int64_t file_bytes, int64_t* ranges) {
    int64_t count = 0, begin = 0, end = -1, opened = first;
    for (int64_t i = first; i < last; ++i) {
        const int64_t offset = (place_of(requests[i]) - base) * row_bytes;
        const int64_t from = offset / block_bytes * block_bytes;
        int64_t to = (offset + row_bytes + block_bytes - 1) / block_bytes * block_bytes;
        if (to > file_bytes) to = file_bytes;
        const bool split = from - end >= gap_bytes && from >= end;
        const bool cut = to - begin > 2 * most_bytes || (from >= end && to - begin > most_bytes);
        if (end >= 0 && (split || cut)) {
            int64_t* range = ranges + 4 * count++;
            range[0] = begin, range[1] = end - begin, range[2] = opened, range[3] = i;
            end = -1;
        }
        if (end < 0) begin = from, opened = i, end = to;
        if (to > end) end = to;
    }
    if (end >= 0) {
        int64_t* range = ranges + 4 * count++;
        range[0] = begin, range[1] = end - begin, range[2] = opened, range[3] = last;
    }
    return count;
}

DEVICE void copy_rows(const uint64_t* requests, int64_t first, int64_t last, int64_t base, int64_t row_bytes,
                      const uint8_t* rows, int64_t offset, uint8_t* out) {
    for (int64_t i = first; i < last; ++i)
        memcpy(out + answer_of(requests[i]) * row_bytes, rows + (place_of(requests[i]) - base) * row_bytes - offset,
               row_bytes);
}

// Rows that are still in memory.
NATIVE(void, ssd_copy_rows, const uint64_t* requests, int64_t first, int64_t last, int64_t base, int64_t row_bytes,
       const void* rows, void* out) {
    copy_rows(requests, first, last, base, row_bytes, (const uint8_t*)rows, 0, (uint8_t*)out);
}

// Check one range that was read into `bytes` and copy its rows. Returns the wrong block's number in the file, or -1.
NATIVE(int64_t, ssd_take_range, const uint64_t* requests, const int64_t* range, int64_t base, int64_t row_bytes,
       int64_t block_bytes, const uint32_t* sums, const void* bytes, void* out) {
    const int64_t block = range[0] / block_bytes;
    const int64_t wrong = crc_mismatch((const uint8_t*)bytes, range[1], block_bytes, sums + block);
    if (wrong >= 0) return block + wrong;
    copy_rows(requests, range[2], range[3], base, row_bytes, (const uint8_t*)bytes, range[0], (uint8_t*)out);
    return -1;
}

// Fill `to` with n bytes from `offset` on. Returns 0, or 1 (the read failed, *value = errno) or 2 (the file ends early,
// *value = bytes that are there).
DEVICE int64_t read_whole(int32_t fd, int64_t offset, int64_t n, uint8_t* to, int64_t* value) {
    for (int64_t have = 0; have < n;) {
        const int64_t got = pread(fd, to + have, n - have, offset + have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            *value = got < 0 ? errno : offset + have;
            return got < 0 ? 1 : 2;
        }
        have += got;
    }
    return 0;
}

// Read a file from its start and leave the sum of each block: in pieces, so that the sums are taken while a piece is in
// the cache, and so that the kernel's read-ahead works on the next one meanwhile (one long read takes 1.6 times as long
// from a cold disk). what: as in read_whole. Returns 0 when all is there.
NATIVE(int64_t, ssd_read_sums, int32_t fd, int64_t offset, int64_t n, int64_t block_bytes, void* out, uint32_t* sums,
       int64_t* what) {
    const int64_t piece_bytes = block_bytes < PIECE_BYTES ? PIECE_BYTES / block_bytes * block_bytes : block_bytes;
    for (int64_t at = 0; at < n; at += piece_bytes) {
        const int64_t size = n - at < piece_bytes ? n - at : piece_bytes;
        uint8_t* to = (uint8_t*)out + at;
        if ((what[0] = read_whole(fd, offset + at, size, to, what + 1))) return what[0];
        crc_blocks(to, size, block_bytes, sums + at / block_bytes);
    }
    return 0;
}

// Read, check and copy ranges [first, last) of an open file; `ahead` ranges are announced to the kernel before they are
// read, so that one thread keeps many reads in flight. Returns -1, or the range that failed with what[0] = 1 or 2 (see
// read_whole) or 3 (what[1] = block whose sum is wrong).
NATIVE(int64_t, ssd_read_ranges, int32_t fd, const uint64_t* requests, const int64_t* ranges, int64_t first,
       int64_t last, int64_t ahead, int64_t base, int64_t row_bytes, int64_t block_bytes, const uint32_t* sums,
       void* buffer, void* out, int64_t* what) {
    int64_t announced = first;
    for (int64_t k = first; k < last; ++k) {
#if defined(POSIX_FADV_WILLNEED)
        for (; announced < last && announced < k + ahead; ++announced)
            posix_fadvise(fd, ranges[4 * announced], ranges[4 * announced + 1], POSIX_FADV_WILLNEED);
#endif
        const int64_t* range = ranges + 4 * k;
        if ((what[0] = read_whole(fd, range[0], range[1], (uint8_t*)buffer, what + 1))) return k;
        const int64_t block = range[0] / block_bytes;
        const int64_t wrong = crc_mismatch((const uint8_t*)buffer, range[1], block_bytes, sums + block);
        if (wrong >= 0) {
            what[0] = 3;
            what[1] = block + wrong;
            return k;
        }
        copy_rows(requests, range[2], range[3], base, row_bytes, (const uint8_t*)buffer, range[0], (uint8_t*)out);
    }
    return -1;
}
