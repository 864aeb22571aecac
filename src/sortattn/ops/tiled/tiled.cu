// Sums over all pairs of a query and a key, tile by tile; nothing of size M x N leaves the chip.
//
// A block has OWN rows of its own, queries or keys, and walks over all rows of the other kind, OTHER at a time. A
// thread holds TM x TN numbers of such a tile in registers: distances, or products of gradients and values. They go
// through shared memory into a second product, where a thread holds TM rows x 4 columns: of values forward, of points
// backward. What a tile adds is summed afresh and then added to the running sum, so that errors grow with the number
// of tiles. There are no atomics: the same call has the same bits.
//
// Set by cuda.py: NUMBER (float or double), KERNEL (a name of Kind), OWN, CHUNKS (blocks of 64 columns, one or at most
// four: then the running sums lie in local memory), SHARED (bytes), BLOCKS (at least, on a multiprocessor), EPSILON (of
// the Riesz kernels), FORWARD for the forward pass.

#include "kinds.cu"

constexpr int THREADS = 128, DOWN = 8, ACROSS = 16;
constexpr int OTHER = 2 * OWN, TM = OWN / DOWN, TN = OTHER / ACROSS, PARTS = THREADS / OWN;
// columns of a tile; four more keep the rows of neighbouring threads in different banks
constexpr int WIDTH = 64, STRIDE = WIDTH + 4, ACROSS_STRIDE = OWN + 4;
constexpr int STEP = TABLE ? 1 : 4;

template <int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector {
    T x[N];
};

struct Shared {
    T second[OTHER * STRIDE];
    // the first tile lies where the scores go when it has been read
    T scores[OTHER * ACROSS_STRIDE];
    T own_norm[OWN], other_norm[OTHER];
    T query_total[OTHER], query_shift[OTHER];
    T halves[2][OWN], parts[PARTS][OWN];
    T change[OWN];
    int own_mark[OWN], other_mark[OTHER];
};
static_assert(sizeof(Shared) <= SHARED, "cuda.py asks for less shared memory than is used");
static_assert(OWN * STRIDE <= OTHER * ACROSS_STRIDE, "the first tile is larger than the scores");

extern __shared__ __align__(16) unsigned char memory[];

// the place of a thread in a tile: lanes are 4 x 8, warps 2 x 2
struct Place {
    int down, across;
    Place() {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        down = lane / 8 + warp % 2 * 4;
        across = lane % 8 + warp / 2 * 8;
    }
    int row(int i) const { return down + DOWN * i; }
    int column(int j) const { return across + ACROSS * j; }
};

// ---- tiles

// rows of a matrix in global memory
struct Rows {
    const T *start;
    int count, width;
    bool whole;

    Rows(const T *start, long long count, long long width) : start(start), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) | width * sizeof(T)) % 16 == 0;
    }
    template <int N> Vector<N> get(int row, int column, T fill) const {
        Vector<N> found;
        const T *from = start + (long long)row * width + column;
        bool inside = row < count;
        if (inside && whole && column + N <= width) return *reinterpret_cast<const Vector<N> *>(from);
        for (int e = 0; e < N; ++e) found.x[e] = inside && column + e < width ? from[e] : fill;
        return found;
    }
};

// `COUNT` rows from `first` on, 64 columns from `column` on, into a tile; returns whether one of these is not tiny
template <int COUNT>
inline bool load(T *tile, const Rows &rows, int first, int column, T scale = 1, T fill = 0, T *norms = nullptr) {
    bool ordinary = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * WIDTH / 4; i += THREADS) {
        int row = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
        Vector<4> found = rows.get<4>(first + row, column + at, fill);
        for (int e = 0; e < 4; ++e) {
            if constexpr (KIND == ADD_BUMP) found.x[e] *= scale;
            ordinary |= fabs(found.x[e]) > T(TINY);
        }
        *reinterpret_cast<Vector<4> *>(tile + row * STRIDE + at) = found;
        if constexpr (!STATIONARY) {
            if (norms) {
                T sum = 0;
                for (int e = 0; e < 4; ++e) sum += norm_term(found.x[e]);
                // sixteen threads hold a row
                for (int lane = 8; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
                if (at == 0) norms[row] = column ? norms[row] + sum : sum;
            }
        }
    }
    return ordinary;
}

// the same as factors of e^(own - other), of 32 dimensions; returns whether one is out of reach
template <int COUNT>
inline bool load_factors(T *tile, const Rows &rows, int first, int column, const T *origin, T rate) {
    bool far = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * WIDTH / 4; i += THREADS) {
        int row = i / (WIDTH / 4), at = i % (WIDTH / 4) * 2;
        Vector<2> found = rows.get<2>(first + row, column + at, 0);
        Vector<4> factors;
        for (int e = 0; e < 2; ++e) {
            bool inside = first + row < rows.count && column + at + e < rows.width;
            T exponent = inside ? (found.x[e] - origin[column + at + e]) * rate : T(0);
            // not `>`, which is false for a NaN
            far |= !(fabs(exponent) <= T(REACH));
            // a dimension beyond the last adds nothing
            factors.x[2 * e] = column + at + e < rows.width ? power_of_two(exponent) : T(0);
            factors.x[2 * e + 1] = column + at + e < rows.width ? power_of_two(-exponent) : T(0);
        }
        *reinterpret_cast<Vector<4> *>(tile + row * STRIDE + at * 2) = factors;
    }
    return far;
}

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

template <bool TENSOR> inline void keep(Shared &shared, const T (&scores)[TM][TN]) {
    using Here = Cell<TENSOR>;
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) shared.scores[Here::column(i, j) * ACROSS_STRIDE + Here::row(i, j)] = scores[i][j];
}

// fresh[i][c] = op(fresh[i][c], score of own row i, column c of the other row), over all other rows
template <class Op> inline void spread(const Shared &shared, T (&fresh)[TM][4], Op op) {
    Place place;
    for (int i = 0; i < TM; ++i)
        for (int c = 0; c < 4; ++c) fresh[i][c] = 0;
#pragma unroll(TABLE ? 1 : 4)
    for (int n = 0; n < OTHER; ++n) {
        auto score = *reinterpret_cast<const Vector<TM> *>(shared.scores + n * ACROSS_STRIDE + place.down * TM);
        auto row = *reinterpret_cast<const Vector<4> *>(shared.second + n * STRIDE + place.across * 4);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) op(fresh[i][c], score.x[i], row.x[c], i, c);
    }
}

// Where a thread's TM x 4 numbers lie in a tile of OWN rows x 64 columns: in a rectangle, or as tensor cores hold them.
template <bool TENSOR> struct Held {
    static int row(int i, int c) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return TENSOR ? warp % 2 * 32 + i / 4 * 16 + c / 2 * 8 + lane / 4 : Place().down * TM + i;
    }
    static int column(int i, int c) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return TENSOR ? warp / 2 * 32 + i % 4 * 8 + lane % 4 * 2 + c % 2 : Place().across * 4 + c;
    }
};

// running += scores times rows, on tensor cores. Three products of halves lose no more digits than float32 does. As the
// cores truncate their sums, these are short, and those of the small parts apart.
inline void add_rows(const Shared &shared, float (&running)[8][4], bool ordinary) {
    float lift = ordinary ? 1.0f : LIFT, drop = 1 / lift;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // any order of the other rows is right: this one meets every bank once
    const T *scores = shared.scores + lane % 4 * 2 * ACROSS_STRIDE + warp % 2 * 32 + lane / 4;
    const T *rows = shared.second + lane % 4 * 2 * STRIDE + warp / 2 * 32 + lane / 4;
#pragma unroll 1
    for (int start = 0; start < OTHER; start += OTHER / 2) {
        float large[8][4] = {}, small[8][4] = {};
#pragma unroll 1
        for (int n = start; n < start + OTHER / 2; n += 8) {
            unsigned a[2][2][4], b[4][2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    T score = scores[(n + e / 2) * ACROSS_STRIDE + i * 16 + e % 2 * 8];
                    split(score, a[i][0][e], a[i][1][e]);
                }
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) split(rows[(n + e) * STRIDE + j * 8] * lift, b[j][0][e], b[j][1][e]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float (&more)[4] = large[i * 4 + j], (&less)[4] = small[i * 4 + j];
                    multiply(more[0], more[1], more[2], more[3], a[i][0], b[j][0]);
                    multiply(less[0], less[1], less[2], less[3], a[i][0], b[j][1]);
                    multiply(less[0], less[1], less[2], less[3], a[i][1], b[j][0]);
                }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) running[i][c] += (large[i][c] + small[i][c]) * drop;
    }
}

inline void add_rows(const Shared &shared, double (&running)[TM][4], bool) {
    T fresh[TM][4];
    spread(shared, fresh, [](T &sum, T score, T value, int, int) { sum += score * value; });
    for (int i = 0; i < TM; ++i)
        for (int c = 0; c < 4; ++c) running[i][c] += fresh[i][c];
}

// reduce over the threads that share rows, then over the two halves of the tile; read `halves` after a barrier
template <class Op> inline void meet(Shared &shared, T (&part)[TM], Op op) {
    Place place;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        for (int lane = 4; lane; lane /= 2) part[i] = op(part[i], __shfl_xor_sync(~0u, part[i], lane));
        if (place.across % 8 == 0) shared.halves[place.across / 8][place.row(i)] = part[i];
    }
}

// This thread's part of the sum of a row of the scores; after the last tile they are put together.
struct RowSum {
    int row = threadIdx.x % OWN, part = threadIdx.x / OWN;
    T running = 0;

    void add(const Shared &shared) {
        T fresh[4] = {};
#pragma unroll 4
        for (int n = 0; n < OTHER / PARTS; ++n)
            fresh[n % 4] += shared.scores[(part * (OTHER / PARTS) + n) * ACROSS_STRIDE + row];
        running += fresh[0] + fresh[1] + (fresh[2] + fresh[3]);
    }
    void leave(Shared &shared) const { shared.parts[part][row] = running; }
    static T whole(const Shared &shared, int row) {
        T sum = 0;
        for (int part = 0; part < PARTS; ++part) sum += shared.parts[part][row];
        return sum;
    }
};

// what a thread holds of every chunk
template <bool TENSOR> inline void put(T *matrix, int first, int count, int width, const T (&sums)[CHUNKS][TM][4]) {
    using Here = Held<TENSOR>;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                int row = first + Here::row(i, c), column = chunk * WIDTH + Here::column(i, c);
                if (row < count && column < width) matrix[(long long)row * width + column] = sums[chunk][i][c];
            }
}

// the own mark that sees or is seen the most
template <bool KEYS> inline int widest(const Shared &shared) {
    int mark = shared.own_mark[0];
    for (int i = 1; i < OWN; ++i) mark = seen<KEYS>(mark, shared.own_mark[i]) ? mark : shared.own_mark[i];
    return mark;
}

// ---- the kernels; blockIdx.x counts tiles, problem by problem

struct Spot {
    long long problem;
    int first;
    // the last tiles first: with a causal mask they have the most to do, or for keys the least
    Spot(long long block, long long rows, bool backwards) {
        long long tiles = (rows + OWN - 1) / OWN, tile = block % tiles;
        problem = block / tiles;
        first = (backwards ? tiles - 1 - tile : tile) * OWN;
    }
};

#ifdef FORWARD

// the same arguments as that of forward.cu; there are no chunks for this one
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(const T *query, const T *key, const T *value, const T *weight, const T *bandwidth, const T *table,
            const Found *found, const void *chunks, T *sums, T *copy, T *total, T *shift, long long rows,
            long long columns, long long dims, long long channels, long long each, long long causal, long long count,
            long long normalised, long long slices, double tau) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Spot spot(blockIdx.x, rows, true);
    long long p = spot.problem;
    Numbers numbers(bandwidth ? bandwidth[p] : T(tau), table, count);
    Rows queries(query + p * rows * dims, rows, dims), keys(key + p * columns * dims, columns, dims);
    Rows values(value + p * columns * channels, columns, channels);
    const T *weights = weight ? weight + p * columns : nullptr;
    Place place;
    if (threadIdx.x < OWN)
        shared.own_mark[threadIdx.x] = query_mark(spot.first + threadIdx.x, rows, columns, each, causal);
    __syncthreads();
    int reach = widest<false>(shared);

    T running[CHUNKS][TM][4] = {}, shifts[TM];
    RowSum totals;
    for (int i = 0; i < TM; ++i) shifts[i] = -infinity();
#pragma unroll 1
    for (int first = 0; first < columns; first += OTHER) {
        int mark = NOWHERE;
        if (threadIdx.x < OTHER)
            shared.other_mark[threadIdx.x] = mark = key_mark(first + threadIdx.x, columns, weights);
        if (!__syncthreads_or(mark < reach)) continue;
        T scores[TM][TN];
        distances<false>(shared, queries, keys, spot.first, first, numbers, scores);
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            int mine = shared.own_mark[place.row(i)];
            T norm = shared.own_norm[place.row(i)];
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                T score = whole(scores[i][j], norm, shared.other_norm[place.column(j)], numbers, dims);
                scores[i][j] = shared.other_mark[place.column(j)] < mine ? score : KIND == LAPLACE ? -infinity() : T(0);
            }
        }
        if constexpr (KIND == LAPLACE) {
            T largest[TM];
            for (int i = 0; i < TM; ++i) {
                largest[i] = scores[i][0];
                for (int j = 1; j < TN; ++j) largest[i] = fmax(largest[i], scores[i][j]);
            }
            meet(shared, largest, [](T a, T b) { return fmax(a, b); });
            __syncthreads();
            for (int i = 0; i < TM; ++i) {
                int row = place.row(i);
                T after = fmax(shifts[i], fmax(shared.halves[0][row], shared.halves[1][row]));
                if (!normalised) after = 0;
                // a row that has seen nothing yet has no scale to change
                T change = shifts[i] == -infinity() ? T(0) : exp(shifts[i] - after);
                if (place.across == 0) shared.change[row] = change;
                shifts[i] = after;
                for (int j = 0; j < TN; ++j) scores[i][j] = exp(scores[i][j] - (after == -infinity() ? T(0) : after));
            }
        }
        __syncthreads();
        keep<false>(shared, scores);
        __syncthreads();
        if constexpr (KIND == LAPLACE) totals.running *= shared.change[totals.row];
        totals.add(shared);
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < channels; ++chunk) {
            if (chunk) __syncthreads();
            bool ordinary = __syncthreads_or(load<OTHER>(shared.second, values, first, chunk * WIDTH));
            if constexpr (KIND == LAPLACE)
                for (int i = 0; i < TM; ++i)
                    for (int c = 0; c < 4; ++c) running[chunk][i][c] *= shared.change[Held<SINGLE>::row(i, c)];
            add_rows(shared, running[chunk], ordinary);
        }
    }

    totals.leave(shared);
    // the last tile may not be done with `change`
    __syncthreads();
    if (KIND == LAPLACE && place.across == 0)
        for (int i = 0; i < TM; ++i) shared.change[place.row(i)] = shifts[i] == -infinity() ? T(0) : shifts[i];
    __syncthreads();
    int row = threadIdx.x, group = rows / each;
    if (row < OWN && spot.first + row < rows) {
        T whole = RowSum::whole(shared, row);
        const Found *parts = found + p * (group + 2) * slices;
        float most = largest(parts + (spot.first + row) / each * slices, slices);
        T poisoned = poison(fmaxf(most, largest(parts + group * slices, 2 * slices)));
        if (total) total[p * rows + spot.first + row] = whole * poisoned;
        if (KIND == LAPLACE && shift) shift[p * rows + spot.first + row] = shared.change[row];
        // as in normalise.py
        T inverse = fabs(whole) < T(0x1p-1022) ? T(0) : 1 / whole;
        shared.own_norm[row] = (normalised ? inverse : T(1)) * poisoned;
    }
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) running[chunk][i][c] *= shared.own_norm[Held<SINGLE>::row(i, c)];
    put<SINGLE>(sums + p * rows * channels, spot.first, rows, channels, running);
    if (copy) put<SINGLE>(copy + p * rows * channels, spot.first, rows, channels, running);
}

#else

struct Inputs {
    const T *grad, *grad_total, *query, *key, *value, *weight, *bandwidth, *table, *shift;
    long long rows, columns, dims, channels, each, causal, count;
    double tau;

    Numbers numbers(long long p) const { return Numbers(bandwidth ? bandwidth[p] : T(tau), table, count); }
};

// the gradients by the scores, sum over c of grad[m][c] value[n][c] + grad_total[m], zero for pairs that are not seen
template <bool KEYS, bool TENSOR> inline void score_gradients(Shared &shared, const Rows &own, const Rows &other,
                                                              int own_first, int other_first, T (&scores)[TM][TN]) {
    products<TENSOR>(shared, own, other, own_first, other_first, scores);
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            int m = Cell<TENSOR>::row(i, j), n = Cell<TENSOR>::column(i, j);
            T sum = scores[i][j] + shared.query_total[KEYS ? n : m];
            scores[i][j] = seen<KEYS>(shared.own_mark[m], shared.other_mark[n]) ? sum : T(0);
        }
}

template <bool KEYS> inline int mark(const Inputs &in, long long p, long long row) {
    if constexpr (KEYS) return key_mark(row, in.columns, in.weight ? in.weight + p * in.columns : nullptr);
    return query_mark(row, in.rows, in.columns, in.each, in.causal);
}

// what belongs to a query beside its points and gradients
inline void load_query(Shared &shared, const Inputs &in, long long p, int first, int place) {
    bool inside = first + place < in.rows;
    shared.query_total[place] = inside ? in.grad_total[p * in.rows + first + place] : T(0);
    shared.query_shift[place] = inside && in.shift ? in.shift[p * in.rows + first + place] : T(0);
}

// the sum of a number of every thread, for the first one; all shared memory is free to be written
inline double block_sum(double number) {
    double *numbers = reinterpret_cast<double *>(memory);
    numbers[threadIdx.x] = number;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) numbers[threadIdx.x] += numbers[threadIdx.x + half];
        __syncthreads();
    }
    return numbers[0];
}

// KEYS: the gradients of keys and values; otherwise of queries. `moment` becomes the sum of (point - origin) gradient.
template <bool KEYS> inline void backward(const Inputs &in, T *grad_points, T *grad_values, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    long long own_rows = KEYS ? in.columns : in.rows, other_rows = KEYS ? in.rows : in.columns;
    Spot spot(blockIdx.x, own_rows, !KEYS);
    long long p = spot.problem;
    Numbers numbers = in.numbers(p);
    Rows queries(in.query + p * in.rows * in.dims, in.rows, in.dims);
    Rows keys(in.key + p * in.columns * in.dims, in.columns, in.dims);
    Rows values(in.value + p * in.columns * in.channels, in.columns, in.channels);
    Rows grads(in.grad + p * in.rows * in.channels, in.rows, in.channels);
    const Rows &own = KEYS ? keys : queries, &other = KEYS ? queries : keys;
    const Rows &own_vectors = KEYS ? values : grads, &other_vectors = KEYS ? grads : values;
    Place place;
    if (threadIdx.x < OWN) {
        shared.own_mark[threadIdx.x] = mark<KEYS>(in, p, spot.first + threadIdx.x);
        shared.own_norm[threadIdx.x] = 0;
        if (!KEYS) load_query(shared, in, p, spot.first, threadIdx.x);
    }
    __syncthreads();
    int reach = widest<KEYS>(shared);

    T running[CHUNKS][TM][4] = {}, running_values[KEYS ? CHUNKS : 1][TM][4] = {};
    RowSum totals;
#pragma unroll 1
    for (int first = 0; first < other_rows; first += OTHER) {
        bool any = false;
        if (threadIdx.x < OTHER) {
            int yours = mark<!KEYS>(in, p, first + threadIdx.x);
            shared.other_mark[threadIdx.x] = yours;
            any = seen<KEYS>(reach, yours);
            if (KEYS) load_query(shared, in, p, first, threadIdx.x);
        }
        if (!__syncthreads_or(any)) continue;

        // what a gradient by a score is multiplied by, where a kernel is not a sum over dimensions
        T factors[TM][TN];
        if constexpr (KEYS || !ADDITIVE) {
            T scores[TM][TN];
            distances<KEYS>(shared, own, other, spot.first, first, numbers, scores);
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    int m = place.row(i), n = place.column(j);
                    T sum = scores[i][j];
                    T score = whole(sum, shared.own_norm[m], shared.other_norm[n], numbers, in.dims);
                    if constexpr (KIND == LAPLACE) score = exp(score - shared.query_shift[KEYS ? n : m]);
                    if constexpr (KIND == LAPLACE) factors[i][j] = score;
                    if constexpr (KIND == RIESZ) factors[i][j] = sum > 0 ? 1 / sqrt(sum) : T(0);
                    scores[i][j] = seen<KEYS>(shared.own_mark[m], shared.other_mark[n]) ? score : T(0);
                }
            __syncthreads();
            if constexpr (KEYS) {
                keep<false>(shared, scores);
#pragma unroll 1
                for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < in.channels; ++chunk) {
                    if (chunk) __syncthreads();
                    bool ordinary = __syncthreads_or(load<OTHER>(shared.second, grads, first, chunk * WIDTH));
                    add_rows(shared, running_values[chunk], ordinary);
                }
                __syncthreads();
            }
        }

        // the factors lie in a grid
        constexpr bool TENSOR = SINGLE && ADDITIVE;
        T scores[TM][TN];
        score_gradients<KEYS, TENSOR>(shared, own_vectors, other_vectors, spot.first, first, scores);
        __syncthreads();
        if constexpr (KIND == RIESZ) {
            // the derivative of the norms is without the factor
            keep<false>(shared, scores);
            __syncthreads();
            totals.add(shared);
            __syncthreads();
        }
        if constexpr (!ADDITIVE)
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                // a pair that is not seen has no gradient, whatever its factor
                for (int j = 0; j < TN; ++j) scores[i][j] = scores[i][j] == 0 ? T(0) : scores[i][j] * factors[i][j];
        keep<TENSOR>(shared, scores);
        if constexpr (SIGNS) {
            __syncthreads();
            totals.add(shared);
        }
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < in.dims; ++chunk) {
            if (chunk) __syncthreads();
            load<OTHER>(shared.second, other, first, chunk * WIDTH, numbers.scale);
            T mine[TM][4], fresh[TM][4];
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                auto point = own.get<4>(spot.first + place.down * TM + i, chunk * WIDTH + place.across * 4, 0);
                for (int c = 0; c < 4; ++c) mine[i][c] = point.x[c] * numbers.scale;
            }
            __syncthreads();
            spread(shared, fresh, [&](T &sum, T score, T yours, int i, int c) {
                sum += score * slope(difference<KEYS>(mine[i][c], yours), numbers);
            });
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) running[chunk][i][c] += fresh[i][c];
        }
    }

    totals.leave(shared);
    __syncthreads();
    double moments = 0;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            int row = place.down * TM + i, column = chunk * WIDTH + place.across * 4;
            auto point = own.get<4>(spot.first + row, column, 0);
            T total = RowSum::whole(shared, row);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                T gradient = SIGNS ? total - 2 * running[chunk][i][c] : running[chunk][i][c];
                if (KEYS) gradient = -gradient;
                gradient = (gradient + norm_slope(point.x[c], shared.own_norm[row]) * total) / numbers.tau;
                running[chunk][i][c] = gradient;
                bool inside = spot.first + row < own.count && column + c < own.width;
                // an offset of all points changes nothing but the rounding
                T origin = STATIONARY && inside && in.columns ? keys.start[column + c] : T(0);
                if (inside) moments += double(point.x[c] - origin) * double(gradient);
            }
        }
    put<false>(grad_points + p * own_rows * in.dims, spot.first, own_rows, in.dims, running);
    if constexpr (KEYS)
        put<SINGLE>(grad_values + p * own_rows * in.channels, spot.first, own_rows, in.channels, running_values);
    __syncthreads();
    moments = block_sum(moments);
    if (threadIdx.x == 0) moment[blockIdx.x] = moments;
}

#define INPUTS                                                                                                         \
    const T *grad, const T *grad_total, const T *query, const T *key, const T *value, const T *weight,                 \
        const T *bandwidth, const T *table, const T *shift, long long rows, long long columns, long long dims,         \
        long long channels, long long each, long long causal, long long count, double tau
#define AS_STRUCT                                                                                                      \
    Inputs {                                                                                                           \
        grad, grad_total, query, key, value, weight, bandwidth, table, shift, rows, columns, dims, channels, each,     \
            causal, count, tau                                                                                         \
    }

// The gradients by the sums and by the total of a row, from that by their quotient; a warp has a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_quotient(const T *grad, const T *quotient, const T *total, T *grad_sums, T *grad_total, long long count,
                      long long channels) {
    long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= count) return;
    T whole = total[row], inverse = fabs(whole) < T(SINGLE ? 0x1p-126 : 0x1p-1022) ? T(0) : 1 / whole, sum = 0;
    for (long long i = row * channels + threadIdx.x % 32; i < (row + 1) * channels; i += 32) {
        sum += grad[i] * quotient[i];
        grad_sums[i] = grad[i] * inverse;
    }
    for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (threadIdx.x % 32 == 0) grad_total[row] = -sum * inverse;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward_query(INPUTS, T *grad_query, double *moment) {
    backward<false>(AS_STRUCT, grad_query, nullptr, moment);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    backward_key(INPUTS, T *grad_key, T *grad_value, double *moment) {
    backward<true>(AS_STRUCT, grad_key, grad_value, moment);
}

// what a pair with this gradient adds to `sums`, see below
inline void add_to_table(T gradient, T difference, int piece, const Numbers &numbers, T (&sums)[2]) {
    if constexpr (KIND == POLYNOMIAL_EXPONENTIAL) {
        T x = distance(difference, numbers), power = exp(-x);
#pragma unroll 1
        for (int i = 0; i < piece; ++i) power *= x;
        sums[0] += gradient * power;
    } else {
        T u = difference / numbers.tau;
        Pieces pieces(u, numbers);
        T share = gradient * (T(pieces.at == piece) + T(pieces.past == piece)) / 2;
        sums[0] += share;
        // a distance may be infinite where the share is zero
        sums[1] += share == 0 ? T(0) : share * (u - anchor(numbers, piece));
    }
}

// Of the table of a kernel. Coefficients: the sum of gradient x^i e^-x for coefficient i = blockIdx.y. Splines: the
// sums of gradient and of gradient (u - anchor) over piece blockIdx.y; a node counts half for the pieces on both sides.
extern "C" __global__ void __launch_bounds__(THREADS) backward_table(INPUTS, double *moments) {
    if constexpr (TABLE) {
        Inputs in = AS_STRUCT;
        Shared &shared = *reinterpret_cast<Shared *>(memory);
        Spot spot(blockIdx.x, rows, true);
        long long p = spot.problem;
        int piece = blockIdx.y;
        Numbers numbers = in.numbers(p);
        Rows queries(query + p * rows * dims, rows, dims), keys(key + p * columns * dims, columns, dims);
        Rows values(value + p * columns * channels, columns, channels);
        Rows grads(grad + p * rows * channels, rows, channels);
        if (threadIdx.x < OWN) {
            shared.own_mark[threadIdx.x] = mark<false>(in, p, spot.first + threadIdx.x);
            load_query(shared, in, p, spot.first, threadIdx.x);
        }
        __syncthreads();
        int reach = widest<false>(shared);
        double constant = 0, linear = 0;
#pragma unroll 1
        for (int first = 0; first < columns; first += OTHER) {
            int yours = NOWHERE;
            if (threadIdx.x < OTHER) shared.other_mark[threadIdx.x] = yours = mark<true>(in, p, first + threadIdx.x);
            if (!__syncthreads_or(yours < reach)) continue;
            T scores[TM][TN];
            score_gradients<false, false>(shared, grads, values, spot.first, first, scores);
#pragma unroll 1
            for (int d = 0; d < dims; d += WIDTH) {
                __syncthreads();
                load<OWN>(shared.scores, queries, spot.first, d);
                load<OTHER>(shared.second, keys, first, d);
                __syncthreads();
                int count = dims - d < WIDTH ? dims - d : WIDTH;
                // few at a time, as these sums cancel
                for (int e = 0; e < count; e += 4) {
                    T fresh[2] = {};
                    combine<1>(shared.scores + e, shared.second + e, count - e < 4 ? count - e : 4, scores,
                               [&](T &score, const Vector<1> &own, const Vector<1> &other) {
                                   add_to_table(score, own.x[0] - other.x[0], piece, numbers, fresh);
                               });
                    constant += fresh[0];
                    linear += fresh[1];
                }
            }
        }
        __syncthreads();
        constant = block_sum(constant);
        __syncthreads();
        linear = block_sum(linear);
        if (threadIdx.x == 0) {
            long long place = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 2;
            moments[place] = constant;
            moments[place + 1] = linear;
        }
    }
}

#endif
