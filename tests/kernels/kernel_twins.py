"""Twins of the kernels in plain NumPy: short code with the same results, in the same order of float operations."""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
EDGE_KEYS = np.array([0, 2**64 - 1, 1, 2**63, 2**64 - 2], np.uint64)


def mix64(x):
    x = np.asarray(x, np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def parts_of(keys, parts, salt):
    return (((mix64(keys ^ np.uint64(salt)) >> np.uint64(32)) * np.uint64(parts)) >> np.uint64(32)).astype(np.int32)


def logarithm(x):
    mantissa, exponent = np.frexp(x)  # [0.5, 1)
    mantissa, exponent = mantissa * 2, exponent - 1
    large = mantissa > 1.4142135623730951
    mantissa, exponent = np.where(large, mantissa * 0.5, mantissa), exponent + large
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z, series = s * s, np.full_like(s, 1.0 / 15)
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = series * z + 1.0 / n
    return exponent.astype(float) * 0.6931471805599453 + 2.0 * s * series


def horner(x, *coefficients):
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def normal_quantile(p):
    q = p - 0.5
    r = 0.180625 - q * q
    middle = (q * horner(r, 59.109374720, 159.29113202, 50.434271938, 3.3871327179)) / horner(
        r, 67.187563600, 78.757757664, 17.895169469, 1.0
    )
    r = np.sqrt(-logarithm(np.where(q < 0, p, 1.0 - p)))
    near, far = r - 1.6, r - 5
    near = horner(near, 0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777) / horner(
        near, 0.12021132975, 0.73700164250, 1.0
    )
    far = horner(far, 0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150) / horner(
        far, 0.012258202635, 0.24197894225, 1.0
    )
    tail = np.where(r <= 5, near, far)
    return np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -tail, tail))


def initial_values(keys, columns, kind, a, b, salt):
    """Return initial values, (keys, columns) float32."""
    a, b = np.float32(a), np.float32(b)
    if kind == "constant":
        return np.full((len(keys), len(columns)), a, np.float32)
    with np.errstate(over="ignore"):
        of_key = mix64(keys ^ np.uint64(salt))[:, None]
        bits = mix64(of_key + (np.asarray(columns, np.uint64) + np.uint64(1))[None, :] * GOLDEN)
    if kind == "uniform":
        unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return a + (b - a) * unit
    p = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    return (np.float64(a) + np.float64(b) * normal_quantile(p)).astype(np.float32)


def pooling_scales(pooling, lengths):
    n = np.maximum(lengths, 1).astype(np.float32)
    ones = np.ones_like(n)
    return {"sum": ones, "mean": ones / n, "sqrtn": ones / np.sqrt(n)}[pooling]


def pooled(rows, dim, row_of, offsets, pooling="sum", weights=None):
    """Return pooled bags, (bags, dim) float32; occurrences are added one after the other."""
    out = np.zeros((len(offsets) - 1, dim), np.float32)
    for bag in range(len(out)):
        for i in range(offsets[bag], offsets[bag + 1]):
            if row_of[i] >= 0:
                row = rows[row_of[i], :dim]
                out[bag] += row if weights is None else weights[i] * row
    scales = pooling_scales(pooling, np.diff(offsets))
    return out if pooling == "sum" else out * scales[:, None]


def grouped(row_of, offsets, first_row, row_count, pooling="sum", weights=None):
    """Return touched rows, starts, bags, coefficients."""
    bag_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    mine = np.flatnonzero((row_of >= first_row) & (row_of < first_row + row_count))
    order = mine[np.argsort(row_of[mine], kind="stable")]
    touched, counts = np.unique(row_of[mine], return_counts=True)
    coefficients = pooling_scales(pooling, np.diff(offsets))[bag_of]
    if weights is not None:
        coefficients = weights * coefficients
    return touched - first_row, np.concatenate([[0], np.cumsum(counts)]), bag_of[order], coefficients[order]


def fixed_sums(gradient, starts, bags, coefficients):
    """Return the sums of gradient (bags, dim) float32 as (touched, dim) int64, in units of 2^-36."""
    contributions = coefficients[:, None] * gradient[bags]
    fixed = np.rint(contributions.astype(np.float64) * 2.0**36).astype(np.int64)
    sums = np.zeros((len(starts) - 1, gradient.shape[1]), np.int64)
    np.add.at(sums, np.repeat(np.arange(len(starts) - 1), np.diff(starts)), fixed)
    return sums


def sum_of_squares(g):
    """Return (n,) float32 of (n, dim): partial sums over d % 8, then a tree."""
    parts = np.zeros((len(g), 8), np.float32)
    for d in range(g.shape[1]):
        parts[:, d % 8] += g[:, d] * g[:, d]
    for half in (4, 2, 1):
        parts[:, :half] += parts[:, half : 2 * half]
    return parts[:, 0]


def power(base, n):
    result, base = np.ones(len(n)), np.full(len(n), np.float64(base))
    for bit in range(32):
        result = np.where(n >> bit & 1, result * base, result)
        base = base * base
    return result


def stepped(optimizer, rows, sums, weight):
    """Return the rows (n, width) after one step with sums (n, dim)."""
    f = np.float32
    dim, rows = sums.shape[1], rows.copy()
    g = (sums.astype(np.float64) * (2.0**-36 / weight)).astype(f)
    lr, l1, l2, epsilon = f(optimizer.learning_rate), f(optimizer.l1), f(optimizer.l2), f(optimizer.epsilon)
    w, first, second = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim]
    if optimizer.clip_norm:
        norm = np.sqrt(sum_of_squares(g))
        clip = f(optimizer.clip_norm)
        g = g * np.where(norm > clip, clip / np.maximum(norm, f(1e-30)), f(1))[:, None]
    if optimizer.kind != "ftrl" and l2:
        g = g + l2 * w
    if optimizer.kind == "sgd":
        w -= lr * g
    elif optimizer.kind == "adagrad":
        first += g * g
        w -= lr * g / (np.sqrt(first) + epsilon)
    elif optimizer.kind == "rowwise_adagrad":
        rows[:, dim] += sum_of_squares(g) / f(dim)
        w -= (lr / (np.sqrt(rows[:, dim]) + epsilon))[:, None] * g
    elif optimizer.kind == "adam":
        steps = rows.view(np.uint32)[:, 3 * dim]
        steps += steps != 2**32 - 1
        beta1, beta2 = f(optimizer.beta1), f(optimizer.beta2)
        rate = (np.float64(lr) / (1.0 - power(optimizer.beta1, steps))).astype(f)[:, None]
        root = (1.0 / np.sqrt(1.0 - power(optimizer.beta2, steps))).astype(f)[:, None]
        first[:] = beta1 * first + f(1 - optimizer.beta1) * g
        second[:] = beta2 * second + f(1 - optimizer.beta2) * (g * g)
        w -= rate * first / (np.sqrt(second) * root + epsilon)
    else:
        before = first.copy()
        first += g * g
        second += g - (np.sqrt(first) - np.sqrt(before)) / lr * w
        shrunk = np.where(second > l1, second - l1, np.where(second < -l1, second + l1, f(0)))
        w[:] = -shrunk / ((f(optimizer.beta) + np.sqrt(first)) / lr + l2)
    return rows
