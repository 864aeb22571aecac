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

// whether slopes are steps times e^-|s - t|, in factors
constexpr bool DECAY = KIND == ADD_LAPLACE;
constexpr int THREADS = 128, OWN = 64, OTHER = DECAY ? 32 : 64, WIDTH = 64;
// words of a row of halves in global memory, large ones and then small ones, and in a tile
constexpr int PACKED = WIDTH, PACKED_STRIDE = PACKED + 16;
// words of a row of places: neighbouring lanes meet different banks
constexpr int PLACES = OTHER / 2 + 4;
// steps that make a slope
constexpr int STEPS = KIND == ADD_BUMP ? 3 : 1;
// of powers of two that halves hold; one that rises and one that falls, both large and small halves
constexpr float MOST = 14.0f;
constexpr int FACTORS_OF = DECAY ? 4 : 0, SUMS = DECAY ? 2 : 1;

// what a tile holds of an other row beside its vectors: dS is their product times `scale`, and `more`
struct Row {
    float scale, more;
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
    // of own row m, 16 dimensions b and g: halves of dimensions g and g + 8
    unsigned ranks[OWN * WIDTH / 2];
    // a thread's sums, of 16 dimensions and four own rows
    float running[16][SUMS][2 * THREADS];
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

// How many of COUNT sorted numbers of a column of `tile` are below, for N at a time, whose reads overlap; in bytes from
// the start of the column, as addresses are made of it.
constexpr int BYTES = WIDTH * sizeof(float);
inline float at(const float *tile, int bytes) {
    return *reinterpret_cast<const float *>(reinterpret_cast<const char *>(tile) + bytes);
}
template <int COUNT, int N, class Below>
inline void search(const float *tile, int column, int (&found)[N], Below below) {
#pragma unroll
    for (int k = 0; k < N; ++k) found[k] = 4 * column;
#pragma unroll
    for (int step = COUNT / 2; step; step /= 2)
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (below(at(tile, found[k] + (step - 1) * BYTES), k)) found[k] += step * BYTES;
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (below(at(tile, found[k]), k)) found[k] += BYTES;
}

// a thread has a dimension, and every second half of the other rows
template <int STEP> inline void find_places(Shared &shared, const Numbers &numbers) {
    int d = threadIdx.x % WIDTH, start = threadIdx.x / WIDTH * (OTHER * WIDTH / THREADS);
    constexpr int N = 8;
#pragma unroll 1
    for (int i = start; i < start + OTHER * WIDTH / THREADS; i += N) {
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
            for (int e = 0; e < 2; ++e)
                both[e] = unsigned(found[k + e]) / BYTES * 2 +
                          level<STEP>(at(shared.sorted, found[k + e]), others[k + e], numbers);
            unsigned halves = (HALF_512 | HALF_512 << 16) + (both[0] | both[1] << 16);
            // one less that number, and half less at a tie: this and a rank are above zero behind the step, a half at it
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
        split(rise[0], rise[1], shared.places[1][place], shared.places[2][place]);
        split(fall[0], fall[1], shared.places[3][place], shared.places[4][place]);
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
    for (int i = 0; i < 32; ++i) shared.runs[(part * 32 + i) * WIDTH + d] = x[i];
    __syncthreads();
    const float *yours = shared.runs + (1 - part) * 32 * WIDTH;
    constexpr int N = 8;
#pragma unroll 1
    for (int i = 0; i < 32; i += N) {
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
    for (int i = part * 32; i < part * 32 + 32; i += N) {
        float own[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) own[k] = point(i + k);
        search<OWN>(shared.sorted, d, found, [&](float x, int k) { return x < own[k]; });
#pragma unroll
        for (int k = 0; k < N; ++k) {
            unsigned short rank = subtract(HALF_512 + unsigned(found[k]) / BYTES * 2, HALF_512);
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

// sums[][i] += what 16 other rows add to own row i of a quad, 16 dimensions and the other rows' part `s` of `place`
template <int ALL, int S> inline void add_steps(unsigned rank, const unsigned (&place)[ALL][S][4], int s,
                                                const unsigned (&weights)[2], float (&sums)[SUMS][4][4], int i) {
    auto steps_at = [&](int step, unsigned (&steps)[4]) {
        const unsigned (&at)[4] = place[step][s];
        steps[0] = step_first(rank, at[0]), steps[1] = step_second(rank, at[1]);
        steps[2] = step_first(rank, at[2]), steps[3] = step_second(rank, at[3]);
    };
    unsigned steps[4];
    steps_at(0, steps);
    if constexpr (DECAY) {
#pragma unroll
        for (int small = 1; small >= 0; --small) {
            unsigned rise[4], fall[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                rise[e] = times(steps[e], place[1 + small][s][e]);
                fall[e] = rest(steps[e], place[3 + small][s][e]);
            }
            multiply_halves(sums[0][i], rise, weights);
            multiply_halves(sums[1][i], fall, weights);
        }
    } else if constexpr (STEPS > 1) {
        multiply_halves(sums[0][i], steps, {times(weights[0], MINUS_TWO), times(weights[1], MINUS_TWO)});
#pragma unroll
        for (int step = 1; step < STEPS; ++step) {
            steps_at(step, steps);
            multiply_halves(sums[0][i], steps, weights);
        }
    } else
        multiply_halves(sums[0][i], steps, weights);
}

// of four own rows that of lane t, from its columns of large and small halves
inline float of_four(const float (&sums)[4][4], int e) {
    int t = threadIdx.x % 4;
    float one = t % 2 ? sums[1][e] + sums[1][e + 1] : sums[0][e] + sums[0][e + 1];
    float two = t % 2 ? sums[3][e] + sums[3][e + 1] : sums[2][e] + sums[2][e + 1];
    return t / 2 ? two : one;
}

// sums of a tile one by one, where factors are out of reach
inline void add_apart(Shared &shared, const Side &own, const float (&score)[OTHER / 8][4], int first, int dims,
                      const Numbers &numbers, float (&apart)[DECAY ? 32 : 1]) {
    if constexpr (DECAY) {
        constexpr int STRIDE = OTHER + 1;
        static_assert(OWN * STRIDE <= OTHER * PACKED_STRIDE, "scores are larger than the vectors");
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, base = threadIdx.x / 32 * 16;
        float *scores = reinterpret_cast<float *>(shared.vectors);
#pragma unroll
        for (int j = 0; j < OTHER / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores[(base + g + e / 2 * 8) * STRIDE + 8 * j + 2 * t + e % 2] = score[j][e];
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < 32; ++i) {
            int quad = i / 2 % 4, d = i / 8 * 16 + i % 2 * 8 + g, row = base + 2 * t + quad % 2 + quad / 2 * 8;
            float point = first + row < own.count && d < dims ? own.points[(long long)(first + row) * dims + d] : 0.0f;
            float sum = 0;
#pragma unroll 4
            for (int n = 0; n < OTHER; ++n)
                sum += scores[row * STRIDE + n] * slope(point - shared.points[n * WIDTH + d], numbers);
            apart[i] += sum;
        }
    }
}

inline void slopes_of(const Problem &problem, const Side &own, const Side &other, int first, const Numbers &numbers,
                      const float *first_key, float *grad, double *moment) {
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
    // of tiles that factors do not serve
    float apart[DECAY ? 32 : 1] = {};
    for (int i = 0; i < 16 * SUMS; ++i)
        *reinterpret_cast<float2 *>(shared.running[i / SUMS][i % SUMS] + 2 * threadIdx.x) = {0, 0};
    // a point in the middle of the own ones
    float origin = DECAY ? shared.sorted[min(left, OWN) / 2 * WIDTH + threadIdx.x % WIDTH] : 0.0f;
    int now = next_tile(shared, problem, other, 0, reach);
    if (now < other.count) fetch(shared, other, now, dims);
#pragma unroll 1
    while (now < other.count) {
        arrive();
        __syncthreads();
        find_places<0>(shared, numbers);
        if constexpr (STEPS > 1) find_places<1>(shared, numbers), find_places<2>(shared, numbers);
        bool far = DECAY && find_factors(shared, origin, numbers.rate, other.count - now);

        // dS of rows g and g + 8 and others 8 j + 2 t + e
        float score[OTHER / 8][4];
#pragma unroll
        for (int j = 0; j < OTHER / 8; ++j) {
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
        for (int j = 0; j < OTHER / 8; ++j)
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
        unsigned weights[4][OTHER / 8];
#pragma unroll
        for (int j = 0; j < OTHER / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                unsigned large, small;
                split(score[j][2 * r] * up[r], score[j][2 * r + 1] * up[r], large, small);
                // of the neighbouring row
                small = __shfl_xor_sync(~0u, small, 4);
                weights[2 * r][j] = g % 2 ? small : large;
                weights[2 * r + 1][j] = g % 2 ? large : small;
            }
        if (__syncthreads_or(far)) {
            add_apart(shared, own, score, first, dims, numbers, apart);
            __syncthreads();
            now = next_tile(shared, problem, other, now + OTHER, reach);
            if (now < other.count) fetch(shared, other, now, dims);
            continue;
        }
        int after = next_tile(shared, problem, other, now + OTHER, reach);
        if (after < other.count) fetch(shared, other, after, dims);

        float back[4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) back[quad] = of_row(down, quad);
#pragma unroll 1
        for (int b = 0; b < 4; ++b) {
            constexpr int ALL = STEPS + FACTORS_OF;
            unsigned place[ALL][OTHER / 16][4];
#pragma unroll
            for (int step = 0; step < ALL; ++step)
#pragma unroll
                for (int s = 0; s < OTHER / 16; ++s)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        place[step][s][e] =
                            shared.places[step][(16 * b + g + e % 2 * 8) * PLACES + 8 * s + e / 2 * 4 + t];
#pragma unroll
            for (int quad = 0; quad < 4; ++quad) {
                float sums[SUMS][4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int row = base + 2 * i + quad % 2 + quad / 2 * 8;
                    unsigned rank = shared.ranks[(row * 4 + b) * 8 + g];
#pragma unroll
                    for (int e = 0; e < 4 * SUMS; ++e) sums[e / 4][i][e % 4] = 0;
#pragma unroll
                    for (int s = 0; s < OTHER / 16; ++s)
                        add_steps(rank, place, s, {weights[quad][2 * s], weights[quad][2 * s + 1]}, sums, i);
                }
#pragma unroll
                for (int which = 0; which < SUMS; ++which) {
                    float (&sum)[4][4] = sums[which];
                    float2 &place = *reinterpret_cast<float2 *>(shared.running[4 * b + quad][which] + 2 * threadIdx.x);
                    float2 old = place;
                    place = {fmaf(of_four(sum, 0), back[quad], old.x), fmaf(of_four(sum, 2), back[quad], old.y)};
                }
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
                    float point = own.points[place], sum = shared.running[4 * b + quad][0][2 * threadIdx.x + h];
                    float gradient = SIGNS ? whole - 2 * sum : sum;
                    if constexpr (DECAY) {
                        float x = (point - shared.sorted[min(left, OWN) / 2 * WIDTH + d]) * numbers.rate;
                        float other_sum = shared.running[4 * b + quad][1][2 * threadIdx.x + h];
                        // an own point far away from all others has no sums, and its factor may be infinite
                        x = fminf(fmaxf(x, -100.0f), 100.0f);
                        gradient = (power_of_two(x) * other_sum - power_of_two(-x) * sum) / 2 + apart[8 * b + 2 * quad + h];
                    }
                    gradient = (gradient + norm_slope(point, 0) * whole) / numbers.tau;
                    grad[place] = gradient;
                    // an offset of all points changes nothing but the rounding
                    moments += double(point - (STATIONARY && first_key ? first_key[d] : 0.0f)) * double(gradient);
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
