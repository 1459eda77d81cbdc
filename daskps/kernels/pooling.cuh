// How a bag is pooled, and where its columns stand; shared by the forward pass and the gradient.
#pragma once
#include "dialect.cuh"

enum { SUM, MEAN, SQRT_N };

// n occurrences: the mean divides by n, sqrt-n by its root; an empty bag gives zeros.
DEVICE float pooling_scale(int32_t pooling, int64_t n) {
    if (pooling == SUM || n == 0) return 1.0f;
    return 1.0f / (pooling == MEAN ? (float)n : SQRT_FLOAT((float)n));
}

// Bag (example, slot) stands at columns [slot * D, (slot + 1) * D) of its example's line of `stride` values.
DEVICE int64_t bag_offset(int64_t bag, int32_t slots, int64_t stride, int32_t D) {
    if (stride == (int64_t)slots * D) return bag * D;
    const uint32_t example = (uint32_t)bag / (uint32_t)slots;
    return example * stride + (int64_t)((uint32_t)bag - example * (uint32_t)slots) * D;
}
