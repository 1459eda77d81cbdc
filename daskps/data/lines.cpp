// Counting and cutting lines: what the row index of text files is built with.
#include "scan.cuh"

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
