// Scale and position of a pooled bag, for the forward pass and for the gradient; search in sorted starts.
#pragma once
#include "dialect.cuh"

enum { SUM, MEAN, SQRT_N };

// n occurrences: the mean divides by n, sqrt-n by its root; an empty bag gives zeros.
DEVICE float pooling_scale(int32_t pooling, int64_t n) {
    if (pooling == SUM || n == 0) return 1.0f;
    return 1.0f / (pooling == MEAN ? (float)n : SQRT_FLOAT((float)n));
}

// Returns the last of n groups that starts at or before an item; starts (n,) ascends, and starts[0] is at or before it.
template <class Start>
DEVICE int64_t last_start(const Start* starts, int64_t n, int64_t item) {
    int64_t low = 0, high = n;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (starts[middle] <= item) low = middle;
        else high = middle;
    }
    return low;
}

// Bag (example, slot) has columns [slot * D, (slot + 1) * D) of its example's line of `stride` values.
DEVICE int64_t bag_offset(int64_t bag, int32_t slots, int64_t stride, int32_t D) {
    if (stride == (int64_t)slots * D) return bag * D;
    const uint32_t example = (uint32_t)bag / (uint32_t)slots;
    return example * stride + (int64_t)((uint32_t)bag - example * (uint32_t)slots) * D;
}
