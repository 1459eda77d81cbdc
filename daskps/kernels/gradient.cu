// Gradients of the touched rows of one shard, and the optimizer's step on them. Two ways with the same bits:
//   gradient_update   sum and step in one pass (one node, on the CPU)
//   gradient_sum, then gradient_add for what other nodes send, then gradient_apply
#include "optimizer.cuh"

#if ON_CPU
struct Range {
    int64_t first, last;
};

// Returns the first row that starts at or after an occurrence.
DEVICE int64_t row_from(const int32_t* starts, int64_t touched, int64_t occurrence) {
    if (touched == 0 || occurrence <= 0) return 0;
    if (occurrence >= starts[touched]) return touched;
    return last_start(starts, touched, occurrence - 1) + 1;
}

// Returns the rows of a share. All shares have about the same number of occurrences; each row is summed by one thread.
DEVICE Range balanced_rows(const int32_t* starts, int64_t touched SHARE_PARAMETERS) {
    const int64_t n = starts[touched];
    return {row_from(starts, touched, n * share_index / share_count),
            row_from(starts, touched, n * (share_index + 1) / share_count)};
}

template <int MAX>
DEVICE void sum_rows(int32_t D, const Gradient& g, int64_t touched_count, int64_t* sums, int32_t* status SHARE_PARAMETERS) {
    const Range range = balanced_rows(g.starts, touched_count SHARE);
    const int64_t ahead_end = g.starts[range.last];
    Findings<MAX> findings;
    clear_findings<MAX>(findings);
    for (int64_t t = range.first; t < range.last; ++t) {
        uint64_t sum[MAX];
        sum_occurrences<MAX>(D, g, g.starts[t], g.starts[t + 1], ahead_end, sum, findings);
        FOR_DIMS(d, k) sums[t * D + d] = (int64_t)sum[k];
    }
    if (const int32_t bad = status_of<MAX>(findings)) ATOMIC_OR(status, bad);
}

template <int MAX>
DEVICE void update_rows(int32_t D, const Gradient& g, const Optimizer& o, const int32_t* touched, int64_t touched_count,
                        int32_t width, float* rows, int32_t* status SHARE_PARAMETERS) {
    const Range range = balanced_rows(g.starts, touched_count SHARE);
    const int64_t ahead_end = g.starts[range.last];
    Findings<MAX> findings;
    clear_findings<MAX>(findings);
    for (int64_t t = range.first; t < range.last; t += STEP_ROWS) {
        const int64_t end = range.last - t < STEP_ROWS ? range.last : t + STEP_ROWS;
        float gradients[STEP_ROWS][MAX];
        for (int64_t r = t; r < end; ++r) {
            if (r + PREFETCH_AHEAD / 2 < range.last) {
                const float* ahead = rows + (int64_t)touched[r + PREFETCH_AHEAD / 2] * width;
                PREFETCH_RUN(ahead, width);
            }
            uint64_t sum[MAX];
            sum_occurrences<MAX>(D, g, g.starts[r], g.starts[r + 1], ahead_end, sum, findings);
            mean_gradient<MAX>(D, o, sum, gradients[r - t]);
        }
        for (int64_t r = t; r < end; ++r) {
            step_row<MAX>(D, o, rows + (int64_t)touched[r] * width, gradients[r - t], findings);
        }
    }
    if (const int32_t bad = status_of<MAX>(findings)) ATOMIC_OR(status, bad);
}

// touched (touched_count,): rows of this shard; rows (row_count, width)
CPU_KERNEL(gradient_update, const Source* sources, int32_t source_count, int32_t slots, int64_t stride, int64_t column,
           const int32_t* touched, int64_t touched_count, const int32_t* starts, const int32_t* bags,
           const float* coefficients, Optimizer optimizer, int32_t dim, int32_t width, float* rows, int32_t* status) {
    const Gradient gradient =
        make_gradient(sources, source_count, slots, stride, column, starts, bags, coefficients, dim);
    WITH_DIMENSION(dim, update_rows, gradient, optimizer, touched, touched_count, width, rows, status SHARE);
}
#else
// Occurrences are cut into runs of RUN, across rows. Integer atomics add up the parts of a row that was cut.
#define RUN 64
template <int MAX>
DEVICE void sum_rows(int32_t D, const Gradient& g, int64_t touched_count, int64_t* sums, int32_t* status) {
    const int64_t n = g.starts[touched_count];
    Findings<MAX> findings;
    clear_findings<MAX>(findings);
    FOR_TILES(run, (n + RUN - 1) / RUN) {
        int64_t first = run * RUN;
        const int64_t last = first + RUN < n ? first + RUN : n;
        for (int64_t t = last_start(g.starts, touched_count, first); first < last; ++t) {
            const int64_t end = g.starts[t + 1] < last ? g.starts[t + 1] : last;
            uint64_t sum[REGISTERS(MAX)];
            sum_occurrences<MAX>(D, g, first, end, 0, sum, findings);
            FOR_DIMS_IN_TURN(d, k) {
                const uint64_t before = atomicAdd((uint64_t*)sums + t * D + d, sum[k]);
                if (sum_too_large(before + sum[k])) findings.status = BAD_SUM;
            }
            first = end;
        }
    }
    if (const int32_t bad = status_of<MAX>(findings)) ATOMIC_OR(status, bad);
}
#endif

// sums (touched_count, dim): overwritten on the CPU; added to on the GPU, so the caller clears them first
KERNEL(gradient_sum, const Source* sources, int32_t source_count, int32_t slots, int64_t stride, int64_t column,
       int64_t touched_count, const int32_t* starts, const int32_t* bags, const float* coefficients, int32_t dim,
       int64_t* sums, int32_t* status) {
    const Gradient gradient =
        make_gradient(sources, source_count, slots, stride, column, starts, bags, coefficients, dim);
    WITH_DIMENSION(dim, sum_rows, gradient, touched_count, sums, status SHARE);
}

template <int MAX>
DEVICE void apply_rows(int32_t D, const Optimizer& o, const int64_t* sums, const int32_t* touched, int64_t touched_count,
                       int32_t width, float* rows, int32_t* status SHARE_PARAMETERS) {
    Findings<MAX> findings;
    clear_findings<MAX>(findings);
    FOR_TILES(t, touched_count) {
#if ON_CPU
        if (t + PREFETCH_AHEAD / 2 < t_end) {
            PREFETCH_RUN(rows + (int64_t)touched[t + PREFETCH_AHEAD / 2] * width, width);
        }
#endif
        uint64_t sum[REGISTERS(MAX)];
        FOR_DIMS(d, k) sum[k] = (uint64_t)sums[t * D + d];
        update_row<MAX>(D, o, rows + (int64_t)touched[t] * width, sum, findings);
    }
    if (const int32_t bad = status_of<MAX>(findings)) ATOMIC_OR(status, bad);
}

KERNEL(gradient_apply, const int64_t* sums, const int32_t* touched, int64_t touched_count, Optimizer optimizer,
       int32_t dim, int32_t width, float* rows, int32_t* status) {
    WITH_DIMENSION(dim, apply_rows, optimizer, sums, touched, touched_count, width, rows, status SHARE);
}

// sums[positions[i]] += received[i]; each position at most once
KERNEL(gradient_add, const int64_t* received, const int32_t* positions, int64_t n, int32_t dim, int64_t* sums,
       int32_t* status) {
    FOR_TILES(i, n) {
        bool wrong = false;
        for (int32_t d = LANE; d < dim; d += LANES) {
            const uint64_t sum = (uint64_t)sums[positions[i] * (int64_t)dim + d] + (uint64_t)received[i * dim + d];
            wrong |= sum_too_large(sum);
            sums[positions[i] * (int64_t)dim + d] = (int64_t)sum;
        }
        if (wrong) ATOMIC_OR(status, BAD_SUM);
    }
}
