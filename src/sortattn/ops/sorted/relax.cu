// The walk along lines of classes for kernels with an exponential, whose keys above count as those below do.
//
// A block has a line, which is cut into runs, and classes of keys go by blocks of thirty-two. On the way down, as their
// rows are summed, what is above the beginning of each block within its run is left in `notes`; then the sums of whole
// runs are summed. On the way up all keys of a block are above at first, and join those below one by one as classes
// of queries pass them. In a block that reaches so far that digits would be lost, keys are weighed for each class.
//
// Macros: those of class_line.cu, CELLS (runs for each warp) and RESIDENT (blocks of a multiprocessor).

#include "class_line.cu"

static_assert(RATE && NODES == 1, "a single node with an exponential");

constexpr int KEYS = 32, RUNS = CREW * CELLS;
typedef Numbers<real> Sums;

// A class of keys: what it gives to the sums below and above.
struct alignas(8) Item {
    real below[SUMS];
    real above[SUMS];
};
// A class of queries: what it is given by those sums, and how many keys of the block it has passed.
struct alignas(16) Class {
    real below[SUMS];
    real above[SUMS];
    int after;
};
struct Station {
    Item items[KEYS];
    Class classes[32];
    int list[64];
};

typedef Shelf<real> Kept;

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

// For every class of queries the sum of the weights, `extras`, and the mean of the rows, in the table, those of a line
// from `offsets` on; for the lines of the heads of a round. `rows` and `row_extras` are for the sums of classes of
// keys, from `key_offsets` on; `notes (blocks of the grid, channel blocks, blocks of keys)`.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    relax(const entry_t *entries, const half_t *key_codes, const int *key_counts, const index_t *key_offsets,
          const half_t *codes, const int *counts, const index_t *offsets, const int *rounds, const half_t *values,
          const real *weights, const double *numbers, const double *taus, double tau, half_t *rows, real *row_extras,
          Kept *notes, half_t *table, real *extras, index_t round, index_t count, index_t dims, index_t most,
          index_t key_most) {
    extern __shared__ __align__(16) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    Kept *lower = reinterpret_cast<Kept *>(stations + CREW), *upper = lower + RUNS;
    __shared__ Cuts<RUNS> cuts;
    // the first class of every run that has passed its first key
    __shared__ int firsts[RUNS + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Station &station = stations[warp];
    index_t stop = rounds[round + 1] * dims;
    notes += (blockIdx.x * gridDim.y + blockIdx.y) * ((key_most + KEYS - 1) / KEYS);
    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        index_t p = line / dims;
        Side side;
        side.read(numbers, taus ? taus[p] : tau, true);
        const entry_t *line_entries = entries + line * count;
        Classes keys = {key_codes + line * key_most, key_counts[line]}, classes = {codes + line * most, counts[line]};
        Own own = {reinterpret_cast<const char *>(values + p * count * STRIDE + blockIdx.y * WIDTH + lane * VEC),
                   rows + key_offsets[line] * STRIDE + blockIdx.y * WIDTH + lane * VEC, Scalars(weights, p * count),
                   row_extras + key_offsets[line], lane};
        half_t *sums_of = table + offsets[line] * STRIDE + blockIdx.y * WIDTH + lane * VEC;
        real *extra_of = extras + offsets[line];
        int total = keys.count, blocks = (total + KEYS - 1) / KEYS;
        // where a block begins, and behind the last one all that comes
        real top = max(keys.place(total - 1), classes.place(classes.count - 1));
        auto place = [&](int block) { return block < blocks ? keys.place(block * KEYS) : top; };
        cuts.make<KEYS>(line_entries, int(count), total);
        if (threadIdx.x <= RUNS) {
            int i = cuts.rank[threadIdx.x], low = 0, high = classes.count;
            real t = place(i);
            while (low < high) {
                int half = (low + high) / 2;
                if (side.passed(0, true, classes.place(half), t))
                    high = half;
                else
                    low = half + 1;
            }
            firsts[threadIdx.x] = i == 0 ? 0 : i == blocks ? classes.count : low;
        }

        // down: what is above each block, and all of the run, seen from both its ends
        Sums above, below;
        for (int run = cuts.take(lane); run < RUNS; run = cuts.take(lane)) {
            int first = cuts.rank[run], block = cuts.rank[run + 1] - 1;
            real high = place(block + 1), origin = block >= first ? place(block) : high;
            above.clear(), below.clear();
            auto prepare = [&](int i, int rank) {
                real t = keys.place(rank), from = keys.place(rank / KEYS * KEYS);
                side.weights(0, t - from, station.items[i].above, real(1), real(0));
                side.weights(0, high - t, station.items[i].below, real(1), real(0));
            };
            collect(own, line_entries, cuts.key[run], cuts.key[run + 1], station.list, prepare,
                    [&](int i, int rank, const Row &mean, real extra) {
                        if (rank / KEYS != block) {
                            notes[block].store(above, lane);
                            block = rank / KEYS;
                            real from = place(block);
                            fade_sums(above, origin - from, side.rate);
                            origin = from;
                        }
                        Item item = station.items[i];
#pragma unroll
                        for (int l = 0; l < SUMS; l++) {
                            above.extra[l] += item.above[l] *= extra;
                            below.extra[l] += item.below[l] *= extra;
                        }
                        add(above, item.above, mean);
                        add(below, item.below, mean);
                    });
            if (first < cuts.rank[run + 1]) notes[first].store(above, lane);
            lower[run].store(below, lane);
            upper[run].store(above, lane);
        }
        __syncthreads();
        if (threadIdx.x == 0) cuts.next = 0;
        // what is below a run, around its lower end, and above it, around its upper one
        for (int side_number = warp; side_number < 2; side_number += CREW) {
            Kept *shelves = side_number ? upper : lower;
            Sums sum, part;
            sum.clear();
            for (int i = 0; i < RUNS; i++) {
                int run = side_number ? RUNS - 1 - i : i;
                shelves[run].load(part, lane);
                __syncwarp();
                shelves[run].store(sum, lane);
                fade_sums(sum, place(cuts.rank[run + 1]) - place(cuts.rank[run]), side.rate);
                add_all(sum, part);
            }
        }
        __syncthreads();

        // up: block by block, with rows on their way
        for (int run = cuts.take(lane); run < RUNS; run = cuts.take(lane)) {
            int first = cuts.rank[run], last = cuts.rank[run + 1];
            if (first == last) continue;
            auto row_of = [&](int i) { return own.row(min(i, total - 1)); };
            Packed ring[RING];
#pragma unroll
            for (int i = 0; i < RING; i++) ring[i] = row_of(first * KEYS + i);
            int at = firsts[run], end = firsts[run + 1];
            real next = place(first), high = place(last);
            lower[run].load(below, lane);
            upper[run].load(above, lane);
            Sums ahead;
            notes[first].load(ahead, lane);
            real next_s = at + lane < end ? classes.place(at + lane) : infinity();
            for (int block = first; block < last; block++) {
                int n = block * KEYS + lane;
                bool there = n < total;
                real origin = next, t = there ? keys.place(n) : infinity(), scalar = there ? own.extras[n] : real(0);
                next = place(block + 1);
                // all above, from the beginning of the block and of the next one
                Sums entire = ahead, over = above;
                if (block + 1 < last) notes[block + 1].load(ahead, lane);
                fade_sums(over, high - next, side.rate);
                Sums rest = over;
                fade_sums(rest, next - origin, side.rate);
                add_all(entire, rest);
                if (block + 1 < last) add_all(over, ahead);
                bool wide = (next - origin) * side.rate > real(4);
                real near[SUMS], far[SUMS], share = there ? real(1) : real(0), before[SUMS], behind[SUMS];
                real reach = there && !wide ? t - origin : real(0);
                side.weights(0, -reach, near, share, real(0));
                side.weights(0, reach, far, share, real(0));
                __syncwarp();
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
                    station.items[lane].below[l] = scalar * near[l], station.items[lane].above[l] = scalar * far[l];
                    before[l] = scan(scalar * near[l], lane), behind[l] = scan(scalar * far[l], lane);
                }
                __syncwarp();
                // Some classes of the block; if they are its last ones, rows of the next block are brought on their
                // way.
                auto go = [&](int taken, auto final) {
                    constexpr bool FINAL = decltype(final)::value;
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
                        *reinterpret_cast<Packed *>(sums_of + index_t(at + which) * STRIDE) = Packed::of(sum);
                        which++;
                        due = which < taken ? station.classes[which].after : NEVER;
                    };
#pragma unroll 1
                    for (int part = 0; part < KEYS; part += RING) {
#pragma unroll
                        for (int i = 0; i < RING; i++) {
                            while (due <= part + i) write();
                            Item item = station.items[part + i];
                            Row row = (FINAL ? ring[i] : row_of(block * KEYS + part + i)).row();
                            if (FINAL) ring[i] = row_of(block * KEYS + part + i + RING);
                            add(up, item.below, row);
                            add(down, item.above, row, real(-1));
                        }
                    }
                    while (which < taken) write();
                    if (FINAL) {
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
                            real spot = __shfl_sync(ALL, s, i), factor[SUMS], over_factor[SUMS], slope[SUMS],
                                 weight[SUMS];
                            bool passed = spot >= origin;
                            side.factors(passed ? spot - origin : real(0), factor, slope, passed ? real(1) : real(0));
                            side.factors(next - spot, over_factor, slope, real(1));
                            // the kernel itself, as what a sum around the class gives to it
                            real kernel[SUMS], sum_extra = real(0), value = real(0), z = there ? spot - t : real(0);
                            side.factors(real(0), kernel, slope, real(1));
                            side.weights(0, z < real(0) ? -z : z, weight, share, real(0));
                            Row sum = {};
#pragma unroll
                            for (int l = 0; l < SUMS; l++) {
                                value += kernel[l] * weight[l];
                                sum_extra += factor[l] * below.extra[l] + over_factor[l] * over.extra[l];
#pragma unroll
                                for (int c = 0; c < VEC; c++) {
                                    sum.at[c] += factor[l] * below.at[l][c] + over_factor[l] * over.at[l][c];
                                }
                            }
                            sum_extra += sum_lanes(value * scalar);
                            real share = inverse(sum_extra);
#pragma unroll 4
                            for (int k = 0; k < KEYS; k++) {
                                real mine = __shfl_sync(ALL, value * scalar, k);
                                Row row = row_of(block * KEYS + k).row();
#pragma unroll
                                for (int c = 0; c < VEC; c++) sum.at[c] += mine * row.at[c];
                            }
#pragma unroll
                            for (int c = 0; c < VEC; c++) sum.at[c] *= share;
                            *reinterpret_cast<Packed *>(sums_of + index_t(at + i) * STRIDE) = Packed::of(sum);
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
                        }
                        real share = inverse(extra);
#pragma unroll
                        for (int l = 0; l < SUMS; l++) {
                            station.classes[lane].below[l] = share * factor[l];
                            station.classes[lane].above[l] = share * over_factor[l];
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
                    // all of it at once, and rows of the next block
                    fade_sums(below, next - origin, side.rate);
                    side.weights(0, there ? next - t : real(0), near, share, real(0));
#pragma unroll
                    for (int l = 0; l < SUMS; l++) below.extra[l] += sum_lanes(scalar * near[l]);
#pragma unroll 4
                    for (int i = 0; i < KEYS; i++) {
                        real weight[SUMS];
#pragma unroll
                        for (int l = 0; l < SUMS; l++) weight[l] = __shfl_sync(ALL, scalar * near[l], i);
                        add(below, weight, row_of(block * KEYS + i).row());
                    }
#pragma unroll
                    for (int i = 0; i < RING; i++) ring[i] = row_of((block + 1) * KEYS + i);
                } else {
#pragma unroll
                    for (int l = 0; l < SUMS; l++) below.extra[l] += __shfl_sync(ALL, before[l], 31);
                    fade_sums(below, next - origin, side.rate);
                }
            }
        }
        __syncthreads();
    }
}
