// The gradients of queries and keys of an additive kernel whose slope is made of steps, in float32:
// sum over n of dS[m][n] slope(q[m][d] - k[n][d]), tile by tile; nothing of size M x N leaves the chip.
//
// A block has 64 rows of its own, queries or keys, and walks over the rows of the other kind, 64 at a time; a warp has
// 16 of its own. The own rows are sorted in every dimension, once; a coordinate of another row is then a place among
// them, and a step one addition of halves that saturates: two at a time, exact, with its mean at a tie. The steps of one
// own row, 16 dimensions and 16 other rows are an operand of tensor cores; the other is dS, a large and a small half in
// columns side by side, so that the product has the digits of float32. The same call has the same bits.
//
// Set by cuda.py: NUMBER (float), KERNEL (a name of Kind), SHARED (bytes), BLOCKS (at least, on a multiprocessor),
// EPSILON (of the Riesz kernels).

#include "kinds.cu"

constexpr int THREADS = 128, OWN = 64, OTHER = 64, WIDTH = 64;
// words of a row of halves in global memory, large ones and then small ones, and in a tile
constexpr int PACKED = WIDTH, PACKED_STRIDE = PACKED + 16;
// words of a row of places: neighbouring lanes meet different banks
constexpr int PLACES = OTHER / 2 + 4;
// steps that make a slope
constexpr int STEPS = KIND == ADD_BUMP ? 3 : 1;

// what a tile holds of an other row beside its vectors: dS is their product times `scale`, and `more`
struct Row {
    float scale, more;
};

struct Shared {
    // one more row, beyond all
    float sorted[(OWN + 1) * WIDTH];
    float points[OTHER * WIDTH];
    unsigned vectors[OTHER * PACKED_STRIDE];
    unsigned places[STEPS][WIDTH * PLACES];
    // of own row m, 16 dimensions b and g: halves of dimensions g and g + 8
    unsigned ranks[OWN * WIDTH / 2];
    Row other[OTHER];
    int own_mark[OWN], other_mark[OTHER];
#ifdef ROLLED
    float2 running[4][4][THREADS];
#endif
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

// two sums of halves, not below zero and not above one; the first of both halves of `own`, or its second
inline unsigned step_first(unsigned own, unsigned others) {
    unsigned sums;
    asm("{.reg .f16 x, y; .reg .b32 both; mov.b32 {x, y}, %1; mov.b32 both, {x, x}; add.rn.sat.f16x2 %0, both, %2;}"
        : "=r"(sums)
        : "r"(own), "r"(others));
    return sums;
}
inline unsigned step_second(unsigned own, unsigned others) {
    unsigned sums;
    asm("{.reg .f16 x, y; .reg .b32 both; mov.b32 {x, y}, %1; mov.b32 both, {y, y}; add.rn.sat.f16x2 %0, both, %2;}"
        : "=r"(sums)
        : "r"(own), "r"(others));
    return sums;
}
// halves from `x` up to 2 x, of which there are 1024: x, and so many of these steps more
constexpr unsigned HALF_512 = 0x6000, HALF_513 = 0x6002;
inline unsigned subtract(unsigned one, unsigned other) {
    unsigned result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));
    return result;
}
inline unsigned times_minus_two(unsigned both) {
    unsigned result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(both), "r"(0xc000c000u));
    return result;
}

// ---- vectors as halves

struct Sizes {
    long long rows, columns, dims, channels, each, causal;
};

// A row of a matrix of at most 64 columns times `factor`, scaled to what halves hold, as large and small halves; returns
// what undoes the scale. A warp has a row.
inline float write_halves(const float *row, int width, float factor, unsigned *to) {
    int lane = threadIdx.x % 32, column = 2 * lane;
    float x = column < width ? row[column] * factor : 0.0f, y = column + 1 < width ? row[column + 1] * factor : 0.0f;
    float most = fmaxf(fabsf(x), fabsf(y));
    for (int other = 16; other; other /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
    int exponent = max(__float_as_int(most) >> 23, 14);
    float up = __int_as_float((2 * 127 + 13 - exponent) << 23), down = __int_as_float((exponent - 13) << 23);
    unsigned large, small;
    split(x * up, y * up, large, small);
    to[lane] = large;
    to[32 + lane] = small;
    return down;
}

// From the gradient by the quotient, `normalised`, or by the sums: the gradients by the sums and by the total of a row,
// the first also as halves, and the values as halves. A warp has a row, of queries first and then of keys.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare(const float *grad, const float *quotient, const float *total, const float *value, float *grad_sums,
            float *grad_total, unsigned *grad_halves, float *grad_scale, unsigned *value_halves, float *value_scale,
            long long queries, long long keys, long long channels, long long normalised) {
    long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= queries + keys) return;
    float scale;
    if (row >= queries) {
        row -= queries;
        scale = write_halves(value + row * channels, channels, 1, value_halves + row * PACKED);
        if (lane == 0) value_scale[row] = scale;
        return;
    }
    float inverse = 1, sum = 0;
    if (normalised) {
        float whole = total[row];
        inverse = fabsf(whole) < 0x1p-126f ? 0.0f : 1 / whole;
        for (long long i = row * channels + lane; i < (row + 1) * channels; i += 32) {
            sum += grad[i] * quotient[i];
            grad_sums[i] = grad[i] * inverse;
        }
        for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    }
    scale = write_halves(grad + row * channels, channels, inverse, grad_halves + row * PACKED);
    if (lane == 0) grad_scale[row] = scale, grad_total[row] = -sum * inverse;
}

// ---- places

// whether an own coordinate is below the step that another one makes, or at it
template <int STEP> inline bool below(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) return own - other < (STEP == 1 ? -numbers.edge : numbers.edge);
    return own < other;
}
template <int STEP> inline bool level(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) return own - other == (STEP == 1 ? -numbers.edge : numbers.edge);
    return own == other;
}

// twice the number of own coordinates below, and one more if the next is level
template <int STEP> inline int place_of(const float *column, float other, const Numbers &numbers) {
    int count = 0;
#pragma unroll
    for (int step = OWN / 2; step; step /= 2)
        if (below<STEP>(column[(count + step - 1) * WIDTH], other, numbers)) count += step;
    if (below<STEP>(column[count * WIDTH], other, numbers)) ++count;
    return 2 * count + level<STEP>(column[count * WIDTH], other, numbers);
}

// a thread has a dimension, and every second 32 of the other rows
template <int STEP> inline void find_places(Shared &shared, const Numbers &numbers) {
    int d = threadIdx.x % WIDTH, start = threadIdx.x / WIDTH * (OTHER * WIDTH / THREADS);
    const float *column = shared.sorted + d;
#pragma unroll 4
    for (int i = 0; i < OTHER * WIDTH / THREADS; i += 2) {
        const float *points = shared.points + (start + i) * WIDTH + d;
        unsigned one = place_of<STEP>(column, points[0] * numbers.scale, numbers);
        unsigned next = place_of<STEP>(column, points[WIDTH] * numbers.scale, numbers);
        unsigned both = (HALF_512 | HALF_512 << 16) + (one | next << 16);
        // one less the number of coordinates below, and half less at a tie: this and a rank are above zero behind the
        // step, a half at it
        shared.places[STEP][d * PLACES + (start + i) / 2] = subtract(HALF_513 | HALF_513 << 16, both);
    }
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

// how many of 32 sorted numbers are below x, or not above it
template <bool LEVEL> inline int count_below(const float *column, float x) {
    int count = 0;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        float found = column[(count + step - 1) * WIDTH];
        if (LEVEL ? found <= x : found < x) count += step;
    }
    float found = column[count * WIDTH];
    return count + (LEVEL ? found <= x : found < x);
}

// own points in order, and the ranks; two threads have a dimension
inline void sort_own(Shared &shared, const float *points, int count, int dims, float scale) {
    int d = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
    auto point = [&](int row) {
        return row >= count ? infinity() : d < dims ? points[(long long)row * dims + d] * scale : 0.0f;
    };
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = point(part * 32 + i);
    sort(x);
#pragma unroll
    for (int i = 0; i < 32; ++i) shared.points[(part * 32 + i) * WIDTH + d] = x[i];
    __syncthreads();
    const float *yours = shared.points + (1 - part) * 32 * WIDTH + d;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
        // of equal numbers those of the first part come first
        float own = shared.points[(part * 32 + i) * WIDTH + d];
        int before = i + (part ? count_below<true>(yours, own) : count_below<false>(yours, own));
        shared.sorted[before * WIDTH + d] = own;
    }
    if (part == 0) shared.sorted[OWN * WIDTH + d] = infinity() - infinity();
    __syncthreads();
    const float *column = shared.sorted + d;
    unsigned short *ranks = reinterpret_cast<unsigned short *>(shared.ranks);
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
        int row = part * 32 + i, below = 0;
        float own = point(row);
#pragma unroll
        for (int step = OWN / 2; step; step /= 2)
            if (column[(below + step - 1) * WIDTH] < own) below += step;
        // 64 numbers are never all below one of them
        unsigned short rank = subtract(HALF_512 + 2 * below, HALF_512);
        ranks[((row * 4 + d / 16) * 8 + d % 8) * 2 + d % 16 / 8] = rank;
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
    Sizes sizes;
    const float *weight, *grad_total;
    // own rows are keys
    bool keys;

    // Own marks are above the other marks that they see; those of keys that see queries have changed their signs.
    int mark(bool key, int row) const {
        int found = key ? key_mark(row, sizes.columns, weight)
                        : query_mark(row, sizes.rows, sizes.columns, sizes.each, sizes.causal);
        return keys ? -found : found;
    }
};

// asynchronously, 64 rows from `first` on; zero where there is nothing
inline void fetch(Shared &shared, const Side &side, int first, int dims) {
#pragma unroll 4
    for (int i = threadIdx.x; i < OTHER * PACKED / 4; i += THREADS) {
        int row = i / (PACKED / 4), at = i % (PACKED / 4) * 4;
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

// lane t of a group of four holds row 2 t + q % 2 + 8 (q / 2) of quad q: what the lanes of that row have
inline float of_row(const float (&rows)[2], int quad) {
    int t = threadIdx.x % 4;
    return __shfl_sync(~0u, rows[quad / 2], (2 * t + quad % 2) * 4);
}

inline void slopes_of(const Problem &problem, const Side &own, const Side &other, int first, const Numbers &numbers,
                      const float *origin, float *grad, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    int dims = problem.sizes.dims, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, base = threadIdx.x / 32 * 16;
    int left = own.count - first;
    if (threadIdx.x < OWN) shared.own_mark[threadIdx.x] = problem.mark(problem.keys, first + threadIdx.x);
    sort_own(shared, own.points + (long long)first * dims, left, dims, numbers.scale);
    __syncthreads();
    int reach = shared.own_mark[0];
    for (int i = 1; i < OWN; ++i) reach = max(reach, shared.own_mark[i]);

    // own vectors, 16 columns by 16: rows g and g + 8; large halves and small ones
    uint4 mine[2][2][2];
    float own_scale[2], own_more[2];
    int own_mark[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int row = first + base + g + 8 * r, there = min(row, own.count - 1);
        const uint4 *from = reinterpret_cast<const uint4 *>(own.vectors + (long long)there * PACKED);
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int c = 0; c < 2; ++c) mine[r][part][c] = from[part * 8 + c * 4 + t];
        own_scale[r] = own.scale[there];
        own_more[r] = problem.keys ? 0.0f : problem.grad_total[there];
        own_mark[r] = shared.own_mark[base + g + 8 * r];
    }

    float total[2] = {};
#ifdef ROLLED
    for (int i = 0; i < 16; ++i) shared.running[i / 4][i % 4][threadIdx.x] = {0, 0};
#else
    float running[4][4][2] = {};
#endif
    int now = next_tile(shared, problem, other, 0, reach);
    if (now < other.count) fetch(shared, other, now, dims);
#pragma unroll 1
    while (now < other.count) {
        arrive();
        __syncthreads();
        find_places<0>(shared, numbers);
        if constexpr (STEPS > 1) find_places<1>(shared, numbers), find_places<2>(shared, numbers);

        // dS of rows g and g + 8 and others 8 j + 2 t + e
        float score[8][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float (&sum)[4] = score[j];
            sum[0] = sum[1] = sum[2] = sum[3] = 0;
            const uint4 *row = reinterpret_cast<const uint4 *>(shared.vectors + (8 * j + g) * PACKED_STRIDE) + t;
            uint4 yours[2][2] = {{row[0], row[4]}, {row[8], row[12]}};
            auto add = [&](int one, int next) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    uint4 up = mine[0][one][c], low = mine[1][one][c], b = yours[next][c];
                    multiply_halves(sum, {up.x, low.x, up.y, low.y}, {b.x, b.y});
                    multiply_halves(sum, {up.z, low.z, up.w, low.w}, {b.z, b.w});
                }
            };
            add(0, 1);
            add(1, 0);
            add(0, 0);
        }
        float most[2] = {}, fresh_total[2] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int n = 8 * j + 2 * t + e % 2, r = e / 2;
                Row its = shared.other[n];
                float sum = fmaf(score[j][e], own_scale[r] * its.scale, own_more[r] + its.more);
                score[j][e] = sum = shared.other_mark[n] < own_mark[r] ? sum : 0.0f;
                most[r] = fmaxf(most[r], fabsf(sum));
                fresh_total[r] += sum;
            }
        float up[2], down[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
            int exponent = max(__float_as_int(most[r]) >> 23, 14);
            up[r] = __int_as_float((2 * 127 + 13 - exponent) << 23), down[r] = __int_as_float((exponent - 13) << 23);
            total[r] += fresh_total[r];
        }
        // columns of the other operand: the large halves of an own row, and its small ones
        unsigned weights[4][8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                unsigned large, small;
                split(score[j][2 * r] * up[r], score[j][2 * r + 1] * up[r], large, small);
                // of the neighbouring row
                small = __shfl_xor_sync(~0u, small, 4);
                weights[2 * r][j] = g % 2 ? small : large;
                weights[2 * r + 1][j] = g % 2 ? large : small;
            }
        __syncthreads();
        int after = next_tile(shared, problem, other, now + OTHER, reach);
        if (after < other.count) fetch(shared, other, after, dims);

        float back[4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) back[quad] = of_row(down, quad);
#ifdef ROLLED
#pragma unroll 1
#else
#pragma unroll
#endif
        for (int b = 0; b < 4; ++b) {
            unsigned place[STEPS][4][4];
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int s = 0; s < 4; ++s)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        place[step][s][e] =
                            shared.places[step][(16 * b + g + e % 2 * 8) * PLACES + 8 * s + e / 2 * 4 + t];
#pragma unroll
            for (int quad = 0; quad < 4; ++quad) {
                float sums[4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int row = base + 2 * i + quad % 2 + quad / 2 * 8;
                    unsigned rank = shared.ranks[(row * 4 + b) * 8 + g];
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[i][e] = 0;
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        unsigned once[2] = {weights[quad][2 * s], weights[quad][2 * s + 1]};
#pragma unroll
                        for (int step = 0; step < STEPS; ++step) {
                            const unsigned (&at)[4] = place[step][s];
                            unsigned steps[4] = {step_first(rank, at[0]), step_second(rank, at[1]),
                                                 step_first(rank, at[2]), step_second(rank, at[3])};
                            if (STEPS > 1 && step == 0)
                                multiply_halves(sums[i], steps, {times_minus_two(once[0]), times_minus_two(once[1])});
                            else
                                multiply_halves(sums[i], steps, once);
                        }
                    }
                }
#ifdef ROLLED
                float2 &place = shared.running[b][quad][threadIdx.x];
                float2 old = place;
                float part[2] = {old.x, old.y};
#else
                float (&part)[2] = running[b][quad];
#endif
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[i] = sums[i][2 * h] + sums[i][2 * h + 1];
                    float one = t % 2 ? sum[1] : sum[0], two = t % 2 ? sum[3] : sum[2];
                    part[h] = fmaf(t / 2 ? two : one, back[quad], part[h]);
                }
#ifdef ROLLED
                place = {part[0], part[1]};
#endif
            }
        }
        now = after;
    }

#pragma unroll
    for (int r = 0; r < 2; ++r)
        for (int x = 1; x < 4; x *= 2) total[r] += __shfl_xor_sync(~0u, total[r], x);
    double moments = 0;
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
        int row = first + base + 2 * t + quad % 2 + quad / 2 * 8;
        float whole = of_row(total, quad);
        if (row < own.count)
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int d = 16 * b + 8 * h + g;
                    if (d >= dims) continue;
                    long long place = (long long)row * dims + d;
                    float point = own.points[place];
#ifdef ROLLED
                    float2 both = shared.running[b][quad][threadIdx.x];
                    float sum = h ? both.y : both.x;
#else
                    float sum = running[b][quad][h];
#endif
                    float gradient = SIGNS ? whole - 2 * sum : sum;
                    gradient = (gradient + norm_slope(point, 0) * whole) / numbers.tau;
                    grad[place] = gradient;
                    // an offset of all points changes nothing but the rounding
                    moments += double(point - (STATIONARY && origin ? origin[d] : 0.0f)) * double(gradient);
                }
    }
    if (!moment) return;
    __syncthreads();
    double *numbers_of_all = reinterpret_cast<double *>(memory);
    numbers_of_all[threadIdx.x] = moments;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) numbers_of_all[threadIdx.x] += numbers_of_all[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *moment = numbers_of_all[0];
}

// Blocks of queries come first, problem by problem, then those of keys. `moments`, if there are any: per block the sum of
// (point - origin) gradient.
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
    Problem problem{{rows, columns, dims, 0, each, causal}, weight ? weight + p * columns : nullptr,
                    grad_total + p * rows, keys};
    Side above{query + p * rows * dims, grad_halves + p * rows * PACKED, grad_scale + p * rows, int(rows)};
    Side below{key + p * columns * dims, value_halves + p * columns * PACKED, value_scale + p * columns, int(columns)};
    Numbers numbers(bandwidth ? bandwidth[p] : float(tau), nullptr, 0);
    // the last queries first: with a causal mask they have the most to do
    int first = (keys ? tile : int(down) - 1 - tile) * OWN;
    float *grad = keys ? grad_key + p * columns * dims : grad_query + p * rows * dims;
    slopes_of(problem, keys ? below : above, keys ? above : below, first, numbers, columns ? below.points : nullptr, grad,
              moments ? moments + blockIdx.x : nullptr);
}
