// Streaming metrics: histograms of logits by label, and sums in fixed point. Integer sums are associative, so bits do not
// depend on batches, threads or nodes; nor on the machine, because exp and log are those of portable.cuh.
#include "portable.cuh"

#define SUM_ONE 4294967296.0  // 2^32: a loss or prediction of 1
#define LARGEST 8192.0f       // bound of a logit: a loss times a mantissa is then below 2^47 units of 1 / SUM_ONE
#define METRIC_BLOCK 256

// A float32 weight is an integer of 24 bits, its mantissa, times a power of two, so sums of weights are exact integers. In
// a histogram they are split into limbs: limb j has units of 2^(32 * (j - ONE_LIMB) - 20), and an example adds less than
// 2^32 of them. Products with a weight are rounded as products with its mantissa in [1, 2) and summed by exponent. So if
// all weights are multiplied by a power of two, only exponents change.
#define LIMBS 10
#define ONE_LIMB 5  // a weight of 1 is 2^20 units of this limb

struct Weight {
    uint64_t mantissa;  // weight = mantissa * 2^(exponent - 150)
    int exponent;       // 1 to 254
};

DEVICE Weight split_weight(float weight) {
    const uint32_t bits = FLOAT_BITS(weight) & 0x7fffffffu, field = bits >> 23;  // -0 is 0
    return {(bits & 0x7fffffu) | (field ? 0x800000u : 0u), field ? (int)field : 1};
}

struct Limbs {  // the addends of a weight to limbs `first` and `first` + 1
    uint64_t low, high;
    int first;
};

DEVICE Limbs limbs_of(Weight w) {
    const int bit = w.exponent + 30;  // of the mantissa's lowest bit, from the unit of limb 0 on
    const uint64_t shifted = w.mantissa << (bit & 31);
    return {shifted & 0xffffffffu, shifted >> 32, bit >> 5};
}

// Returns max(x, 0), exactly. Compilers make a branch of `x > 0 ? x : 0`, and then do not vectorise the loop around it.
DEVICE double positive_part(double x) { return 0.5 * (x + __builtin_fabs(x)); }

// Log losses and probabilities of logits, from ln(1 + e^-|z|) and 1 / (1 + e^-|z|). Without branches the loop is
// vectorised, which makes it three to five times as fast.
DEVICE void score(const float* labels, const float* logits, int64_t n, double* losses, double* predictions) {
    const uint64_t one = DOUBLE_BITS(1.0);
    for (int64_t i = 0; i < n; ++i) {
        const double z = logits[i], size = __builtin_fabs(z);
        const double e = portable_exp(positive_part(size - 700.0) - size);  // of -700 at least
        const double wrong = z * (1.0 - 2.0 * (double)labels[i]);           // exactly z or -z
        losses[i] = positive_part(wrong) + portable_log_mantissa(1.0 + e);
        const uint64_t negative = 0 - (DOUBLE_BITS(z) >> 63);
        predictions[i] = BITS_DOUBLE((DOUBLE_BITS(e) & negative) | (one & ~negative)) / (1.0 + e);
    }
}

DEVICE int64_t bucket_of(float logit, double limit, int64_t buckets) {
    const double z = logit < -limit ? -limit : logit > limit ? limit : (double)logit;
    const int64_t bucket = (int64_t)((z + limit) * ((double)buckets / (2.0 * limit)));
    return bucket < buckets ? bucket : buckets - 1;
}

DEVICE int64_t fixed_point(double value, double one) { return (int64_t)(value * one + 0.5); }

DEVICE void store_wide(unsigned __int128 sum, uint64_t* low_high) {
    low_high[0] = (uint64_t)sum;
    low_high[1] = (uint64_t)(sum >> 64);
}

// Returns 0 if an example can be counted: label 0 or 1, logit and weight within their bounds, none of them NaN.
DEVICE int bad_example(float label, float logit, float weight) {
    const int good_label = (label == 0.0f) | (label == 1.0f), good_logit = (logit > -LARGEST) & (logit < LARGEST);
    return 1 ^ (good_label & good_logit & (weight >= 0.0f) & (weight <= 3.4028235e38f));
}

// Returns the first example that cannot be counted, or -1.
NATIVE(int64_t, metric_check, const float* labels, const float* logits, const float* weights, int64_t n) {
    int bad = 0;
    if (weights)
        for (int64_t i = 0; i < n; ++i) bad |= bad_example(labels[i], logits[i], weights[i]);
    else
        for (int64_t i = 0; i < n; ++i) bad |= bad_example(labels[i], logits[i], 1.0f);
    for (int64_t i = 0; bad && i < n; ++i)
        if (bad_example(labels[i], logits[i], weights ? weights[i] : 1.0f)) return i;
    return -1;
}

// Returns the limbs that these weights add to, as a bit set.
NATIVE(int64_t, metric_limbs, const float* weights, int64_t n) {
    int64_t used = 0;
    for (int64_t i = 0; i < n; ++i) {
        const Limbs l = limbs_of(split_weight(weights[i]));
        used |= (int64_t)(l.low != 0) << l.first | (int64_t)(l.high != 0) << (l.first + 1);
    }
    return used;
}

// Adds to the histograms (buckets) of the limbs. limbs (LIMBS, 2): addresses of each limb's negatives and positives; those
// that metric_limbs does not name may be 0. sums (256, 4) becomes, by exponent and of these examples alone: mantissas of all
// and of positive examples; losses and predictions, times the mantissa in [1, 2), in units of 1 / SUM_ONE. n <= 2^16 keeps
// them under 2^63. weights may be null: all one.
NATIVE(void, metric_update, const float* labels, const float* logits, const float* weights, int64_t n, double limit,
       int64_t buckets, const uint64_t* limbs, uint64_t* sums) {
    int64_t* const ones[2] = {(int64_t*)limbs[2 * ONE_LIMB], (int64_t*)limbs[2 * ONE_LIMB + 1]};
    for (int i = 0; i < 256 * 4; ++i) sums[i] = 0;
    for (int64_t start = 0; start < n; start += METRIC_BLOCK) {
        const int64_t count = start + METRIC_BLOCK < n ? METRIC_BLOCK : n - start;
        double losses[METRIC_BLOCK], predictions[METRIC_BLOCK];
        score(labels + start, logits + start, count, losses, predictions);
        if (!weights) {
            uint64_t clicks = 0, loss = 0, prediction = 0;
            for (int64_t i = 0; i < count; ++i) {
                const int clicked = labels[start + i] > 0.5f;
                ones[clicked][bucket_of(logits[start + i], limit, buckets)] += 1 << 20;
                clicks += (uint64_t)clicked;
                loss += (uint64_t)fixed_point(losses[i], SUM_ONE);
                prediction += (uint64_t)fixed_point(predictions[i], SUM_ONE);
            }
            uint64_t* sum = sums + 4 * 127;
            sum[0] += (uint64_t)count << 23;
            sum[1] += clicks << 23;
            sum[2] += loss;
            sum[3] += prediction;
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            const Weight w = split_weight(weights[start + i]);
            const Limbs l = limbs_of(w);
            const int clicked = labels[start + i] > 0.5f;
            const int64_t bucket = bucket_of(logits[start + i], limit, buckets);
            if (l.low) ((int64_t*)limbs[2 * l.first + clicked])[bucket] += (int64_t)l.low;
            if (l.high) ((int64_t*)limbs[2 * l.first + 2 + clicked])[bucket] += (int64_t)l.high;
            const double mantissa = (double)w.mantissa / 8388608.0;
            uint64_t* sum = sums + 4 * w.exponent;
            sum[0] += w.mantissa;
            sum[1] += clicked ? w.mantissa : 0;
            sum[2] += (uint64_t)fixed_point(losses[i] * mantissa, SUM_ONE);
            sum[3] += (uint64_t)fixed_point(predictions[i] * mantissa, SUM_ONE);
        }
    }
}

template <int MAX>
DEVICE void count_pairs(const uint64_t* limbs, int64_t count, int64_t buckets, uint64_t* pairs) {
    unsigned __int128 right[MAX][MAX] = {}, tied[MAX][MAX] = {};
    uint64_t below[MAX] = {};
    for (int64_t i = 0; i < buckets; ++i) {
        uint64_t negative[MAX], positive[MAX], any_positive = 0, any = 0;
        for (int a = 0; a < (MAX == 1 ? 1 : count); ++a) {
            negative[a] = ((const uint64_t*)limbs[2 * a])[i];
            positive[a] = ((const uint64_t*)limbs[2 * a + 1])[i];
            any_positive |= positive[a];
            any |= negative[a] | positive[a];
        }
        if (!any) continue;
        for (int b = 0; b < (MAX == 1 ? 1 : count); ++b) {
            if (any_positive)
                for (int a = 0; a < (MAX == 1 ? 1 : count); ++a) {
                    right[a][b] += (unsigned __int128)positive[a] * (2 * below[b] + negative[b]);
                    tied[a][b] += (unsigned __int128)positive[a] * negative[b];
                }
            below[b] += negative[b];
        }
    }
    for (int64_t a = 0; a < count; ++a)
        for (int64_t b = 0; b < count; ++b) {
            store_wide(right[a][b], pairs + 4 * (a * count + b));
            store_wide(tied[a][b], pairs + 4 * (a * count + b) + 2);
        }
}

// Twice the weight of (positive, negative) pairs in the right order, ties half, and of tied pairs: two words each, lower
// first, for the positives of every limb by the negatives of every limb: pairs (count, count, 4). limbs (count, 2) as for
// metric_update. Each stays under 2^125 while the total of every limb stays under 2^62.
NATIVE(void, metric_pairs, const uint64_t* limbs, int64_t count, int64_t buckets, uint64_t* pairs) {
    if (count == 1)
        count_pairs<1>(limbs, count, buckets, pairs);
    else
        count_pairs<LIMBS>(limbs, count, buckets, pairs);
}

// Metrics by group. Finds the position of each occurrence's mixed key in `known` (count) and writes it to groups (n): -1 if
// the mixed key is above the largest one that is kept (2^64 / 2^cut - 1), -2 if it is unknown; it is then written to `fresh`.
// `table` (mask + 1) is scratch, at most half full. Returns the number of fresh keys; a key may occur there several times.
NATIVE(int64_t, metric_groups, const uint64_t* keys, int64_t n, const uint64_t* known, int64_t count, int64_t cut,
       int64_t mask, int32_t* table, int32_t* groups, uint64_t* fresh) {
    for (int64_t i = 0; i <= mask; ++i) table[i] = -2;
    for (int64_t g = 0; g < count; ++g) {
        int64_t place = (int64_t)known[g] & mask;
        while (table[place] >= 0) place = (place + 1) & mask;
        table[place] = (int32_t)g;
    }
    const uint64_t highest = ~0ull >> cut;
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t mixed = mix64(keys[i]);
        if (mixed > highest) {
            groups[i] = -1;
            continue;
        }
        int64_t place = (int64_t)mixed & mask;
        while (table[place] >= 0 && known[table[place]] != mixed) place = (place + 1) & mask;
        groups[i] = table[place];
        if (groups[i] < 0) fresh[found++] = mixed;
    }
    return found;
}

// Writes code and addends (group_metrics.py) of every occurrence that is kept; `numbers` are the numbers of the groups.
// Without weights, sums are not written. Returns the number of entries.
NATIVE(int64_t, metric_entries, const int32_t* groups, const int64_t* numbers, const float* labels, const float* logits,
       const float* weights, int64_t n, int64_t* codes, int64_t* sums) {
    int64_t used = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (groups[i] < 0) continue;
        const Weight w = weights ? split_weight(weights[i]) : Weight{1 << 23, 127};
        const uint32_t bits = FLOAT_BITS(logits[i] + 0.0f);  // -0 becomes 0
        const int64_t place = bits >> 31 ? ~bits : bits | 0x80000000u;  // in the order of the logits
        codes[used] = numbers[groups[i]] << 38 | place << 6 | (int64_t)(labels[i] > 0.5f) << 5 | w.exponent >> 3;
        if (weights) sums[used] = (int64_t)(w.mantissa << (w.exponent & 7));
        ++used;
    }
    return used;
}

// Adds weight, weight of positives, loss and prediction of the occurrences whose weight has this exponent to totals
// (groups, 4); `one` is a loss or prediction of 1 with a mantissa of 1.
NATIVE(void, metric_group_totals, const int32_t* groups, const float* labels, const double* losses,
       const double* predictions, const float* weights, int64_t n, int64_t exponent, double one, int64_t* totals) {
    for (int64_t i = 0; i < n; ++i) {
        const Weight w = weights ? split_weight(weights[i]) : Weight{1 << 23, 127};
        if (groups[i] < 0 || w.exponent != exponent) continue;
        const double share = (double)w.mantissa / 8388608.0 * one;
        int64_t* total = totals + 4 * groups[i];
        total[0] += (int64_t)w.mantissa;
        total[1] += labels[i] > 0.5f ? (int64_t)w.mantissa : 0;
        total[2] += fixed_point(losses[i], share);
        total[3] += fixed_point(predictions[i], share);
    }
}

// losses and predictions (n), for metrics by group.
NATIVE(void, metric_score, const float* labels, const float* logits, int64_t n, double* losses, double* predictions) {
    score(labels, logits, n, losses, predictions);
}
