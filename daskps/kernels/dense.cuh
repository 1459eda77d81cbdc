// Sums of the dense network in 64-bit fixed point: a sum of integers does not depend on the order of its addends.
// `fixed` rounds to the nearest integer by adding 1.5 * 2^52, which needs |x| < 2^51. A flag is set if an addend is not
// finite or too large.
#pragma once
#include "dialect.cuh"

#define GRADIENT_ONE 68719476736.0      // 2^36: one unit of a gradient sum is 1.5e-11
#define EXAMPLE_ONE 1073741824.0        // 2^30: one unit of a loss or weight sum is 9.3e-10
#define FIXED_LIMIT 2251799813685248.0  // 2^51
#define FIXED_MAGIC 6755399441055744.0  // 1.5 * 2^52
#define FIXED_MAGIC_BITS 0x4338000000000000ull

DEVICE bool fits_fixed(double x) { return (x < FIXED_LIMIT) & (x > -FIXED_LIMIT); }  // false for NaN too

DEVICE int64_t fixed(double x) { return (int64_t)(DOUBLE_BITS(x + FIXED_MAGIC) - FIXED_MAGIC_BITS); }

// Adds to a sum. Several threads of a GPU may add to the same sum; on the CPU each thread has its own sums.
DEVICE void add_fixed_to(int64_t* sum, double x) {
#if ON_CPU
    *sum += fixed(x);
#else
    atomicAdd((unsigned long long*)sum, (unsigned long long)fixed(x));
#endif
}
