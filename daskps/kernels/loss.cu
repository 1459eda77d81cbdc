// Log loss of a sigmoid, with its gradient. exp and log are polynomials in double, good to 1e-13 relative, so that every
// CPU gives the same bits: libm and NumPy choose their exp by the features of the CPU.
#include "dense.cuh"

#define EXP_LIMIT 80.0  // exp(-80) = 1.8e-35 is still a normal float; the loss itself stays linear beyond it

// exp(-a) for 0 <= a <= EXP_LIMIT: 2^-n * exp(r), |r| <= ln(2) / 2, Taylor to degree 12.
DEVICE double exp_minus(double a) {
    const double n = (a * 1.4426950408889634 + FIXED_MAGIC) - FIXED_MAGIC;
    const double r = (n * 0.693147180369123816490 - a) + n * 1.90821492927058770002e-10;
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * BITS_DOUBLE((uint64_t)(1023 - fixed(n)) << 52);
}

// log(1 + e) for 0 <= e <= 1: 2 atanh(s) with s = e / (2 + e) <= 1/3; the first term left out is below 3e-14 of it.
DEVICE double log_one_plus(double e) {
    const double s = e / (2.0 + e);
    const double q = s * s;
    double p = 1.0 / 27;
    p = p * q + 1.0 / 25;
    p = p * q + 1.0 / 23;
    p = p * q + 1.0 / 21;
    p = p * q + 1.0 / 19;
    p = p * q + 1.0 / 17;
    p = p * q + 1.0 / 15;
    p = p * q + 1.0 / 13;
    p = p * q + 1.0 / 11;
    p = p * q + 1.0 / 9;
    p = p * q + 1.0 / 7;
    p = p * q + 1.0 / 5;
    p = p * q + 1.0 / 3;
    p = p * q + 1.0;
    return 2.0 * s * p;
}

DEVICE double magnitude(double z) { return BITS_DOUBLE(DOUBLE_BITS(z) & 0x7fffffffffffffffull); }

DEVICE double exp_minus_magnitude(double z) {
    const double a = magnitude(z);
    return exp_minus(a < EXP_LIMIT ? a : EXP_LIMIT);  // NaN becomes EXP_LIMIT; callers handle NaN
}

DEVICE bool countable(double x) { return magnitude(x) < 8192.0; }  // 2^13, so 2^20 examples cannot overflow a sum

KERNEL(sigmoid_of, const float* logits, int64_t n, float* probabilities) {
    FOR_ITEMS(i, n) {
        const double z = logits[i];
        const double e = exp_minus_magnitude(z);
        const double p = (z < 0.0 ? e : 1.0) / (1.0 + e);
        probabilities[i] = (float)(p + (z - z));  // NaN stays
    }
}

// Computes one example. Returns nonzero if its weighted loss or its weight cannot be counted.
DEVICE int32_t log_loss_of(float logit, float label, double w, float* probability, float* gradient, int64_t* loss,
                           int64_t* weight) {
    const double z = logit;
    const double y = label;
    const double e = exp_minus_magnitude(z);
    const double p = (z < 0.0 ? e : 1.0) / (1.0 + e);
    const double l = w * ((z > 0.0 ? z : 0.0) - y * z + log_one_plus(e));
    *probability = (float)p;
    *gradient = (float)(w * (p - y));
    *loss = fixed(l * EXAMPLE_ONE);
    *weight = fixed(w * EXAMPLE_ONE);
    return (int32_t)!countable(l) | (int32_t)!countable(w) | (int32_t)(w < 0.0);
}

// weights may be null: all one. They are multiplied by `scale`, a power of two, so that the largest of a step are about 1.
// gradients are of the weighted loss, not divided by anything; losses and example_weights are in units of 1 / EXAMPLE_ONE.
// The flag is set if an example cannot be counted.
KERNEL(log_loss, const float* logits, const float* labels, const float* weights, double scale, int64_t n,
       float* __restrict__ probabilities, float* __restrict__ gradients, int64_t* __restrict__ losses,
       int64_t* __restrict__ example_weights, int32_t* flag) {
    int32_t wrong = 0;
    if (weights)
        FOR_ITEMS(i, n)
            wrong |= log_loss_of(logits[i], labels[i], weights[i] * scale, probabilities + i, gradients + i, losses + i,
                                 example_weights + i);
    else
        FOR_ITEMS(i, n)
            wrong |= log_loss_of(logits[i], labels[i], scale, probabilities + i, gradients + i, losses + i,
                                 example_weights + i);
    if (wrong) ATOMIC_OR(flag, 1);
}
