// What the kernels of the dense network share: sums in 64-bit fixed point, which do not depend on the order of adding,
// and the square root. A sum's addend that is not finite or too large raises a flag. `fixed` rounds to the nearest integer by adding 1.5 * 2^52, which needs |x| < 2^51 and no libm.
#pragma once
#include "dialect.cuh"

#define GRADIENT_ONE 68719476736.0  // 2^36: one unit of a gradient sum is 1.5e-11
#define EXAMPLE_ONE 1073741824.0    // 2^30: one unit of a loss or weight sum is 9.3e-10
#define FIXED_LIMIT 2251799813685248.0  // 2^51
#define FIXED_MAGIC 6755399441055744.0  // 1.5 * 2^52

#if defined(__CUDACC__)
#define DOUBLE_BITS(value) __double_as_longlong(value)
#define BITS_DOUBLE(bits) __longlong_as_double(bits)
#define SQUARE_ROOT(x) __fsqrt_rn(x)
#define RAISE(flag) atomicExch(flag, 1)  // several items may want to
#else
#define DOUBLE_BITS(value) __builtin_bit_cast(int64_t, value)  // a union would keep loops from being vectorised
#define BITS_DOUBLE(bits) __builtin_bit_cast(double, bits)
#define SQUARE_ROOT(x) __builtin_sqrtf(x)
#define RAISE(flag) (*(flag) = 1)
#endif

DEVICE bool fits_fixed(double x) { return (x < FIXED_LIMIT) & (x > -FIXED_LIMIT); }  // false for NaN too

DEVICE int64_t fixed(double x) { return DOUBLE_BITS(x + FIXED_MAGIC) - DOUBLE_BITS(FIXED_MAGIC); }
