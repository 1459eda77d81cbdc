// The dense network between its matrix products: gradients into fixed-point sums, ReLU backward, and the optimizers,
// which take the sums of the whole step. Parameters, sums and optimizer state are flat arrays of equal length n.
#include "dense.cuh"

#if ON_CPU
#define COLUMNS 64  // with 16, GCC unrolls before it vectorises, and branches on every value: 20 times slower
#else
#define COLUMNS 1  // neighbouring threads take neighbouring columns
#endif
#define ROWS 32  // summed in float before they are rounded; affects the bits
#define CHUNK 1024
// A run of ROWS rows is one addend of a bias' sum. 2^20 examples give 2^15 addends of less than 2^47: no overflow.
#define RUN_LIMIT 140737488355328.0

// Part of a matrix (rows, columns) that one thread works on: a run of rows by a run of columns.
struct Cut {
    int64_t row, row_end, column;
    int width;
};

DEVICE int64_t column_runs(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS; }

DEVICE int64_t runs(int64_t rows, int64_t columns) { return (rows + ROWS - 1) / ROWS * column_runs(columns); }

DEVICE Cut cut(int64_t run, int64_t rows, int64_t columns) {
    Cut c;
    c.row = run / column_runs(columns) * ROWS;
    c.row_end = c.row + ROWS < rows ? c.row + ROWS : rows;
    c.column = run % column_runs(columns) * COLUMNS;
    c.width = columns - c.column < COLUMNS ? (int)(columns - c.column) : COLUMNS;
    return c;
}

DEVICE void bias_relu_row(const float* __restrict__ bias, float* __restrict__ value, int width) {
    for (int c = 0; c < width; ++c) {
        const float sum = value[c] + bias[c];
        value[c] = sum < 0.0f ? 0.0f : sum;  // NaN stays
    }
}

// values (rows, columns) = max(values + bias, 0)
KERNEL(bias_relu, const float* bias, int64_t rows, int64_t columns, float* values) {
    FOR_ITEMS(run, runs(rows, columns)) {
        const Cut at = cut(run, rows, columns);
        for (int64_t row = at.row; row < at.row_end; ++row) {
            float* value = values + row * columns + at.column;
            if (at.width == COLUMNS)  // a width that the compiler knows
                bias_relu_row(bias + at.column, value, COLUMNS);
            else
                bias_relu_row(bias + at.column, value, at.width);
        }
    }
}

DEVICE void relu_backward_row(const float* __restrict__ a, float* __restrict__ g, float* __restrict__ total,
                              int width) {
    for (int c = 0; c < width; ++c) {
        const float kept = a[c] > 0.0f ? g[c] : 0.0f;
        g[c] = kept;
        total[c] += kept;
    }
}

DEVICE void add_run(double total, int64_t* sum, int32_t* flag) {
    const double x = total * GRADIENT_ONE;
    if (!(x < RUN_LIMIT && x > -RUN_LIMIT)) ATOMIC_OR(flag, 1);
    add_fixed_to(sum, x);
}

// gradients (rows, columns) become 0 where the activation is 0; sums (columns,) += their sums over the rows.
KERNEL(relu_backward, const float* activations, int64_t rows, int64_t columns, float* gradients, int64_t* sums,
       int32_t* flag) {
    FOR_ITEMS(run, runs(rows, columns)) {
        const Cut at = cut(run, rows, columns);
        float total[COLUMNS] = {};
        for (int64_t row = at.row; row < at.row_end; ++row) {
            const float* a = activations + row * columns + at.column;
            float* g = gradients + row * columns + at.column;
            if (at.width == COLUMNS)
                relu_backward_row(a, g, total, COLUMNS);
            else
                relu_backward_row(a, g, total, at.width);
        }
        for (int c = 0; c < at.width; ++c) add_run(total[c], sums + at.column + c, flag);
    }
}

// sums (1,) += the sum of n gradients of logits: the gradient of the logit's bias.
KERNEL(add_total, const float* gradients, int64_t n, int64_t* sums, int32_t* flag) {
    FOR_ITEMS(run, (n + ROWS - 1) / ROWS) {
        const int64_t end = (run + 1) * ROWS < n ? (run + 1) * ROWS : n;
        float total = 0.0f;
        for (int64_t i = run * ROWS; i < end; ++i) total += gradients[i];
        add_run(total, sums, flag);
    }
}

// sums (n,) += gradients (n,) of a block's weights, rounded to units of 1 / GRADIENT_ONE
KERNEL(add_fixed, const float* gradients, int64_t n, int64_t* sums, int32_t* flag) {
    int32_t wrong = 0;
    FOR_ITEMS(i, n) {
        const double x = gradients[i] * GRADIENT_ONE;
        wrong |= !fits_fixed(x);
        sums[i] += fixed(x);
    }
    if (wrong) ATOMIC_OR(flag, 1);
}

DEVICE float mean_gradient(const int64_t* sums, int64_t i, double scale) { return (float)((double)sums[i] * scale); }

// Returns the gradient of one parameter for the optimizer: clipped, then with L2, which applies to the first `decayed`
// parameters, the weights.
DEVICE float step_gradient(const int64_t* sums, const float* parameters, int64_t i, double scale, float clip, float l2,
                           int64_t decayed) {
    const float g = clip * mean_gradient(sums, i, scale);
    return i < decayed ? g + l2 * parameters[i] : g;
}

// squares[c]: the sum of squared mean gradients of the c-th run of CHUNK parameters, for clipping by norm.
KERNEL(dense_squares, const int64_t* sums, int64_t n, double scale, double* squares) {
    FOR_ITEMS(chunk, (n + CHUNK - 1) / CHUNK) {
        const int64_t end = (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n;
        double total = 0.0;
        for (int64_t i = chunk * CHUNK; i < end; ++i) {
            const double g = mean_gradient(sums, i, scale);
            total += g * g;
        }
        squares[chunk] = total;
    }
}

KERNEL(dense_sgd, const int64_t* sums, int64_t n, double scale, float l2, int64_t decayed, float clip,
       float learning_rate, float* parameters) {
    FOR_ITEMS(i, n) {
        const float g = step_gradient(sums, parameters, i, scale, clip, l2, decayed);
        parameters[i] -= learning_rate * g;
    }
}

KERNEL(dense_adagrad, const int64_t* sums, int64_t n, double scale, float l2, int64_t decayed, float clip,
       float learning_rate, float epsilon, float* parameters, float* accumulator) {
    FOR_ITEMS(i, n) {
        const float g = step_gradient(sums, parameters, i, scale, clip, l2, decayed);
        const float a = accumulator[i] + g * g;
        accumulator[i] = a;
        parameters[i] -= learning_rate * g / (SQRT_FLOAT(a) + epsilon);
    }
}

// step_size is learning_rate / (1 - beta1^t), correction 1 / sqrt(1 - beta2^t), rest1 and rest2 1 - beta1 and 1 - beta2.
KERNEL(dense_adam, const int64_t* sums, int64_t n, double scale, float l2, int64_t decayed, float clip, float step_size,
       float correction, float beta1, float rest1, float beta2, float rest2, float epsilon, float* parameters,
       float* momentum, float* variance) {
    FOR_ITEMS(i, n) {
        const float g = step_gradient(sums, parameters, i, scale, clip, l2, decayed);
        const float m = beta1 * momentum[i] + rest1 * g;
        const float v = beta2 * variance[i] + rest2 * g * g;
        momentum[i] = m;
        variance[i] = v;
        parameters[i] -= step_size * m / (SQRT_FLOAT(v) * correction + epsilon);
    }
}
