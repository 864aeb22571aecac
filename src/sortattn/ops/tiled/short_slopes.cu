// The gradients of points; a part of short_backward.cu.

// what rounding took from edge - |own - other|, which it says is zero
inline float lost(float own, float other, const Numbers &numbers) {
    float difference = own - other, minus = difference - own;
    float error = (own - (difference - minus)) - (other + minus);
    return numbers.rest - (difference < 0 ? -error : error);
}

// The gradients of own points from those by the scores. `raw` are the other points, as the kernel takes differences of
// them, in rows of `stride`; `factors` what the scores were made of.
inline void slopes(const float *scores, const float *raw, int stride, const float *factors, int others,
                   const Points &points, const Matrix<Stored> &mine, const Matrix<Stored> &gradients) {
    const Numbers &numbers = points.numbers;
    float own[ROWS][4], sums[ROWS][4] = {}, totals[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        Vector found = mine.get(own_row(i), column());
#pragma unroll
        for (int e = 0; e < 4; ++e) own[i][e] = found.x[e] * numbers.scale;
    }
    if (FACTORS && !points.far) {
        // of other points below and above, before the own factors
        float above[ROWS][4] = {};
        across<1>(scores, others, [&](const float (&score)[ROWS], int n) {
            Vector other = read(raw + n * stride + column());
            Vector plus = read(factors + n * POINTS + column()), minus = read(factors + n * POINTS + WIDTH + column());
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (own[i][e] > other.x[e]) sums[i][e] = fmaf(score[i], plus.x[e], sums[i][e]);
                    if (own[i][e] < other.x[e]) above[i][e] = fmaf(score[i], minus.x[e], above[i][e]);
                }
        });
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float exponent = (own[i][e] - points.origin.x[e]) * numbers.rate;
                sums[i][e] = power_of_two(exponent) * above[i][e] - power_of_two(-exponent) * sums[i][e];
            }
    } else {
        across<1>(scores, others, [&](const float (&score)[ROWS], int n) {
            Vector other = read(raw + n * stride + column());
            bool level = false;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                if constexpr (SIGNS) totals[i] += score[i];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float difference = own[i][e] - other.x[e];
                    sums[i][e] = fmaf(score[i], slope(difference, numbers), sums[i][e]);
                    // of 16 bits differences are exact
                    if constexpr (KIND == ADD_BUMP && !NARROW) level |= fabsf(difference) == numbers.edge;
                }
            }
            // rounding is not to choose the side of a step
            if (!NARROW && level)
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float difference = own[i][e] - other.x[e];
                        if (fabsf(difference) != numbers.edge) continue;
                        float side = step(lost(own[i][e], other.x[e], numbers)) - 0.5f;
                        sums[i][e] -= score[i] * sign(difference) * side;
                    }
        });
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float gradient[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float sum = SIGNS ? totals[i] - 2 * sums[i][e] : sums[i][e];
            gradient[e] = (sum + norm_slope(own[i][e], 0) * totals[i]) / numbers.tau;
        }
        gradients.put(own_row(i), column(), gradient);
    }
}
