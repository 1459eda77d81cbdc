// Counts and digests lines, for the index of text files.
#include <string.h>

#include "scan.cuh"
#include "xxh64.cuh"

// Returns how often `byte` occurs.
NATIVE(int64_t, data_count_byte, const uint8_t* text, int64_t size, int32_t byte) {
    int64_t count = 0, place = 0;
    for (; place + 64 <= size; place += 64) count += __builtin_popcountll(equal64(text + place, (uint8_t)byte));
    for (; place < size; ++place) count += text[place] == (uint8_t)byte;
    return count;
}

// Returns the position after the last newline, or 0 if there is none.
NATIVE(int64_t, data_last_line, const uint8_t* text, int64_t size) {
    while (size > 0 && text[size - 1] != '\n') --size;
    return size;
}

// Returns a digest of the first `lines` lines: the sum of the hashes of the lines, without newline, each seeded with its
// line number. So it does not depend on how a file is cut into blocks, and digests of consecutive lines can be added.
NATIVE(uint64_t, data_digest_lines, const uint8_t* text, int64_t size, int64_t first_line, int64_t lines) {
    uint64_t sum = 0;
    for (int64_t place = 0, line = first_line; place < size && line - first_line < lines; ++line) {
        const void* found = memchr(text + place, '\n', (size_t)(size - place));
        int64_t end = found ? (const uint8_t*)found - text : size;
        sum += xxh64(text + place, end - place, (uint64_t)line);
        place = end + 1;
    }
    return sum;
}

// Returns the position after the first newline, or `size` if there is none.
NATIVE(int64_t, data_first_line, const uint8_t* text, int64_t size) {
    const void* found = memchr(text, '\n', (size_t)size);
    return found ? (const uint8_t*)found - text + 1 : size;
}
