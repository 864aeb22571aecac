// Numbers of all pairs of rows, TM x TN of a thread, and their inner products; a part of short.cu.

// The scores of a thread: own rows `down`, `down + height` and so on, others `across`, `across + width` and so on.
struct Place {
    int height, width, down, across;
    Place(int own, int others) : height((own + TM - 1) / TM), width((others + TN - 1) / TN) {
        down = threadIdx.x % height, across = threadIdx.x / height;
    }
    bool idle() const { return across >= width; }
    int rows() const { return height * TM; }
    int others() const { return width * TN; }
};

// op(sum, own numbers, other numbers) for all pairs of a thread, N vectors of every row at a time
template <int N, class Op> inline void pairs(const float *own, const float *other, int stride, int columns,
                                             const Place &place, float (&sums)[TM][TN], Op op) {
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sums[i][j] = 0;
    if (place.idle()) return;
#pragma unroll 1
    for (int d = 0; d < columns; d += 4) {
        Vector mine[TM][N], yours[N];
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int e = 0; e < N; ++e)
                mine[i][e] = read(own + (place.down + i * place.height) * stride + d + e * WIDTH);
#pragma unroll
        for (int j = 0; j < TN; ++j) {
#pragma unroll
            for (int e = 0; e < N; ++e)
                yours[e] = read(other + (place.across + j * place.width) * stride + d + e * WIDTH);
#pragma unroll
            for (int i = 0; i < TM; ++i) op(sums[i][j], mine[i], yours);
        }
    }
}

// scores[other][own] = op(number, own, other) for all pairs
template <class Op>
inline void keep(float *scores, const Place &place, int others, const float (&sums)[TM][TN], Op op) {
    if (place.idle()) return;
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            int m = place.down + i * place.height, n = place.across + j * place.width;
            if (m < OWN && n < others) scores[n * OWN + m] = op(sums[i][j], m, n);
        }
}

inline void products(const float *own, const float *other, int channels, const Place &place, float (&sums)[TM][TN]) {
    pairs<1>(own, other, STRIDE, channels, place, sums, [](float &sum, const Vector *own, const Vector *other) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum = fmaf(own[0].x[e], other[0].x[e], sum);
    });
}
