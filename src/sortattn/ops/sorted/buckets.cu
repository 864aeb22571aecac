// Runs are sorted by buckets: as many as there are keys, along a piecewise linear approximation of their distribution.
// Every key is thrown into its bucket, and neighbours exchange places until they are in order, which takes few steps.
//
// sort.cu comes before.

#include "settle.cu"

// pieces of the approximate distribution, one a thread
constexpr int CELLS = THREADS;
// keys of a bucket, at most: a warp that settles two of every lane sees so many to either side
constexpr int CROWD = 32;
// whether equal keys take the order in which they come: those of sixteen bits, which no order is asked for, and which
// are often equal
constexpr bool EARLY = NARROW;
// a bucket and how many came there before are kept in a word
static_assert(RUN <= 0x4000 && ITEMS % 4 == 0, "twice a place has fifteen bits, and keys are read four at a time");
// infinity, as no key is
constexpr word BEHIND_ALL = 0x7f800000u;
// of shared memory: keys and indices, cells and sums of warps
constexpr int BUCKET_BYTES = RUN * 8 + CELLS * 4 + WARPS * 8;

// Neighbours that are read and written at a time.
template <typename T, int MANY> struct alignas(4 * MANY) Some {
    T at[MANY];
};
typedef Some<word, 4> Four;

// Where in shared memory a key belongs: a thread that reads its ITEMS neighbours, four at a time, meets no other.
__device__ inline int spread(int place) { return place ^ (place >> 3 & ITEMS - 4); }

// The first key of this thread; the others are a warp's width apart.
__device__ inline int first_key() { return threadIdx.x / 32 * 32 * ITEMS + threadIdx.x % 32; }

// Call `body(i)` for every key of this thread that is there, of `number`; warps that have all do not look at each.
template <typename F> __device__ inline void for_keys(int number, F body) {
    int start = first_key();
    if (start - int(threadIdx.x % 32) + 32 * ITEMS <= number) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) body(i);
        return;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (start + i * 32 < number) body(i);
    }
}

// The sum over all threads before, in a block; `totals` has room for WARPS numbers.
__device__ inline int sum_before(int mine, int *totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sum = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        int other = __shfl_up_sync(ALL, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    return __reduce_add_sync(ALL, lane < warp ? totals[lane] : 0) + sum - mine;
}

// Which bucket a key belongs to; monotone. Numbers are converted by adding 2^23, whose last bit is one: conversions
// take four times as long as sums.
struct Buckets {
    static constexpr float UNIT = 8388608.0f;
    // of 2^23, and of 2^22, whose last bit is a half
    static constexpr word UNIT_BITS = 0x4b000000u, HALF_BITS = 0x4a800000u;
    float low, scale;
    // of every cell: how many buckets it has, and above the lower sixteen bits twice the place of its middle
    const word *cells;
    Keys keys;

    // in cells; rounded alike wherever it is computed
    __device__ float where(float x) const { return __fmul_rn(keys.along(x) - low, scale); }
    // the closest cell, as a float that is UNIT more
    __device__ static float closest(float where) { return __fadd_rn(where, UNIT); }
    __device__ static int integer(float more) { return int(__float_as_uint(more) - UNIT_BITS); }
    __device__ static word cell(int first, int some) { return word(2 * first + some) << 16 | word(some); }
    // rounded up it may be the first bucket of the next cell, which is in order as well; behind the last cell's middle
    // there are none
    __device__ int operator()(float x) const {
        float w = where(x), more = closest(w);
        word here = cells[integer(more)];
        float share = w - (more - UNIT), width = __uint_as_float(UNIT_BITS | (here & 0xffff)) - UNIT;
        float place = __fmaf_rn(share, width, __uint_as_float(HALF_BITS | here >> 16));
        return int(__float_as_uint(place) >> 1 & 0xffff);
    }
};

// The least and the largest key of a block; there is a barrier between what was written before and what comes behind.
// Returns false if these are so few digits that two passes sort them, and that is looked for.
__device__ inline bool find_ends(const float (&key)[ITEMS], int number, bool look, word *ends, float &least,
                                 float &most) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    least = __uint_as_float(BEHIND_ALL), most = -least;
    word digits = 0;
    for_keys(number, [&](int i) {
        least = fminf(least, key[i]), most = fmaxf(most, key[i]);
        digits |= __float_as_uint(key[i]);
    });
    // of patterns, which a warp finds at a time
    word low = __reduce_min_sync(ALL, pattern(least)), high = __reduce_max_sync(ALL, pattern(most));
    if (lane == 0) ends[warp] = low, ends[WARPS + warp] = high;
    bool more = __syncthreads_or(digits & 0xffff);
    least = ::number(__reduce_min_sync(ALL, ends[lane % WARPS]));
    most = ::number(__reduce_max_sync(ALL, ends[WARPS + lane % WARPS]));
    return more || !look;
}

// Turn the numbers of keys in all buckets into those in the buckets before; a warp has 32 * ITEMS of them.
__device__ inline void sum_buckets(word *counts, int *totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Four *mine = reinterpret_cast<Four *>(counts + warp * 32 * ITEMS) + lane;
    auto some = [&](int i) {
        return mine[i * 32].at[0] + mine[i * 32].at[1] + mine[i * 32].at[2] + mine[i * 32].at[3];
    };
    word before[ITEMS / 4 + 1], sum = 0;
    // two at a time in the halves of a word, as a warp has no more than thirty-two keys of a bucket
#pragma unroll
    for (int i = 0; i < ITEMS / 4; i += 2) {
        word both = some(i) | (i + 1 < ITEMS / 4 ? some(i + 1) << 16 : 0), all = both;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            word other = __shfl_up_sync(ALL, all, offset);
            if (lane >= offset) all += other;
        }
        word last = __shfl_sync(ALL, all, 31);
        all -= both;
        before[i] = sum + (all & 0xffff), sum += last & 0xffff;
        before[i + 1] = sum + (all >> 16), sum += last >> 16;
    }
    if (lane == 0) totals[warp] = int(sum);
    __syncthreads();
    int first = __reduce_add_sync(ALL, lane < warp ? totals[lane] : 0);
#pragma unroll
    for (int i = 0; i < ITEMS / 4; i++) {
        Four here = mine[i * 32];
        word next = word(first) + before[i];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            word some = here.at[k];
            here.at[k] = next;
            next += some;
        }
        mine[i * 32] = here;
    }
}

// Neighbours from place `first` on, MANY a thread, of `number` keys; behind all is what is not there.
template <int MANY> struct Neighbours {
    static constexpr int WIDE = MANY % 4 ? 2 : 4;
    float key[MANY];
    int index[MANY];

    __device__ void read(const float *keys, const int *indices, int first, int number) {
        int mine = first + int(threadIdx.x % 32) * MANY;
#pragma unroll
        for (int i = 0; i < MANY; i += WIDE) {
            int at = spread(mine + i) / WIDE;
            auto some = reinterpret_cast<const Some<float, WIDE> *>(keys)[at];
            auto some_indices = reinterpret_cast<const Some<int, WIDE> *>(indices)[at];
#pragma unroll
            for (int k = 0; k < WIDE; k++) key[i + k] = some.at[k], index[i + k] = some_indices.at[k];
        }
        if (first + 32 * MANY <= number) return;
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            if (mine + i >= number) key[i] = __uint_as_float(BEHIND_ALL), index[i] = 0;
        }
    }
    __device__ void write(float *keys, int *indices, int first) const {
        int mine = first + int(threadIdx.x % 32) * MANY;
#pragma unroll
        for (int i = 0; i < MANY; i += WIDE) {
            int at = spread(mine + i) / WIDE;
            Some<float, WIDE> some;
            Some<int, WIDE> some_indices;
#pragma unroll
            for (int k = 0; k < WIDE; k++) some.at[k] = key[i + k], some_indices.at[k] = index[i + k];
            reinterpret_cast<Some<float, WIDE> *>(keys)[at] = some;
            reinterpret_cast<Some<int, WIDE> *>(indices)[at] = some_indices;
        }
    }
};

// Sort `number` keys of a run by buckets, key n being that of the point `point(n)`; returns false, having done nothing
// but written behind the first RUN numbers, if a bucket is crowded or if they have `few` digits and may be sorted by
// these.
template <typename F> __device__ bool sort_by_buckets(const float (&key)[ITEMS], int number, bool few, char *shared,
                                                      int *order, float *places, F point, const Keys &lines) {
    float *keys = reinterpret_cast<float *>(shared);
    int *indices = reinterpret_cast<int *>(keys + RUN);
    word *cells = reinterpret_cast<word *>(indices + RUN);
    int *totals = reinterpret_cast<int *>(cells + CELLS);
    // the number of keys in every bucket, then those in the buckets before; the keys come where they are
    word *counts = reinterpret_cast<word *>(keys);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, start = first_key(), stretch = start - lane;

    for (int i = threadIdx.x; i < RUN / 4; i += THREADS) reinterpret_cast<Four *>(counts)[i] = {};
    cells[threadIdx.x] = 0;
    float least, most;
    if (!find_ends(key, number, few, reinterpret_cast<word *>(totals), least, most)) return false;
    float low = lines.along(least);
    Buckets bucket = {low, float(CELLS - 1) / (lines.along(most) - low), cells, lines};
    // all keys equal, or too far apart for a float
    if (!(bucket.scale > 0.0f && bucket.scale < 1e30f)) return false;

    for_keys(number, [&](int i) { atomicAdd(cells + Buckets::integer(Buckets::closest(bucket.where(key[i]))), 1u); });
    __syncthreads();
    int some = int(cells[threadIdx.x]);
    cells[threadIdx.x] = Buckets::cell(sum_before(some, totals), some);
    __syncthreads();

    // the bucket of every key, and above the lower sixteen bits how many came there before
    word place[ITEMS];
    word most_before = 0;
    for_keys(number, [&](int i) {
        int b = bucket(key[i]);
        word before = atomicAdd(counts + b, 1u);
        most_before = max(most_before, before);
        place[i] = word(b) | before << 16;
    });
    if (__syncthreads_or(most_before >= CROWD)) return false;
    sum_buckets(counts, totals);
    __syncthreads();
    int index[ITEMS];
    for_keys(number, [&](int i) {
        place[i] = spread(counts[place[i] & 0xffff] + (place[i] >> 16));
        index[i] = point(start + i * 32);
    });
    __syncthreads();
    for_keys(number, [&](int i) { keys[place[i]] = key[i], indices[place[i]] = index[i]; });
    __syncthreads();

    // a bucket in two warps' stretches first: no other is that close
    if (warp && stretch < number) {
        Neighbours<2> around;
        around.read(keys, indices, stretch - 32, number);
        settle(around.key, around.index, !EARLY);
        around.write(keys, indices, stretch - 32);
    }
    __syncthreads();
    if (stretch >= number) return true;
    Neighbours<ITEMS> mine;
    mine.read(keys, indices, stretch, number);
    settle(mine.key, mine.index, !EARLY);
    mine.write(keys, indices, stretch);
    __syncwarp();
    for_keys(number, [&](int i) {
        int n = start + i * 32, at = spread(n);
        order[n] = indices[at];
        places[n] = keys[at];
    });
    return true;
}
