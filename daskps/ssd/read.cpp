// Reading of rows from segments: plan the ranges to read, read them, check every block, copy the requested rows.
//
// A request is a 64-bit word: the upper 32 bits are the place of the row, the lower 32 bits the row of `out` to which it is
// copied. Requests are sorted by place.
#include "crc32c.cuh"
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

static const int64_t PIECE_BYTES = 256 << 10;

// Requests for rows of one segment, and where the rows go.
struct SegmentRead {
    const uint64_t* requests;  // all requests of the load, sorted
    int64_t base;              // place of the segment's first row
    int64_t row_bytes;
    int64_t block_bytes;   // bytes per checksum
    const uint32_t* sums;  // checksums of the blocks of the segment's rows; null if its rows are in memory
    uint8_t* out;          // rows of the result
};

DEVICE int64_t place_of(uint64_t request) { return (int64_t)(request >> 32); }
DEVICE int64_t target_of(uint64_t request) { return (int64_t)(request & 0xffffffffu); }

// Sort requests by the lower `bits` bits of their places: a radix sort of 11 bits per pass. NumPy's sort takes 5 times as
// long.
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

// Plan the reads for requests [first, last), all of one segment. A range is (offset, bytes, first request, last request) and
// consists of whole blocks. Blocks less than gap_bytes apart share a range. A range is cut at about most_bytes, if possible
// between two blocks and where no row is split, at the latest at twice that size. Returns the number of ranges.
NATIVE(int64_t, ssd_plan, const SegmentRead* read, int64_t first, int64_t last, int64_t gap_bytes, int64_t most_bytes,
       int64_t file_bytes, int64_t* ranges) {
    const int64_t row_bytes = read->row_bytes, block_bytes = read->block_bytes;
    int64_t count = 0, begin = 0, end = -1, opened = first;
    for (int64_t i = first; i < last; ++i) {
        const int64_t offset = (place_of(read->requests[i]) - read->base) * row_bytes;
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

// Copy the rows of requests [first, last) from `rows`, which begins `offset` bytes after the segment's first row.
DEVICE void copy_rows(const SegmentRead& read, int64_t first, int64_t last, const uint8_t* rows, int64_t offset) {
    for (int64_t i = first; i < last; ++i) {
        const uint64_t request = read.requests[i];
        memcpy(read.out + target_of(request) * read.row_bytes,
               rows + (place_of(request) - read.base) * read.row_bytes - offset, read.row_bytes);
    }
}

// Check a range that was read into `bytes` and copy its rows. Returns -1, or the number of the first damaged block.
DEVICE int64_t take_range(const SegmentRead& read, const int64_t* range, const uint8_t* bytes) {
    const int64_t block = range[0] / read.block_bytes;
    const int64_t wrong = crc_mismatch(bytes, range[1], read.block_bytes, read.sums + block);
    if (wrong >= 0) return block + wrong;
    copy_rows(read, range[2], range[3], bytes, range[0]);
    return -1;
}

// Copy the rows of requests [first, last) from a segment that is still in memory.
NATIVE(void, ssd_copy_rows, const SegmentRead* read, int64_t first, int64_t last, const void* rows) {
    copy_rows(*read, first, last, (const uint8_t*)rows, 0);
}

// As take_range, for a range that the caller has read.
NATIVE(int64_t, ssd_take_range, const SegmentRead* read, const int64_t* range, const void* bytes) {
    return take_range(*read, range, (const uint8_t*)bytes);
}

// Fill `to` with n bytes of a file from `offset` on. Returns 0, or 1 if the read failed (*value: errno), or 2 if the file
// ends too early (*value: its length).
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

// Read n bytes of a file from `offset` on, and write the checksum of each block. It reads pieces: a piece is still in the
// CPU's cache when its checksums are computed, and meanwhile the kernel reads ahead. (One long read takes 1.6 times as long
// from a cold disk.) Returns 0, or an error as read_whole, which is also in what[0], with its value in what[1].
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

// Read, check and copy ranges [first, last) of an open file. `ahead` ranges are announced to the kernel before they are read,
// so that one thread has many reads in flight. Returns -1, or the number of the range that failed: what[0] is 1 or 2 (see
// read_whole), or 3 for a damaged block (what[1]: its number).
NATIVE(int64_t, ssd_read_ranges, const SegmentRead* read, int32_t fd, const int64_t* ranges, int64_t first, int64_t last,
       int64_t ahead, void* buffer, int64_t* what) {
    int64_t announced = first;
    for (int64_t k = first; k < last; ++k) {
#if defined(POSIX_FADV_WILLNEED)
        for (; announced < last && announced < k + ahead; ++announced)
            posix_fadvise(fd, ranges[4 * announced], ranges[4 * announced + 1], POSIX_FADV_WILLNEED);
#endif
        const int64_t* range = ranges + 4 * k;
        if ((what[0] = read_whole(fd, range[0], range[1], (uint8_t*)buffer, what + 1))) return k;
        const int64_t wrong = take_range(*read, range, (const uint8_t*)buffer);
        if (wrong >= 0) {
            what[0] = 3;
            what[1] = wrong;
            return k;
        }
    }
    return -1;
}
