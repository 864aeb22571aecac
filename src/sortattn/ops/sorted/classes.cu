// Coordinates of sixteen bits: few of them differ, and what is summed for a query depends on their classes alone.
//
// A line is one dimension of one head. Its classes are the different coordinates on it, in order; where a coordinate
// stands among them is found in a bitmap of all that there can be.
//
// Macros: those of half.cu and THREADS (of a block).

#include "half.cu"
#include "wind.cu"

// words of the bitmap, and of a thread
constexpr int WORDS = 2048, SHARE = WORDS / THREADS;
// codes that are read at a time
constexpr int EIGHT = 8;
static_assert(SHARE * THREADS == WORDS && THREADS % 32 == 0, "words are shared by all threads");

// ---- points to codes

constexpr int TILE = 64;

// `points (heads, count, dims)` to `codes (heads, dims, pitch)`, a tile a block; `unfit (heads, group)` counts what is
// no finite number, of every `each` points for themselves, or for the whole group if that is zero.
extern "C" __global__ void __launch_bounds__(256) spread(const half_t *points, half_t *codes, int *unfit, index_t count,
                                                         index_t dims, index_t pitch, index_t group, index_t each) {
    __shared__ half_t tile[TILE][TILE + 2];
    index_t rows = (count + TILE - 1) / TILE, columns = (dims + TILE - 1) / TILE;
    index_t first = blockIdx.x % rows * TILE, first_dim = blockIdx.x / rows % columns * TILE;
    index_t p = blockIdx.x / rows / columns;
    auto put = [&](int row, int column, half_t bits) {
        if (unfit_bits(bits)) {
            for (index_t g = 0; g < group; g++) {
                if (!each || (first + row) / each == g) atomicAdd(unfit + p * group + g, 1);
            }
        }
        tile[column][row] = half_t(code_of(bits));
    };
    // two dimensions at a time, a warp a point
    const half_t *start = points + (p * count + first) * dims + first_dim;
    int column = threadIdx.x % 32 * 2;
    bool even = dims % 2 == 0;
    unsigned words[TILE / 8];
#pragma unroll
    for (int k = 0; k < TILE / 8; k++) {
        int row = threadIdx.x / 32 + 8 * k;
        const half_t *here = start + row * dims + column;
        words[k] = 0;
        if (first + row < count && first_dim + column < dims) {
            if (even)
                words[k] = *reinterpret_cast<const unsigned *>(here);
            else
                words[k] = here[0] | (first_dim + column + 1 < dims ? unsigned(here[1]) << 16 : 0u);
        }
    }
#pragma unroll
    for (int k = 0; k < TILE / 8; k++) {
        int row = threadIdx.x / 32 + 8 * k;
        put(row, column, half_t(words[k])), put(row, column + 1, half_t(words[k] >> 16));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * TILE / 2; i += 256) {
        index_t d = first_dim + i / (TILE / 2), n = first + i % (TILE / 2) * 2;
        if (d >= dims || n >= pitch) continue;
        const half_t *two = &tile[i / (TILE / 2)][i % (TILE / 2) * 2];
        *reinterpret_cast<unsigned *>(codes + (p * dims + d) * pitch + n) = two[0] | unsigned(two[1]) << 16;
    }
}

// What is no finite number among the values of every head, `each` words of them, for all of its group.
extern "C" __global__ void __launch_bounds__(256)
    look(const unsigned *values, int *unfit, index_t each, index_t group, index_t slices) {
    index_t p = blockIdx.x / slices, slice = blockIdx.x % slices, share = (each + slices - 1) / slices;
    bool found = false;
    values += p * each;
#pragma unroll 8
    for (index_t i = slice * share + threadIdx.x; i < min((slice + 1) * share, each); i += 256) {
        unsigned word = values[i];
        found = found || unfit_bits(half_t(word)) || unfit_bits(half_t(word >> 16));
    }
    if (!__syncthreads_or(found) || threadIdx.x) return;
    for (index_t g = 0; g < group; g++) atomicAdd(unfit + p * group + g, 1);
}

// ---- classes of a line

// Eight codes, as they are read.
struct alignas(16) Codes {
    unsigned word[EIGHT / 2];

    __device__ unsigned at(int i) const { return word[i / 2] >> i % 2 * 16 & 0xffffu; }
};

// The sums over the threads of a block before each, and of all.
__device__ inline int sum_before(int mine, int *warps, int &all) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        int other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int before = sum - mine;
    all = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += warps[w];
        all += warps[w];
    }
    return before;
}

// Of all coordinates that there can be, those on a line.
struct Bitmap {
    unsigned bits[WORDS];
    // classes before the first one of a word
    unsigned before[WORDS];
    int warps[THREADS / 32];

    // call `visit(n, code)` for all codes of a line
    template <typename F> __device__ static void each(const half_t *codes, index_t count, F visit) {
        for (index_t n = threadIdx.x * EIGHT; n < count; n += THREADS * EIGHT) {
            Codes some = *reinterpret_cast<const Codes *>(codes + n);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                if (n + i < count) visit(int(n) + i, some.at(i));
            }
        }
    }
    // codes by what they are on a circle, if the line is wound
    __device__ static void turn(half_t *codes, index_t count, const half_t *turned) {
        for (index_t n = threadIdx.x * EIGHT; n < count; n += THREADS * EIGHT) {
            Codes some = *reinterpret_cast<const Codes *>(codes + n);
#pragma unroll
            for (int i = 0; i < EIGHT / 2; i++)
                some.word[i] = turned[some.at(2 * i)] | unsigned(turned[some.at(2 * i + 1)]) << 16;
            *reinterpret_cast<Codes *>(codes + n) = some;
        }
    }
    // from the codes of a line; returns the number of classes
    __device__ int fill(const half_t *codes, index_t count) {
        for (int i = threadIdx.x; i < WORDS; i += THREADS) bits[i] = 0;
        __syncthreads();
        each(codes, count, [&](int, unsigned code) {
            unsigned bit = 1u << code % 32;
            // most are there already, and looking takes less time
            if (!(static_cast<volatile unsigned *>(bits)[code / 32] & bit)) atomicOr(bits + code / 32, bit);
        });
        __syncthreads();
        int mine = 0, all;
#pragma unroll
        for (int i = 0; i < SHARE; i++) mine += __popc(bits[threadIdx.x * SHARE + i]);
        int sum = sum_before(mine, warps, all);
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            before[threadIdx.x * SHARE + i] = sum;
            sum += __popc(bits[threadIdx.x * SHARE + i]);
        }
        __syncthreads();
        return all;
    }
    // codes, as far as whole vectors reach, by the numbers of their classes
    __device__ void replace(half_t *codes, index_t pitch, int all) const {
        for (index_t n = threadIdx.x * EIGHT; n < pitch; n += THREADS * EIGHT) {
            Codes some = *reinterpret_cast<const Codes *>(codes + n);
#pragma unroll
            for (int i = 0; i < EIGHT / 2; i++) {
                // what stands behind the last point has some class too
                unsigned low = min(rank(some.at(2 * i)), all - 1), high = min(rank(some.at(2 * i + 1)), all - 1);
                some.word[i] = low | high << 16;
            }
            *reinterpret_cast<Codes *>(codes + n) = some;
        }
    }
    // the codes of all classes
    __device__ void list(half_t *classes) const {
        for (int word = threadIdx.x; word < WORDS; word += THREADS) {
            int place = int(before[word]);
            for (unsigned left = bits[word]; left; left &= left - 1)
                classes[place++] = half_t(word * 32 + __ffs(left) - 1);
        }
    }
    __device__ int rank(unsigned code) const {
        return int(before[code / 32]) + __popc(bits[code / 32] & ((1u << code % 32) - 1));
    }
};

// Codes `(lines, pitch)` to the numbers of their classes, in place; `classes (lines, most)` are the codes of those, and
// `counts (lines)` how many there are. Those of lines that are wound are `turned` first.
extern "C" __global__ void __launch_bounds__(THREADS)
    rank_classes(half_t *codes, half_t *classes, int *counts, const Winding *windings, const half_t *turned,
                 index_t count, index_t pitch, index_t most) {
    __shared__ Bitmap map;
    if (is_wound(windings, blockIdx.x)) Bitmap::turn(codes + blockIdx.x * pitch, count, turned);
    int all = map.fill(codes + blockIdx.x * pitch, count);
    map.replace(codes + blockIdx.x * pitch, pitch, all);
    map.list(classes + blockIdx.x * most);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

// The same, and the points of every line in order, `entries (lines, count)` of the number of a class and an index, by
// counting those of every class, `room` classes at a time. They are put in order in shared memory, `stage` at a time,
// but for a class that has more; equal ones stand as they come.
extern "C" __global__ void __launch_bounds__(THREADS)
    arrange(half_t *codes, entry_t *entries, half_t *classes, int *counts, const Winding *windings,
            const half_t *turned, index_t count, index_t pitch, index_t most, index_t room, index_t stage) {
    extern __shared__ __align__(16) char shared[];
    entry_t *staged = reinterpret_cast<entry_t *>(shared);
    int *places = reinterpret_cast<int *>(staged + stage);
    __shared__ Bitmap map;
    codes += blockIdx.x * pitch, entries += blockIdx.x * count;
    if (is_wound(windings, blockIdx.x)) Bitmap::turn(codes, count, turned);
    int all = map.fill(codes, count), start = 0;
    map.replace(codes, pitch, all);
    map.list(classes + blockIdx.x * most);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
    for (int first = 0; first < all; first += int(room)) {
        int some = min(int(room), all - first);
        __syncthreads();
        for (int i = threadIdx.x; i < some; i += THREADS) places[i] = 0;
        __syncthreads();
        Bitmap::each(codes, count, [&](int, unsigned rank) {
            int i = int(rank) - first;
            if (i >= 0 && i < some) atomicAdd(places + i, 1);
        });
        __syncthreads();
        int share = (some + THREADS - 1) / THREADS, from = min(int(threadIdx.x) * share, some);
        int to = min(from + share, some), mine = 0, total;
        for (int i = from; i < to; i++) mine += places[i];
        int sum = start + sum_before(mine, map.warps, total);
        for (int i = from; i < to; i++) {
            int here = places[i];
            places[i] = sum;
            sum += here;
        }
        start += total;
        __syncthreads();
        // classes that fit together
        for (int next = 0, last; next < some; next = last) {
            auto end_of = [&](int i) { return i < some ? places[i] : start; };
            int begin = places[next], low = next + 1, high = some;
            while (low < high) {
                int half = (low + high + 1) / 2;
                if (end_of(half) - begin <= stage)
                    low = half;
                else
                    high = half - 1;
            }
            last = low;
            int number = end_of(last) - begin;
            bool fits = number <= stage;
            __syncthreads();
            Bitmap::each(codes, count, [&](int n, unsigned rank) {
                int i = int(rank) - first;
                if (i < next || i >= last) return;
                int place = atomicAdd(places + i, 1);
                (fits ? staged[place - begin] : entries[place]) = entry_t(rank) << INDEX | entry_t(n);
            });
            __syncthreads();
            for (int i = threadIdx.x; fits && i < number; i += THREADS) entries[begin + i] = staged[i];
            __syncthreads();
        }
    }
}

// ---- rounds

// Which heads are walked at a time: their classes of queries have no more than `room` rows together with those of keys,
// if these have any, on lines that are not wound. `rounds (most + 1)` are the first heads, and `offsets (heads, dims)`
// and `key_offsets` where the rows of a line begin.
//
// As `wave` lines are walked at a time, a round ends where the last of its waves is as full as can be, with `least`
// heads at least, for which there is always room.
extern "C" __global__ void __launch_bounds__(THREADS)
    divide_rounds(const int *counts, const int *key_counts, const Winding *windings, index_t *offsets,
                  index_t *key_offsets, int *rounds, index_t heads, index_t dims, index_t room, index_t most,
                  index_t wave, index_t least) {
    __shared__ index_t sizes[THREADS], starts[THREADS];
    index_t used = 0, round = 0, begin = 0;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) rounds[0] = 0;
    for (index_t first = 0; first < heads; first += THREADS) {
        int some = int(min(heads - first, index_t(THREADS)));
        // by a warp: `visit(line, first row of queries, of keys)` for all lines of a head; returns how many rows it has
        auto go_through = [&](int head, auto visit) {
            index_t sum = 0;
            for (index_t d = 0; d < dims; d += 32) {
                index_t line = (first + head) * dims + d + lane, mine = 0, keys = 0;
                if (d + lane < dims) {
                    if (key_counts && !is_wound(windings, line)) keys = key_counts[line];
                    mine = counts[line] + keys;
                }
                index_t all = mine;
#pragma unroll
                for (int offset = 1; offset < 32; offset <<= 1) {
                    index_t other = __shfl_up_sync(0xffffffffu, all, offset);
                    if (lane >= offset) all += other;
                }
                if (d + lane < dims) visit(line, sum + all - mine, sum + all - keys);
                sum += __shfl_sync(0xffffffffu, all, 31);
            }
            return sum;
        };
        __syncthreads();
        for (int head = warp; head < some; head += THREADS / 32) {
            index_t size = go_through(head, [](index_t, index_t, index_t) {});
            if (lane == 0) sizes[head] = size;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            // the best end of the round so far, and its lines and waves
            index_t best = -1, best_lines = 0, best_waves = 1;
            for (index_t i = 0; i < some; i++) {
                if (used + sizes[i] > room) {
                    i = best < 0 ? i : best;
                    rounds[++round] = int(begin = first + i);
                    used = 0, best = -1, best_lines = 0, best_waves = 1;
                }
                starts[i] = used;
                used += sizes[i];
                index_t lines = (first + i + 1 - begin) * dims, waves = (lines + wave - 1) / wave;
                if (lines >= least * dims && lines * best_waves >= best_lines * waves)
                    best = i + 1, best_lines = lines, best_waves = waves;
            }
        }
        __syncthreads();
        for (int head = warp; head < some; head += THREADS / 32) {
            index_t start = starts[head];
            go_through(head, [&](index_t line, index_t queries, index_t keys) {
                offsets[line] = start + queries;
                if (key_counts) key_offsets[line] = start + keys;
            });
        }
    }
    if (threadIdx.x == 0) {
        while (round < most) rounds[++round] = int(heads);
    }
}
