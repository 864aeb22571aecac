// Argsorts of many lines of float32 in shared memory, of parts that fit there.
//
// A long line is split at some of its keys, taken from a sorted sample, into stretches that fit, which are sorted one
// by one. If one is too long after all, or crowded, the line is cut into runs instead, which are sorted and merged.
//
// A run is thrown into as many buckets as it has keys, along a piecewise linear approximation of its distribution, and
// every key then finds its place among the few in its bucket. Where there are many in one, as ties are, or keys have
// few digits, as those of bfloat16, the run is sorted digit by digit instead. Equal keys keep their order either way,
// but for those of a stretch that is sorted by digits, which is why it may be refused.
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

// A float as an unsigned integer that sorts alike: its magnitude above or below the middle. What has zeros at the end
// of a float, as a bfloat16 has, has them here.
__device__ inline word pattern(float x) {
    // -0.0 ties with 0.0, and what is no finite number stands at zero
    x = x - x == 0.0f ? x + 0.0f : 0.0f;
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

// pieces of the approximate distribution
constexpr int CELLS = 1024;
// keys of a bucket, at most
constexpr int CROWD = 48;

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
        int total = totals[lane], all = total;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            int other = __shfl_up_sync(ALL, all, offset);
            if (lane >= offset) all += other;
        }
        totals[lane] = all - total;
    }
    __syncthreads();
    return totals[warp] + sum - mine;
}

// Which bucket a key belongs to; monotone.
struct Buckets {
    float low, scale;
    // of every cell: the first bucket and how many there are, packed
    const int2 *cells;

    // in cells; rounded alike wherever it is computed
    __device__ float where(float x) const { return __fmul_rn(x - low, scale); }
    __device__ int cell(float x) const { return min(int(where(x)), CELLS - 1); }
    __device__ int operator()(float x) const {
        int c = cell(x);
        int2 here = cells[c];
        return here.x + min(int(__fmul_rn(__fsub_rn(where(x), float(c)), float(here.y))), here.y - 1);
    }
};

// Sort `number` keys of a run by buckets, key n being that of the point `point(n)`; returns false, having done nothing,
// if a bucket is crowded.
template <typename F> __device__ bool sort_by_buckets(const word (&key)[ITEMS], int number, char *shared, int *order,
                                                      float *places, F point) {
    word *keys = reinterpret_cast<word *>(shared);
    unsigned short *indices = reinterpret_cast<unsigned short *>(keys + RUN);
    // the number of keys in every bucket, then those in the buckets before; two in a word
    word *counts = reinterpret_cast<word *>(indices + RUN);
    unsigned short *starts = reinterpret_cast<unsigned short *>(counts);
    int2 *cells = reinterpret_cast<int2 *>(counts + RUN / 2);
    int *totals = reinterpret_cast<int *>(cells + CELLS);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, start = warp * 32 * ITEMS + lane;

    // as patterns compare like the numbers
    word least = ALL, most = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (start + i * 32 < number) least = min(least, key[i]), most = max(most, key[i]);
    }
    least = __reduce_min_sync(ALL, least), most = __reduce_max_sync(ALL, most);
    if (lane == 0) keys[warp] = least, keys[WARPS + warp] = most;
    for (int i = threadIdx.x; i < RUN / 2; i += THREADS) counts[i] = 0;
    for (int i = threadIdx.x; i < CELLS; i += THREADS) cells[i] = {0, 0};
    __syncthreads();
    least = __reduce_min_sync(ALL, keys[lane]), most = __reduce_max_sync(ALL, keys[WARPS + lane]);
    Buckets bucket = {::number(least), float(CELLS) / (::number(most) - ::number(least)), cells};
    // all keys equal, or too far apart for a float
    if (!(bucket.scale > 0.0f && bucket.scale < 1e30f)) return false;

#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (start + i * 32 < number) atomicAdd(&cells[bucket.cell(::number(key[i]))].y, 1);
    }
    __syncthreads();
    static_assert(CELLS == THREADS, "a thread has one cell");
    int before = sum_before(cells[threadIdx.x].y, totals);
    cells[threadIdx.x].x = before;
    __syncthreads();

    // the bucket of every key, and how many came there before
    word places_of[ITEMS];
    bool crowded = false;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (start + i * 32 < number) {
            int b = bucket(::number(key[i])), shift = b % 2 * 16;
            word arrival = atomicAdd(counts + b / 2, 1u << shift) >> shift & 0xffff;
            crowded = crowded || arrival >= CROWD;
            places_of[i] = word(b) | arrival << 16;
        }
    }
    if (__syncthreads_or(crowded)) return false;

    // a thread has ITEMS neighbouring buckets
    int sum = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) sum += starts[threadIdx.x * ITEMS + i];
    sum = sum_before(sum, totals);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int here = starts[threadIdx.x * ITEMS + i];
        starts[threadIdx.x * ITEMS + i] = sum;
        sum += here;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = start + i * 32;
        if (n < number) {
            int place = starts[places_of[i] & 0xffff] + (places_of[i] >> 16);
            keys[place] = key[i];
            indices[place] = n;
        }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < number; n += THREADS) {
        word mine = keys[n];
        int index = point(indices[n]), b = bucket(::number(mine)), place = starts[b];
        int stop = b + 1 < RUN ? starts[b + 1] : number;
        for (int m = place, end = stop; m < end; m++) {
            word other = keys[m];
            place += other < mine || (other == mine && point(indices[m]) < index);
        }
        order[place] = index;
        places[place] = ::number(mine);
    }
    return true;
}

// Whether the first `count` keys have so few digits that two passes sort them.
__device__ inline bool few_digits(const word (&key)[ITEMS], int count) {
    int start = threadIdx.x / 32 * 32 * ITEMS + threadIdx.x % 32;
    bool more = false;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) more = more || (start + i * 32 < count && key[i] & 0xffff);
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
    return __reduce_or_sync(ALL, bits[lane]) & ~__reduce_and_sync(ALL, bits[WARPS + lane]);
}

// Sort the first `count` keys of a run digit by digit, the least significant first, by those that vary; the others sort
// behind all. A warp owns a stretch of the run and goes through it in order.
template <typename F>
__device__ void sort_by_digits(word (&key)[ITEMS], int count, char *shared, int *order, float *places, F point) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

// lines of a block that splits: what it reads of a sector
constexpr int LINES = 4;

// Put the keys of every dimension of `points (heads, count, dims)` into one of `parts` stretches, with their indices:
// `pairs (heads * dims, parts, RUN)`, of which there are `sizes (heads * dims, parts)`. They are split at keys of a
// sample of every line, `sample (heads * dims, sampled)` in order. `sorted` is left zero for lines with too long a
// stretch and, if equal keys are to keep their order, for those with so many ties in the sample that stretches would be
// crowded.
extern "C" __global__ void __launch_bounds__(THREADS)
    split(const float *points, const float *sample, uint2 *pairs, int *sizes, int *sorted, index_t count, index_t dims,
          index_t parts, index_t sampled, index_t stable) {
    extern __shared__ char shared[];
    __shared__ int ties[LINES], wrong[LINES];
    index_t groups = (dims + LINES - 1) / LINES, d = blockIdx.x % groups * LINES + threadIdx.x % LINES;
    index_t head = blockIdx.x / groups, line = head * dims + d;
    bool here = d < dims;
    int mine = threadIdx.x % LINES;
    int *cursors = reinterpret_cast<int *>(shared) + mine * parts;
    float *bounds = reinterpret_cast<float *>(shared) + (LINES + mine) * parts;
    if (threadIdx.x < LINES) ties[mine] = wrong[mine] = 0;
    __syncthreads();
    if (here) {
        sample += line * sampled;
        int equal = 0;
        for (index_t i = threadIdx.x / LINES + 1; i < sampled; i += THREADS / LINES)
            equal += sample[i] == sample[i - 1];
        if (equal) atomicAdd(ties + mine, equal);
        for (index_t i = threadIdx.x / LINES; i < parts; i += THREADS / LINES) {
            cursors[i] = 0;
            bounds[i] = sample[sampled * i / parts];
        }
    }
    __syncthreads();
    here = here && (!stable || 2 * ties[mine] < sampled);
    if (here) {
        const float *keys = points + head * count * dims + d;
        uint2 *to = pairs + line * parts * RUN;
        bool fits = true;
#pragma unroll 8
        for (index_t n = threadIdx.x / LINES; n < count; n += THREADS / LINES) {
            word key = pattern(keys[n * dims]);
            float x = number(key);
            // the last stretch that does not begin behind it
            int low = 0, high = int(parts) - 1;
            while (low < high) {
                int half = (low + high + 1) / 2;
                if (bounds[half] <= x)
                    low = half;
                else
                    high = half - 1;
            }
            int place = atomicAdd(cursors + low, 1);
            fits = fits && place < RUN;
            if (place < RUN) to[low * RUN + place] = {key, word(n)};
        }
        if (!fits) wrong[mine] = 1;
    }
    __syncthreads();
    if (here) {
        for (index_t i = threadIdx.x / LINES; i < parts; i += THREADS / LINES) sizes[line * parts + i] = cursors[i];
    }
    if (threadIdx.x < LINES && d < dims) sorted[line] = here && !wrong[mine];
}

// Sort the stretches of every line, where they are in `pairs`; if equal keys are to keep their order, `sorted` becomes
// zero for lines with a crowded one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sort_parts(const uint2 *pairs, const int *sizes, int *sorted, int *order, float *places, index_t count,
               index_t parts, index_t stable) {
    extern __shared__ char shared[];
    index_t line = blockIdx.x / parts, part = blockIdx.x % parts, first = line * count;
    if (!sorted[line]) return;
    for (int i = 0; i < part; i++) first += sizes[line * parts + i];
    int number_of = sizes[blockIdx.x];
    pairs += blockIdx.x * RUN;
    int start = threadIdx.x / 32 * 32 * ITEMS + threadIdx.x % 32;
    word key[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) key[i] = start + i * 32 < number_of ? pairs[start + i * 32].x : ALL;
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
// the indices and the coordinates, in order run by run. Lines that are `sorted`, if not null, are left alone.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sort_runs(const float *points, int *order, float *places, const int *sorted, index_t count, index_t dims,
              index_t runs) {
    extern __shared__ char shared[];
    index_t line = blockIdx.x % (gridDim.x / runs), first = blockIdx.x / (gridDim.x / runs) * RUN;
    if (sorted && sorted[line]) return;
    int number_of = int(min(count - first, index_t(RUN)));
    // neighbouring blocks read neighbouring dimensions: what one leaves of a sector the next finds in the cache
    points += (line / dims * count + first) * dims + line % dims;
    order += line * count + first;
    places += line * count + first;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    word key[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int n = warp * 32 * ITEMS + i * 32 + lane;
        // what is missing in the last run sorts behind all there is
        key[i] = n < number_of ? pattern(points[n * dims]) : ALL;
    }
    auto point = [&](int n) { return int(first) + n; };
    if (!few_digits(key, number_of) && sort_by_buckets(key, number_of, shared, order, places, point)) return;
    sort_by_digits(key, number_of, shared, order, places, point);
}

// a thread of a block that merges writes MERGED places
constexpr int MERGERS = 256;
constexpr int MERGED = 8;
constexpr int TILE = MERGERS * MERGED;

// How many of the first `diagonal` places of two merged runs come from the left one; `holds(half)` says that the
// left one's number `half` comes before the right one's `diagonal - half - 1`. All lanes search together.
template <typename F> __device__ inline int count_left(int low, int high, F holds) {
    int lane = threadIdx.x % 32;
    while (low < high) {
        int step = (high - low + 31) / 32, probe = low + (lane + 1) * step - 1;
        int whole = __popc(__ballot_sync(ALL, probe < high && holds(probe)));
        high = min(high, low + (whole + 1) * step - 1);
        low = min(low + whole * step, high);
    }
    return low;
}

// Neighbours that fall into the same bank are kept apart.
__device__ inline int apart(int i) { return i + i / 32; }

// Merge neighbouring sorted runs of `length` into runs twice as long; a block writes TILE places.
extern "C" __global__ void __launch_bounds__(MERGERS)
    merge_runs(const int *order, const float *places, int *merged_order, float *merged_places, const int *sorted,
               index_t count, index_t length) {
    __shared__ float numbers[TILE + TILE / 32];
    __shared__ int indices[TILE + TILE / 32];
    __shared__ int bounds[2];
    index_t tiles = (count + TILE - 1) / TILE, line = blockIdx.x / tiles, out = blockIdx.x % tiles * TILE;
    if (sorted[line]) return;
    // the length of a run is a multiple of TILE: the places of a block are in one pair of runs
    index_t start = out / (2 * length) * (2 * length), middle = min(start + length, count),
            stop = min(start + 2 * length, count);
    order += line * count, places += line * count, merged_order += line * count, merged_places += line * count;
    int left_length = int(middle - start), right_length = int(stop - middle), warp = threadIdx.x / 32;
    int number = int(min(index_t(TILE), stop - out)), from = int(out - start);
    if (warp < 2) {
        int diagonal = from + warp * number;
        int left = count_left(max(diagonal - right_length, 0), min(diagonal, left_length),
                              [&](int half) { return places[start + half] <= places[middle + diagonal - half - 1]; });
        if (threadIdx.x % 32 == 0) bounds[warp] = left;
    }
    __syncthreads();
    int left = bounds[0], lefts = bounds[1] - left, right = from - left;
    for (int i = threadIdx.x; i < number; i += MERGERS) {
        index_t at = i < lefts ? start + left + i : middle + right + i - lefts;
        numbers[apart(i)] = places[at];
        indices[apart(i)] = order[at];
    }
    __syncthreads();
    int diagonal = min(int(threadIdx.x) * MERGED, number), rights = number - lefts;
    int low = max(diagonal - rights, 0), high = min(diagonal, lefts);
    while (low < high) {
        int half = (low + high) / 2;
        if (numbers[apart(half)] <= numbers[apart(lefts + diagonal - half - 1)])
            low = half + 1;
        else
            high = half;
    }
    int a = low, b = lefts + diagonal - low;
    float merged[MERGED];
    int merged_indices[MERGED];
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
        bool from_left = b >= number || (a < lefts && numbers[apart(a)] <= numbers[apart(b)]);
        int next = diagonal + i < number ? apart(from_left ? a++ : b++) : 0;
        merged[i] = numbers[next];
        merged_indices[i] = indices[next];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
        if (diagonal + i < number) {
            numbers[apart(diagonal + i)] = merged[i];
            indices[apart(diagonal + i)] = merged_indices[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < number; i += MERGERS) {
        merged_order[out + i] = indices[apart(i)];
        merged_places[out + i] = numbers[apart(i)];
    }
}
