// What the kernels of the dense network share: sums in 64-bit fixed point, which do not depend on the order of adding,
// and the square root. `fixed` rounds to the nearest integer by adding 1.5 * 2^52, which needs |x| < 2^51 and no libm.
#pragma once
#include "dialect.cuh"

#define GRADIENT_ONE 68719476736.0  // 2^36: one unit of a gradient sum is 1.5e-11
#define EXAMPLE_ONE 1073741824.0    // 2^30: one unit of a loss or weight sum is 9.3e-10
#define FIXED_LIMIT 2251799813685248.0  // 2^51
#define FIXED_MAGIC 6755399441055744.0  // 1.5 * 2^52
// Values of a flag: what went wrong in a kernel, 0 being nothing.
#define NOT_FINITE 1
#define TOO_LARGE 2

union DoubleBits {
    double value;
    int64_t bits;
};

DEVICE int64_t double_bits(double value) {
    DoubleBits both;
    both.value = value;
    return both.bits;
}

DEVICE double bits_double(int64_t bits) {
    DoubleBits both;
    both.bits = bits;
    return both.value;
}

DEVICE bool fits_fixed(double x) { return x < FIXED_LIMIT && x > -FIXED_LIMIT; }  // false for NaN too

DEVICE int64_t fixed(double x) { return double_bits(x + FIXED_MAGIC) - double_bits(FIXED_MAGIC); }

// Several items may find something wrong; any of them may have the word.
DEVICE void raise_flag(int32_t* flag, double x) {
    int32_t what = x - x == 0.0 ? TOO_LARGE : NOT_FINITE;
#if defined(__CUDACC__)
    atomicExch(flag, what);
#else
    *flag = what;
#endif
}

DEVICE float square_root(float x) {
#if defined(__CUDACC__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}
