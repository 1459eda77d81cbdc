// Counting and cutting lines: what the example index of text files is built with.
#include <string.h>

#include "scan.cuh"
#include "xxh64.cuh"

// Number of bytes equal to `byte`.
NATIVE(int64_t, data_count_byte, const uint8_t* text, int64_t size, int32_t byte) {
    int64_t count = 0, place = 0;
    for (; place + 64 <= size; place += 64) count += __builtin_popcountll(equal64(text + place, (uint8_t)byte));
    for (; place < size; ++place) count += text[place] == (uint8_t)byte;
    return count;
}

// Place behind the last newline, or 0 when there is none.
NATIVE(int64_t, data_last_line, const uint8_t* text, int64_t size) {
    while (size > 0 && text[size - 1] != '\n') --size;
    return size;
}

// A digest of `lines` lines from the start of `text`: the sum of the hashes of their bytes, without the newline, each
// seeded by its number. So it is the same in whatever blocks a file is read, and digests of runs of lines add up.
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

// Place behind the first newline, or `size` when there is none.
NATIVE(int64_t, data_first_line, const uint8_t* text, int64_t size) {
    const void* found = memchr(text, '\n', (size_t)size);
    return found ? (const uint8_t*)found - text + 1 : size;
}
