// Sums over all others, row by row, ROWS x 4 columns of a thread; a part of short.cu.

inline int own_row(int i) { return threadIdx.x / COLUMNS * ROWS + i; }

// op(scores of the own rows, other row) for all others
template <int UNROLL, class Op> inline void across(const float *scores, int others, Op op) {
    constexpr int N = ROWS % 2 ? 1 : 2;
#pragma unroll UNROLL
    for (int n = 0; n < others; ++n) {
        float mine[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i += N) {
            auto found = *reinterpret_cast<const Several<float, N> *>(scores + n * OWN + own_row(i));
            for (int e = 0; e < N; ++e) mine[i + e] = found.x[e];
        }
        op(mine, n);
    }
}

// sums of the other vectors, and of the scores themselves
inline void multiply(const float *scores, const float *vectors, int others, float (&sums)[ROWS][4],
                     float (&totals)[ROWS]) {
    across<2>(scores, others, [&](const float (&score)[ROWS], int n) {
        Vector row = read(vectors + n * STRIDE + column());
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            totals[i] += score[i];
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][e] = fmaf(score[i], row.x[e], sums[i][e]);
        }
    });
}
