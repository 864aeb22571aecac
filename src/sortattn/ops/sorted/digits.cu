// Runs are sorted digit by digit.
//
// sort.cu comes before.

constexpr int BITS = 8;
constexpr int DIGITS = 1 << BITS;

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

// of shared memory: keys, indices, digits of all warps, and starts
constexpr int DIGIT_BYTES = RUN * 6 + WARPS * DIGITS * 2 + (DIGITS + WARPS) * 4;
