// Argsorts of many lines of float32: radix sort in shared memory, and merging of runs that do not fit there.
//
// Macros: ITEMS (keys of a thread).

typedef long long index_t;
typedef unsigned int word;

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int BITS = 8;
constexpr int DIGITS = 1 << BITS;
constexpr unsigned ALL = 0xffffffffu;
// the longest run that a block sorts
constexpr int RUN = THREADS * ITEMS;

// A float's bits sort as an unsigned integer once negative ones are flipped whole and others in the sign.
__device__ inline word pattern(float x) {
    // -0.0 ties with 0.0, and what is no finite number stands at zero
    x = x - x == 0.0f ? x + 0.0f : 0.0f;
    word bits = __float_as_uint(x);
    return bits ^ (word(int(bits) >> 31) | 0x80000000u);
}

__device__ inline float number(word pattern) {
    return __uint_as_float(pattern & 0x80000000u ? pattern ^ 0x80000000u : ~pattern);
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

// Sort every dimension of `points (heads, count, dims)` in runs of RUN: `order` and `places (heads, dims, count)` hold
// the indices and the coordinates, in order run by run.
//
// Least significant digit first. A warp owns a stretch of the run and goes through it in order, so equal keys keep
// theirs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sort_runs(const float *points, int *order, float *places, index_t count, index_t dims, index_t runs) {
    extern __shared__ word shared[];
    word *keys = shared;
    unsigned short *indices = reinterpret_cast<unsigned short *>(keys + RUN);
    // how many keys with a digit there are before those of a warp
    unsigned short *counts = indices + RUN;
    word *starts = reinterpret_cast<word *>(counts + WARPS * DIGITS);
    index_t line = blockIdx.x % (gridDim.x / runs), first = blockIdx.x / (gridDim.x / runs) * RUN;
    int number_of = int(min(count - first, index_t(RUN)));
    // neighbouring blocks read neighbouring dimensions: what one leaves of a sector the next finds in the cache
    points += (line / dims * count + first) * dims + line % dims;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned before_me = (1u << lane) - 1;
    word key[ITEMS];
    unsigned short index[ITEMS], rank[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = warp * 32 * ITEMS + i * 32 + lane;
        // what is missing in the last run sorts behind all there is
        key[i] = n < number_of ? pattern(points[n * dims]) : ALL;
        index[i] = n;
    }
    for (int shift = 0; shift < 32; shift += BITS) {
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
    order += line * count + first;
    places += line * count + first;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = warp * 32 * ITEMS + i * 32 + lane;
        if (n < number_of) {
            order[n] = int(first) + index[i];
            places[n] = number(key[i]);
        }
    }
}

constexpr int MERGED = 8;

// Merge neighbouring sorted runs of `length` into runs twice as long; a thread writes MERGED places.
extern "C" __global__ void merge_runs(const int *order, const float *places, int *merged_order, float *merged_places,
                                      index_t lines, index_t count, index_t length) {
    index_t pieces = (count + MERGED - 1) / MERGED;
    index_t job = blockIdx.x * index_t(blockDim.x) + threadIdx.x;
    if (job >= lines * pieces) return;
    index_t line = job / pieces, out = job % pieces * MERGED;
    // the length of a run is a multiple of MERGED: a thread's places are in one pair of runs
    index_t start = out / (2 * length) * (2 * length), middle = min(start + length, count),
            stop = min(start + 2 * length, count);
    order += line * count, places += line * count, merged_order += line * count, merged_places += line * count;
    // how many of the first `out - start` places come from the left run
    index_t diagonal = out - start, low = max(diagonal - (stop - middle), index_t(0)),
            high = min(diagonal, middle - start);
    while (low < high) {
        index_t half = (low + high) / 2;
        if (places[start + half] <= places[middle + diagonal - half - 1])
            low = half + 1;
        else
            high = half;
    }
    index_t left = start + low, right = middle + diagonal - low;
    float a = left < middle ? places[left] : 0.0f, b = right < stop ? places[right] : 0.0f;
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
        if (out + i >= stop) return;
        bool from_left = right >= stop || (left < middle && a <= b);
        index_t from = from_left ? left++ : right++;
        merged_order[out + i] = order[from];
        merged_places[out + i] = from_left ? a : b;
        if (from_left)
            a = left < middle ? places[left] : 0.0f;
        else
            b = right < stop ? places[right] : 0.0f;
    }
}
