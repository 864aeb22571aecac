// Short sequences, forward and backward: a block has some rows of a head, queries or keys, and all the others at once.
//
// Scores, or the gradients by them, are made pair by pair, TM x TN by a thread, and left in shared memory; what they
// are multiplied with is summed row by row, ROWS x 4 columns by a thread. Tensors are read where they lie and as they
// are, in 16 bits or 32; all sums are float32. There are no atomics: the same call has the same bits.
//
// Set by short.py: NUMBER (float), KERNEL (a name of Kind, of an additive kernel without a table), EPSILON (of the
// Riesz kernels), INPUT (a name of Type), MOST (rows of a head), THREADS, TM, TN, ROWS, BLOCKS (at least, on a
// multiprocessor), FORWARD (1 for the forward pass).

#include "kinds.cu"

enum Type { FLOAT32, FLOAT16, BFLOAT16 };
constexpr Type TYPE = INPUT;
constexpr bool NARROW = TYPE != FLOAT32;

constexpr int COLUMNS = 16, GROUPS = THREADS / COLUMNS, OWN = GROUPS * ROWS;
// four more keep the rows of neighbouring threads in different banks; points may be two factors, in two halves of a row
constexpr int WIDTH = 64, STRIDE = WIDTH + 4, POINTS = (FACTORS ? 2 * WIDTH : WIDTH) + 4;
// of four dimensions one is left as a point, whose exponential a third pipe takes; gradients need the factors of all
constexpr bool MIXED = FACTORS && FORWARD;
// loads of a thread that are on their way at a time
constexpr int BATCH = 6;

extern __shared__ __align__(16) unsigned char memory[];
// of queries: what divides their sums, and the inner product of a row of the output and its gradient
__shared__ float inverse[MOST], inner[MOST];

// ---- numbers of 16 bits

inline float half_of(unsigned both, int which) {
    float found[2];
    asm("{.reg .f16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(found[0]), "=f"(found[1])
        : "r"(both));
    return found[which];
}
inline float widen(float x) { return x; }
inline float widen(unsigned short x) { return TYPE == BFLOAT16 ? __uint_as_float(unsigned(x) << 16) : half_of(x, 0); }
inline void narrow(float x, float &to) { to = x; }
inline void narrow(float x, unsigned short &to) {
    unsigned bits = __float_as_uint(x);
    // to the nearest, of two equally near to the even one
    bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fff0000;
    to = TYPE == BFLOAT16 ? bits >> 16 : pack(x, 0);
}
template <bool WIDE> struct Choose {
    using Type = float;
};
template <> struct Choose<false> {
    using Type = unsigned short;
};
using Stored = Choose<!NARROW>::Type;

// ---- matrices

template <class N, int COUNT> struct alignas(COUNT * sizeof(N)) Several {
    N x[COUNT];
};
template <class N> using Four = Several<N, 4>;
using Vector = Four<float>;

inline Vector read(const float *from) { return *reinterpret_cast<const Vector *>(from); }

// some rows of a head's matrix in global memory
template <class N> struct Matrix {
    N *start;
    long long stride;
    int count, width;
    bool whole;

    // `place` is of the head, in numbers
    Matrix(const N *tensor, long long place, long long stride, int first, int count, int width)
        : start(const_cast<N *>(tensor) + place + first * stride), stride(stride), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) % sizeof(Four<N>)) == 0 && (stride | width) % 4 == 0;
    }
    // four numbers of a row, zeros beyond the last; WHOLE ones can be read at once
    template <bool WHOLE = false> Vector get(int row, int column) const {
        Vector found = {};
        const N *from = start + row * stride + column;
        if (WHOLE && row < count && column < width) {
            Four<N> raw = *reinterpret_cast<const Four<N> *>(from);
            for (int e = 0; e < 4; ++e) found.x[e] = widen(raw.x[e]);
        }
        if (!WHOLE && row < count)
            for (int e = 0; e < 4; ++e)
                if (column + e < width) found.x[e] = widen(from[e]);
        return found;
    }
    void put(int row, int column, const float (&x)[4]) const {
        if (row >= count) return;
        Four<N> raw;
        for (int e = 0; e < 4; ++e) narrow(x[e], raw.x[e]);
        N *to = start + row * stride + column;
        if (whole && column < width)
            *reinterpret_cast<Four<N> *>(to) = raw;
        else
            for (int e = 0; e < 4; ++e)
                if (column + e < width) to[e] = raw.x[e];
    }
};

// the four columns of a thread, the same whatever it does
inline int column() { return threadIdx.x % COLUMNS * 4; }

// op(row, numbers) for `rows` rows of a matrix, zeros beyond; WHOLE ones are read some at a time
template <bool WHOLE, class Op> inline void each_of(const Matrix<Stored> &matrix, int rows, Op op) {
    constexpr int N = WHOLE ? BATCH : 1;
#pragma unroll 1
    for (int row = threadIdx.x / COLUMNS; row < rows; row += N * GROUPS) {
        Vector found[N];
#pragma unroll
        for (int b = 0; b < N; ++b) found[b] = matrix.get<WHOLE>(row + b * GROUPS, column());
#pragma unroll
        for (int b = 0; b < N; ++b)
            if (row + b * GROUPS < rows) op(row + b * GROUPS, found[b]);
    }
}
template <class Op> inline void each(const Matrix<Stored> &matrix, int rows, Op op) {
    if (matrix.whole)
        each_of<true>(matrix, rows, op);
    else
        each_of<false>(matrix, rows, op);
}

inline void load(float *tile, const Matrix<Stored> &matrix, int rows) {
    each(matrix, rows,
         [&](int row, const Vector &x) { *reinterpret_cast<Vector *>(tile + row * STRIDE + column()) = x; });
}

// ---- pairs

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

// What a block knows of its head's points.
struct Points {
    Numbers numbers;
    int dims;
    // distances are measured from the first key, those of the thread's columns
    Vector origin = {};
    // of exponents
    float largest = 0;
    // factors are out of reach
    bool far = false;

    Vector exponents(const Vector &x) const {
        Vector found;
        for (int e = 0; e < 4; ++e) found.x[e] = (x.x[e] - origin.x[e]) * numbers.rate;
        return found;
    }
    // Rows as the scores want them; OTHER ones are far away in dimensions that are not there. What is no number makes
    // `spoilt` one too.
    template <bool OTHER> void load(float *tile, const Matrix<Stored> &matrix, int rows, float &spoilt) {
        each(matrix, rows, [&](int row, const Vector &x) {
            Vector found = x;
#pragma unroll
            for (int e = 0; e < 4; ++e) spoilt = fmaf(x.x[e], 0.0f, spoilt);
            if constexpr (FACTORS) {
                Vector exponent = exponents(x), minus;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    bool inside = column() + e < dims;
                    // the zeros beyond the last row may be farther away than any point
                    if (row < matrix.count) largest = fmaxf(largest, fabsf(exponent.x[e]));
                    found.x[e] = inside ? power_of_two(exponent.x[e]) : 0.0f;
                    minus.x[e] = inside ? power_of_two(-exponent.x[e]) : 0.0f;
                    if (MIXED && e == 3) found.x[e] = inside ? exponent.x[e] : OTHER ? infinity() : 0.0f;
                }
                *reinterpret_cast<Vector *>(tile + row * POINTS + WIDTH + column()) = minus;
            }
            if constexpr (KIND == ADD_BUMP)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    // the edge is below one
                    found.x[e] = column() + e < dims ? x.x[e] * numbers.scale : OTHER ? 4.0f : 0.0f;
            *reinterpret_cast<Vector *>(tile + row * POINTS + column()) = found;
        });
    }
    // the same where factors do not serve
    template <bool OTHER> void load_far(float *tile, const Matrix<Stored> &matrix, int rows) const {
        each(matrix, rows, [&](int row, const Vector &x) {
            Vector found = x;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (OTHER && column() + e >= dims) found.x[e] = infinity();
            *reinterpret_cast<Vector *>(tile + row * POINTS + column()) = found;
        });
    }
};

// Sums of the terms of all pairs; tiles are free to be written. Returns whether there is what is no number.
inline bool scores_of(float *own, float *other, Points &points, const Matrix<Stored> &mine,
                      const Matrix<Stored> &others, const Place &place, float (&sums)[TM][TN]) {
    float spoilt = 0;
    points.load<false>(own, mine, place.rows(), spoilt);
    points.load<true>(other, others, place.others(), spoilt);
    bool bad = __syncthreads_or(spoilt != 0);
    int columns = (points.dims + 3) / 4 * 4;
    if constexpr (FACTORS) {
        points.far = __syncthreads_or(points.largest > REACH);
        if (!points.far) {
            // e^-|s - t| is the lesser of e^s and e^t times the lesser of e^-s and e^-t
            auto add = [](float &sum, const Vector *own, const Vector *other) {
#pragma unroll
                for (int e = 0; e < (MIXED ? 3 : 4); ++e)
                    sum = fmaf(fminf(own[0].x[e], other[0].x[e]), fminf(own[1].x[e], other[1].x[e]), sum);
                if (MIXED) sum += power_of_two(-fabsf(own[0].x[3] - other[0].x[3]));
            };
            pairs<2>(own, other, POINTS, columns, place, sums, add);
            return bad;
        }
        points.load_far<false>(own, mine, place.rows());
        points.load_far<true>(other, others, place.others());
        __syncthreads();
    }
    pairs<1>(own, other, POINTS, columns, place, sums, [&](float &sum, const Vector *own, const Vector *other) {
        // a few terms first: fewer additions to a number that is larger than they are
        float fresh[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) fresh[e] = term_of(own[0].x[e], other[0].x[e], points.numbers);
        sum += (fresh[0] + fresh[1]) + (fresh[2] + fresh[3]);
    });
    return bad;
}

// a score in units of `unit`
inline float score_of(float sum, const Points &points) {
    return KIND == ADD_RIESZ ? fmaf(2, sum, float(EPSILON) * points.dims * points.numbers.tau) : sum;
}

// ---- rows

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

// ---- the kernels

// where a head of a tensor begins
inline long long place_of(unsigned problem, unsigned heads, long long batch, long long head) {
    return problem / heads * batch + problem % heads * head;
}

inline Points points_of(const Matrix<Stored> &keys, int dims, double tau) {
    Points points{Numbers(float(tau), nullptr, 0), dims};
    if constexpr (FACTORS) points.origin = keys.get(0, column());
    if constexpr (KIND == ADD_BUMP) points.numbers.rest = float(tau * points.numbers.scale - points.numbers.edge);
    return points;
}

// as in normalise.py
inline float reciprocal(float total) { return fabsf(total) < 0x1p-126f ? 0.0f : 1 / total; }

#if FORWARD

// A block has `part` queries. `copy`, the same rows in float32, may be null, and so may `total`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    short_forward(const Stored *query, const Stored *key, const Stored *value, Stored *out, float *copy, float *total,
                  long long query_batch, long long query_head, long long query_row, long long key_batch,
                  long long key_head, long long key_row, long long value_batch, long long value_head,
                  long long value_row, long long out_batch, long long out_head, long long out_row, long long heads,
                  long long rows, long long columns, long long dims, long long channels, long long part,
                  long long scores_at, long long vectors_at, long long normalised, double tau) {
    unsigned parts = unsigned(rows + part - 1) / unsigned(part), p = blockIdx.x / parts;
    int first = blockIdx.x % parts * part, own = min(int(rows) - first, int(part));
    float *points_tile = reinterpret_cast<float *>(memory), *scores = points_tile + scores_at;
    float *vectors = points_tile + vectors_at;
    Matrix<Stored> queries(query, place_of(p, heads, query_batch, query_head), query_row, first, own, dims);
    Matrix<Stored> keys(key, place_of(p, heads, key_batch, key_head), key_row, 0, columns, dims);
    Matrix<Stored> values(value, place_of(p, heads, value_batch, value_head), value_row, 0, columns, channels);
    Points points = points_of(keys, dims, tau);
    Place place(own, columns);
    float sums[TM][TN], spoilt = 0;
    bool bad = scores_of(scores, points_tile, points, queries, keys, place, sums);
    __syncthreads();
    keep(scores, place, columns, sums, [&](float sum, int, int) { return score_of(sum, points); });
    auto look = [&](int, const Vector &x) {
        for (int e = 0; e < 4; ++e) spoilt = fmaf(x.x[e], 0.0f, spoilt);
    };
    each(values, columns, [&](int row, const Vector &x) {
        look(row, x);
        *reinterpret_cast<Vector *>(vectors + row * STRIDE + column()) = x;
    });
    // queries of other blocks count as well
    if (parts > 1) {
        Matrix<Stored> all(query, place_of(p, heads, query_batch, query_head), query_row, 0, rows, dims);
        each(all, rows, look);
    }
    bad |= __syncthreads_or(spoilt != 0);

    float made[ROWS][4] = {}, totals[ROWS] = {};
    multiply(scores, vectors, columns, made, totals);
    Matrix<Stored> results(out, place_of(p, heads, out_batch, out_head), out_row, first, own, channels);
    Matrix<float> copies(copy, (long long)p * rows * channels, channels, first, copy ? own : 0, channels);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float whole = totals[i] * unit(points.numbers);
        float scale = normalised ? reciprocal(whole) : 1.0f;
        if (bad) scale = whole = infinity() - infinity();
#pragma unroll
        for (int e = 0; e < 4; ++e) made[i][e] = made[i][e] * scale * unit(points.numbers);
        results.put(own_row(i), column(), made[i]);
        copies.put(own_row(i), column(), made[i]);
        if (total && column() == 0 && own_row(i) < own) total[p * rows + first + own_row(i)] = whole;
    }
}

#else

// `inverse` and `inner` of some queries from the rows of the output and their gradients
template <bool WHOLE>
inline void quotients(const Matrix<Stored> &grads, const Matrix<float> &results, const float *total, bool normalised) {
    constexpr int N = WHOLE ? BATCH : 1;
#pragma unroll 1
    for (int start = 0; start < grads.count; start += N * GROUPS) {
        int row = start + threadIdx.x / COLUMNS;
        float sums[N] = {};
#pragma unroll
        for (int b = 0; b < N; ++b) {
            Vector grad = grads.get<WHOLE>(row + b * GROUPS, column());
            Vector result = results.get<WHOLE>(row + b * GROUPS, column());
            for (int e = 0; e < 4; ++e) sums[b] = fmaf(grad.x[e], result.x[e], sums[b]);
        }
#pragma unroll
        for (int b = 0; b < N; ++b) {
            for (int lane = COLUMNS / 2; lane; lane /= 2) sums[b] += __shfl_xor_sync(~0u, sums[b], lane);
            int place = row + b * GROUPS;
            if (column() || place >= grads.count) continue;
            inverse[place] = normalised ? reciprocal(total[place]) : 1.0f;
            inner[place] = sums[b];
        }
    }
}

// The first blocks have keys, `key_part` of them, and make their gradients and those of their values; the others have
// queries. `result` are the rows of the output in float32, not needed if they are not normalised.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    short_backward(const Stored *query, const Stored *key, const Stored *value, const Stored *grad, const float *result,
                   const float *total, Stored *grad_query, Stored *grad_key, Stored *grad_value, long long query_batch,
                   long long query_head, long long query_row, long long key_batch, long long key_head,
                   long long key_row, long long value_batch, long long value_head, long long value_row,
                   long long grad_batch, long long grad_head, long long grad_row, long long grad_query_batch,
                   long long grad_query_head, long long grad_query_row, long long grad_key_batch,
                   long long grad_key_head, long long grad_key_row, long long grad_value_batch,
                   long long grad_value_head, long long grad_value_row, long long heads, long long problems,
                   long long rows, long long columns, long long dims, long long channels, long long query_part,
                   long long key_part, long long scores_at, long long vectors_at, long long normalised, double tau) {
    unsigned key_parts = unsigned(columns + key_part - 1) / unsigned(key_part), key_blocks = problems * key_parts;
    bool reversed = blockIdx.x < key_blocks;
    unsigned block = reversed ? blockIdx.x : blockIdx.x - key_blocks;
    unsigned parts = reversed ? key_parts : unsigned(rows + query_part - 1) / unsigned(query_part), p = block / parts;
    int part = reversed ? key_part : query_part, first = block % parts * part;
    int own = min(int(reversed ? columns : rows) - first, part), others = reversed ? rows : columns;
    float *points_tile = reinterpret_cast<float *>(memory), *scores = points_tile + scores_at;
    float *vectors = points_tile + vectors_at;
    long long query_place = place_of(p, heads, query_batch, query_head);
    long long key_place = place_of(p, heads, key_batch, key_head);
    long long value_place = place_of(p, heads, value_batch, value_head);
    long long grad_place = place_of(p, heads, grad_batch, grad_head);
    Points points = points_of(Matrix<Stored>(key, key_place, key_row, 0, columns, dims), dims, tau);
    // points, and what the gradients by the scores are products of
    Matrix<Stored> own_points(reversed ? key : query, reversed ? key_place : query_place,
                              reversed ? key_row : query_row, first, own, dims);
    Matrix<Stored> other_points(reversed ? query : key, reversed ? query_place : key_place,
                                reversed ? query_row : key_row, 0, others, dims);
    Matrix<Stored> own_vectors(reversed ? value : grad, reversed ? value_place : grad_place,
                               reversed ? value_row : grad_row, first, own, channels);
    Matrix<Stored> other_vectors(reversed ? grad : value, reversed ? grad_place : value_place,
                                 reversed ? grad_row : value_row, 0, others, channels);
    Place place(own, others);

    int first_query = reversed ? 0 : first, queries = reversed ? others : own;
    Matrix<Stored> grads(grad, grad_place, grad_row, first_query, queries, channels);
    Matrix<float> results(result, (long long)p * rows * channels, channels, first_query, normalised ? queries : 0,
                          channels);
    const float *totals = total + (long long)p * rows + first_query;
    if (grads.whole && results.whole)
        quotients<true>(grads, results, totals, normalised);
    else
        quotients<false>(grads, results, totals, normalised);
    float sums[TM][TN];
    if (reversed) {
        scores_of(scores, points_tile, points, own_points, other_points, place, sums);
        __syncthreads();
        // the gradients of values are sums of scores and gradients
        float size = unit(points.numbers);
        keep(scores, place, others, sums,
             [&](float sum, int, int n) { return score_of(sum, points) * inverse[n] * size; });
        load(vectors, other_vectors, place.others());
        __syncthreads();
        float made[ROWS][4] = {}, unused[ROWS] = {};
        multiply(scores, vectors, others, made, unused);
        Matrix<Stored> to(grad_value, place_of(p, heads, grad_value_batch, grad_value_head), grad_value_row, first, own,
                          channels);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) to.put(own_row(i), column(), made[i]);
        __syncthreads();
    } else {
        float spoilt = 0;
        points.load<true>(points_tile, other_points, place.others(), spoilt);
        if constexpr (FACTORS) {
            each(own_points, own, [&](int, const Vector &x) {
                Vector exponent = points.exponents(x);
                for (int e = 0; e < 4; ++e) points.largest = fmaxf(points.largest, fabsf(exponent.x[e]));
            });
            points.far = __syncthreads_or(points.largest > REACH);
        }
        load(vectors, other_vectors, place.others());
    }
    load(scores, own_vectors, place.rows());
    __syncthreads();
    products(scores, vectors, channels, place, sums);
    __syncthreads();
    keep(scores, place, others, sums, [&](float sum, int m, int n) {
        int row = reversed ? n : m;
        return (sum - inner[row]) * inverse[row];
    });
    // points that are not factors serve as they are
    if constexpr (FACTORS) load(vectors, other_points, place.others());
    __syncthreads();
    Matrix<Stored> to(reversed ? grad_key : grad_query,
                      reversed ? place_of(p, heads, grad_key_batch, grad_key_head)
                               : place_of(p, heads, grad_query_batch, grad_query_head),
                      reversed ? grad_key_row : grad_query_row, first, own, dims);
    slopes(scores, FACTORS ? vectors : points_tile, FACTORS ? STRIDE : POINTS, points_tile, others, points, own_points,
           to);
}

#endif
