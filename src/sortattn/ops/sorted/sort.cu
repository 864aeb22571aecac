// Argsorts of many lines of float32 in shared memory, of parts that fit there.
//
// A long line is split at some of its keys, taken from a sorted sample, into stretches that fit, which are sorted one
// by one. If one is too long after all, or crowded, the line is cut into runs instead, which are sorted and merged.
//
// A run is sorted by buckets. Where there are many keys in one, as ties are, or keys have few digits, as those of
// bfloat16, it is sorted digit by digit instead. Equal keys keep their order either way, but for those of sixteen bits,
// and of a stretch that is sorted by digits, which is why it may be refused.
//
// Lines may be wound, see wind.cu, each if its `Winding` says so: then keys are words, and so are sorted coordinates.
//
// Macros: THREADS (of a block that sorts, at least DIGITS), ITEMS (keys of a thread), WOUND (lines may be), NARROW
// (points have sixteen bits; then also those of half.cu).

#include "search.cu"
#ifndef NARROW
#define NARROW 0
#endif
#if NARROW
#include "half.cu"
typedef half_t given_t;
#else
typedef float given_t;
__device__ inline float widen(float x) { return x; }
#endif

#ifndef WOUND
#define WOUND 0
#endif
#include "wind.cu"

typedef long long index_t;

constexpr int WARPS = THREADS / 32;
// the longest run that a block sorts
constexpr int RUN = THREADS * ITEMS;

__device__ inline bool finite(float x) { return x - x == 0.0f; }
// What is no finite number stands at zero, and there is one zero.
__device__ inline float clean(float x) { return finite(x) ? x + 0.0f : 0.0f; }

// Where what is no finite number is counted: `unfit (heads, group)`, of every `each` points of a head, or for the whole
// group if that is zero.
struct Unfit {
    int *unfit;
    index_t group, each;

    __device__ void mark(index_t head, index_t point) const {
        if (!unfit) return;
        for (index_t g = 0; g < group; g++) {
            if (!each || point / each == g) unfit[head * group + g] = 1;
        }
    }
};

// A clean float as an unsigned integer that sorts alike: its magnitude above or below the middle. What has zeros at the
// end of a float, as a bfloat16 has, has them here.
__device__ inline word pattern(float x) {
    word bits = __float_as_uint(x);
    return bits & 0x80000000u ? 0u - bits : bits ^ 0x80000000u;
}

__device__ inline float number(word pattern) {
    return __uint_as_float(pattern & 0x80000000u ? pattern ^ 0x80000000u : 0u - pattern);
}

// The keys of a line: what they are sorted by, and where they are along it, for words are no floats to compute with.
struct Keys {
#if WOUND
    Winding winding;

    __device__ Keys(const Winding *windings, index_t line) : winding(windings[line]) {}
    __device__ float of(float x) const { return winding.cells ? __uint_as_float(winding.wound(x)) : x; }
    // the upper digits of a word, as an integer that is a float
    __device__ float along(float key) const {
        return winding.cells ? __uint_as_float(0x4b000000u | __float_as_uint(key) >> 8) : key;
    }
#else
    __device__ Keys(const Winding *, index_t) {}
    __device__ float of(float x) const { return x; }
    __device__ float along(float key) const { return key; }
#endif
};

// Call `body(line, i)` for `each` parts of all lines that are not `sorted`, these shared out among the blocks. Most are
// sorted already, which takes less time to see for many at a time than a block of its own to begin.
template <typename F> __device__ inline void for_unsorted(const int *sorted, index_t lines, index_t each, F body) {
    for (index_t first = 0; first < lines; first += blockDim.x) {
        index_t mine = first + threadIdx.x;
        if (!__syncthreads_or(mine < lines && !sorted[mine])) continue;
        for (index_t line = first; line < min(lines, first + blockDim.x); line++) {
            if (sorted[line]) continue;
            index_t before = line * each % gridDim.x;
            for (index_t i = (blockIdx.x + gridDim.x - before) % gridDim.x; i < each; i += gridDim.x) body(line, i);
        }
    }
}

#include "buckets.cu"
#include "digits.cu"
#include "split.cu"

// Have `number` pairs brought into the second-level cache, a line of 128 bytes a thread.
__device__ inline void expect(const uint2 *pairs, int number) {
#ifdef __CUDA_ARCH__
    for (int i = threadIdx.x * 16; i < number; i += THREADS * 16)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(pairs + i));
#endif
}

// Sort the stretches of every line, where they are in `pairs`; if equal keys are to keep their order, `sorted` becomes
// zero for lines with a crowded one.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    sort_parts(const uint2 *pairs, const int *sizes, int *sorted, int *order, float *places, index_t count,
               index_t parts, index_t stable, index_t ahead, const Winding *windings) {
    extern __shared__ __align__(16) char shared[];
    // of 32 bits, as 64 take their time
    word many = word(parts), line = blockIdx.x / many;
    int part = int(blockIdx.x % many), before = 0, number_of = sizes[blockIdx.x], start = first_key();
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < part; i += 32) before += sizes[blockIdx.x - part + i];
    // of the block that takes this one's place
    int next = blockIdx.x + ahead < gridDim.x ? min(sizes[blockIdx.x + ahead], RUN) : 0;
    // by all threads alike: other blocks of the line may change it
    if (__syncthreads_or(!sorted[line])) return;
    pairs += index_t(blockIdx.x) * RUN;
    // where they will be in the end
    int *indices = reinterpret_cast<int *>(shared) + RUN;
    float key[ITEMS] = {};
    int index[ITEMS];
    for_keys(number_of, [&](int i) {
        uint2 pair = pairs[start + i * 32];
        key[i] = __uint_as_float(pair.x), index[i] = int(pair.y);
    });
    expect(pairs + ahead * RUN, next);
    for_keys(number_of, [&](int i) { indices[start + i * 32] = index[i]; });
    index_t first = index_t(line) * count + __reduce_add_sync(ALL, before);
    order += first, places += first;
    auto parked = [&](int n) { return indices[n]; };
    if (sort_by_buckets(key, number_of, !stable, shared, order, places, parked, Keys(windings, line))) return;
    // digits leave equal keys in the order that they have in a stretch, which is none
    if (!stable || number_of <= 1)
        sort_by_digits(key, number_of, shared, order, places, [&](int n) { return int(pairs[n].y); });
    else if (threadIdx.x == 0)
        atomicExch(sorted + line, 0);
}

// Sort `number_of` points of a line by their coordinates, `dims` apart, that at `points` being the point `first`;
// `unfit(n)` is called for each that is no finite number.
template <typename F> __device__ inline void sort_run(const given_t *points, index_t dims, int first, int number_of,
                                                      char *shared, int *order, float *places, const Keys &keys,
                                                      F unfit) {
    int start = first_key();
    float key[ITEMS] = {};
    // without a branch for each, all of them are on their way at a time
    for_keys(number_of, [&](int i) { key[i] = widen(points[(start + i * 32) * dims]); });
    // no longer, if one is no finite number
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) zero += 0.0f * key[i], key[i] += 0.0f;
    if (zero != 0.0f) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) key[i] = clean(key[i]);
#pragma unroll 1
        for (int n = start; n < min(number_of, start + 32 * ITEMS); n += 32) {
            if (!finite(widen(points[n * dims]))) unfit(first + n);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) key[i] = keys.of(key[i]);
    auto point = [&](int n) { return first + n; };
    if (!sort_by_buckets(key, number_of, true, shared, order, places, point, keys))
        sort_by_digits(key, number_of, shared, order, places, point);
}

// Sort every dimension of `points (heads, count, dims)`, of no more than RUN: `order` and `places (heads, dims, count)`
// hold the indices and the coordinates in order; behind them those of `others`, if not null, as many. What is no finite
// number is counted as in `Unfit`, among the first points for the whole group, if there are others.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    sort_runs(const given_t *points, const given_t *others, int *order, float *places, index_t count, index_t dims,
              int *unfit, index_t group, index_t each, const Winding *windings) {
    extern __shared__ __align__(16) char shared[];
    // neighbouring blocks read neighbouring dimensions: what one leaves of a sector the next finds in the cache
    word line = blockIdx.x, width = word(dims);
    order += line * count, places += line * count;
    Unfit looking = {unfit, group, others ? 0 : each};
    if (others && line >= gridDim.x / 2) points = others, line -= gridDim.x / 2, looking.each = each;
    index_t head = line / width;
    points += head * count * dims + line % width;
    sort_run(points, dims, 0, int(count), shared, order, places, Keys(windings, line),
             [&](int n) { looking.mark(head, n); });
}

// Sort the lines that are not `sorted` in runs of RUN, `runs` of each of `lines`; they lie in order run by run.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    sort_rest(const given_t *points, int *order, float *places, const int *sorted, index_t lines, index_t count,
              index_t dims, index_t runs, int *unfit, index_t group, index_t each, const Winding *windings) {
    extern __shared__ __align__(16) char shared[];
    Unfit looking = {unfit, group, each};
    for_unsorted(sorted, lines, runs, [&](index_t line, index_t run) {
        index_t head = line / dims, first = run * RUN, to = line * count + first;
        const given_t *from = points + (head * count + first) * dims + line % dims;
        sort_run(from, dims, int(first), int(min(count - first, index_t(RUN))), shared, order + to, places + to,
                 Keys(windings, line), [&](int n) { looking.mark(head, n); });
        __syncthreads();
    });
}

#include "merge.cu"
