// The dense network between its matrix products: gradients into fixed-point sums, ReLU backward, and the optimizers,
// which take the sums of the whole step. Parameters, sums and optimizer state are flat arrays of equal length n.
#include "dense.cuh"

#if defined(__CUDACC__)
#define COLUMNS 1  // neighbouring threads take neighbouring columns
#else
#define COLUMNS 16  // one vector or two
#endif
#define CHUNK 1024

// sums += gradients, (n,)
KERNEL(add_fixed, const float* gradients, int64_t n, int64_t* sums, int32_t* flag) {
    bool fits = true;
    FOR_ITEMS(i, n) {
        const double x = gradients[i] * GRADIENT_ONE;
        fits &= fits_fixed(x);
        sums[i] += fixed(x);
    }
    if (fits) return;
    FOR_ITEMS(j, n) {
        const double x = gradients[j] * GRADIENT_ONE;
        if (!fits_fixed(x)) raise_flag(flag, x);
    }
}

// One row of a tile of columns: the gradient where the unit was active, and its running sum.
DEVICE void relu_row(const float* a, float* g, float* total, int width) {
    for (int c = 0; c < width; ++c) {
        const float kept = a[c] > 0.0f ? g[c] : 0.0f;
        g[c] = kept;
        total[c] += kept;
    }
}

// gradients (rows, columns) become 0 where the activation is 0; sums (columns,) += their sum over the rows, in order.
KERNEL(relu_backward, const float* activations, int64_t rows, int64_t columns, float* gradients, int64_t* sums,
       int32_t* flag) {
    FOR_ITEMS(tile, (columns + COLUMNS - 1) / COLUMNS) {
        const int64_t first = tile * COLUMNS;
        const int width = columns - first < COLUMNS ? (int)(columns - first) : COLUMNS;
        float total[COLUMNS] = {};
        for (int64_t row = 0; row < rows; ++row) {
            const float* a = activations + row * columns + first;
            float* g = gradients + row * columns + first;
            if (width == COLUMNS)  // a width known to the compiler is one vector operation
                relu_row(a, g, total, COLUMNS);
            else
                relu_row(a, g, total, width);
        }
        for (int c = 0; c < width; ++c) {
            const double x = total[c] * GRADIENT_ONE;
            if (!fits_fixed(x)) raise_flag(flag, x);
            sums[first + c] += fixed(x);
        }
    }
}

// sums (1,) += the sum over n gradients: the bias of the logit. One item, because a block is short and order is kept.
KERNEL(add_total_fixed, const float* gradients, int64_t n, int64_t* sums, int32_t* flag) {
    FOR_ITEMS(item, 1) {
        double total = 0.0;
        for (int64_t i = 0; i < n; ++i) total += gradients[i];
        const double x = total * GRADIENT_ONE;
        if (!fits_fixed(x)) raise_flag(flag, x);
        sums[item] += fixed(x);
    }
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
        parameters[i] -= learning_rate * g / (square_root(a) + epsilon);
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
        parameters[i] -= step_size * m / (square_root(v) * correction + epsilon);
    }
}
