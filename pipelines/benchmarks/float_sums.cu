// The update with plain float32 sums in the order of the occurrences, only to measure what fixed point costs.
#include "optimizer.cuh"

template <int MAX>
static void float_rows(int32_t D, const Gradient& g, const Optimizer& o, const int32_t* touched, int64_t first,
                       int64_t last, int32_t width, float* rows) {
    const int64_t ahead_end = g.starts[last];
    Findings<MAX> findings;
    clear_findings<MAX>(findings);
    for (int64_t t = first; t < last; t += STEP_ROWS) {
        const int64_t end = last - t < STEP_ROWS ? last : t + STEP_ROWS;
        float sums[STEP_ROWS][MAX];
        for (int64_t r = t; r < end; ++r) {
            if (r + PREFETCH_AHEAD / 2 < last) {
                const float* ahead = rows + (int64_t)touched[r + PREFETCH_AHEAD / 2] * width;
                PREFETCH_RUN(ahead, width);
            }
            float sum[MAX];
            FOR_DIMS(d, k) sum[k] = 0;
            for (int64_t i = g.starts[r]; i < g.starts[r + 1]; ++i) {
                if (i + PREFETCH_AHEAD < ahead_end) {
                    const float* ahead = bag_gradient(g, g.bags[i + PREFETCH_AHEAD], D);
                    PREFETCH_RUN(ahead, D);
                }
                const float* values = bag_gradient(g, g.bags[i], D);
                FOR_DIMS(d, k) sum[k] += values[d];
            }
            FOR_DIMS(d, k) sums[r - t][k] = sum[k] * (float)(o.factor * FIXED_ONE);
        }
        for (int64_t r = t; r < end; ++r) {
            step_row<MAX>(D, o, rows + (int64_t)touched[r] * width, sums[r - t], findings);
        }
    }
}

CPU_KERNEL(float_update, const Source* sources, int32_t slots, int64_t stride, const int32_t* touched,
           int64_t touched_count, const int32_t* starts, const int32_t* bags, float learning_rate, double factor,
           int32_t dim, int32_t width, float* rows) {
    const Gradient gradient = make_gradient(sources, 1, slots, stride, 0, starts, bags, nullptr, dim);
    const Optimizer optimizer = {ROWWISE_ADAGRAD, learning_rate, 1e-8f, 0, 0, 0, 0, 0, factor};
    const int64_t first = touched_count * share_index / share_count;
    const int64_t last = touched_count * (share_index + 1) / share_count;
    WITH_DIMENSION(dim, float_rows, gradient, optimizer, touched, first, last, width, rows);
}
