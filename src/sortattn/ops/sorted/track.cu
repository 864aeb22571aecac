// What all kernels have in common that go along tracks, see walk.cu: points, sides of a kernel, sums and lists.
//
// Macros: REAL and VEC (channels of a lane), PARTS (of the channels, each for a warp), NODES and POWERS (coefficients
// of a polynomial), HALVES (ties count half), RATE (whether there is an exponential), BOTH (sources above count too),
// COMPACT, FOLDED (0, or 1 and -1 as in `Terms`), PRODUCTS (inner products instead of scattered sums), SLOPES
// (scattered sums, and inner products with their derivatives), ORDERED (no atomics: one dimension of a head and one
// track at a time), CHUNK (rows that a lane has on their way at a time), PASSING (what is read leaves the
// second-level cache first), ALONG (as in `Column`), RESIDENT (warps of a multiprocessor that walk), WAY (1 or -1, if
// all tracks are read from the same end, or 0).

#include "search.cu"
#include "wind.cu"

typedef REAL real;
typedef long long index_t;

constexpr int WIDTH = 32 * VEC;
// channels of a row
constexpr index_t STRIDE = index_t(PARTS) * WIDTH;
// of a block that sums moments; one that walks has a single warp, as some walks take longer than others
constexpr int WARPS = 4;
// sources of a block of `summarise`; fewer, where runs begin with more than one of them
constexpr int BLOCK = BOTH || COMPACT ? 128 : 256;
// blocks whose moments are on their way at a time, of a warp that goes along a track
constexpr int AHEAD = 4;
// rows that are on their way at a time where a walk begins: registers are free there
constexpr int DEEP = 16;
// blocks of a group, whose moments are summed where only a window counts
constexpr int GROUP = 16;
// a compact window with at most so many sources is summed one by one
constexpr int FEW = 32;
// the sums of a compact kernel are begun afresh after so many widths of its support, before rounding adds up
constexpr int FAR = 1;
// those of sources above after so many e-folds: they lose the digits that e^(2 REACH) has, and more with a polynomial
constexpr int REACH = POWERS > 1 ? 1 : 2;
// the polynomials' sums for a target: below, and with BOTH above
constexpr int SUMS = POWERS * (BOTH ? 2 : 1);
// numbers that describe one side of a block: moments of every channel and of the extra scalar
constexpr int HALF = POWERS * (WIDTH + 1);
// and all of them
constexpr int SIZE = SUMS * (WIDTH + 1);
// Places for moments of a track: of its blocks, of all its sources, and of groups of blocks.
__device__ inline index_t moment_places(index_t blocks) {
    return blocks + 1 + (COMPACT ? (blocks + GROUP - 1) / GROUP : 0);
}
// numbers that describe a track: nodes, coefficients below and above, rate
constexpr int TABLE = NODES + NODES * SUMS + 1;
static_assert(!BOTH || (NODES == 1 && !COMPACT && !FOLDED), "sources above are those of a single node at zero");
static_assert(!RATE || (NODES == 1 && !COMPACT && !FOLDED), "an exponential is that of a single node at zero");
static_assert(RATE || !BOTH || !SLOPES, "without an exponential both sides have no slope");
// places of the walk on the line of sources: one for every node, or one with ties and one without
constexpr int KEPT = NODES * (HALVES ? 2 : 1);
// those of node j: without ties, and with them
__device__ constexpr int strict(int j) { return HALVES ? 2 * j + 1 : j; }
__device__ constexpr int loose(int j) { return HALVES ? 2 * j : j; }
constexpr bool ADDED = !PRODUCTS, MULTIPLIED = PRODUCTS || SLOPES;
constexpr int EACH_NODE = HALVES ? 2 : 1;
constexpr int NEVER = 0x7fffffff;
// targets of a batch whose ties are settled one by one
constexpr int SETTLED = 4;
// sources of a node that a batch may have, in thirty-twos: those of one node may be much denser than those of another
constexpr int SPREAD = NODES > 1 ? 4 : 1;
// sources of a batch
constexpr int LIST = NODES > 1 ? 64 * NODES : 32 * KEPT;

template <int N> struct Int {
    static constexpr int value = N;
};

// One of two, whatever their types.
template <bool FIRST, typename A, typename B> __device__ inline auto &choose(A &first, B &second) {
    if constexpr (FIRST)
        return first;
    else
        return second;
}

__device__ constexpr double binomial(int n, int k) {
    double result = 1.0;
    for (int i = 0; i < k; i++) result = result * (n - i) / (i + 1);
    return result;
}

__device__ inline real infinity() { return real(__int_as_float(0x7f800000)); }

// without __CUDA_ARCH__ this is a test on a CPU
__device__ inline float exponential(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
#else
    return exp(x);
#endif
}
__device__ inline double exponential(double x) { return exp(x); }

struct alignas(VEC * sizeof(real)) Row {
    real at[VEC];
};

#if defined __CUDA_ARCH__ && PASSING
// Of a long head: rows of targets, which are added to, had better stay in the second-level cache than those of sources,
// and than coordinates and indices, which are read once.
__device__ inline unsigned long long passing() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline int read_once(const int *place) {
    int number;
    asm("ld.global.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(number) : "l"(place), "l"(passing()));
    return number;
}
__device__ inline float read_once(const float *place) {
    float number;
    asm("ld.global.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(number) : "l"(place), "l"(passing()));
    return number;
}
__device__ inline double read_once(const double *place) { return *place; }
#else
template <typename T> __device__ inline T read_once(const T *place) { return *place; }
#endif

// The sorted points of a track.
struct Line {
    const real *places;
    const int *order;
    int count, given;

    __device__ Line(const real *places, const int *order, index_t line, index_t count, bool mirrored)
        : places(places + line * count), order(order + line * count), count(int(count)), given(mirrored ? -1 : 1) {
        if (step() < 0) skip(1 - this->count, this->count);
    }
    __device__ int step() const { return WAY ? WAY : given; }
    __device__ void skip(int some, int left) { places += some * step(), order += some * step(), count = left; }
    __device__ int index(int i) const { return read_once(order + i * step()); }
    __device__ real place(int i) const {
        real x = read_once(places + i * step());
        return step() < 0 ? -x : x;
    }
    __device__ void skip(int some) { skip(some, count - some); }
    // of a folded line, where it begins that lies above zero, or there too
    __device__ int half(bool zero) const {
        return first_without(0, count, [&](int i) { return zero ? place(i) < real(0) : place(i) <= real(0); });
    }
    __device__ void keep_half(bool zero) { skip(half(zero)); }
};

// A number for every point of a head in one dimension, which is added to: of `numbers (heads, points, dims)` or, with
// ALONG, `(heads, dims, points)` in the order of the lines, whose coordinates are `places`. What is added to at random
// takes the cache from rows.
struct Column {
    real *start;
    const real *places;
    unsigned step;

    __device__ Column(real *numbers, const real *places, index_t p, index_t count, index_t d, index_t dims)
        : start(ALONG ? numbers : numbers + p * count * dims + d), places(places), step(unsigned(dims)) {}
    // that of the i-th point of a line, which has this index
    __device__ real *of(const Line &line, int i, int index) const {
        return start + (ALONG ? line.places + i * line.step() - places : index_t(unsigned(index)) * step);
    }
};

#include "side.cu"

// SUMS numbers, or those of one side, for each channel of a lane and for the extra scalar.
template <typename T, int COUNT = SUMS> struct Numbers {
    T at[COUNT][VEC];
    T extra[COUNT];

    __device__ void clear() {
#pragma unroll
        for (int l = 0; l < COUNT; l++) clear(l);
    }
    __device__ void clear(int l) {
#pragma unroll
        for (int c = 0; c < VEC; c++) at[l][c] = T(0);
        extra[l] = T(0);
    }
    __device__ void add_row(const real (&weight)[COUNT], const Row &row) {
#pragma unroll
        for (int l = 0; l < COUNT; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] += weight[l] * T(row.at[c]);
        }
    }
    template <typename S> __device__ void add_rows(const Numbers<S, COUNT> &other) {
#pragma unroll
        for (int l = 0; l < COUNT; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] += T(other.at[l][c]);
        }
    }
    // at[to] += factor * from
    __device__ void mix(int to, const T (&from)[VEC], T from_extra, T factor) {
#pragma unroll
        for (int c = 0; c < VEC; c++) at[to][c] += factor * from[c];
        extra[to] += factor * from_extra;
    }
    __device__ void scale(int l, T factor) {
#pragma unroll
        for (int c = 0; c < VEC; c++) at[l][c] *= factor;
        extra[l] *= factor;
    }
    __device__ void load(const real *place, int lane) {
#pragma unroll
        for (int l = 0; l < COUNT; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] = place[l * (WIDTH + 1) + c * 32 + lane];
            extra[l] = place[l * (WIDTH + 1) + WIDTH];
        }
    }
    __device__ void store(real *place, int lane) const {
#pragma unroll
        for (int l = 0; l < COUNT; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) place[l * (WIDTH + 1) + c * 32 + lane] = real(at[l][c]);
            if (lane == 0) place[l * (WIDTH + 1) + WIDTH] = real(extra[l]);
        }
    }
};

// What sums come to in the working precision, to which sources of a batch are added; through a shuffle, as the compiler
// would convert them for every target again.
__device__ inline Numbers<real> rounded(const Numbers<double> &state, int lane) {
    Numbers<real> base;
    base.clear();
    base.add_rows(state);
#pragma unroll
    for (int l = 0; l < SUMS; l++) {
#pragma unroll
        for (int c = 0; c < VEC; c++) base.at[l][c] = __shfl_sync(ALL, base.at[l][c], lane);
    }
    return base;
}

// Move the origin up by `distance`: of moments sum z^k e^(-rate z) v of sources at z below it, or of factors of
// y^l e^(-rate y) of targets at y above it; those from FIRST on.
template <bool MOMENTS, int FIRST, int COUNT>
__device__ inline void move_side(Numbers<double, COUNT> &numbers, double distance, double rate) {
    constexpr int STEP = MOMENTS ? -1 : 1, START = MOMENTS ? POWERS - 1 : 0;
    double decay = RATE ? exp(-rate * distance) : 1.0;
#pragma unroll
    for (int n = 0; n < POWERS; n++) {
        int to = START + n * STEP;
        double power = 1.0;
#pragma unroll
        for (int i = 1; i < POWERS - n; i++) {
            int from = to + i * STEP;
            power *= distance;
            numbers.mix(FIRST + to, numbers.at[FIRST + from], numbers.extra[FIRST + from],
                        power * binomial(MOMENTS ? to : from, MOMENTS ? from : to));
        }
        if (RATE) numbers.scale(FIRST + to, decay);
    }
}
// What the walk keeps: with an exponential moments, as the coefficients of the slope are others than those of the sum
// and little may be left of them; without one factors, as every node has coefficients of its own.
__device__ inline void move_state(Numbers<double> &state, double distance, double rate) {
    move_side<RATE, 0>(state, distance, rate);
    if (BOTH) move_side<RATE, SUMS - POWERS>(state, -distance, rate);
}

// Rows of a head as one lane sees them, from `start` on. The compiler would add up the parts of an address for every
// row again, so it is not told what the start is made of.
struct Rows {
    const real *start;

    __device__ Rows(const real *first, int lane) : start(first + lane * VEC) {
#ifdef __CUDA_ARCH__
        asm("cvta.to.global.u64 %0, %0;" : "+l"(start));
#endif
    }
    __device__ Row *at(int index) const {
        const real *place = start + index_t(unsigned(index)) * STRIDE;
#ifdef __CUDA_ARCH__
        return static_cast<Row *>(__cvta_global_to_generic(reinterpret_cast<unsigned long long>(place)));
#else
        return reinterpret_cast<Row *>(const_cast<real *>(place));
#endif
    }
    __device__ Row load(int index) const {
#if defined __CUDA_ARCH__ && PASSING
        if constexpr (sizeof(real) == 4 && VEC == 2) {
            float2 row;
            asm volatile("ld.global.L2::cache_hint.v2.f32 {%0, %1}, [%2], %3;"
                         : "=f"(row.x), "=f"(row.y)
                         : "l"(at(index)), "l"(passing()));
            return {real(row.x), real(row.y)};
        }
#endif
        return *at(index);
    }
};

// A place in a list in shared memory; its address is kept, as the compiler would make it anew for every item.
template <typename T> struct Cursor {
#ifdef __CUDA_ARCH__
    unsigned place;

    __device__ Cursor(T *list, int first) : place(unsigned(__cvta_generic_to_shared(list + first))) {
        asm("" : "+r"(place));
    }
    __device__ T &here() const { return *static_cast<T *>(__cvta_shared_to_generic(place)); }
    __device__ void step(int some) { place += some * unsigned(sizeof(T)); }
#else
    T *place;

    Cursor(T *list, int first) : place(list + first) {}
    T &here() const { return *place; }
    void step(int some) { place += some; }
#endif
    __device__ bool before(const Cursor &other) const { return place < other.place; }
};

// The extra scalars of a head: all one, if there are none.
struct Scalars {
    const real *start;

    __device__ Scalars(const real *scalars, index_t first) : start(scalars ? scalars + first : nullptr) {}
    __device__ real operator[](int index) const { return start ? start[index] : real(1); }
};

template <typename T> __device__ inline T sum_lanes(T x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(ALL, x, offset);
    return x;
}

// A source of a list, with what it gives to each of the sums.
struct alignas(sizeof(real) == 4 && SUMS == 1 ? 8 : 16) Source {
    real weight[SUMS];
    int index;
};

// Lane by lane, how many of the 32 numbers held by the lanes come before: `before(number)` is true for the first ones.
template <typename T, typename F> __device__ inline int count_before(T numbers, F before) {
    int count = 0;
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        if (before(__shfl_sync(ALL, numbers, count + step - 1))) count += step;
    }
    return count + (before(__shfl_sync(ALL, numbers, count)) ? 1 : 0);
}

// The sums over the lanes up to and including each.
__device__ inline real scan(real x, int lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        real other = __shfl_up_sync(ALL, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

// A target of a list, with what each of the sums gives to it.
struct alignas(16) Target {
    real weight[SUMS];
#if SLOPES
    // the derivative by y
    real slope[SUMS];
#endif
    int index;
    // the sources of the list that the target behind it has passed
    int after;
};

__device__ inline void add_to(Row &row, const real (&sum)[VEC]) {
    real *place = row.at;
#if ORDERED
#pragma unroll
    for (int c = 0; c < VEC; c++) place[c] += sum[c];
#else
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(real) == 4 && VEC == 2) {
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(place), "f"(float(sum[0])), "f"(float(sum[1 % VEC]))
                     : "memory");
        return;
    }
    if constexpr (sizeof(real) == 4 && VEC == 4) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "f"(float(sum[0])),
                     "f"(float(sum[1 % VEC])), "f"(float(sum[2 % VEC])), "f"(float(sum[3 % VEC]))
                     : "memory");
        return;
    }
#endif
#pragma unroll
    for (int c = 0; c < VEC; c++) atomicAdd(place + c, sum[c]);
#endif
}

__device__ inline void add_to(real *place, real sum) {
#if ORDERED
    *place += sum;
#else
    atomicAdd(place, sum);
#endif
}

#include "copies.cu"
#include "hand.cu"
