// The dense network between its matrix products: gradients into fixed-point sums, ReLU backward, and the optimizers,
// which take the sums of the whole step. Parameters, sums and optimizer state are flat arrays of equal length n.
#include "dense.cuh"

#if ON_CPU
#define COLUMNS 64  // 16 would be unrolled before it is vectorised, and branch on every value: 20 times slower
#else
#define COLUMNS 1  // neighbouring threads take neighbouring columns
#endif
#define CHUNK 1024

// Both layer kernels take runs of columns, so that sums over rows stay in registers.
#define FOR_COLUMNS(tile, columns) FOR_ITEMS(tile, ((columns) + COLUMNS - 1) / COLUMNS)

DEVICE void bias_relu_row(const float* __restrict__ bias, float* __restrict__ value, int width) {
    for (int c = 0; c < width; ++c) {
        const float sum = value[c] + bias[c];
        value[c] = sum < 0.0f ? 0.0f : sum;  // NaN stays
    }
}

// values (rows, columns) = max(values + bias, 0)
KERNEL(bias_relu, const float* bias, int64_t rows, int64_t columns, float* values) {
    FOR_COLUMNS(tile, columns) {
        const int64_t first = tile * COLUMNS;
        const int width = columns - first < COLUMNS ? (int)(columns - first) : COLUMNS;
        for (int64_t row = 0; row < rows; ++row) {
            float* value = values + row * columns + first;
            if (width == COLUMNS)
                bias_relu_row(bias + first, value, COLUMNS);
            else
                bias_relu_row(bias + first, value, width);
        }
    }
}

DEVICE void relu_backward_row(const float* __restrict__ a, float* __restrict__ g, float* __restrict__ total, int width) {
    for (int c = 0; c < width; ++c) {
        const float kept = a[c] > 0.0f ? g[c] : 0.0f;
        g[c] = kept;
        total[c] += kept;
    }
}

// gradients (rows, columns) become 0 where the activation is 0; bias_gradients (columns,) are their sums over the rows.
KERNEL(relu_backward, const float* activations, int64_t rows, int64_t columns, float* gradients, float* bias_gradients) {
    FOR_COLUMNS(tile, columns) {
        const int64_t first = tile * COLUMNS;
        const int width = columns - first < COLUMNS ? (int)(columns - first) : COLUMNS;
        float total[COLUMNS] = {};
        for (int64_t row = 0; row < rows; ++row) {
            const float* a = activations + row * columns + first;
            float* g = gradients + row * columns + first;
            if (width == COLUMNS)
                relu_backward_row(a, g, total, COLUMNS);
            else
                relu_backward_row(a, g, total, width);
        }
        for (int c = 0; c < width; ++c) bias_gradients[first + c] = total[c];
    }
}

// total (1,) = the sum of n values in order: the gradient of the logit's bias. One item, because a block is short.
KERNEL(sum_in_order, const float* values, int64_t n, float* total) {
    FOR_ITEMS(item, 1) {
        double sum = 0.0;
        for (int64_t i = 0; i < n; ++i) sum += values[i];
        total[item] = (float)sum;
    }
}

// sums (n,) += gradients (n,) of one block, rounded to units of 1 / GRADIENT_ONE
KERNEL(add_fixed, const float* gradients, int64_t n, int64_t* sums, int32_t* flag) {
    int32_t wrong = 0;
    FOR_ITEMS(i, n) {
        const double x = gradients[i] * GRADIENT_ONE;
        wrong |= !fits_fixed(x);
        sums[i] += fixed(x);
    }
    if (wrong) ATOMIC_OR(flag, 1);
}

// The mean gradient of one parameter; L2 pulls on the first `decayed` of them, which are the weights and not the biases.
DEVICE float mean_gradient(const int64_t* sums, const float* parameters, int64_t i, double scale, float l2,
                           int64_t decayed) {
    const float g = (float)((double)sums[i] * scale);
    return i < decayed ? g + l2 * parameters[i] : g;
}

// squares[c]: the sum of squared mean gradients of the c-th run of CHUNK parameters, for clipping by norm.
KERNEL(dense_squares, const int64_t* sums, const float* parameters, int64_t n, double scale, float l2, int64_t decayed,
       double* squares) {
    FOR_ITEMS(chunk, (n + CHUNK - 1) / CHUNK) {
        const int64_t end = (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n;
        double total = 0.0;
        for (int64_t i = chunk * CHUNK; i < end; ++i) {
            const double g = mean_gradient(sums, parameters, i, scale, l2, decayed);
            total += g * g;
        }
        squares[chunk] = total;
    }
}

KERNEL(dense_sgd, const int64_t* sums, int64_t n, double scale, float l2, int64_t decayed, float clip,
       float learning_rate, float* parameters) {
    FOR_ITEMS(i, n) {
        const float g = clip * mean_gradient(sums, parameters, i, scale, l2, decayed);
        parameters[i] -= learning_rate * g;
    }
}

KERNEL(dense_adagrad, const int64_t* sums, int64_t n, double scale, float l2, int64_t decayed, float clip,
       float learning_rate, float epsilon, float* parameters, float* accumulator) {
    FOR_ITEMS(i, n) {
        const float g = clip * mean_gradient(sums, parameters, i, scale, l2, decayed);
        const float a = accumulator[i] + g * g;
        accumulator[i] = a;
        parameters[i] -= learning_rate * g / (SQRT_FLOAT(a) + epsilon);
    }
}

// step_size is learning_rate / (1 - beta1^t), correction 1 / sqrt(1 - beta2^t), rest1 and rest2 1 - beta1 and 1 - beta2.
KERNEL(dense_adam, const int64_t* sums, int64_t n, double scale, float l2, int64_t decayed, float clip, float step_size,
       float correction, float beta1, float rest1, float beta2, float rest2, float epsilon, float* parameters,
       float* first_moment, float* second_moment) {
    FOR_ITEMS(i, n) {
        const float g = clip * mean_gradient(sums, parameters, i, scale, l2, decayed);
        const float m = beta1 * first_moment[i] + rest1 * g;
        const float v = beta2 * second_moment[i] + rest2 * g * g;
        first_moment[i] = m;
        second_moment[i] = v;
        parameters[i] -= step_size * m / (SQRT_FLOAT(v) * correction + epsilon);
    }
}
