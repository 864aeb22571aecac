// Argsorts of many lines of float32 in shared memory, of parts that fit there.
//
// A long line is split at some of its keys, taken from a sorted sample, into stretches that fit, which are sorted one
// by one. If one is too long after all, or crowded, the line is cut into runs instead, which are sorted and merged.
//
// A run is thrown into as many buckets as it has keys, along a piecewise linear approximation of its distribution, and
// every key then finds its place among the few in its bucket. Where there are many in one, as ties are, or keys have
// few digits, as those of bfloat16, the run is sorted digit by digit instead. Equal keys keep their order either way,
// but for those of sixteen bits, and of a stretch that is sorted by digits, which is why it may be refused.
//
// Macros: THREADS (of a block that sorts, at least DIGITS), ITEMS (keys of a thread), NARROW (points have sixteen bits;
// then also those of half.cu).

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

typedef long long index_t;
typedef unsigned int word;

constexpr int WARPS = THREADS / 32;
constexpr int BITS = 8;
constexpr int DIGITS = 1 << BITS;
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

// The lanes of the warp that hold the same digit.
__device__ inline unsigned peers_of(word digit) {
    unsigned same = ALL;
#pragma unroll
    for (int bit = 0; bit < BITS; bit++) {
        bool mine = digit >> bit & 1;
        unsigned votes = __ballot_sync(ALL, mine);
        same &= mine ? votes : ~votes;
    }
    return same;
}

// pieces of the approximate distribution, one a thread
constexpr int CELLS = THREADS;
// keys of a bucket, at most: a warp sees so many to either side
constexpr int CROWD = 32;
// whether equal keys take the order in which they come: those of sixteen bits, which no order is asked for, and which
// are often equal
constexpr bool EARLY = NARROW;
// of an index in a run: set for the first key of a bucket
constexpr unsigned FIRST = 0x8000;
static_assert(RUN <= int(FIRST), "an index has fifteen bits");

// Numbers of neighbouring buckets, read and written at a time.
struct alignas(ITEMS < 8 ? 2 * ITEMS : 16) Counts {
    unsigned short at[ITEMS];
};

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
    if (warp == 0) {
        int total = lane < WARPS ? totals[lane] : 0, all = total;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            int other = __shfl_up_sync(ALL, all, offset);
            if (lane >= offset) all += other;
        }
        if (lane < WARPS) totals[lane] = all - total;
    }
    __syncthreads();
    return totals[warp] + sum - mine;
}

// Which bucket a key belongs to; monotone. Numbers are converted by adding 2^23, whose last bit is one: conversions
// take four times as long as sums.
struct Buckets {
    static constexpr float UNIT = 8388608.0f;
    static constexpr word UNIT_BITS = 0x4b000000u;
    float low, scale;
    // of every cell: the first bucket, and how many there are above the lower sixteen bits
    const word *cells;

    // in cells; rounded alike wherever it is computed
    __device__ float where(float x) const { return __fmul_rn(x - low, scale); }
    // the closest cell, as a float that is UNIT more
    __device__ static float closest(float where) { return __fadd_rn(where, UNIT); }
    __device__ static int integer(float more) { return int(__float_as_uint(more) - UNIT_BITS); }
    __device__ int operator()(float x) const {
        float w = where(x), more = closest(w);
        word here = cells[integer(more)];
        int some = here >> 16;
        float share = w - (more - UNIT), width = __uint_as_float(UNIT_BITS | word(some)) - UNIT;
        // from -1/2 to some - 1/2
        float within = share * width + (0.5f * width - 0.5f);
        return int(here & 0xffff) + max(min(integer(within + UNIT), some - 1), 0);
    }
};

// Sort `number` keys of a run by buckets, key n being that of the point `point(n)`; returns false, having done nothing,
// if a bucket is crowded.
template <typename F> __device__ bool sort_by_buckets(const float (&key)[ITEMS], int number, char *shared, int *order,
                                                      float *places, F point) {
    float *keys = reinterpret_cast<float *>(shared);
    unsigned short *indices = reinterpret_cast<unsigned short *>(keys + RUN);
    // the number of keys in every bucket, then those in the buckets before; two in a word
    word *counts = reinterpret_cast<word *>(indices + RUN);
    unsigned short *starts = reinterpret_cast<unsigned short *>(counts);
    word *cells = counts + RUN / 2;
    int *totals = reinterpret_cast<int *>(cells + CELLS);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, start = warp * 32 * ITEMS + lane;

    float least = key[0], most = key[0];
#pragma unroll
    for (int i = 1; i < ITEMS; i++) {
        if (start + i * 32 < number) least = fminf(least, key[i]), most = fmaxf(most, key[i]);
    }
    // of patterns, which a warp finds at a time
    word *ends = counts;
    bool any = start < number;
    word low = __reduce_min_sync(ALL, any ? pattern(least) : ALL),
         high = __reduce_max_sync(ALL, any ? pattern(most) : 0);
    if (lane == 0) ends[warp] = low, ends[WARPS + warp] = high;
    cells[threadIdx.x] = 0;
    __syncthreads();
    least = ::number(__reduce_min_sync(ALL, ends[lane % WARPS]));
    most = ::number(__reduce_max_sync(ALL, ends[WARPS + lane % WARPS]));
    Buckets bucket = {least, float(CELLS - 1) / (most - least), cells};
    // all keys equal, or too far apart for a float
    if (!(bucket.scale > 0.0f && bucket.scale < 1e30f)) return false;

#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        // of keys that are not there none is counted
        bool there = start + i * 32 < number;
        float x = there ? key[i] : least;
        atomicAdd(cells + Buckets::integer(Buckets::closest(bucket.where(x))), there ? 1u : 0u);
        if (i % 4 == 3) __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < RUN / 2; i += THREADS) counts[i] = 0;
    word some = cells[threadIdx.x];
    cells[threadIdx.x] = some << 16 | word(sum_before(int(some), totals));
    __syncthreads();

    // the bucket of every key, and how many came there before; left where the keys will be, as registers are few
    word *places_of = reinterpret_cast<word *>(keys) + start;
    bool crowded = false;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        bool there = start + i * 32 < number;
        int b = bucket(there ? key[i] : least), shift = b % 2 * 16;
        word arrival = atomicAdd(counts + b / 2, there ? 1u << shift : 0u) >> shift & 0xffff;
        crowded = crowded || arrival >= CROWD;
        places_of[i * 32] = word(b) | arrival << 16;
        if (i % 4 == 3) __syncwarp();
    }
    if (__syncthreads_or(crowded)) return false;

    // a thread has ITEMS neighbouring buckets
    Counts &mine = reinterpret_cast<Counts *>(starts)[threadIdx.x];
    Counts here = mine;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) sum += here.at[i];
    sum = sum_before(sum, totals);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int more = here.at[i];
        here.at[i] = sum;
        sum += more;
    }
    mine = here;
    word place_of[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) place_of[i] = places_of[i * 32];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = start + i * 32;
        if (n < number) {
            word arrival = place_of[i] >> 16;
            int place = starts[place_of[i] & 0xffff] + arrival;
            keys[place] = key[i];
            indices[place] = arrival ? n : n | FIRST;
        }
    }
    __syncthreads();
    // bit by bit, which of thirty-two neighbours are the first in their bucket; one behind the last key is
    auto index_at = [&](int n) { return n < number ? word(indices[n]) : FIRST; };
    int stretch = warp * 32 * ITEMS;
    unsigned firsts_before = warp ? __ballot_sync(ALL, index_at(stretch - 32 + lane) & FIRST) : 0;
    word index = index_at(start);
    unsigned firsts = __ballot_sync(ALL, index & FIRST);
#pragma unroll 2
    for (int i = 0; i < ITEMS && stretch + i * 32 < number; i++) {
        int n = start + i * 32;
        word next = index_at(n + 32);
        unsigned firsts_behind = __ballot_sync(ALL, next & FIRST);
        if (n < number) {
            // up to this one and from the next on
            unsigned low = ((unsigned long long)firsts << 32 | firsts_before) >> (lane + 1);
            unsigned high = ((unsigned long long)firsts_behind << 32 | firsts) >> (lane + 1);
            int first = n - __clz(low), last = n + __ffs(high), place = first;
            float mine = keys[n];
            int own = point(index & (FIRST - 1)), same = 0;
            const float *other = keys + first, *end = keys + last, *here = keys + n;
            // there are two or three
#pragma unroll 1
            do {
                float x = *other;
                place += x < mine || (EARLY && x == mine && other < here);
                same += x == mine;
                other++;
            } while (other < end);
            if (!EARLY && same > 1) {
#pragma unroll 1
                for (int m = first; m < last; m++) place += keys[m] == mine && point(indices[m] & (FIRST - 1)) < own;
            }
            order[place] = own;
            places[place] = mine;
        }
        firsts_before = firsts, firsts = firsts_behind, index = next;
    }
    return true;
}

// Whether the first `count` keys have so few digits that two passes sort them.
__device__ inline bool few_digits(const float (&key)[ITEMS], int count) {
    int start = threadIdx.x / 32 * 32 * ITEMS + threadIdx.x % 32;
    bool more = false;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) more = more || (start + i * 32 < count && __float_as_uint(key[i]) & 0xffff);
    return !__syncthreads_or(more);
}

// Bits that are not the same in all of the first `count` keys of a run.
__device__ inline word varying_bits(const word (&key)[ITEMS], int count) {
    __shared__ word bits[2 * WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    word some = 0, all = ALL;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (warp * 32 * ITEMS + i * 32 + lane < count) some |= key[i], all &= key[i];
    }
    some = __reduce_or_sync(ALL, some), all = __reduce_and_sync(ALL, all);
    if (lane == 0) bits[warp] = some, bits[WARPS + warp] = all;
    __syncthreads();
    return __reduce_or_sync(ALL, bits[lane % WARPS]) & ~__reduce_and_sync(ALL, bits[WARPS + lane % WARPS]);
}

// Sort the first `count` keys of a run digit by digit, the least significant first, by those that vary; the others sort
// behind all. A warp owns a stretch of the run and goes through it in order.
template <typename F> __device__ void sort_by_digits(const float (&numbers)[ITEMS], int count, char *shared, int *order,
                                                     float *places, F point) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    word key[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) key[i] = warp * 32 * ITEMS + i * 32 + lane < count ? pattern(numbers[i]) : ALL;
    word varying = varying_bits(key, count);
    word *keys = reinterpret_cast<word *>(shared);
    unsigned short *indices = reinterpret_cast<unsigned short *>(keys + RUN);
    // how many keys with a digit there are before those of a warp
    unsigned short *counts = indices + RUN;
    word *starts = reinterpret_cast<word *>(counts + WARPS * DIGITS);
    unsigned before_me = (1u << lane) - 1;
    unsigned short index[ITEMS], rank[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) index[i] = warp * 32 * ITEMS + i * 32 + lane;
    for (int shift = 0; shift < 32; shift += BITS) {
        if (!(varying >> shift & (DIGITS - 1))) continue;
        __syncthreads();
        for (int i = threadIdx.x; i < WARPS * DIGITS; i += THREADS) counts[i] = 0;
        __syncthreads();
        unsigned short *mine = counts + warp * DIGITS;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            word digit = key[i] >> shift & (DIGITS - 1);
            unsigned same = peers_of(digit);
            int before = mine[digit];
            rank[i] = before + __popc(same & before_me);
            __syncwarp();
            if ((same & before_me) == 0) mine[digit] = before + __popc(same);
            __syncwarp();
        }
        __syncthreads();
        // by digit: the counts of the warps before, then of the digits before
        if (threadIdx.x < DIGITS) {
            word total = 0;
#pragma unroll 8
            for (int w = 0; w < WARPS; w++) {
                word here = counts[w * DIGITS + threadIdx.x];
                counts[w * DIGITS + threadIdx.x] = total;
                total += here;
            }
            word sum = total;
            for (int offset = 1; offset < 32; offset <<= 1) {
                word other = __shfl_up_sync(ALL, sum, offset);
                if (lane >= offset) sum += other;
            }
            starts[threadIdx.x] = sum - total;
            if (lane == 31) starts[DIGITS + warp] = sum;
        }
        __syncthreads();
        if (threadIdx.x < DIGITS) {
            word base = 0;
            for (int w = 0; w < warp; w++) base += starts[DIGITS + w];
            starts[threadIdx.x] += base;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            word digit = key[i] >> shift & (DIGITS - 1);
            int place = starts[digit] + mine[digit] + rank[i];
            keys[place] = key[i];
            indices[place] = index[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int n = warp * 32 * ITEMS + i * 32 + lane;
            key[i] = keys[n];
            index[i] = indices[n];
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = warp * 32 * ITEMS + i * 32 + lane;
        if (n < count) {
            order[n] = point(index[i]);
            places[n] = number(key[i]);
        }
    }
}

// what a sort takes of the shared memory: keys and indices; then counts, cells and totals, or digits of all warps and
// starts
constexpr int BUCKET_BYTES = RUN * 2 + CELLS * 4 + WARPS * 4, DIGIT_BYTES = WARPS * DIGITS * 2 + (DIGITS + WARPS) * 4;
constexpr int SORT_BYTES = RUN * 6 + (BUCKET_BYTES > DIGIT_BYTES ? BUCKET_BYTES : DIGIT_BYTES);

// lines of a block that splits: what it reads of a sector
constexpr int LINES = 4;
// points of a block that splits, and keys of a thread that are on their way at a time
constexpr int SEGMENT = 16384, SOME = 4;

// Put the keys of every dimension of `points (heads, count, dims)` into one of `parts` stretches, with their indices:
// `pairs (heads * dims, parts, RUN)`, of which there are `sizes (heads * dims, parts)`, zero before. They are split at
// keys of a sample of every line, `sample (heads * dims, sampled)` in order. `sorted`, one before, becomes zero for
// lines with too long a stretch and, if equal keys are to keep their order, for those with so many ties in the sample
// that stretches would be crowded. What is no finite number is counted as in `Unfit`.
extern "C" __global__ void __launch_bounds__(THREADS, 2048 / THREADS)
    split(const given_t *points, const float *sample, uint2 *pairs, int *sizes, int *sorted, index_t count,
          index_t dims, index_t parts, index_t sampled, index_t stable, int *unfit, index_t group_of, index_t each) {
    extern __shared__ __align__(16) char shared[];
    __shared__ int ties[LINES];
    index_t segments = (count + SEGMENT - 1) / SEGMENT, groups = (dims + LINES - 1) / LINES;
    index_t group = blockIdx.x / segments, start = blockIdx.x % segments * SEGMENT;
    index_t head = group / groups, d = group % groups * LINES + threadIdx.x % LINES, line = head * dims + d;
    int mine = threadIdx.x % LINES, thread = threadIdx.x / LINES;
    constexpr int EACH = THREADS / LINES;
    // of the stretches of every line: the keys of a tile, those in the stretches before, where they go to, and the
    // first key; then the keys of the tile, in the order of the stretches
    int *counts = reinterpret_cast<int *>(shared), *befores = counts + LINES * parts, *bases = befores + LINES * parts;
    float *bounds = reinterpret_cast<float *>(bases + LINES * parts);
    uint2 *staged = reinterpret_cast<uint2 *>(bounds + LINES * parts);
    bool here = d < dims;
    if (threadIdx.x < LINES) ties[mine] = 0;
    __syncthreads();
    if (here) {
        sample += line * sampled;
        int equal = 0;
        for (index_t i = thread + 1; stable && i < sampled; i += EACH) equal += sample[i] == sample[i - 1];
        if (equal) atomicAdd(ties + mine, equal);
        for (index_t i = thread; i < parts; i += EACH) {
            counts[mine * parts + i] = 0;
            bounds[mine * parts + i] = sample[sampled * i / parts];
        }
    }
    __syncthreads();
    auto crowded = [&](int which) { return stable && 2 * ties[which] >= sampled; };
    if (here && crowded(mine)) sorted[line] = 0;
    here = here && !crowded(mine);
    // another line to write, such that the lanes of a warp have neighbours
    int other = threadIdx.x / 32 % LINES, writer = threadIdx.x / 32 / LINES * 32 + threadIdx.x % 32;
    index_t other_line = line - mine + other;
    bool other_here = d - mine + other < dims && !crowded(other), fits = true;
    uint2 *to = pairs + other_line * parts * RUN;
    // the last stretch that does not begin behind
    auto last_from = [&](const auto *firsts, auto x) {
        int low = 0, high = int(parts) - 1;
        while (low < high) {
            int half = (low + high + 1) / 2;
            if (firsts[half] <= x)
                low = half;
            else
                high = half - 1;
        }
        return low;
    };
    // no longer, if a key of this thread is no finite number
    float zero = 0.0f;
    const given_t *keys = points + (head * count + start + thread) * dims + d;
    index_t step = EACH * dims;
    int number_of = int(min(count - start, index_t(SEGMENT)));
    // those of this thread
    int some_keys = here ? (number_of - thread + EACH - 1) / EACH : 0;
    for (int tile = 0; tile * EACH < number_of; tile += SOME) {
        float key[SOME];
        word place[SOME];
#pragma unroll
        for (int i = 0; i < SOME; i++, keys += step) key[i] = tile + i < some_keys ? widen(*keys) : 0.0f;
#pragma unroll
        for (int i = 0; i < SOME; i++) {
            zero += 0.0f * key[i];
            key[i] = clean(key[i]);
        }
#pragma unroll
        for (int i = 0; i < SOME; i++) {
            if (tile + i >= some_keys) continue;
            int low = last_from(bounds + mine * parts, key[i]);
            place[i] = word(low) << 16 | word(atomicAdd(counts + mine * parts + low, 1));
        }
        __syncthreads();
        for (index_t i = thread; here && i < parts; i += EACH) {
            int before = 0, some = counts[mine * parts + i];
            for (index_t k = 0; k < i; k++) before += counts[mine * parts + k];
            befores[mine * parts + i] = before;
            if (some) bases[mine * parts + i] = atomicAdd(sizes + line * parts + i, some);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SOME; i++) {
            if (tile + i >= some_keys) continue;
            int at = befores[mine * parts + (place[i] >> 16)] + int(place[i] & 0xffff);
            staged[mine * SOME * EACH + at] = {__float_as_uint(key[i]), word(start) + (tile + i) * EACH + thread};
        }
        for (index_t i = thread; here && i < parts; i += EACH) counts[mine * parts + i] = 0;
        __syncthreads();
        int total = other_here ? min(SOME * EACH, number_of - tile * EACH) : 0;
        for (int i = writer; i < total; i += EACH) {
            int low = last_from(befores + other * parts, i);
            int at = bases[other * parts + low] + i - befores[other * parts + low];
            fits = fits && at < RUN;
            if (at < RUN) to[low * RUN + at] = staged[other * SOME * EACH + i];
        }
    }
    if (!fits) sorted[other_line] = 0;
    if (zero == 0.0f) return;
    Unfit looking = {unfit, group_of, each};
    keys = points + (head * count + start + thread) * dims + d;
    for (int i = 0; i < some_keys; i++, keys += step) {
        if (!finite(widen(*keys))) looking.mark(head, start + i * EACH + thread);
    }
}

// Sort the stretches of every line, where they are in `pairs`; if equal keys are to keep their order, `sorted` becomes
// zero for lines with a crowded one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sort_parts(const uint2 *pairs, const int *sizes, int *sorted, int *order, float *places, index_t count,
               index_t parts, index_t stable) {
    extern __shared__ __align__(16) char shared[];
    index_t line = blockIdx.x / parts, part = blockIdx.x % parts, first = line * count;
    if (!sorted[line]) return;
    for (int i = 0; i < part; i++) first += sizes[line * parts + i];
    int number_of = sizes[blockIdx.x];
    pairs += index_t(blockIdx.x) * RUN;
    int start = threadIdx.x / 32 * 32 * ITEMS + threadIdx.x % 32;
    float key[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = start + i * 32;
        key[i] = n < number_of ? __uint_as_float(pairs[n].x) : 0.0f;
    }
    order += first, places += first;
    auto point = [&](int n) { return int(pairs[n].y); };
    // digits leave equal keys in the order that they have in a stretch, which is none
    bool buckets = stable || !few_digits(key, number_of);
    if (buckets && sort_by_buckets(key, number_of, shared, order, places, point)) return;
    if (!stable || number_of <= 1)
        sort_by_digits(key, number_of, shared, order, places, point);
    else if (threadIdx.x == 0)
        atomicExch(sorted + line, 0);
}

// Sort every dimension of `points (heads, count, dims)` in runs of RUN: `order` and `places (heads, dims, count)` hold
// the indices and the coordinates, in order run by run; behind them those of `others`, if not null, as many. Lines that
// are `sorted`, if not null, are left alone. What is no finite number is counted as in `Unfit`, among the first points
// for the whole group, if there are others.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    sort_runs(const given_t *points, const given_t *others, int *order, float *places, const int *sorted, index_t count,
              index_t dims, index_t runs, int *unfit, index_t group, index_t each) {
    extern __shared__ __align__(16) char shared[];
    // neighbouring blocks read neighbouring dimensions: what one leaves of a sector the next finds in the cache
    index_t blocks = gridDim.x / runs, line = blockIdx.x % blocks, first = blockIdx.x / blocks * RUN;
    if (sorted && sorted[line]) return;
    int number_of = int(min(count - first, index_t(RUN)));
    order += line * count + first;
    places += line * count + first;
    Unfit looking = {unfit, group, others ? 0 : each};
    if (others && line >= blocks / 2) points = others, line -= blocks / 2, looking.each = each;
    points += (line / dims * count + first) * dims + line % dims;
    int start = threadIdx.x / 32 * 32 * ITEMS + threadIdx.x % 32;
    float key[ITEMS];
    auto load = [&](auto there) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) key[i] = there(i) ? widen(points[(start + i * 32) * dims]) : 0.0f;
        bool all = true;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) all = all && finite(key[i]);
        if (all) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) key[i] += 0.0f;
            return;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (!finite(key[i])) looking.mark(line / dims, first + start + i * 32);
            key[i] = clean(key[i]);
        }
    };
    // without a branch for each, all of them are on their way at a time
    if (number_of == RUN)
        load([](int) { return true; });
    else
        load([&](int i) { return start + i * 32 < number_of; });
    auto point = [&](int n) { return int(first) + n; };
    if (!few_digits(key, number_of) && sort_by_buckets(key, number_of, shared, order, places, point)) return;
    sort_by_digits(key, number_of, shared, order, places, point);
}

#include "merge.cu"
