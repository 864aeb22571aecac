// Numbers of all pairs of a tile, TM x TN of a thread: distances and inner products. A part of tiled.cu, backward.cu
// and backward_table.cu.

// sums[i][j] = op(sums[i][j], own vector i, other vector j) over `count` columns of both tiles, N at a time
template <int N, class Op> inline void combine(const T *own, const T *other, int count, T (&sums)[TM][TN], Op op) {
    Place place;
#pragma unroll 1
    for (int d = 0; d < count; d += N) {
        Vector<N> mine[TM];
#pragma unroll
        for (int i = 0; i < TM; ++i) mine[i] = *reinterpret_cast<const Vector<N> *>(own + place.row(i) * STRIDE + d);
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            Vector<N> yours = *reinterpret_cast<const Vector<N> *>(other + place.column(j) * STRIDE + d);
#pragma unroll
            for (int i = 0; i < TM; ++i) op(sums[i][j], mine[i], yours);
        }
    }
}

template <bool KEYS> inline T difference(T own, T other) { return KEYS ? other - own : own - other; }

template <bool KEYS, int N>
inline void combine_terms(Shared &shared, int count, const Numbers &numbers, T (&sums)[TM][TN]) {
    auto add = [&](T &sum, const Vector<N> &own, const Vector<N> &other) {
        // a few terms first: fewer additions to a number that is larger than they are
        T fresh = term(difference<KEYS>(own.x[0], other.x[0]), numbers);
#pragma unroll
        for (int e = 1; e < N; ++e) fresh += term(difference<KEYS>(own.x[e], other.x[e]), numbers);
        sum += fresh;
    };
    combine<N>(shared.scores, shared.second, count, sums, add);
}

// the terms summed over all dimensions, and the norms; both tiles are free to be written
template <bool KEYS> inline void distances(Shared &shared, const Rows &own, const Rows &other, int own_first,
                                           int other_first, const Numbers &numbers, T (&sums)[TM][TN]) {
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sums[i][j] = 0;
    constexpr int DIMS = FACTORS ? WIDTH / 2 : WIDTH;
    // far from the zeros of the own rows, where the term is zero
    T fill = KIND == ADD_BUMP ? T(4) / numbers.scale : KIND == ADD_LAPLACE ? infinity() : T(0);
#pragma unroll 1
    for (int d = 0; d < own.width; d += DIMS) {
        int count = own.width - d < DIMS ? own.width - d : DIMS;
        if (d) __syncthreads();
        if constexpr (FACTORS) {
            const T *origin = other.start + (long long)other_first * other.width;
            bool far = load_factors<OWN>(shared.scores, own, own_first, d, origin, numbers.rate);
            // the other way round: the first factors of both multiply to e^(own - other)
            far |= load_factors<OTHER>(shared.second, other, other_first, d, origin, -numbers.rate);
            if (!__syncthreads_or(far)) {
                auto add = [](T &sum, const Vector<4> &own, const Vector<4> &other) {
                    sum += fmin(own.x[0] * other.x[0], own.x[1] * other.x[1]) +
                           fmin(own.x[2] * other.x[2], own.x[3] * other.x[3]);
                };
                combine<4>(shared.scores, shared.second, 2 * count, sums, add);
                continue;
            }
        }
        load<OWN>(shared.scores, own, own_first, d, numbers.scale, T(0), shared.own_norm);
        load<OTHER>(shared.second, other, other_first, d, numbers.scale, fill, shared.other_norm);
        __syncthreads();
        combine_terms<KEYS, STEP>(shared, count, numbers, sums);
    }
}

// Where a thread's TM x TN numbers lie in a tile of OWN x OTHER: in a grid, or as tensor cores hold them.
template <bool TENSOR> struct Cell {
    static int row(int i, int) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return TENSOR ? warp % 2 * 32 + i / 4 * 16 + i % 4 / 2 * 8 + lane / 4 : Place().row(i);
    }
    static int column(int i, int j) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return TENSOR ? warp / 2 * 64 + j * 8 + lane % 4 * 2 + i % 2 : Place().column(j);
    }
};

inline void multiply_rows(const Shared &shared, int count, T (&sums)[TM][TN]) {
    auto add = [](T &sum, const Vector<4> &own, const Vector<4> &other) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum += own.x[e] * other.x[e];
    };
    combine<4>(shared.scores, shared.second, count, sums, add);
}

// the same on tensor cores
inline void multiply_rows_there(const Shared &shared, int count, float (&sums)[8][8]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T *own = shared.scores + (warp % 2 * 32 + lane / 4) * STRIDE + lane % 4;
    const T *other = shared.second + (warp / 2 * 64 + lane / 4) * STRIDE + lane % 4;
#pragma unroll 1
    for (int c = 0; c < count; c += 8) {
        unsigned a[2][2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                T point = own[(i * 16 + e % 2 * 8) * STRIDE + c + e / 2 * 4];
                split(point, a[i][0][e], a[i][1][e]);
            }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            unsigned b[2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) split(other[j * 8 * STRIDE + c + e * 4], b[0][e], b[1][e]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float &s = sums[i * 4][j], &t = sums[i * 4 + 1][j], &u = sums[i * 4 + 2][j], &v = sums[i * 4 + 3][j];
                multiply(s, t, u, v, a[i][0], b[1]);
                multiply(s, t, u, v, a[i][1], b[0]);
                multiply(s, t, u, v, a[i][0], b[0]);
            }
        }
    }
}
// never called: float64 has no such products
inline void multiply_rows_there(const Shared &, int, double (&)[TM][TN]) {}

// the inner products of the rows, summed over all columns; both tiles are free to be written
template <bool TENSOR> inline void products(Shared &shared, const Rows &own, const Rows &other, int own_first,
                                            int other_first, T (&sums)[TM][TN]) {
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sums[i][j] = 0;
#pragma unroll 1
    for (int c = 0; c < own.width; c += WIDTH) {
        if (c) __syncthreads();
        load<OWN>(shared.scores, own, own_first, c);
        load<OTHER>(shared.second, other, other_first, c);
        __syncthreads();
        int count = own.width - c < WIDTH ? own.width - c : WIDTH;
        if constexpr (TENSOR)
            multiply_rows_there(shared, count, sums);
        else
            multiply_rows(shared, count, sums);
    }
}
