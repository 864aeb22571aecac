// The gradients of queries and keys of an additive kernel whose slope is made of steps, in float32:
// sum over n of dS[m][n] slope(q[m][d] - k[n][d]), tile by tile; nothing of size M x N leaves the chip.
//
// A block has 64 rows of its own, queries or keys, and walks over the rows of the other kind, 64 at a time; two warps
// have 16 of its own, each of them half of the dimensions. The own rows are sorted in every dimension, once; a
// coordinate of another row is then a place among them, and a step one addition of halves that saturates: two at a
// time, exact, with its mean at a tie. The steps of one own row, 16 dimensions and 16 other rows are an operand of
// tensor cores; the other is dS, a large and a small half in columns side by side, so that the product has the digits
// of float32. The same call has the same bits.
//
// Set by cuda.py: NUMBER (float), KERNEL (a name of Kind), SHARED (bytes), BLOCKS (at least, on a multiprocessor),
// EPSILON (of the Riesz kernels), COARSE (1 for inputs of 16 bits: of two halves the large ones alone), SLICE (rows
// that a block prepares).

#include "kinds.cu"

// whether slopes are steps times e^-|s - t|, in factors
constexpr bool DECAY = KIND == ADD_LAPLACE;
constexpr int THREADS = 256, OWN = 64, OTHER = DECAY && !COARSE ? 32 : 64, WIDTH = 64;
// words of a row of halves in global memory, large ones and then small ones, and in a tile
constexpr int PACKED = WIDTH, PACKED_STRIDE = PACKED + 16;
// words of a row of places: neighbouring lanes meet different banks
constexpr int PLACES = OTHER / 2 + 4;
// steps that make a slope
constexpr int STEPS = KIND == ADD_BUMP ? 3 : 1;
// of powers of two that halves hold
constexpr float MOST = 14.0f;
// halves of a number; of a factor that rises, and of one that falls
constexpr int PARTS = COARSE ? 1 : 2;
constexpr int FACTORS_OF = DECAY ? 2 * PARTS : 0, SUMS = DECAY ? 2 : 1;
// how many times 16 other rows a thread holds the places of
constexpr int TOGETHER = STEPS + FACTORS_OF > 2 ? 2 : OTHER / 16;

// what a tile holds of an other row beside its vectors: dS is their product times `scale`, and `more`
struct Row {
    float scale, more;
};

// dS as halves, of a lane, of four own rows and half of the others
struct alignas(OTHER / 4) Weights {
    unsigned x[OTHER / 16];
};

struct Shared {
    // one more row, beyond all
    float sorted[(OWN + 1) * WIDTH];
    union {
        struct {
            float points[OTHER * WIDTH];
            unsigned vectors[OTHER * PACKED_STRIDE];
        };
        // while the own points are sorted
        float runs[OWN * WIDTH];
    };
    unsigned places[STEPS + FACTORS_OF][WIDTH * PLACES];
    // of own row m, 16 dimensions b and g: those of dimensions g and g + 8
    unsigned ranks[OWN * WIDTH / 2];
    Weights weights[OWN / 16][4][2][32];
    // the largest of a row of dS, in both halves of the other rows
    float most[2][OWN];
    float totals[OWN];
    Row other[OTHER];
    int own_mark[OWN], other_mark[OTHER];
};
static_assert(sizeof(Shared) <= SHARED, "cuda.py asks for less shared memory than is used");
extern __shared__ __align__(16) unsigned char memory[];

inline void copy(unsigned *to, const unsigned *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void copy_one(unsigned *to, const unsigned *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void arrive() { asm volatile("cp.async.wait_all;"); }

// two sums of halves, not below zero and not above one
inline unsigned add_halves(unsigned one, unsigned other) {
    unsigned sums;
    asm("add.rn.sat.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(one), "r"(other));
    return sums;
}
// two steps: of one own coordinate, the first or the second of a pair, and two others
template <bool SECOND> inline unsigned steps_of(unsigned pair, unsigned others) {
    return add_halves(__byte_perm(pair, 0, SECOND ? 0x3232 : 0x1010), others);
}
// halves from `x` up to 2 x, of which there are 1024: x, and so many of these steps more
constexpr unsigned HALF_512 = 0x6000, HALF_513 = 0x6002, MINUS_TWO = 0xc000c000;
inline unsigned subtract(unsigned one, unsigned other) {
    unsigned result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));
    return result;
}

inline unsigned times(unsigned one, unsigned other) {
    unsigned result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));
    return result;
}
// x less `part` of it
inline unsigned rest(unsigned part, unsigned x) {
    unsigned result;
    asm("{.reg .b32 minus; neg.f16x2 minus, %1; fma.rn.f16x2 %0, minus, %2, %2;}" : "=r"(result) : "r"(part), "r"(x));
    return result;
}

// ---- vectors as halves

// The power of two that brings numbers up to `most` into the reach of halves, and the one that undoes it.
inline void reach_of(float most, float &up, float &down) {
    // not below 14, so that both are normal numbers
    int exponent = max(__float_as_int(most) >> 23, 14);
    up = __int_as_float((2 * 127 + 13 - exponent) << 23), down = __int_as_float((exponent - 13) << 23);
}

// A row of a matrix of at most 64 columns times `factor`, scaled to what halves hold, as large and small halves;
// returns what undoes the scale. A warp has a row.
inline float write_halves(const float *row, int width, float factor, unsigned *to, Found &found) {
    int lane = threadIdx.x % 32, column = 2 * lane;
    float x = column < width ? row[column] * factor : 0.0f, y = column + 1 < width ? row[column + 1] * factor : 0.0f;
    look(x, 0.0f, found), look(y, 0.0f, found);
    float most = fmaxf(fabsf(x), fabsf(y));
    for (int other = 16; other; other /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
    float up, down;
    reach_of(most, up, down);
    unsigned large, small;
    split(x * up, y * up, large, small);
    to[lane] = large;
    to[32 + lane] = small;
    return down;
}

// From the gradient by the quotient, `normalised`, or by the sums: the gradients by the sums and by the total of a row,
// the first also as halves, and the values as halves. A warp has a row at a time, of queries or of keys. And how far
// the numbers reach that the gradients of the values are made of, as survey.cu has it: there keys see queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare(const float *query, const float *key, const float *value, const float *grad, const float *quotient,
            const float *total, float *grad_sums, float *grad_total, unsigned *grad_halves, float *grad_scale,
            unsigned *value_halves, float *value_scale, Found *found, long long rows, long long columns, long long dims,
            long long channels, long long normalised, long long slices) {
    long long p = blockIdx.x / (2 * slices);
    int slice = blockIdx.x % slices, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool keys = blockIdx.x / slices % 2 == 0;
    long long count = keys ? columns : rows;
    const float *origin = query + p * rows * dims;
    // of points; of the gradients by the sums
    Found parts[2] = {};
#pragma unroll 1
    for (int i = warp; i < SLICE && slice * SLICE + i < count; i += THREADS / 32) {
        long long row = p * count + slice * SLICE + i;
        for (int d = lane; d < dims; d += 32)
            look((keys ? key : query)[row * dims + d], DECAY && rows ? origin[d] : 0.0f, parts[0]);
        if (keys) {
            Found unused = {};
            float scale = write_halves(value + row * channels, channels, 1, value_halves + row * PACKED, unused);
            if (lane == 0) value_scale[row] = scale;
            continue;
        }
        float inverse = 1, sum = 0;
        if (normalised) {
            float whole = total[row];
            inverse = fabsf(whole) < 0x1p-126f ? 0.0f : 1 / whole;
            for (long long at = row * channels + lane; at < (row + 1) * channels; at += 32) {
                sum += grad[at] * quotient[at];
                grad_sums[at] = grad[at] * inverse;
            }
            for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        }
        float scale = write_halves(grad + row * channels, channels, inverse, grad_halves + row * PACKED, parts[1]);
        if (lane == 0) grad_scale[row] = scale, grad_total[row] = -sum * inverse;
    }

    __shared__ Found all[2][THREADS / 32];
    for (int part = 0; part < 2; ++part) {
        parts[part] = join_lanes(parts[part]);
        if (lane == 0) all[part][warp] = parts[part];
    }
    __syncthreads();
    if (lane || warp > !keys) return;
    Found mine = {};
    for (int w = 0; w < THREADS / 32; ++w) join(mine, all[warp][w]);
    found[(p * 3 + (keys ? 0 : 1 + warp)) * slices + slice] = mine;
}

// ---- places

// whether an own coordinate is below the step that another one makes, or at it, but for rounding
template <int STEP> inline bool below(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) return own - other < (STEP == 1 ? -numbers.edge : numbers.edge);
    return own < other;
}
template <int STEP> inline bool level(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) return own - other == (STEP == 1 ? -numbers.edge : numbers.edge);
    return own == other;
}
// how far it is beyond it where rounding says that it is level: what the difference has lost, which no rounding
// touches, and what the edge has
template <int STEP> inline float lost(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) {
        float difference = own - other, minus = difference - own;
        return ((own - (difference - minus)) - (other + minus)) - (STEP == 1 ? -numbers.rest : numbers.rest);
    }
    return 0.0f;
}

// How many of COUNT sorted numbers of a column of `tile` are below, for N at a time, whose reads overlap; in bytes from
// the start of the column, as addresses are made of it.
constexpr int BYTES = WIDTH * sizeof(float);
inline float at(const float *tile, int bytes) {
    return *reinterpret_cast<const float *>(reinterpret_cast<const char *>(tile) + bytes);
}
template <int COUNT, int N, class Below>
inline void search(const float *tile, int column, int (&found)[N], Below below) {
    // the first two of these are the same numbers for all
    float middle = tile[(COUNT / 2 - 1) * WIDTH + column];
    float low = tile[(COUNT / 4 - 1) * WIDTH + column], high = tile[(COUNT / 4 * 3 - 1) * WIDTH + column];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        bool up = below(middle, k);
        found[k] = 4 * column + (up ? COUNT / 2 * BYTES : 0);
        if (below(up ? high : low, k)) found[k] += COUNT / 4 * BYTES;
    }
#pragma unroll
    for (int step = COUNT / 8; step; step /= 2)
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (below(at(tile, found[k] + (step - 1) * BYTES), k)) found[k] += step * BYTES;
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (below(at(tile, found[k]), k)) found[k] += BYTES;
}

// a thread has a dimension, and a part of the `count` other rows
template <int STEP> inline void find_places(Shared &shared, const Numbers &numbers, int count) {
    int d = threadIdx.x % WIDTH, start = threadIdx.x / WIDTH * (OTHER * WIDTH / THREADS);
    constexpr int N = 8;
#pragma unroll 1
    for (int i = start; i < min(start + OTHER * WIDTH / THREADS, count); i += N) {
        float others[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) others[k] = shared.points[(i + k) * WIDTH + d] * numbers.scale;
        search<OWN>(shared.sorted, d, found, [&](float own, int k) { return below<STEP>(own, others[k], numbers); });
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            // twice the number of own coordinates below, and one more if the next is level
            unsigned both[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float other = others[k + e], own = at(shared.sorted, found[k + e]), rest = 1.0f;
                // rounding keeps the order, so those that it makes level are neighbours; hardly ever there are any
                while (level<STEP>(own, other, numbers) && (rest = lost<STEP>(own, other, numbers)) < 0.0f)
                    own = at(shared.sorted, found[k + e] += BYTES);
                both[e] = unsigned(found[k + e]) / BYTES * 2 + (level<STEP>(own, other, numbers) && rest == 0.0f);
            }
            // one less that number, and half less at a tie: this and a rank are above zero behind the step, a half at
            // it
            unsigned halves = (HALF_512 | HALF_512 << 16) + (both[0] | both[1] << 16);
            shared.places[STEP][d * PLACES + (i + k) / 2] = subtract(HALF_513 | HALF_513 << 16, halves);
        }
    }
}

// e^t and e^-t of the other rows, as powers of two from an own point in the middle; returns whether one is out of reach
inline bool find_factors(Shared &shared, float origin, float rate, int count) {
    bool far = false;
    int d = threadIdx.x % WIDTH, start = threadIdx.x / WIDTH * (OTHER * WIDTH / THREADS);
#pragma unroll 4
    for (int i = 0; i < OTHER * WIDTH / THREADS; i += 2) {
        float rise[2], fall[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float x = (shared.points[(start + i + e) * WIDTH + d] - origin) * rate;
            // not `>`, which is false for a NaN
            far |= start + i + e < count && !(fabsf(x) <= MOST);
            x = fminf(fmaxf(x, -MOST), MOST);
            // twice as large as they are, for the sake of the smallest
            rise[e] = power_of_two(x + 1), fall[e] = power_of_two(1 - x);
        }
        int place = d * PLACES + (start + i) / 2;
        unsigned small[2];
        split(rise[0], rise[1], shared.places[1][place], small[0]);
        split(fall[0], fall[1], shared.places[1 + PARTS][place], small[1]);
        if (PARTS > 1) shared.places[2][place] = small[0], shared.places[2 + PARTS][place] = small[1];
    }
    return far;
}

// sorts 32 numbers that a thread holds
inline void sort(float (&x)[32]) {
#pragma unroll
    for (int size = 0; size < 5; ++size)
#pragma unroll
        for (int stride = size; stride >= 0; --stride)
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (!(i >> stride & 1)) {
                    int j = i | 1 << stride;
                    float low = fminf(x[i], x[j]), high = fmaxf(x[i], x[j]);
                    bool up = size == 4 || !(i >> (size + 1) & 1);
                    x[i] = up ? low : high, x[j] = up ? high : low;
                }
}

// own points in order, and the ranks; first two threads have a dimension, and then four
inline void sort_own(Shared &shared, const float *points, int count, int dims, float scale) {
    int d = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
    auto point = [&](int row) {
        return row >= count ? infinity() : d < dims ? points[(long long)row * dims + d] * scale : 0.0f;
    };
    if (part < 2) {
        float x[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = point(part * 32 + i);
        sort(x);
#pragma unroll
        for (int i = 0; i < 32; ++i) shared.runs[(part * 32 + i) * WIDTH + d] = x[i];
    }
    __syncthreads();
    const float *yours = shared.runs + (1 - part) * 32 * WIDTH;
    constexpr int N = 8;
#pragma unroll 1
    for (int i = part < 2 ? 0 : 32; i < 32; i += N) {
        float own[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) own[k] = shared.runs[(part * 32 + i + k) * WIDTH + d];
        // of equal numbers those of the first part come first
        search<32>(yours, d, found, [&](float x, int k) { return x < own[k] || (part && x == own[k]); });
#pragma unroll
        for (int k = 0; k < N; ++k) shared.sorted[found[k] / 4 + (i + k) * WIDTH] = own[k];
    }
    if (part == 0) shared.sorted[OWN * WIDTH + d] = infinity() - infinity();
    __syncthreads();
    unsigned short *ranks = reinterpret_cast<unsigned short *>(shared.ranks);
#pragma unroll 1
    for (int i = part * 16; i < part * 16 + 16; i += N) {
        float own[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) own[k] = point(i + k);
        search<OWN>(shared.sorted, d, found, [&](float x, int k) { return x < own[k]; });
#pragma unroll
        for (int k = 0; k < N; ++k) {
            unsigned twice = unsigned(found[k]) / BYTES * 2;
            unsigned short rank = subtract(HALF_512 + twice, HALF_512);
            ranks[(((i + k) * 4 + d / 16) * 8 + d % 8) * 2 + d % 16 / 8] = rank;
        }
    }
}

// ---- the kernel

// what belongs to the other rows, or to the own ones
struct Side {
    const float *points;
    const unsigned *vectors;
    const float *scale;
    int count;
};

struct Problem {
    int rows, columns, dims, each;
    bool causal;
    const float *weight, *grad_total;
    // own rows are keys
    bool keys;

    // Own marks are above the other marks that they see; those of keys that see queries have changed their signs.
    int mark(bool key, int row) const {
        int found = key ? key_mark(row, columns, weight) : query_mark(row, rows, columns, each, causal);
        return keys ? -found : found;
    }
};

// asynchronously, 64 rows from `first` on; zero where there is nothing
inline void fetch(Shared &shared, const Side &side, int first, int dims) {
#pragma unroll 4
    for (int i = threadIdx.x; i < OTHER * PACKED * PARTS / 8; i += THREADS) {
        int row = i / (PACKED * PARTS / 8), at = i % (PACKED * PARTS / 8) * 4;
        bool there = first + row < side.count;
        const unsigned *from = side.vectors + (long long)(there ? first + row : 0) * PACKED + at;
        copy(shared.vectors + row * PACKED_STRIDE + at, from, there ? 16 : 0);
    }
    const unsigned *points = reinterpret_cast<const unsigned *>(side.points);
    unsigned *to = reinterpret_cast<unsigned *>(shared.points);
    if ((reinterpret_cast<unsigned long long>(points) | dims * 4) % 16 == 0)
#pragma unroll 4
        for (int i = threadIdx.x; i < OTHER * WIDTH / 4; i += THREADS) {
            int row = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
            bool there = first + row < side.count && at < dims;
            copy(to + row * WIDTH + at, there ? points + (long long)(first + row) * dims + at : points, there ? 16 : 0);
        }
    else
#pragma unroll 1
        for (int i = threadIdx.x; i < OTHER * WIDTH; i += THREADS) {
            int row = i / WIDTH, at = i % WIDTH;
            bool there = first + row < side.count && at < dims;
            copy_one(to + i, there ? points + (long long)(first + row) * dims + at : points, there ? 4 : 0);
        }
}

// the first tile from `first` on that the block sees something of; what belongs to its rows is in shared memory then
inline int next_tile(Shared &shared, const Problem &problem, const Side &other, int first, int reach) {
    for (; first < other.count; first += OTHER) {
        bool any = false;
        if (threadIdx.x < OTHER) {
            int row = first + threadIdx.x, mark = problem.mark(!problem.keys, row);
            bool inside = row < other.count;
            shared.other_mark[threadIdx.x] = mark;
            shared.other[threadIdx.x] = {inside ? other.scale[row] : 0.0f,
                                         problem.keys && inside ? problem.grad_total[row] : 0.0f};
            any = mark < reach;
        }
        if (__syncthreads_or(any)) break;
    }
    return first;
}

// where a thread is: 16 own rows from `base` on, `half` of the other rows, and then of the dimensions
struct Lane {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, group = threadIdx.x / 32 % 4, half = threadIdx.x / 128;
    int base = group * 16;
    // of quad q, and of 16 dimensions b
    int row(int quad) const { return base + 2 * t + quad % 2 + quad / 2 * 8; }
    int dim(int b, int h) const { return 32 * half + 16 * b + 8 * h + g; }
};

// what S times 16 other rows from `start` on add to four own rows in 16 dimensions
template <int S> inline void add_steps(const Weights (&all)[2][32], int start, const unsigned (&rank)[4],
                                       const unsigned (&place)[STEPS + FACTORS_OF][S][4], float (&sums)[SUMS][4][4]) {
    auto steps_at = [&](int i, const unsigned (&at)[4], unsigned (&steps)[4]) {
        steps[0] = steps_of<false>(rank[i], at[0]), steps[1] = steps_of<true>(rank[i], at[1]);
        steps[2] = steps_of<false>(rank[i], at[2]), steps[3] = steps_of<true>(rank[i], at[3]);
    };
#pragma unroll
    for (int s = 0; s < S; ++s) {
        constexpr int EACH = OTHER / 16;
        int at = 2 * (start + s);
        const unsigned *from = all[at / EACH][threadIdx.x % 32].x + at % EACH;
        unsigned weights[2] = {from[0], from[1]};
        if constexpr (DECAY) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned steps[4];
                steps_at(i, place[0][s], steps);
#pragma unroll
                for (int small = PARTS - 1; small >= 0; --small) {
                    unsigned rise[4], fall[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        rise[e] = times(steps[e], place[1 + small][s][e]);
                        fall[e] = rest(steps[e], place[1 + PARTS + small][s][e]);
                    }
                    multiply_halves(sums[0][i], rise, weights);
                    multiply_halves(sums[1][i], fall, weights);
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned those[2] = {weights[0], weights[1]};
                if (STEPS > 1 && step == 0)
                    those[0] = times(those[0], MINUS_TWO), those[1] = times(those[1], MINUS_TWO);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    unsigned steps[4];
                    steps_at(i, place[step][s], steps);
                    multiply_halves(sums[0][i], steps, those);
                }
            }
        }
    }
}

// of four own rows that of lane t, from its columns of large and small halves
inline float of_four(const float (&sums)[4][4], int e) {
    int t = threadIdx.x % 4;
    float one = t % 2 ? sums[1][e] + sums[1][e + 1] : sums[0][e] + sums[0][e + 1];
    float two = t % 2 ? sums[3][e] + sums[3][e + 1] : sums[2][e] + sums[2][e + 1];
    return t / 2 ? two : one;
}

// sums of a tile one by one, where factors are out of reach
inline void add_apart(Shared &shared, const Side &own, const float (&score)[OTHER / 16][4], int first, int dims,
                      const Numbers &numbers, float (&apart)[DECAY ? 16 : 1]) {
    if constexpr (DECAY) {
        constexpr int STRIDE = OTHER + 1;
        static_assert(OWN * STRIDE <= OTHER * PACKED_STRIDE, "the scores are larger than the vectors");
        Lane lane;
        float *scores = reinterpret_cast<float *>(shared.vectors);
#pragma unroll
        for (int j = 0; j < OTHER / 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores[(lane.base + lane.g + e / 2 * 8) * STRIDE + lane.half * OTHER / 2 + 8 * j + 2 * lane.t + e % 2] =
                    score[j][e];
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {
            int row = lane.row(i / 2 % 4), d = lane.dim(i / 8, i % 2);
            float point = first + row < own.count && d < dims ? own.points[(long long)(first + row) * dims + d] : 0.0f;
            float sum = 0;
#pragma unroll 4
            for (int n = 0; n < OTHER; ++n)
                sum += scores[row * STRIDE + n] * slope(point - shared.points[n * WIDTH + d], numbers);
            apart[i] += sum;
        }
    }
}

// dS of own rows g and g + 8 of a lane's group and of half of the other rows, 8 j + 2 t + e
struct Scores {
    const uint4 *vectors[2];
    float scale[2], more[2], total[2] = {};
    int mark[2];

    Scores(const Shared &shared, const Problem &problem, const Side &own, int first) {
        Lane lane;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = lane.base + lane.g + 8 * r, there = min(first + row, own.count - 1);
            vectors[r] = reinterpret_cast<const uint4 *>(own.vectors + (long long)there * PACKED) + lane.t;
            scale[r] = own.scale[there];
            more[r] = problem.keys ? 0.0f : problem.grad_total[there];
            mark[r] = shared.own_mark[row];
        }
    }

    // Zero beyond the last of `left` own rows and `here` others; the largest of each row is in shared memory then.
    void make(Shared &shared, int left, int here, float (&score)[OTHER / 16][4]) {
        Lane lane;
        if (lane.base >= left || lane.half * OTHER / 2 >= here) {
            for (int i = 0; i < OTHER / 4; ++i) score[i / 4][i % 4] = 0;
            for (int r = 0; r < 2; ++r) shared.most[lane.half][lane.base + lane.g + 8 * r] = 0;
            return;
        }
        // 16 columns by 16; large halves and small ones
        uint4 mine[2][2][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) mine[i / 4][i / 2 % 2][i % 2] = vectors[i / 4][i / 2 % 2 * 8 + i % 2 * 4];
        float most[2] = {}, fresh[2] = {};
#pragma unroll
        for (int j = 0; j < OTHER / 16; ++j) {
            int first = lane.half * OTHER / 2 + 8 * j;
            const uint4 *row = reinterpret_cast<const uint4 *>(shared.vectors + (first + lane.g) * PACKED_STRIDE);
            uint4 yours[2][2];
#pragma unroll
            for (int part = 0; part < 2; ++part)
#pragma unroll
                for (int c = 0; c < 2; ++c) yours[part][c] = row[part * 8 + c * 4 + lane.t];
            // three products at a time do not wait for each other
            float sums[3][4] = {};
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int product = COARSE ? 2 : 0; product < 3; ++product) {
                    uint4 up = mine[0][product == 1][c], low = mine[1][product == 1][c], b = yours[product == 0][c];
                    multiply_halves(sums[product], {up.x, low.x, up.y, low.y}, {b.x, b.y});
                }
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int product = COARSE ? 2 : 0; product < 3; ++product) {
                    uint4 up = mine[0][product == 1][c], low = mine[1][product == 1][c], b = yours[product == 0][c];
                    multiply_halves(sums[product], {up.z, low.z, up.w, low.w}, {b.z, b.w});
                }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int n = first + 2 * lane.t + e % 2, r = e / 2;
                Row its = shared.other[n];
                float sum = sums[2][e] + (sums[0][e] + sums[1][e]);
                sum = fmaf(sum, scale[r] * its.scale, more[r] + its.more);
                score[j][e] = sum = shared.other_mark[n] < mark[r] ? sum : 0.0f;
                most[r] = fmaxf(most[r], fabsf(sum));
                fresh[r] += sum;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
            shared.most[lane.half][lane.base + lane.g + 8 * r] = most[r];
            total[r] += fresh[r];
        }
    }
};

// dS as columns of the other operand, of a lane and half of the other rows: large halves of an own row, its small ones
inline void keep_weights(Shared &shared, const float (&score)[OTHER / 16][4]) {
    Lane lane;
    Weights quads[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int row = lane.base + lane.g + 8 * r;
        float up, down;
        reach_of(fmaxf(shared.most[0][row], shared.most[1][row]), up, down);
#pragma unroll
        for (int j = 0; j < OTHER / 16; ++j) {
            unsigned large, small;
            split(score[j][2 * r] * up, score[j][2 * r + 1] * up, large, small);
            // of the neighbouring row
            small = COARSE ? 0 : __shfl_xor_sync(~0u, small, 4);
            quads[2 * r].x[j] = lane.g % 2 ? small : large;
            quads[2 * r + 1].x[j] = lane.g % 2 ? large : small;
        }
    }
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) shared.weights[lane.group][quad][lane.half][threadIdx.x % 32] = quads[quad];
}

// what S times 16 other rows from `start` on add to 16 own rows in half of the dimensions
template <int S>
inline void add_rows(const Shared &shared, int start, const float (&back)[4], float (&running)[SUMS][2][4][2]) {
    Lane lane;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        unsigned place[STEPS + FACTORS_OF][S][4];
#pragma unroll
        for (int step = 0; step < STEPS + FACTORS_OF; ++step)
#pragma unroll
            for (int i = 0; i < 4 * S; ++i) {
                const unsigned *row = shared.places[step] + lane.dim(b, i % 2) * PLACES;
                place[step][i / 4][i % 4] = row[8 * (start + i / 4) + i % 4 / 2 * 4 + lane.t];
            }
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            unsigned rank[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = lane.base + 2 * i + quad % 2 + quad / 2 * 8;
                rank[i] = shared.ranks[(row * 4 + 2 * lane.half + b) * 8 + lane.g];
            }
            float sums[SUMS][4][4] = {};
            add_steps<S>(shared.weights[lane.group][quad], start, rank, place, sums);
#pragma unroll
            for (int which = 0; which < SUMS; ++which)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float &sum = running[which][b][quad][h];
                    sum = fmaf(of_four(sums[which], 2 * h), back[quad], sum);
                }
        }
    }
}

// the two warps of 16 own rows put the totals of dS together
inline void join_totals(Shared &shared, Scores &scores) {
    Lane lane;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        for (int x = 1; x < 4; x *= 2) scores.total[r] += __shfl_xor_sync(~0u, scores.total[r], x);
        if (lane.half == 0) shared.totals[lane.base + lane.g + 8 * r] = scores.total[r];
    }
    __syncthreads();
    if (lane.half && lane.t == 0)
        for (int r = 0; r < 2; ++r) shared.totals[lane.base + lane.g + 8 * r] += scores.total[r];
    __syncthreads();
}

// where the gradients of the own rows go
struct Gradients {
    float *to;
    const float *first_key;
    double moments = 0;

    void write(const Side &own, int row, int d, int dims, float gradient, float total, const Numbers &numbers) {
        long long place = (long long)row * dims + d;
        float point = own.points[place];
        to[place] = gradient = (gradient + norm_slope(point, 0) * total) / numbers.tau;
        // an offset of all points changes nothing but the rounding
        moments += double(point - (STATIONARY && first_key ? first_key[d] : 0.0f)) * double(gradient);
    }
    // what all threads have found
    void leave(double *moment) const {
        if (!moment) return;
        __syncthreads();
        double *sums = reinterpret_cast<double *>(memory);
        sums[threadIdx.x] = moments;
        __syncthreads();
        for (int half = THREADS / 2; half; half /= 2) {
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) *moment = sums[0];
    }
};

// for at most this many own rows, as at the end of a sequence, sorting them takes longer than one step after the other
constexpr int FEW = 8;

// the step of an own coordinate and another one, exactly
template <int STEP> inline float step_of(float own, float other, const Numbers &numbers) {
    if (below<STEP>(own, other, numbers)) return 0.0f;
    return level<STEP>(own, other, numbers) ? step(lost<STEP>(own, other, numbers)) : 1.0f;
}
inline float slope_of(float own, float other, const Numbers &numbers) {
    if constexpr (KIND != ADD_BUMP) return slope(own - other, numbers);
    own *= numbers.scale, other *= numbers.scale;
    return step_of<1>(own, other, numbers) - 2 * step_of<0>(own, other, numbers) + step_of<2>(own, other, numbers);
}

inline void slopes_of_few(const Problem &problem, const Side &own, const Side &other, int first, const Numbers &numbers,
                          Gradients gradients, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Lane lane;
    int dims = problem.dims, left = own.count - first, d = threadIdx.x % WIDTH;
    if (threadIdx.x < OWN) shared.own_mark[threadIdx.x] = problem.mark(problem.keys, first + threadIdx.x);
    __syncthreads();
    int reach = shared.own_mark[0];
    for (int i = 1; i < FEW; ++i) reach = max(reach, shared.own_mark[i]);
    Scores scores(shared, problem, own, first);
    constexpr int PARTS_OF = THREADS / WIDTH, STRIDE = OTHER + 1;
    float *tile = shared.sorted, point[FEW / PARTS_OF], sums[FEW / PARTS_OF] = {};
    auto row_of = [&](int i) { return threadIdx.x / WIDTH + i * PARTS_OF; };
    auto mine = [&](int i) { return row_of(i) < left && d < dims; };
#pragma unroll
    for (int i = 0; i < FEW / PARTS_OF; ++i)
        point[i] = mine(i) ? own.points[(long long)(first + row_of(i)) * dims + d] : 0.0f;
    int now = next_tile(shared, problem, other, 0, reach);
    if (now < other.count) fetch(shared, other, now, dims);
#pragma unroll 1
    while (now < other.count) {
        arrive();
        __syncthreads();
        int here = min(other.count - now, OTHER);
        float score[OTHER / 16][4];
        scores.make(shared, left, here, score);
        if (lane.group == 0)
#pragma unroll
            for (int j = 0; j < OTHER / 16; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    tile[lane.g * STRIDE + lane.half * OTHER / 2 + 8 * j + 2 * lane.t + e] = score[j][e];
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < FEW / PARTS_OF && mine(i); ++i) {
            float sum = 0;
#pragma unroll 4
            for (int n = 0; n < here; ++n)
                sum += tile[row_of(i) * STRIDE + n] * slope_of(point[i], shared.points[n * WIDTH + d], numbers);
            sums[i] += sum;
        }
        __syncthreads();
        now = next_tile(shared, problem, other, now + OTHER, reach);
        if (now < other.count) fetch(shared, other, now, dims);
    }
    join_totals(shared, scores);
#pragma unroll
    for (int i = 0; i < FEW / PARTS_OF; ++i)
        if (mine(i)) {
            float total = shared.totals[row_of(i)];
            gradients.write(own, first + row_of(i), d, dims, SIGNS ? total - 2 * sums[i] : sums[i], total, numbers);
        }
    gradients.leave(moment);
}

inline void slopes_of(const Problem &problem, const Side &own, const Side &other, int first, const Numbers &numbers,
                      Gradients gradients, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Lane lane;
    int dims = problem.dims, left = own.count - first;
    if (left <= FEW) return slopes_of_few(problem, own, other, first, numbers, gradients, moment);
    if (threadIdx.x < OWN) shared.own_mark[threadIdx.x] = problem.mark(problem.keys, first + threadIdx.x);
    sort_own(shared, own.points + (long long)first * dims, left, dims, numbers.scale);
    __syncthreads();
    int reach = shared.own_mark[0];
    for (int i = 1; i < OWN; ++i) reach = max(reach, shared.own_mark[i]);

    Scores scores(shared, problem, own, first);
    float running[SUMS][2][4][2] = {};
    // of tiles that factors do not serve
    float apart[DECAY ? 16 : 1] = {};
    // a point in the middle of the own ones
    float origin = DECAY ? shared.sorted[min(left, OWN) / 2 * WIDTH + threadIdx.x % WIDTH] : 0.0f;
    int now = next_tile(shared, problem, other, 0, reach);
    if (now < other.count) fetch(shared, other, now, dims);
#pragma unroll 1
    while (now < other.count) {
        arrive();
        __syncthreads();
        int here = min(other.count - now, OTHER);
        float score[OTHER / 16][4];
        scores.make(shared, left, here, score);
        int filled = (here + 15) / 16 * 16;
        find_places<0>(shared, numbers, filled);
        if constexpr (STEPS > 1) find_places<1>(shared, numbers, filled), find_places<2>(shared, numbers, filled);
        bool far = DECAY && find_factors(shared, origin, numbers.rate, here);
        far = __syncthreads_or(far);
        if (far) {
            add_apart(shared, own, score, first, dims, numbers, apart);
            __syncthreads();
        } else
            keep_weights(shared, score);
        now = next_tile(shared, problem, other, now + OTHER, reach);
        if (now < other.count) fetch(shared, other, now, dims);
        if (far) continue;
        __syncthreads();

        // nothing to do for a warp beyond the last own row
        if (lane.base >= left) continue;
        float back[4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            float up;
            reach_of(fmaxf(shared.most[0][lane.row(quad)], shared.most[1][lane.row(quad)]), up, back[quad]);
        }
        if (here <= 16)
            add_rows<1>(shared, 0, back, running);
        else
#pragma unroll 1
            for (int start = 0; 16 * start < here; start += TOGETHER) add_rows<TOGETHER>(shared, start, back, running);
    }

    join_totals(shared, scores);
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
        int row = first + lane.row(quad);
        float total = shared.totals[lane.row(quad)];
        if (row < own.count)
#pragma unroll
            for (int b = 0; b < 2; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int d = lane.dim(b, h);
                    if (d >= dims) continue;
                    float sum = running[0][b][quad][h], gradient = SIGNS ? total - 2 * sum : sum;
                    if constexpr (DECAY) {
                        // an own point far away from all others has no sums, and its factor may be infinite
                        float middle = shared.sorted[min(left, OWN) / 2 * WIDTH + d];
                        float x = (own.points[(long long)row * dims + d] - middle) * numbers.rate;
                        x = fminf(fmaxf(x, -100.0f), 100.0f);
                        gradient = power_of_two(x) * running[1][b][quad][h] - power_of_two(-x) * sum;
                        gradient = gradient / 2 + apart[8 * b + 2 * quad + h];
                    }
                    gradients.write(own, row, d, dims, gradient, total, numbers);
                }
    }
    gradients.leave(moment);
}

// Blocks of queries come first, problem by problem, then those of keys. `moments`, if there are any: per block the sum
// of (point - origin) gradient.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slopes(const float *query, const float *key, const unsigned *grad_halves, const float *grad_scale,
           const float *grad_total, const unsigned *value_halves, const float *value_scale, const float *weight,
           const float *bandwidth, float *grad_query, float *grad_key, double *moments, long long problems,
           long long rows, long long columns, long long dims, long long each, long long causal, double tau) {
    unsigned down = (rows + OWN - 1) / OWN, across = (columns + OWN - 1) / OWN, block = blockIdx.x;
    bool keys = block >= problems * down;
    if (keys) block -= problems * down;
    long long p = block / (keys ? across : down);
    int tile = block % (keys ? across : down);
    Problem problem{int(rows),
                    int(columns),
                    int(dims),
                    int(each),
                    causal != 0,
                    weight ? weight + p * columns : nullptr,
                    grad_total + p * rows,
                    keys};
    auto side = [&](bool of_keys) {
        long long start = p * (of_keys ? columns : rows);
        return Side{(of_keys ? key : query) + start * dims, (of_keys ? value_halves : grad_halves) + start * PACKED,
                    (of_keys ? value_scale : grad_scale) + start, int(of_keys ? columns : rows)};
    };
    Side own = side(keys), other = side(!keys);
    Numbers numbers(bandwidth ? bandwidth[p] : float(tau), nullptr, 0);
    if (!bandwidth) numbers.rest = float(tau * numbers.scale - numbers.edge);
    // the last queries first: with a causal mask they have the most to do
    int first = (keys ? tile : int(down) - 1 - tile) * OWN;
    float *grad = keys ? grad_key + p * columns * dims : grad_query + p * rows * dims;
    slopes_of(problem, own, other, first, numbers, {grad, columns ? key + p * columns * dims : nullptr},
              moments ? moments + blockIdx.x : nullptr);
}
