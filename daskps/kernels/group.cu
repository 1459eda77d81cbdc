// Groups the occurrences of a step by row, on the CPU (a GPU sorts with CuPy): the touched rows, ascending, and for each
// its occurrences in their order. Only the rows of one shard count, [first_row, first_row + row_count). A radix sort by
// parts of 2^shift rows, whose counters stay in cache:
//   group_count    counts the occurrences of each share in each part
//   group_deal     writes row and bag of each occurrence as one word, and its coefficient, part by part
//   group_sort     sorts each part: a bit per row gives the touched rows in order, a counter per row their positions
//   group_join     concatenates the parts' lists of touched rows
#include "pooling.cuh"

DEVICE float occurrence_coefficient(const int64_t* offsets, int64_t bag, const float* weights, int64_t i, int32_t pooling) {
    const float scale = pooling_scale(pooling, offsets[bag + 1] - offsets[bag]);
    return weights ? weights[i] * scale : scale;
}

// Writes the bag of each occurrence and, unless coefficients is null, weight * scale of the bag; for the sort on a GPU.
KERNEL(group_bags, const int64_t* offsets, int64_t bags, const float* weights, int32_t pooling, int32_t* bag_of,
       float* coefficients) {
    FOR_TILES(bag, bags) {
        for (int64_t i = offsets[bag] + LANE; i < offsets[bag + 1]; i += LANES) {
            bag_of[i] = (int32_t)bag;
            if (coefficients) coefficients[i] = occurrence_coefficient(offsets, bag, weights, i, pooling);
        }
    }
}

#if ON_CPU
// counts (shares, parts), zeroed
CPU_KERNEL(group_count, const int32_t* row_of, int64_t n, int32_t first_row, int32_t row_count, int32_t shift,
           int64_t parts, int32_t* counts) {
    int32_t* mine = counts + share_index * parts;
    FOR_ITEMS(i, n) {
        const uint32_t row = (uint32_t)row_of[i] - (uint32_t)first_row;
        if (row < (uint32_t)row_count) ++mine[row >> shift];
    }
}

// Turns counts into each share's first position in each part; part_starts (parts + 1). Returns the number of occurrences.
NATIVE(int64_t, group_places, int32_t* counts, int64_t shares, int64_t parts, int32_t* part_starts) {
    int32_t place = 0;
    for (int64_t part = 0; part < parts; ++part) {
        part_starts[part] = place;
        for (int64_t share = 0; share < shares; ++share) {
            const int32_t size = counts[share * parts + part];
            counts[share * parts + part] = place;
            place += size;
        }
    }
    part_starts[parts] = place;
    return place;
}

// dealt, dealt_coefficients: by part; the coefficients are null if all are 1.
CPU_KERNEL(group_deal, const int32_t* row_of, int64_t n, const int64_t* offsets, int64_t bags, const float* weights,
           int32_t pooling, int32_t first_row, int32_t row_count, int32_t shift, int64_t parts, int32_t* next,
           uint64_t* dealt, float* dealt_coefficients) {
    int32_t* mine = next + share_index * parts;
    int64_t bag = last_start(offsets, bags, n * share_index / share_count);
    FOR_ITEMS(i, n) {
        while (offsets[bag + 1] <= i) ++bag;
        const uint32_t row = (uint32_t)row_of[i] - (uint32_t)first_row;
        if (row >= (uint32_t)row_count) continue;
        const int32_t place = mine[row >> shift]++;
        dealt[place] = (uint64_t)row << 32 | (uint64_t)bag;
        if (dealt_coefficients) dealt_coefficients[place] = occurrence_coefficient(offsets, bag, weights, i, pooling);
    }
}

// counters (shares, 2^shift) and marks (shares, 2^shift / 64) must be 0, and are 0 again afterwards. Part p writes its
// touched rows and their starts from position part_starts[p] on, and their number to touched_counts[p].
CPU_KERNEL(group_sort, const int32_t* part_starts, int64_t parts, int32_t shift, int64_t* next_part, int32_t* counters,
           uint64_t* marks, const uint64_t* dealt, const float* dealt_coefficients, int32_t* touched, int32_t* starts,
           int32_t* touched_counts, int32_t* bags, float* coefficients) {
    const int64_t range = (int64_t)1 << shift, words = (range + 63) / 64;
    int32_t* const counter = counters + share_index * range;
    uint64_t* const mark = marks + share_index * words;
    for (int64_t part; (part = ATOMIC_NEXT(next_part)) < parts;) {
        const int32_t first = part_starts[part], last = part_starts[part + 1];
        const int32_t base = (int32_t)(part << shift);
        for (int32_t i = first; i < last; ++i) {
            const int32_t row = (int32_t)(dealt[i] >> 32) - base;
            mark[row >> 6] |= (uint64_t)1 << (row & 63);
            ++counter[row];
        }
        int32_t found = first, place = first;
        for (int64_t word = 0; first < last && word < words; ++word) {
            for (uint64_t left = mark[word]; left; left &= left - 1) {
                const int32_t row = (int32_t)(word * 64) + __builtin_ctzll(left);
                touched[found] = base + row;
                starts[found++] = place;
                const int32_t size = counter[row];
                counter[row] = place;
                place += size;
            }
            mark[word] = 0;
        }
        for (int32_t i = first; i < last; ++i) {
            const int32_t at = counter[(int32_t)(dealt[i] >> 32) - base]++;
            bags[at] = (int32_t)dealt[i];
            if (coefficients) coefficients[at] = dealt_coefficients[i];
        }
        for (int32_t i = first; i < found; ++i) counter[touched[i] - base] = 0;
        touched_counts[part] = found - first;
    }
}

// bases (parts + 1): the sums of touched_counts; joined (touched) and joined_starts (touched + 1)
CPU_KERNEL(group_join, const int32_t* part_starts, int64_t parts, const int32_t* bases, const int32_t* touched,
           const int32_t* starts, int32_t* joined, int32_t* joined_starts) {
    FOR_ITEMS(part, parts) {
        const int32_t from = part_starts[part] - bases[part];
        for (int32_t i = bases[part]; i < bases[part + 1]; ++i) {
            joined[i] = touched[from + i];
            joined_starts[i] = starts[from + i];
        }
    }
    if (share_index == 0) joined_starts[bases[parts]] = part_starts[parts];
}
#endif
