// Streaming metrics: histograms of logits by label, and sums in fixed point. Integer sums are associative, so bits do not
// depend on batches, threads or nodes; exp and log are those of portable.cuh, so not on the machine either.
#include "portable.cuh"

#define WEIGHT_ONE 1048576.0   // 2^20: weights are rounded to 2^-20 before anything else
#define SUM_ONE 4294967296.0   // 2^32: weighted losses and predictions, added up in 128 bits
#define GROUP_ONE 16777216.0   // 2^24: the same by group, added up in 64 bits
#define LARGEST 8192.0f        // of a weight or a logit's size: products stay under 2^59
#define METRIC_BLOCK 256

// max(x, 0), exactly. Compilers keep `x > 0 ? x : 0` as a branch, which keeps the loop around it out of vectors.
DEVICE double positive_part(double x) { return 0.5 * (x + __builtin_fabs(x)); }

// Log losses and probabilities of logits: ln(1 + e^-|z|) and 1 / (1 + e^-|z|) are all it takes. Without branches this
// runs in vectors, at three to five times the speed.
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

// 0 for an example that can be counted: its label 0 or 1, the size of its logit and its weight in bounds, none of them NaN.
DEVICE int bad_example(float label, float logit, float weight) {
    const int good_label = (label == 0.0f) | (label == 1.0f), good_logit = (logit > -LARGEST) & (logit < LARGEST);
    return 1 ^ (good_label & good_logit & (weight >= 0.0f) & (weight < LARGEST));
}

// -1, or the first example that cannot be counted.
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

// Adds to positives and negatives (buckets), in units of 1 / WEIGHT_ONE. sums (6) becomes weight, positive weight, and loss and
// prediction as two words each, lower first, of these examples alone. weights may be null: all one.
NATIVE(void, metric_update, const float* labels, const float* logits, const float* weights, int64_t n, double limit,
       int64_t buckets, int64_t* positives, int64_t* negatives, uint64_t* sums) {
    int64_t total = 0, positive = 0;
    unsigned __int128 loss = 0, prediction = 0;
    for (int64_t start = 0; start < n; start += METRIC_BLOCK) {
        const int64_t count = start + METRIC_BLOCK < n ? METRIC_BLOCK : n - start;
        double losses[METRIC_BLOCK], predictions[METRIC_BLOCK];
        score(labels + start, logits + start, count, losses, predictions);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t units = weights ? fixed_point(weights[start + i], WEIGHT_ONE) : (int64_t)WEIGHT_ONE;
            const double weight = (double)units / WEIGHT_ONE;
            const bool clicked = labels[start + i] > 0.5f;
            (clicked ? positives : negatives)[bucket_of(logits[start + i], limit, buckets)] += units;
            total += units;
            positive += clicked ? units : 0;
            loss += (uint64_t)fixed_point(losses[i] * weight, SUM_ONE);
            prediction += (uint64_t)fixed_point(predictions[i] * weight, SUM_ONE);
        }
    }
    sums[0] = (uint64_t)total;
    sums[1] = (uint64_t)positive;
    store_wide(loss, sums + 2);
    store_wide(prediction, sums + 4);
}

// Twice the weight of (positive, negative) pairs in the right order, ties half, and of tied pairs: two words each. All
// pairs together stay under 2^124 while the total weight stays under 2^62.
NATIVE(void, metric_pairs, const int64_t* positives, const int64_t* negatives, int64_t buckets, uint64_t* pairs) {
    unsigned __int128 right = 0, tied = 0;
    uint64_t below = 0;
    for (int64_t i = 0; i < buckets; ++i) {
        if ((positives[i] | negatives[i]) == 0) continue;
        const uint64_t negative = (uint64_t)negatives[i];
        right += (unsigned __int128)(uint64_t)positives[i] * (2 * below + negative);
        tied += (unsigned __int128)(uint64_t)positives[i] * negative;
        below += negative;
    }
    store_wide(right, pairs);
    store_wide(tied, pairs + 2);
}

// --- By group: an open-addressing table of (group, bucket). place is bucket + 1; 0 is an empty slot. ---

struct GroupTable {
    uint64_t* groups;   // (mask + 1) mixed key of the group
    uint32_t* places;   // (mask + 1)
    int64_t* sums;      // (mask + 1, 4) positive weight, negative weight, loss, prediction
    int64_t mask;
    int64_t entries;

    int64_t* find_or_insert(uint64_t group, uint32_t place) {
        int64_t slot = (int64_t)mix64(group + place * 0x9e3779b97f4a7c15ull) & mask;
        while (places[slot] != 0 && (places[slot] != place || groups[slot] != group)) slot = (slot + 1) & mask;
        if (places[slot] == 0) {
            groups[slot] = group;
            places[slot] = place;
            ++entries;
        }
        return sums + 4 * slot;
    }
};

// Totals stop at 2^62, where Python refuses to go on; no sum of a part is larger than the total.
DEVICE int64_t saturated(int64_t total) { return total < (1ll << 62) ? total : 1ll << 62; }

// losses and predictions (n) for metric_group_update.
NATIVE(void, metric_score, const float* labels, const float* logits, int64_t n, double* losses, double* predictions) {
    score(labels, logits, n, losses, predictions);
}

// Examples from first_example on, each into the group of every key that it has in `slot`, until one more might fill the
// table over half. totals (3) collects weight, loss and the number of entries. Returns the first example not counted.
// Groups whose mixed key is over `highest` are counted in totals alone.
NATIVE(int64_t, metric_group_update, const float* labels, const float* logits, const float* weights, const double* losses,
       const double* predictions, int64_t first_example, int64_t n, const uint64_t* keys, const int64_t* offsets, int64_t slots, int64_t slot, double limit, int64_t buckets,
       uint64_t highest, uint64_t* groups, uint32_t* places, int64_t* sums, int64_t mask, int64_t* totals) {
    GroupTable table{groups, places, sums, mask, totals[2]};
    int64_t i = first_example;
    for (; i < n; ++i) {
        const int64_t begin = offsets[i * slots + slot], end = offsets[i * slots + slot + 1];
        if (begin == end) continue;
        if (2 * (table.entries + (end - begin)) > mask) break;
        const int64_t units = weights ? fixed_point(weights[i], WEIGHT_ONE) : (int64_t)WEIGHT_ONE;
        const double weight = (double)units / WEIGHT_ONE;
        const int64_t loss = fixed_point(losses[i] * weight, GROUP_ONE);
        const int64_t prediction = fixed_point(predictions[i] * weight, GROUP_ONE);
        const uint32_t place = (uint32_t)bucket_of(logits[i], limit, buckets) + 1;
        totals[0] = saturated(totals[0] + units * (end - begin));
        totals[1] = saturated(totals[1] + loss * (end - begin));
        for (int64_t k = begin; k < end; ++k) {
            const uint64_t group = mix64(keys[k]);
            if (group > highest) continue;
            int64_t* entry = table.find_or_insert(group, place);
            entry[labels[i] > 0.5f ? 0 : 1] += units;
            entry[2] += loss;
            entry[3] += prediction;
        }
    }
    totals[2] = table.entries;
    return i;
}

// Adds n entries, which must fit. Returns the number of entries then.
NATIVE(int64_t, metric_group_insert, const uint64_t* from_groups, const uint32_t* from_places, const int64_t* from_sums,
       int64_t n, int64_t entries, uint64_t* groups, uint32_t* places, int64_t* sums, int64_t mask) {
    GroupTable table{groups, places, sums, mask, entries};
    for (int64_t i = 0; i < n; ++i) {
        int64_t* entry = table.find_or_insert(from_groups[i], from_places[i]);
        for (int field = 0; field < 4; ++field) entry[field] += from_sums[4 * i + field];
    }
    return table.entries;
}

// Entries in order of (group, place); starts (groups + 1). aucs (groups): NaN where a group has one label only.
NATIVE(void, metric_group_aucs, const int64_t* sums, const int64_t* starts, int64_t groups, double* aucs) {
    for (int64_t g = 0; g < groups; ++g) {
        unsigned __int128 right = 0;
        uint64_t below = 0, positive = 0;
        for (int64_t i = starts[g]; i < starts[g + 1]; ++i) {
            right += (unsigned __int128)(uint64_t)sums[4 * i] * (2 * below + (uint64_t)sums[4 * i + 1]);
            positive += (uint64_t)sums[4 * i];
            below += (uint64_t)sums[4 * i + 1];
        }
        const unsigned __int128 all = (unsigned __int128)positive * below;
        aucs[g] = all ? (double)right / (2.0 * (double)all) : __builtin_nan("");
    }
}
