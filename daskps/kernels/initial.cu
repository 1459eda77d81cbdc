// Initial rows: a function of (seed, table, key, column) alone, so a row is the same wherever and whenever it is made.
// No libm: the same bits on every CPU. The normal distribution is Wichura's PPND7 (algorithm AS 241, 7 digits).
#include "dialect.cuh"

enum { CONSTANT, UNIFORM, NORMAL };

// The natural logarithm of a normal positive double: x = 2^e * m, log m by the series of atanh; error under 1e-12.
DEVICE double logarithm(double x) {
    const uint64_t bits = DOUBLE_BITS(x);
    int64_t exponent = (int64_t)(bits >> 52) - 1023;
    double m = BITS_DOUBLE((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        ++exponent;
    }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;  // |s| < 0.172, so z^8 / 17 < 1e-13
    double series = 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    series = series * z + 1.0;
    return (double)exponent * 0.6931471805599453 + 2.0 * s * series;
}

// Returns the quantile of the standard normal distribution at p, 0 < p < 1.
DEVICE double normal_quantile(double p) {
    const double q = p - 0.5;
    if (q <= 0.425 && q >= -0.425) {
        const double r = 0.180625 - q * q;
        return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
               (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
    }
    double r = SQRT_DOUBLE(-logarithm(q < 0 ? p : 1.0 - p)), value;
    if (r <= 5) {
        r -= 1.6;
        value = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
                ((0.12021132975 * r + 0.73700164250) * r + 1.0);
    } else {
        r -= 5;
        value = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) /
                ((0.012258202635 * r + 0.24197894225) * r + 1.0);
    }
    return q < 0 ? -value : value;
}

// kind CONSTANT: a; UNIFORM: from a to b; NORMAL: mean a, standard deviation b.
DEVICE float initial_value(uint64_t of_key, int32_t column, int32_t kind, float a, float b) {
    if (kind == CONSTANT) return a;
    const uint64_t bits = mix64(of_key + (uint64_t)(column + 1) * 0x9e3779b97f4a7c15ull);
    if (kind == UNIFORM) return a + (b - a) * ((float)(bits >> 40) * 5.9604644775390625e-08f);  // 24 bits * 2^-24
    const double p = ((double)(bits >> 32) + 0.5) * 2.3283064365386963e-10;                     // 32 bits * 2^-32
    return (float)((double)a + (double)b * normal_quantile(p));
}

// Writes columns [column, column + count) of the rows of `keys`: row positions[i], or row i if null, belongs to keys[i].
KERNEL(initial_rows, const uint64_t* keys, const int32_t* positions, int64_t n, uint64_t salt, int32_t kind, float a,
       float b, int32_t column, int32_t count, int32_t width, float* rows) {
    FOR_TILES(i, n) {
        const uint64_t of_key = mix64(keys[i] ^ salt);
        float* row = rows + (positions ? (int64_t)positions[i] : i) * width;
        for (int32_t c = column + LANE; c < column + count; c += LANES) row[c] = initial_value(of_key, c, kind, a, b);
    }
}
