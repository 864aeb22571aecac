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

constexpr int TILE = 64, SPREADERS = 256;

// `points (heads, count, dims)` to `codes (heads, dims, pitch)`, a tile a block; `unfit (heads, group)` counts what is
// no finite number, of every `each` points for themselves, or for the whole group if that is zero.
extern "C" __global__ void __launch_bounds__(SPREADERS)
    spread(const half_t *points, half_t *codes, int *unfit, index_t count, index_t dims, index_t pitch, index_t group,
           index_t each) {
    // two points of a dimension in a word; even dimensions before odd ones, as a thread has two
    __shared__ unsigned tile[TILE][TILE / 2 + 1];
    index_t rows = (count + TILE - 1) / TILE, columns = (dims + TILE - 1) / TILE;
    index_t first = blockIdx.x % rows * TILE, first_dim = blockIdx.x / rows % columns * TILE;
    index_t p = blockIdx.x / rows / columns;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane * 2;
    const half_t *start = points + (p * count + first) * dims + first_dim + column;
    int points_here = int(min(count - first, index_t(TILE))), dims_here = int(min(dims - first_dim, index_t(TILE)));
    bool even = dims % 2 == 0;
    // two dimensions of two points at a time, a warp for each
    constexpr int TIMES = TILE / 2 / (SPREADERS / 32);
    unsigned words[TIMES][2];
#pragma unroll
    for (int k = 0; k < 2 * TIMES; k++) {
        int row = (warp + SPREADERS / 32 * (k / 2)) * 2 + k % 2;
        const half_t *here = start + row * dims;
        unsigned &word = words[k / 2][k % 2] = 0;
        if (row < points_here && column < dims_here) {
            if (even)
                word = *reinterpret_cast<const unsigned *>(here);
            else
                word = here[0] | (column + 1 < dims_here ? unsigned(here[1]) << 16 : 0u);
        }
    }
#pragma unroll
    for (int k = 0; k < TIMES; k++) {
        int pair = warp + SPREADERS / 32 * k;
        unsigned both[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            unsigned word = words[k][i];
            both[i] = codes_of(word);
            if (!is_special(word)) continue;
            both[i] = code_of(half_t(word)) | code_of(half_t(word >> 16)) << 16;
            int number = unfit_bits(half_t(word)) + unfit_bits(half_t(word >> 16));
            for (index_t g = 0; number && g < group; g++) {
                if (!each || (first + 2 * pair + i) / each == g) atomicAdd(unfit + p * group + g, number);
            }
        }
        tile[lane][pair] = (both[0] & 0xffffu) | both[1] << 16;
        tile[lane + TILE / 2][pair] = both[0] >> 16 | (both[1] & 0xffff0000u);
    }
    __syncthreads();
    unsigned *to = reinterpret_cast<unsigned *>(codes + (p * dims + first_dim) * pitch + first) + lane;
#pragma unroll
    for (int k = 0; k < TILE / (SPREADERS / 32); k++) {
        int d = warp + SPREADERS / 32 * k;
        if (d < dims_here) to[d * (pitch / 2)] = tile[d % 2 * (TILE / 2) + d / 2][lane];
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
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto summed = [&](int sum) {
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            int other = __shfl_up_sync(0xffffffffu, sum, offset);
            if (lane >= offset) sum += other;
        }
        return sum;
    };
    int sum = summed(mine);
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int others = summed(lane < THREADS / 32 ? warps[lane] : 0);
    all = __shfl_sync(0xffffffffu, others, 31);
    int before = __shfl_sync(0xffffffffu, others, max(warp - 1, 0));
    return sum - mine + (warp ? before : 0);
}

// Codes of a line that a thread has, of one part of it after the other; those of a short one stay.
constexpr int HELD = 2, PART = HELD * EIGHT * THREADS;

struct Held {
    Codes some[HELD];

    __device__ static int place(int part, int k) { return (part * HELD + k) * EIGHT * THREADS + threadIdx.x * EIGHT; }
    // behind the last point is some `other` once more, so that there are no more classes
    __device__ void load(const half_t *codes, int count, int pitch, int part, unsigned other) {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int n = place(part, k);
            some[k] = n < pitch ? *reinterpret_cast<const Codes *>(codes + n) : Codes{};
        }
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int n = place(part, k);
            if (n + EIGHT <= count) continue;
#pragma unroll
            for (int i = 0; i < EIGHT / 2; i++) {
                unsigned &word = some[k].word[i];
                if (n + 2 * i >= count) word = other | other << 16;
                if (n + 2 * i + 1 >= count) word = (word & 0xffffu) | other << 16;
            }
        }
    }
    __device__ void store(half_t *codes, int pitch, int part) const {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (place(part, k) < pitch) *reinterpret_cast<Codes *>(codes + place(part, k)) = some[k];
        }
    }
    // `change(code)` for all of them
    template <typename F> __device__ void replace(F change) {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
#pragma unroll
            for (int i = 0; i < EIGHT; i += 2)
                some[k].word[i / 2] = change(some[k].at(i)) | change(some[k].at(i + 1)) << 16;
        }
    }
};

// Of all coordinates that there can be, those on a line.
struct Bitmap {
    unsigned bits[WORDS];
    // classes before the first one of a word
    unsigned before[WORDS];
    int warps[THREADS / 32];

    // call `visit(n, code)` for all codes of a line
    template <typename F> __device__ static void each(const half_t *codes, int count, F visit) {
        int whole = count / EIGHT * EIGHT, rest = whole + int(threadIdx.x);
        for (int n = threadIdx.x * EIGHT; n < whole; n += THREADS * EIGHT) {
            Codes some = *reinterpret_cast<const Codes *>(codes + n);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) visit(n + i, some.at(i));
        }
        if (rest < count) visit(rest, unsigned(codes[rest]));
    }
    // from the codes of a line, those of a line that is wound by what they are on a circle; returns the number of
    // classes, and in `held` the last part
    __device__ int fill(Held &held, half_t *codes, int count, int pitch, const half_t *turned) {
        for (int i = threadIdx.x; i < WORDS; i += THREADS) bits[i] = 0;
        unsigned other = codes[0];
        held.load(codes, count, pitch, 0, other);
        __syncthreads();
        for (int part = 0; part * PART < count; part++) {
            if (part) held.load(codes, count, pitch, part, other);
            if (turned) {
                held.replace([&](unsigned code) { return unsigned(turned[code]); });
                if (pitch > PART) held.store(codes, pitch, part);
            }
            held.replace([&](unsigned code) {
                unsigned bit = 1u << code % 32;
                // most are there already, and looking takes less time
                if (!(static_cast<volatile unsigned *>(bits)[code / 32] & bit)) atomicOr(bits + code / 32, bit);
                return code;
            });
        }
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
    __device__ void rank_all(Held &held, half_t *codes, int count, int pitch) const {
        unsigned other = codes[0];
        __syncthreads();
        for (int part = 0; part * PART < count; part++) {
            if (pitch > PART) held.load(codes, count, pitch, part, other);
            held.replace([&](unsigned code) { return unsigned(rank(code)); });
            held.store(codes, pitch, part);
        }
    }
    // the codes of all classes, which are put beside each other first, `room` of them at a time
    __device__ void list(half_t *classes, int all, half_t *listed, int room) const {
        for (int first = 0; first < all; first += room) {
            int some = min(room, all - first);
            for (int word = threadIdx.x; word < WORDS; word += THREADS) {
                int place = int(before[word]) - first;
                for (unsigned left = bits[word]; left; left &= left - 1, place++) {
                    if (unsigned(place) < unsigned(some)) listed[place] = half_t(word * 32 + __ffs(left) - 1);
                }
            }
            __syncthreads();
            for (int i = threadIdx.x; i < some; i += THREADS) classes[first + i] = listed[i];
            __syncthreads();
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
    constexpr int LISTED = EIGHT * THREADS;
    __shared__ Bitmap map;
    __shared__ half_t listed[LISTED];
    codes += blockIdx.x * pitch;
    Held held;
    int all = map.fill(held, codes, int(count), int(pitch), is_wound(windings, blockIdx.x) ? turned : nullptr);
    map.rank_all(held, codes, int(count), int(pitch));
    map.list(classes + blockIdx.x * most, all, listed, LISTED);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

// The first key of every class, in place of how many there are of each, beginning with `start`; returns how many all
// are.
__device__ inline int begin_classes(int *places, int some, int start, int *warps) {
    // an odd share, whose places are in different banks
    int share = (some + THREADS - 1) / THREADS | 1, from = min(int(threadIdx.x) * share, some);
    int to = min(from + share, some), mine = 0, total;
    for (int i = from; i < to; i++) mine += places[i];
    int sum = start + sum_before(mine, warps, total);
    for (int i = from; i < to; i++) {
        int here = places[i];
        places[i] = sum;
        sum += here;
    }
    __syncthreads();
    return total;
}

__device__ inline void copy_entries(entry_t *to, const entry_t *from, int number) {
    constexpr int FEW = sizeof(Codes) / sizeof(entry_t);
    int some = reinterpret_cast<unsigned long long>(to) % sizeof(Codes) ? 0 : number / FEW;
    for (int i = threadIdx.x; i < some; i += THREADS)
        reinterpret_cast<Codes *>(to)[i] = reinterpret_cast<const Codes *>(from)[i];
    for (int i = some * FEW + threadIdx.x; i < number; i += THREADS) to[i] = from[i];
}

// The same, and the points of every line in order, `entries (lines, count)` of the number of a class and an index, by
// counting those of every class, `room` classes at a time. They are put in order in shared memory, `stage` at a time,
// but for a class that has more; equal ones stand as they come.
extern "C" __global__ void __launch_bounds__(THREADS)
    arrange(half_t *codes, entry_t *entries, half_t *classes, int *counts, const Winding *windings,
            const half_t *turned, index_t many, index_t pitch, index_t most, index_t room, index_t stage) {
    extern __shared__ __align__(16) char shared[];
    entry_t *staged = reinterpret_cast<entry_t *>(shared);
    int *places = reinterpret_cast<int *>(staged + stage);
    __shared__ Bitmap map;
    int count = int(many), start = 0;
    codes += blockIdx.x * pitch, entries += blockIdx.x * many;
    Held held;
    int all = map.fill(held, codes, count, int(pitch), is_wound(windings, blockIdx.x) ? turned : nullptr);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
    map.list(classes + blockIdx.x * most, all, reinterpret_cast<half_t *>(staged), int(stage));
    if (pitch <= PART && all <= room && count <= stage) {
        // a short line: codes stay where they are, and how many of its class came before each is known by counting
        for (int i = threadIdx.x; i < all; i += THREADS) places[i] = 0;
        __syncthreads();
        Codes nth[HELD];
        held.replace([&](unsigned code) { return unsigned(map.rank(code)); });
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int n = Held::place(0, k);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                unsigned before = 0;
                if (n + i < count) before = unsigned(atomicAdd(places + held.some[k].at(i), 1));
                nth[k].word[i / 2] = i % 2 ? nth[k].word[i / 2] | before << 16 : before;
            }
        }
        __syncthreads();
        begin_classes(places, all, 0, map.warps);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int n = Held::place(0, k);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                unsigned rank = held.some[k].at(i);
                if (n + i < count) staged[places[rank] + nth[k].at(i)] = entry_t(rank) << INDEX | entry_t(n + i);
            }
        }
        __syncthreads();
        copy_entries(entries, staged, count);
        return;
    }
    map.rank_all(held, codes, count, int(pitch));
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
        start += begin_classes(places, some, start, map.warps);
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
            if (fits) copy_entries(entries + begin, staged, number);
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
// heads at least (the last round may have fewer), for which there is always room.
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
