// The factorization machine over pooled slots: a slot's embedding is [linear weight, factors...], D = 1 + k values.
// logit = sum of the linear weights + 0.5 * sum over the factors of ((sum over slots v)^2 - sum over slots v^2).
// With D = 1 it is a logistic regression. Sums run over the slots in order, so bits do not depend on the CPU.
#include "dialect.cuh"

#if ON_CPU
#define ONE_BY_ONE _Pragma("GCC unroll 1")  // GCC does not vectorise a loop of 16 that it has unrolled: 4 times slower
#else
#define ONE_BY_ONE _Pragma("unroll")  // keeps the sums in registers
#endif

// totals (n, D) and squares (n, D) += the sums over the slots of one table. pooled (n, slots * D)
template <int FIXED> DEVICE void sum_slots(const float* pooled, int64_t slots, int64_t width, float* total, float* square) {
    const int64_t D = FIXED ? FIXED : width;
    for (int64_t s = 0; s < slots; ++s)
        ONE_BY_ONE for (int64_t d = 0; d < D; ++d) {
            const float v = pooled[s * D + d];
            total[d] += v;
            square[d] += v * v;
        }
}

// For common dimensions, the sums of one example stay in registers: 3 times as fast.
template <int FIXED> DEVICE void sum_slots_in_registers(const float* pooled, int64_t slots, float* total, float* square) {
    float t[FIXED], q[FIXED];
    for (int d = 0; d < FIXED; ++d) t[d] = total[d], q[d] = square[d];
    sum_slots<FIXED>(pooled, slots, FIXED, t, q);
    for (int d = 0; d < FIXED; ++d) total[d] = t[d], square[d] = q[d];
}

KERNEL(fm_sums, const float* pooled, int64_t n, int64_t slots, int64_t width, float* totals, float* squares) {
    FOR_ITEMS(i, n) {
        const float* row = pooled + i * slots * width;
        float* total = totals + i * width;
        float* square = squares + i * width;
        switch (width) {
            case 1: sum_slots_in_registers<1>(row, slots, total, square); break;
            case 5: sum_slots_in_registers<5>(row, slots, total, square); break;
            case 8: sum_slots_in_registers<8>(row, slots, total, square); break;
            case 9: sum_slots_in_registers<9>(row, slots, total, square); break;
            case 16: sum_slots_in_registers<16>(row, slots, total, square); break;
            case 17: sum_slots_in_registers<17>(row, slots, total, square); break;
            case 33: sum_slots_in_registers<33>(row, slots, total, square); break;
            default: sum_slots<0>(row, slots, width, total, square);
        }
    }
}

// logits (n,) += the machine's output
KERNEL(fm_logits, const float* totals, const float* squares, int64_t n, int64_t width, float* logits) {
    FOR_ITEMS(i, n) {
        const float* total = totals + i * width;
        const float* square = squares + i * width;
        float pairs = 0.0f;
        for (int64_t d = 1; d < width; ++d) pairs += total[d] * total[d] - square[d];
        logits[i] += total[0] + 0.5f * pairs;
    }
}

// pooled_gradients (n, slots * D) = the gradient, given that of the logits, plus `other`, which may be null and is of the
// same shape. The output may be `pooled` itself: each value is read before it is written.
KERNEL(fm_backward, const float* gradients, const float* totals, const float* pooled, const float* other, int64_t n,
       int64_t slots, int64_t width, float* pooled_gradients) {
    FOR_ITEMS(i, n) {
        const float g = gradients[i];
        const float* total = totals + i * width;
        for (int64_t s = 0; s < slots; ++s) {
            const int64_t start = (i * slots + s) * width;
            for (int64_t d = 0; d < width; ++d) {
                const float value = d ? g * (total[d] - pooled[start + d]) : g;
                pooled_gradients[start + d] = other ? other[start + d] + value : value;
            }
        }
    }
}
