// exp, log and sine from + - * / alone, in a fixed order. A libm may round differently on another machine; these give the
// same bits on every machine and CPU variant, and so does a NumPy reference of a few lines. Relative error < 1e-15.
#pragma once
#include "dialect.cuh"

// e^x for |x| <= 700: x = n ln 2 + r with |r| <= 0.347, then Taylor to r^13 / 13! (the next term is under 5e-18).
DEVICE double portable_exp(double x) {
    const double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest integer
    const double shifted = x * 1.4426950408889634 + shift;
    const double n = shifted - shift;
    const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double sum = 1.6059043836821613e-10;
    sum = sum * r + 2.08767569878681e-09;
    sum = sum * r + 2.505210838544172e-08;
    sum = sum * r + 2.755731922398589e-07;
    sum = sum * r + 2.7557319223985893e-06;
    sum = sum * r + 2.48015873015873e-05;
    sum = sum * r + 1.984126984126984e-04;
    sum = sum * r + 1.388888888888889e-03;
    sum = sum * r + 8.333333333333333e-03;
    sum = sum * r + 4.1666666666666664e-02;
    sum = sum * r + 1.6666666666666666e-01;
    sum = sum * r + 0.5;
    sum = sum * r + 1.0;
    sum = sum * r + 1.0;
    return sum * BITS_DOUBLE((DOUBLE_BITS(shifted) << 52) + (1023ull << 52));  // n stands in the lowest bits
}

// ln m for m in [1, 2]: ln sqrt 2 + 2 atanh s with |s| <= 0.172, odd series to s^21 (the next term is under 2e-19).
DEVICE double portable_log_mantissa(double m) {
    const double root = 1.4142135623730951;
    const double s = (m - root) / (m + root);
    const double q = s * s;
    double sum = 0.047619047619047616;
    sum = sum * q + 0.05263157894736842;
    sum = sum * q + 0.058823529411764705;
    sum = sum * q + 0.06666666666666667;
    sum = sum * q + 0.07692307692307693;
    sum = sum * q + 0.09090909090909091;
    sum = sum * q + 0.1111111111111111;
    sum = sum * q + 0.14285714285714285;
    sum = sum * q + 0.2;
    sum = sum * q + 0.3333333333333333;
    sum = sum * q + 1.0;
    return 0.34657359027997264 + 2.0 * s * sum;
}

// sin(pi / 2 * t) for t in [0, 1]: Taylor in a = pi / 2 * t to a^21 / 21! (the next term is under 1.3e-18).
DEVICE double portable_quarter_sine(double t) {
    const double a = 1.5707963267948966 * t;
    const double q = a * a;
    double sum = 1.9572941063391263e-20;
    sum = sum * q - 8.22063524662433e-18;
    sum = sum * q + 2.8114572543455206e-15;
    sum = sum * q - 7.647163731819816e-13;
    sum = sum * q + 1.6059043836821613e-10;
    sum = sum * q - 2.505210838544172e-08;
    sum = sum * q + 2.7557319223985893e-06;
    sum = sum * q - 1.984126984126984e-04;
    sum = sum * q + 8.333333333333333e-03;
    sum = sum * q - 1.6666666666666666e-01;
    sum = sum * q + 1.0;
    return a * sum;
}
