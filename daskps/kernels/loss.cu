// Log loss of a sigmoid, with its gradient. exp and log are polynomials in double, good to 1e-13 relative, so that every
// CPU gives the same bits: libm and NumPy choose another exp by what the CPU knows.
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
    return p * bits_double((1023 - fixed(n)) << 52);
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

DEVICE double sigmoid(double z) {
    const double a = z < 0.0 ? -z : z;
    const double e = exp_minus(a < EXP_LIMIT ? a : EXP_LIMIT);
    return (z < 0.0 ? e : 1.0) / (1.0 + e);
}

KERNEL(sigmoid_of, const float* logits, int64_t n, float* probabilities) {
    FOR_ITEMS(i, n) probabilities[i] = logits[i] == logits[i] ? (float)sigmoid(logits[i]) : logits[i];
}

// weights may be null: all one. gradients are of the weighted loss, not divided by anything; losses and example_weights
// are in units of 1 / EXAMPLE_ONE. An example whose weighted loss or weight cannot be counted raises the flag.
KERNEL(log_loss, const float* logits, const float* labels, const float* weights, int64_t n, float* probabilities,
       float* gradients, int64_t* losses, int64_t* example_weights, int32_t* flag) {
    FOR_ITEMS(i, n) {
        const double z = logits[i];
        const double y = labels[i];
        const double w = weights ? (double)weights[i] : 1.0;
        const double a = z < 0.0 ? -z : z;
        const double e = exp_minus(a < EXP_LIMIT ? a : EXP_LIMIT);
        const double p = (z < 0.0 ? e : 1.0) / (1.0 + e);
        const double loss = w * ((z > 0.0 ? z : 0.0) - y * z + log_one_plus(e));
        // 2^13 each, so that 2^20 examples cannot overflow
        const bool counts = loss < 8192.0 && loss > -8192.0 && w < 8192.0 && w >= 0.0;
        if (!counts) raise_flag(flag, loss + w);
        probabilities[i] = (float)p;
        gradients[i] = (float)(w * (p - y));
        losses[i] = counts ? fixed(loss * EXAMPLE_ONE) : 0;
        example_weights[i] = counts ? fixed(w * EXAMPLE_ONE) : 0;
    }
}
