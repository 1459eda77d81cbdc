// Optimizers of rows: one step of one row. A row begins with the embedding (D values); the optimizer's state follows:
//   SGD              -
//   ADAGRAD          accumulator (D)
//   ROWWISE_ADAGRAD  accumulator (1): the mean of the squared gradient
//   ADAM             momentum (D), variance (D), steps (1, uint32)
//   FTRL             accumulator (D), linear (D)
// Float32 arithmetic in a fixed order, no contraction, no libm: the same bits on every CPU.
#pragma once
#include "gradient.cuh"

// On the CPU, the gradients of STEP_ROWS rows are summed, then the rows are updated. Row by row, the square root and the
// division (30 cycles) would delay the next row's sum, because its number of occurrences is often mispredicted.
#define STEP_ROWS 16

enum { SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL };

// Settings of an optimizer, as hbm/optimizer.py names them. Kernels take it by value; Python reads its members here.
struct Optimizer {
    int32_t kind;
    float learning_rate;
    float epsilon;
    double beta1, beta2;
    float beta;
    float l1, l2;
    float clip_norm;  // largest norm of a row's gradient; 0: no clipping
    double factor;    // from fixed point to the mean gradient: 2^-36 / weight of the step
};

// Partial sums by d % 8, then a tree: the order in which the 8 lanes of a tile add with shuffles.
template <int MAX>
DEVICE float sum_of_squares(int32_t D, const float* g) {
#if ON_CPU
    float part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int d = 0;
    for (; d + 8 <= D; d += 8) {
        _Pragma("omp simd") for (int j = 0; j < 8; ++j) part[j] += g[d + j] * g[d + j];
    }
    for (int j = 0; d + j < D; ++j) part[j] += g[d + j] * g[d + j];
    typedef float Four __attribute__((vector_size(16)));
    Four low, high;
    __builtin_memcpy(&low, part, sizeof low);
    __builtin_memcpy(&high, part + 4, sizeof high);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
#else
    float part = 0;
    FOR_DIMS_IN_TURN(d, k) part += g[k] * g[k];
    for (int half = 4; half; half /= 2) part += __shfl_xor_sync(TILE_MASK, part, half, LANES);
    return part;
#endif
}

// Returns base^n by squaring, in double.
DEVICE double power(double base, uint32_t n) {
    double result = 1.0;
    for (; n; n >>= 1) {
        if (n & 1) result *= base;
        base *= base;
    }
    return result;
}

template <int MAX>
DEVICE void adagrad_row(int32_t D, const Optimizer& o, float* row, const float* g) {
    FOR_DIMS(d, k) {
        const float accumulator = row[D + d] + g[k] * g[k];
        row[D + d] = accumulator;
        row[d] -= o.learning_rate * g[k] / (SQRT_FLOAT(accumulator) + o.epsilon);
    }
}

template <int MAX>
DEVICE void rowwise_adagrad_row(int32_t D, const Optimizer& o, float* row, const float* g) {
    const float accumulator = row[D] + sum_of_squares<MAX>(D, g) / (float)D;
    const float rate = o.learning_rate / (SQRT_FLOAT(accumulator) + o.epsilon);
    TILE_SYNC();  // every lane has read the accumulator
    if (LANE == 0) row[D] = accumulator;
    FOR_DIMS(d, k) row[d] -= rate * g[k];
}

template <int MAX>
DEVICE void adam_row(int32_t D, const Optimizer& o, float* row, const float* g) {
    uint32_t* steps = (uint32_t*)(row + 3 * D);
    const uint32_t step = *steps + (*steps != 0xffffffffu);  // stays at the largest count
    TILE_SYNC();                                             // every lane has read the count
    if (LANE == 0) *steps = step;
    const float rate = (float)((double)o.learning_rate / (1.0 - power(o.beta1, step)));
    const float root = (float)(1.0 / SQRT_DOUBLE(1.0 - power(o.beta2, step)));
    const float beta1 = (float)o.beta1, rest1 = (float)(1.0 - o.beta1);  // 1 - 0.999f would be 1.7e-5 off
    const float beta2 = (float)o.beta2, rest2 = (float)(1.0 - o.beta2);
    FOR_DIMS(d, k) {
        const float momentum = beta1 * row[D + d] + rest1 * g[k];
        const float variance = beta2 * row[2 * D + d] + rest2 * (g[k] * g[k]);
        row[D + d] = momentum;
        row[2 * D + d] = variance;
        row[d] -= rate * momentum / (SQRT_FLOAT(variance) * root + o.epsilon);
    }
}

template <int MAX>
DEVICE void ftrl_row(int32_t D, const Optimizer& o, float* row, const float* g) {
    FOR_DIMS(d, k) {
        const float before = row[D + d], after = before + g[k] * g[k];
        const float sigma = (SQRT_FLOAT(after) - SQRT_FLOAT(before)) / o.learning_rate;
        const float linear = row[2 * D + d] + (g[k] - sigma * row[d]);
        const float shrunk = linear > o.l1 ? linear - o.l1 : linear < -o.l1 ? linear + o.l1 : 0.0f;
        row[D + d] = after;
        row[2 * D + d] = linear;
        row[d] = -shrunk / ((o.beta + SQRT_FLOAT(after)) / o.learning_rate + o.l2);
    }
}

// Updates one row with its gradient g, which is overwritten.
template <int MAX>
DEVICE void step_row(int32_t D, const Optimizer& o, float* row, float* g, Findings<MAX>& findings) {
    if (o.clip_norm > 0) {
        const float norm = SQRT_FLOAT(sum_of_squares<MAX>(D, g));
        const float scale = norm > o.clip_norm ? o.clip_norm / norm : 1.0f;
        FOR_DIMS(d, k) g[k] *= scale;
    }
    if (o.l2 != 0 && o.kind != FTRL) FOR_DIMS(d, k) g[k] += o.l2 * row[d];
    switch (o.kind) {
        case SGD: FOR_DIMS(d, k) row[d] -= o.learning_rate * g[k]; break;
        case ADAGRAD: adagrad_row<MAX>(D, o, row, g); break;
        case ROWWISE_ADAGRAD: rowwise_adagrad_row<MAX>(D, o, row, g); break;
        case ADAM: adam_row<MAX>(D, o, row, g); break;
        default: ftrl_row<MAX>(D, o, row, g);
    }
    FOR_DIMS(d, k) {
        const uint32_t magnitude = FLOAT_BITS(row[d]) & 0x7fffffffu;
        findings.largest[FOUND(k)] = magnitude > findings.largest[FOUND(k)] ? magnitude : findings.largest[FOUND(k)];
    }
}

// Writes the mean gradient of a row, given the sum of its contributions.
template <int MAX>
DEVICE void mean_gradient(int32_t D, const Optimizer& o, const uint64_t* sum, float* g) {
    FOR_DIMS(d, k) g[k] = (float)((double)(int64_t)sum[k] * o.factor);
}

// Updates one row, given the sum of its contributions.
template <int MAX>
DEVICE void update_row(int32_t D, const Optimizer& o, float* row, const uint64_t* sum, Findings<MAX>& findings) {
    float g[REGISTERS(MAX)];
    mean_gradient<MAX>(D, o, sum, g);
    step_row<MAX>(D, o, row, g, findings);
}
