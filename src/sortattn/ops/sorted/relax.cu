// The walk of ascend.cu for kernels with an exponential, whose keys above count as those below do.
//
// Keys go by blocks of thirty-two. On the way down, a run of blocks by itself, what is above each block is left in
// `notes`; the sums of whole runs are then exchanged. On the way up the rows of a block are in registers: all of its
// keys are above at first, and join those below one by one as classes pass them. In a block that reaches so far that
// digits would be lost, keys are weighed for each class by itself.
//
// Macros: those of class_line.cu, and CREW (warps of a block).

#include "class_line.cu"

static_assert(sizeof(real) == 4 && RATE && !BOTH && !HALVES && NODES == 1, "a single node with an exponential");

constexpr int KEYS = 32;

// A key: what it gives to the sums below and above, and the index of the one a block behind it.
struct alignas(16) Item {
    real below[SUMS];
    real above[SUMS];
    int index;
};
// A class: what it is given by those sums, and how many keys of the block it has passed.
struct alignas(16) Class {
    real below[SUMS];
    real above[SUMS];
    int after;
};
struct Station {
    Item items[KEYS];
    Class classes[32];
};

typedef Numbers<real> Sums;

struct Shelf {
    real at[SUMS][VEC][32];
    real extra[SUMS];

    __device__ void store(const Sums &sums, int lane) {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c][lane] = sums.at[l][c];
            if (lane == 0) extra[l] = sums.extra[l];
        }
    }
    __device__ void load(Sums &sums, int lane) const {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) sums.at[l][c] = at[l][c][lane];
            sums.extra[l] = extra[l];
        }
    }
};

// Moments of what is farther away by `distance`, see `move_side`.
__device__ inline void fade_sums(Sums &sums, real distance, real rate) {
    real decay = exponential(-rate * distance);
#pragma unroll
    for (int to = SUMS - 1; to >= 0; to--) {
        real power = real(1);
#pragma unroll
        for (int from = to - 1; from >= 0; from--) {
            power *= distance;
            sums.mix(to, sums.at[from], sums.extra[from], power * real(binomial(to, from)));
        }
        sums.scale(to, decay);
    }
}
__device__ inline void add_all(Sums &sums, const Sums &other) {
    sums.add_rows(other);
#pragma unroll
    for (int l = 0; l < SUMS; l++) sums.extra[l] += other.extra[l];
}
__device__ inline void add(Sums &sum, const real *weight, const Row &row, real sign = real(1)) {
#pragma unroll
    for (int l = 0; l < SUMS; l++) {
#pragma unroll
        for (int c = 0; c < VEC; c++) sum.at[l][c] += sign * weight[l] * row.at[c];
    }
}

// Arguments as in ascend.cu; `notes (blocks of the grid, channel blocks, blocks of keys, shelf)`.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    relax(const entry_t *entries, const half_t *codes, const int *counts, const index_t *offsets, const int *rounds,
          const half_t *rows, const real *weights, const double *numbers, const double *taus, double tau, Shelf *notes,
          kept_t *table, real *extras, index_t round, index_t count, index_t dims, index_t most) {
    __shared__ Station stations[CREW];
    __shared__ Shelf shelves[2 * CREW];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Station &station = stations[warp];
    index_t stop = rounds[round + 1] * dims;
    int total = int(count), blocks = (total + KEYS - 1) / KEYS, run = (blocks + CREW - 1) / CREW;
    notes += (blockIdx.x * gridDim.y + blockIdx.y) * index_t(blocks);
    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        index_t p = line / dims;
        Side side;
        side.read(numbers, taus ? taus[p] : tau, true);
        Keys keys(entries + line * count, total, false);
        Classes classes(codes + line * most, counts[line], false);
        Scalars scalars(weights, p * count);
        const char *own = reinterpret_cast<const char *>(rows + p * count * STRIDE + blockIdx.y * WIDTH + lane * VEC);
        auto load = [&](int index) {
            return *reinterpret_cast<const Packed *>(own + index_t(unsigned(index)) * (STRIDE * 2));
        };
        kept_t *sums_of = table + offsets[line] * STRIDE + blockIdx.y * WIDTH + lane * VEC;
        real *extra_of = extras + offsets[line];
        // where a block begins, and behind the last one all that comes
        real top = max(keys.place(keys.at(total - 1)), classes.place(classes.count - 1));
        auto place = [&](int block) { return block < blocks ? keys.place(keys.at(block * KEYS)) : top; };
        // the first class that has passed the first key of a block
        auto class_of = [&](int block) {
            if (block == 0) return 0;
            if (block >= blocks) return classes.count;
            real t = place(block);
            return count_first(classes.count, lane, [&](int i) { return !side.passed(0, true, classes.place(i), t); });
        };
        int first = min(warp * run, blocks), last = min(first + run, blocks);
        real low = place(first), high = place(last);

        // down: what is above each block, and all of the run, seen from both its ends
        Sums above, below;
        above.clear(), below.clear();
        entry_t next_key = 0;
        auto fetch = [&](int block) {
            int i = block * KEYS + lane;
            next_key = block >= 0 && block < blocks && i < total ? keys.at(i) : entry_t(0);
        };
        fetch(last - 1);
        real behind = high, start = first < last ? place(last - 1) : low;
        for (int block = last - 1; block >= first; block--) {
            bool there = block * KEYS + lane < total;
            entry_t key = next_key;
            real t = there ? keys.place(key) : start, origin = start;
            int index = keys.index(key);
            real scalar = there ? scalars[index] : real(0);
            fetch(block - 1);
            start = block > first ? place(block - 1) : origin;
            real near[SUMS], far[SUMS], share = there ? real(1) : real(0);
            side.weights(0, t - origin, near, share, real(0));
            side.weights(0, high - t, far, share, real(0));
            __syncwarp();
            station.items[lane].index = index;
#pragma unroll
            for (int l = 0; l < SUMS; l++) station.items[lane].above[l] = near[l], station.items[lane].below[l] = far[l];
            __syncwarp();
            notes[block].store(above, lane);
            fade_sums(above, behind - origin, side.rate);
            behind = origin;
#pragma unroll 1
            for (int i = 0; i < KEYS; i += RING) {
                Packed row[RING];
#pragma unroll
                for (int k = 0; k < RING; k++) row[k] = load(station.items[i + k].index);
#pragma unroll
                for (int k = 0; k < RING; k++) {
                    Row numbers = row[k].row();
                    add(above, station.items[i + k].above, numbers);
                    add(below, station.items[i + k].below, numbers);
                }
            }
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                above.extra[l] += sum_lanes(scalar * near[l]);
                below.extra[l] += sum_lanes(scalar * far[l]);
            }
        }
        shelves[warp].store(below, lane);
        shelves[CREW + warp].store(above, lane);
        __syncthreads();
        // what is below the run, around its lower end, and above it, around its upper one
        Sums part;
        above.clear(), below.clear();
        for (int w = 0; w < warp; w++) {
            shelves[w].load(part, lane);
            fade_sums(below, place(min((w + 1) * run, blocks)) - place(min(w * run, blocks)), side.rate);
            add_all(below, part);
        }
        for (int w = CREW - 1; w > warp; w--) {
            shelves[CREW + w].load(part, lane);
            fade_sums(above, place(min((w + 1) * run, blocks)) - place(min(w * run, blocks)), side.rate);
            add_all(above, part);
        }

        // up: block by block, the rows of the next one on their way
        Packed row[KEYS];
        fetch(first);
#pragma unroll
        for (int i = 0; i < KEYS; i++) row[i] = load(__shfl_sync(ALL, keys.index(next_key), i));
        int at = class_of(first), end = class_of(last);
        real next = low;
        Sums ahead;
        ahead.clear();
        if (first < last) notes[first].load(ahead, lane);
        real next_s = at + lane < end ? classes.place(at + lane) : infinity();
        for (int block = first; block < last; block++) {
            bool there = block * KEYS + lane < total;
            entry_t key = next_key;
            real origin = next, t = there ? keys.place(key) : infinity();
            int index = keys.index(key);
            real scalar = there ? scalars[index] : real(0);
            next = place(block + 1);
            fetch(block + 1 < last ? block + 1 : -1);
            // all above the block, around its end and then around its beginning
            Sums over = ahead, all = above;
            if (block + 1 < last) notes[block + 1].load(ahead, lane);
            fade_sums(all, high - next, side.rate);
            add_all(over, all);
            bool wide = (next - origin) * side.rate > real(4);
            real near[SUMS], far[SUMS], share = there ? real(1) : real(0), before[SUMS], behind[SUMS];
            real reach = there && !wide ? t - origin : real(0);
            side.weights(0, -reach, near, share, real(0));
            side.weights(0, reach, far, share, real(0));
            __syncwarp();
            station.items[lane].index = keys.index(next_key);
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                station.items[lane].below[l] = near[l], station.items[lane].above[l] = far[l];
                before[l] = scan(scalar * near[l], lane), behind[l] = scan(scalar * far[l], lane);
            }
            __syncwarp();
            Sums entire = over;
            if (!wide) {
                fade_sums(entire, next - origin, side.rate);
#pragma unroll
                for (int i = 0; i < KEYS; i++) add(entire, station.items[i].above, row[i].row());
#pragma unroll
                for (int l = 0; l < SUMS; l++) entire.extra[l] += __shfl_sync(ALL, behind[l], 31);
            }
            // Some classes of the block, and if they are the last of them, rows of the next block on their way.
            auto go = [&](int taken, auto final) {
                Sums up = below, down = entire;
                int which = 0, due = taken ? station.classes[0].after : NEVER;
                auto write = [&]() {
                    Class to = station.classes[which];
                    Row sum = {};
#pragma unroll
                    for (int l = 0; l < SUMS; l++) {
#pragma unroll
                        for (int c = 0; c < VEC; c++) {
                            sum.at[c] += to.below[l] * up.at[l][c] + to.above[l] * down.at[l][c];
                        }
                    }
                    *reinterpret_cast<Kept *>(sums_of + (at + which) * STRIDE) = close(sum);
                    which++;
                    due = which < taken ? station.classes[which].after : NEVER;
                };
#pragma unroll
                for (int i = 0; i < KEYS; i++) {
                    while (due <= i) write();
                    Item item = station.items[i];
                    Row numbers = row[i].row();
                    if (decltype(final)::value) row[i] = load(item.index);
                    add(up, item.below, numbers);
                    add(down, item.above, numbers, real(-1));
                }
                while (which < taken) write();
                if (decltype(final)::value) {
#pragma unroll
                    for (int l = 0; l < SUMS; l++) {
#pragma unroll
                        for (int c = 0; c < VEC; c++) below.at[l][c] = up.at[l][c];
                    }
                }
            };
            while (true) {
                real s = next_s;
                bool in = at + lane < end && (block + 1 == last || !side.passed(0, true, s, next));
                unsigned waiting = ~__ballot_sync(ALL, in);
                int taken = waiting ? __ffs(waiting) - 1 : 32;
                in = lane < taken;
                next_s = at + taken + lane < end ? classes.place(at + taken + lane) : infinity();
                if (wide) {
                    // one class after the other
                    for (int i = 0; i < taken; i++) {
                        real spot = __shfl_sync(ALL, s, i), factor[SUMS], over_factor[SUMS], slope[SUMS], weight[SUMS];
                        bool passed = spot >= origin;
                        side.factors(passed ? spot - origin : real(0), factor, slope, passed ? real(1) : real(0));
                        side.factors(next - spot, over_factor, slope, real(1));
                        // the kernel itself, as what a sum around the class gives to it
                        real own[SUMS], sum_extra = real(0), value = real(0), z = there ? spot - t : real(0);
                        side.factors(real(0), own, slope, real(1));
                        side.weights(0, z < real(0) ? -z : z, weight, share, real(0));
                        Row sum = {};
#pragma unroll
                        for (int l = 0; l < SUMS; l++) {
                            value += own[l] * weight[l];
                            sum_extra += factor[l] * below.extra[l] + over_factor[l] * over.extra[l];
#pragma unroll
                            for (int c = 0; c < VEC; c++) {
                                sum.at[c] += factor[l] * below.at[l][c] + over_factor[l] * over.at[l][c];
                            }
                        }
                        sum_extra += sum_lanes(value * scalar);
#pragma unroll
                        for (int k = 0; k < KEYS; k++) {
                            real mine = __shfl_sync(ALL, value, k);
                            Row numbers = row[k].row();
#pragma unroll
                            for (int c = 0; c < VEC; c++) sum.at[c] += mine * numbers.at[c];
                        }
                        *reinterpret_cast<Kept *>(sums_of + (at + i) * STRIDE) = close(sum);
                        if (lane == 0 && blockIdx.y == 0) extra_of[at + i] = sum_extra;
                    }
                } else {
                    int rank = count_before(t, [&](real t) { return side.passed(0, true, s, t); });
                    real factor[SUMS], over_factor[SUMS], slope[SUMS], extra = real(0);
                    real y = in ? s - origin : real(0);
                    side.factors(y < real(0) ? real(0) : y, factor, slope, in && y >= real(0) ? real(1) : real(0));
                    side.factors(-y, over_factor, slope, in ? real(1) : real(0));
#pragma unroll
                    for (int l = 0; l < SUMS; l++) {
                        real one = __shfl_sync(ALL, before[l], max(rank - 1, 0));
                        real other = __shfl_sync(ALL, behind[l], max(rank - 1, 0));
                        extra += factor[l] * (below.extra[l] + (rank ? one : real(0)));
                        extra += over_factor[l] * (entire.extra[l] - (rank ? other : real(0)));
                        station.classes[lane].below[l] = factor[l], station.classes[lane].above[l] = over_factor[l];
                    }
                    station.classes[lane].after = rank;
                    if (in && blockIdx.y == 0) extra_of[at + lane] = extra;
                    __syncwarp();
                    if (taken == 32)
                        go(taken, Int<false>());
                    else
                        go(taken, Int<true>());
                }
                at += taken;
                __syncwarp();
                if (taken < 32) break;
            }
            if (wide) {
                // all of it at once, and the rows of the next block
                fade_sums(below, next - origin, side.rate);
                side.weights(0, there ? next - t : real(0), near, share, real(0));
#pragma unroll
                for (int l = 0; l < SUMS; l++) below.extra[l] += sum_lanes(scalar * near[l]);
#pragma unroll
                for (int i = 0; i < KEYS; i++) {
                    real weight[SUMS];
#pragma unroll
                    for (int l = 0; l < SUMS; l++) weight[l] = __shfl_sync(ALL, near[l], i);
                    Row numbers = row[i].row();
                    row[i] = load(station.items[i].index);
                    add(below, weight, numbers);
                }
            } else {
#pragma unroll
                for (int l = 0; l < SUMS; l++) below.extra[l] += __shfl_sync(ALL, before[l], 31);
                fade_sums(below, next - origin, side.rate);
            }
        }
        __syncthreads();
    }
}
