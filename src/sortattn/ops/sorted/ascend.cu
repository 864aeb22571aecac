// The walk along lines of sixteen-bit coordinates, see classes.cu: sums for every class of queries, stored in a table.
//
// A block has a line, its warps a run of it each: some of the sorted keys and the classes among them. At first all rows
// are summed, run by run; then every run begins with what the runs before it give. Warps go by batches of at most
// thirty-two classes and, at every node, thirty-two keys, as in walk.cu. A batch takes all keys before the first class
// that has to wait, so it has either as many keys or as many classes as there can be.
//
// A kernel with an exponential has two sides. What keys above give is summed on the way down, within the run, as the
// first sums are made; on the way up that of the runs above is added, which fades with the distance.
//
// A folded line (see `kernels.Terms`; there is one node, and the kernel is linear) is walked at once: below zero it is
// what all negative keys give at zero, and a class above zero sees all keys as if they were there.
//
// Macros: those of track.cu, for sums of what is below, of half.cu, CREW (warps of a block), CELLS (parts of a run whose
// keys are summed by themselves) and RING (rows that a lane has on their way).

#include "class_line.cu"

static_assert(sizeof(real) == 4 && !BOTH && !HALVES && FOLDED >= 0 && ADDED && !SLOPES, "sums of what is below");
static_assert(!FOLDED || (NODES == 1 && POWERS == 2), "a folded line has a linear kernel");

// A key of a list: what it gives to the sums, and on the way down to the moments of its run.
constexpr int WEIGHTS = RATE ? 2 * SUMS : SUMS;
struct alignas(WEIGHTS == 1 ? 8 : 16) Item {
    real weight[WEIGHTS];
    int index;
};
// A class of a list: what the sums give to it, and the keys above its run, and how many keys are before it.
struct alignas(16) Class {
    real weight[SUMS];
    real above[RATE ? SUMS : 1];
    int after;
};
struct alignas(16) Station {
    Item items[32 * NODES + 2 * RING];
    Class classes[32];
};

typedef Numbers<double> Wide;

// Sums in shared memory.
struct Shelf {
    double at[SUMS][VEC][32];
    double extra[SUMS];

    __device__ void store(const Wide &sums, int lane) {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c][lane] = sums.at[l][c];
            if (lane == 0) extra[l] = sums.extra[l];
        }
    }
    __device__ void load(Wide &sums, int lane) const {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) sums.at[l][c] = at[l][c][lane];
            sums.extra[l] = extra[l];
        }
    }
};

__device__ inline void add_all(Wide &sums, const Wide &other) {
    sums.add_rows(other);
#pragma unroll
    for (int l = 0; l < SUMS; l++) sums.extra[l] += other.extra[l];
}

// What a warp needs wherever it goes.
struct Walker {
    Station &station;
    const Side &side;
    const char *rows;
    Scalars scalars;
    kept_t *table;
    real *extras;
    int lane;
    real span;

    __device__ Packed load(int index) const {
        return *reinterpret_cast<const Packed *>(rows + index_t(unsigned(index)) * (STRIDE * 2));
    }

    // Add the keys from `first` to `last` to sums, with weights that `weigh(place, weight)` finds.
    template <typename F> __device__ void absorb(Wide &sums, const Keys &keys, int first, int last, F weigh) const {
        double extra[SUMS] = {};
        for (int n = first; n < last; n += 32) {
            bool there = n + lane < last;
            entry_t entry = there ? keys.at(n + lane) : entry_t(0);
            int index = keys.index(entry);
            real scalar = there ? scalars[index] : real(0), weight[SUMS];
            weigh(keys.place(entry), weight);
            __syncwarp();
            station.items[lane].index = index;
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                station.items[lane].weight[l] = there ? weight[l] : real(0);
                if (there) extra[l] += double(scalar * weight[l]);
            }
            __syncwarp();
            Numbers<real> some;
            some.clear();
#pragma unroll 1
            for (int i = 0; i < 32 && n + i < last; i += RING) {
                Packed row[RING];
#pragma unroll
                for (int k = 0; k < RING; k++) row[k] = load(station.items[i + k].index);
#pragma unroll
                for (int k = 0; k < RING; k++) add(some, station.items[i + k].weight, row[k].row());
            }
            sums.add_rows(some);
        }
        __syncwarp();
#pragma unroll
        for (int l = 0; l < SUMS; l++) sums.extra[l] += sum_lanes(extra[l]);
    }

    __device__ static void add(Numbers<real> &sum, const real *weight, const Row &row) {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) sum.at[l][c] += weight[l] * row.at[c];
        }
    }

    // Go along some classes, from `origin` on, which `state` is around; `passed` are the keys passed at every node.
    //
    // DOWN, the moments of the keys around `end` are summed too. Up, the sums of what is above the run, `above` around
    // its `end`, and what stands in the table are added. With FOLDED, `total` are the sums of all keys.
    template <bool DOWN>
    __device__ void go(const Keys &keys, const Classes &classes, index_t first, Wide &state, real &origin,
                       int (&passed)[NODES], real end, Wide &moments, const Numbers<real> &above, const Wide &total) {
        // where the sums of a class stand
        auto place_of = [&](int i) {
            return reinterpret_cast<Kept *>(table + (first + i * classes.step) * STRIDE + lane * VEC);
        };
        constexpr bool ON_TOP = RATE && !DOWN;
        bool crossed = FOLDED && origin > real(0);
        int at = 0;
        real next_s;
        entry_t next_key[NODES];
        auto fetch = [&]() {
            next_s = at + lane < classes.count ? classes.place(at + lane) : infinity();
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                int i = passed[j] + lane;
                next_key[j] = i < keys.count ? keys.at(i) : entry_t(0);
            }
        };
        fetch();
        while (at < classes.count) {
            real s = next_s, from = __shfl_sync(ALL, s, 0);
            if (from != origin) move_state(state, double(from) - double(origin), side.rate);
            origin = from;
            if (COMPACT && passed[0] == passed[NODES - 1]) state.clear();
            if (FOLDED && !crossed && origin > real(0)) {
                crossed = true;
                bend(state, total, origin);
            }
            // beyond the last key the kernel is constant
            if (FOLDED && crossed && passed[0] == keys.count) state.clear(SUMS - 1);
            bool wanted = at + lane < classes.count;
            bool in = wanted && s - origin <= span && !(FOLDED && !crossed && s > real(0));
            int rank[NODES], source[NODES], all = 0;
            real t[NODES];
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                bool there = passed[j] + lane < keys.count;
                source[j] = keys.index(next_key[j]);
                t[j] = there ? keys.place(next_key[j]) : infinity();
                rank[j] = count_before(t[j], [&](real t) { return side.passed(j, !DOWN, s, t); });
                in = in && !(rank[j] == 32 && keys.count - passed[j] > 32);
                all += rank[j];
            }
            // the keys in the window of a compact kernel
            int low = passed[NODES - 1] + rank[NODES - 1], window = passed[0] + rank[0] - low;
            unsigned waiting = ~__ballot_sync(ALL, in);
            int taken = waiting ? __ffs(waiting) - 1 : 32;
            // whether a class waits for the next batch
            bool more = taken < 32 && at + taken < classes.count;
            in = lane < taken;
            unsigned few = COMPACT ? __ballot_sync(ALL, in && window <= FEW) : 0;
            real factor[SUMS], slope[SUMS], fading[SUMS], extra = real(0);
            side.factors(in ? s - origin : real(0), factor, slope, in ? real(1) : real(0));
            if (ON_TOP) {
                side.factors(in ? end - s : real(0), fading, slope, in ? real(1) : real(0));
                if (in && blockIdx.y == 0) extra = extras[first + at + lane];
#pragma unroll
                for (int l = 0; l < SUMS; l++) extra += fading[l] * above.extra[l];
            }
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                extra += factor[l] * real(state.extra[l]);
                station.classes[lane].weight[l] = factor[l];
                if (ON_TOP) station.classes[lane].above[l] = fading[l];
            }
            station.classes[lane].after = all;
            int some[NODES], listed = 0;
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                some[j] = __shfl_sync(ALL, rank[j], more ? taken : max(taken - 1, 0));
                if (more) {
                    // none so far behind the origin that the exponential is too large
                    some[j] = min(some[j], __popc(__ballot_sync(ALL, t[j] + side.node[j] - origin <= span)));
                    if (lane == taken) rank[j] = some[j];
                }
                listed += some[j];
            }
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                bool here = lane < some[j];
                int where = lane;
                if (NODES > 1) {
                    // the classes before it
                    int before = min(count_before(rank[j], [&](int rank) { return rank <= lane; }), taken);
#pragma unroll
                    for (int k = 0; k < NODES; k++) {
                        if (k == j) continue;
                        // the keys at other nodes before those, and at earlier nodes before the next one
                        int last = k < j ? before : before - 1;
                        int others = __shfl_sync(ALL, rank[k], max(min(last, 31), 0));
                        where += last < 0 ? 0 : others;
                    }
                }
                real weight[SUMS], scalar = here ? scalars[source[j]] : real(0);
                side.weights(j, here ? origin - t[j] - side.node[j] : real(0), weight, real(1), real(0));
                if (here) station.items[where].index = source[j];
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
                    if (here) station.items[RING + where].weight[l] = weight[l];
                    real sum = scan(here ? scalar * weight[l] : real(0), lane);
                    real part = __shfl_sync(ALL, sum, max(rank[j] - 1, 0));
                    if (rank[j]) extra += factor[l] * part;
                    state.extra[l] += double(__shfl_sync(ALL, sum, 31));
                }
                if (RATE && DOWN) {
                    side.weights(0, here ? t[j] - end : real(0), weight, real(1), real(0));
#pragma unroll
                    for (int l = 0; l < SUMS; l++) {
                        if (here) station.items[RING + where].weight[WEIGHTS - SUMS + l] = weight[l];
                        moments.extra[l] += double(sum_lanes(here ? scalar * weight[l] : real(0)));
                    }
                }
                passed[j] += some[j];
            }
            if (in && blockIdx.y == 0) extras[first + (at + lane) * classes.step] = extra;
            int before = at;
            at += taken;
            fetch();
            for (int i = lane; i < 2 * RING; i += 32) station.items[listed + i].index = 0;
            if (lane < RING) {
#pragma unroll
                for (int l = 0; l < WEIGHTS; l++) station.items[listed + RING + lane].weight[l] = real(0);
            }
            __syncwarp();

            Numbers<real> base, local, moment;
            base.clear(), local.clear(), moment.clear();
            base.add_rows(state);
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
#pragma unroll
                // through a shuffle, as the compiler would convert it for every class again
                for (int c = 0; c < VEC; c++) base.at[l][c] = __shfl_sync(ALL, base.at[l][c], lane);
            }
            int next = 0, due = taken ? station.classes[0].after : NEVER;
            Row old = {};
            if (ON_TOP && taken) old = open(*place_of(before));
            auto write = [&]() {
                Class to = station.classes[next];
                Row sum = old;
                // on its way
                if (ON_TOP && next + 1 < taken) old = open(*place_of(before + next + 1));
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
#pragma unroll
                    for (int c = 0; c < VEC; c++) {
                        real number = base.at[l][c] + local.at[l][c];
                        sum.at[c] += to.weight[l] * number;
                        if (ON_TOP) sum.at[c] += to.above[l] * above.at[l][c];
                    }
                }
                *place_of(before + next) = close(sum);
                next++;
                due = next < taken ? station.classes[next].after : NEVER;
            };
            if (listed) {
                Packed row[RING];
#pragma unroll
                for (int i = 0; i < RING; i++) row[i] = load(station.items[i].index);
                for (int n = 0; n < listed; n += RING) {
#pragma unroll
                    for (int i = 0; i < RING; i++) {
                        while (due <= n + i) write();
                        Item item = station.items[n + RING + i];
                        Row numbers = row[i].row();
                        row[i] = load(item.index);
                        add(local, item.weight, numbers);
                        if (RATE && DOWN) add(moment, item.weight + (WEIGHTS - SUMS), numbers);
                    }
                }
            }
            while (next < taken) write();
            state.add_rows(local);
            if (RATE && DOWN) moments.add_rows(moment);
            __syncwarp();
            // little is left of the sums for a class with few keys in its window, which are summed one by one
            for (; COMPACT && few; few &= few - 1) {
                int which = __ffs(few) - 1, start = __shfl_sync(ALL, low, which);
                int stop = start + __shfl_sync(ALL, window, which);
                real spot = __shfl_sync(ALL, s, which), sum_extra = real(0);
                Row sum = {};
#pragma unroll 4
                for (int n = start; n < stop; n++) {
                    entry_t entry = keys.at(n);
                    real weight = side.value(spot, keys.place(entry));
                    Row row = load(keys.index(entry)).row();
#pragma unroll
                    for (int c = 0; c < VEC; c++) sum.at[c] += weight * row.at[c];
                    sum_extra += weight * scalars[keys.index(entry)];
                }
                *place_of(before + which) = close(sum);
                if (lane == 0 && blockIdx.y == 0) extras[first + before + which] = sum_extra;
            }
        }
    }

    // A folded line at zero: all keys are seen from there on.
    __device__ void bend(Wide &state, const Wide &total, real origin) const {
        double slope = -double(side.below[0][SUMS - 1]);
        state.mix(0, total.at[0], total.extra[0], slope * double(origin));
        state.mix(SUMS - 1, total.at[0], total.extra[0], slope);
    }
};

// The sums of every class of a line: rows `table (lines, classes, STRIDE)` and `extras (lines, classes)`, those of a line
// from `offsets` on; the lines are those of the heads of a round.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    ascend(const entry_t *entries, const half_t *codes, const int *counts, const index_t *offsets, const int *rounds,
           const half_t *rows, const real *weights, const double *numbers, const double *taus, double tau,
           double constant, kept_t *table, real *extras, index_t round, index_t count, index_t dims, index_t most) {
    extern __shared__ __align__(16) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    Shelf *shelves = reinterpret_cast<Shelf *>(stations + CREW);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    index_t stop = rounds[round + 1] * dims;
    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        index_t p = line / dims;
        Side side;
        side.read(numbers, taus ? taus[p] : tau, true);
        const entry_t *line_keys = entries + line * count;
        const half_t *line_codes = codes + line * most;
        real support = side.node[NODES - 1] - side.node[0];
        real span = RATE ? real(4) / side.rate : COMPACT ? support / 4 : infinity();
        Walker walker = {stations[warp],
                         side,
                         reinterpret_cast<const char *>(rows + p * count * STRIDE + blockIdx.y * WIDTH + lane * VEC),
                         Scalars(weights, p * count),
                         table + offsets[line] * STRIDE + blockIdx.y * WIDTH,
                         extras + offsets[line],
                         lane,
                         span};
        Keys keys(line_keys, int(count), false);
        Classes classes(line_codes, counts[line], false);
        // a cell has whole batches, a run whole cells; the last ones may be empty
        int cell = (int(count) + CREW * CELLS * 32 - 1) / (CREW * CELLS * 32) * 32, run = cell * CELLS;
        int cells = (int(count) + cell - 1) / cell;
        auto place = [&](int n) { return keys.place(keys.at(min(n, keys.count - 1))); };
        // the first class that has passed the first key of a run
        auto class_of = [&](int w) {
            if (w == 0) return 0;
            if (w * run >= keys.count) return classes.count;
            real t = place(w * run);
            return count_first(classes.count, lane,
                               [&](int i) { return !side.passed(NODES / 2, true, classes.place(i), t); });
        };
        int first = class_of(warp), last = class_of(warp + 1);
        // moments of keys from `begin` to `end`, which are below `origin`
        auto sum_keys = [&](Wide &sums, int begin, int end, real origin) {
            walker.absorb(sums, keys, begin, end, [&](real t, real(&weight)[SUMS]) {
                real z = origin - t, power = RATE ? exponential(-side.rate * z) : real(1);
#pragma unroll
                for (int l = 0; l < SUMS; l++, power *= z) weight[l] = power;
            });
        };
        Numbers<real> above;
        Wide state, nothing;
        int passed[NODES] = {};
        nothing.clear(), above.clear(), state.clear();
        if constexpr (RATE) {
            int begin = min(warp * run, keys.count), end = min(begin + run, keys.count);
            real low = place(begin), high = place(end);
            // no class of the last run is above
            if (end == keys.count && first < last) high = max(high, classes.place(last - 1));
            Wide moments;
            moments.clear();
            // down, from the upper end
            Keys down(line_keys + begin, end - begin, true);
            Classes upper(line_codes + first, last - first, true);
            real origin = upper.count ? upper.place(0) : -high;
            walker.go<true>(down, upper, last - 1, state, origin, passed, -high, moments, above, nothing);
            move_state(state, double(-low) - double(origin), side.rate);
            walker.absorb(state, down, passed[0], down.count, [&](real t, real(&weight)[SUMS]) {
                side.weights(0, -low - t, weight, real(1), real(0));
            });
            walker.absorb(moments, down, passed[0], down.count, [&](real t, real(&weight)[SUMS]) {
                side.weights(0, high + t, weight, real(1), real(0));
            });
            shelves[warp].store(moments, lane);
            shelves[CREW + warp].store(state, lane);
            __syncthreads();
            state.clear();
            Wide part, sum;
            for (int w = 0; w < warp; w++) {
                shelves[w].load(part, lane);
                move_state(state, double(place((w + 1) * run)) - double(place(w * run)), side.rate);
                add_all(state, part);
            }
            sum.clear();
            for (int w = CREW - 1; w > warp; w--) {
                shelves[CREW + w].load(part, lane);
                move_state(sum, double(place((w + 1) * run)) - double(place(w * run)), side.rate);
                add_all(sum, part);
            }
            above.add_rows(sum);
#pragma unroll
            for (int l = 0; l < SUMS; l++) above.extra[l] = real(sum.extra[l]);
            Keys up(line_keys + begin, end - begin, false);
            Classes mine(line_codes + first, last - first, false);
            // nothing is below the first run
            origin = warp == 0 && mine.count ? mine.place(0) : low, passed[0] = 0;
            walker.go<false>(up, mine, first, state, origin, passed, high, nothing, above, nothing);
        } else {
            Wide sums;
            for (int c = warp * CELLS; c < min((warp + 1) * CELLS, cells); c++) {
                sums.clear();
                sum_keys(sums, c * cell, min((c + 1) * cell, keys.count), place((c + 1) * cell));
                shelves[c].store(sums, lane);
            }
            __syncthreads();
            // from the moments of a cell to those of all keys before it
            if (warp == 0) {
                sums.clear();
                for (int c = 0; c < cells; c++) {
                    Wide part;
                    shelves[c].load(part, lane);
                    __syncwarp();
                    shelves[c].store(sums, lane);
                    move_side<true, 0>(sums, double(place((c + 1) * cell)) - double(place(c * cell)), 0.0);
                    add_all(sums, part);
                }
                shelves[cells].store(sums, lane);
            }
            __syncthreads();
            // what all keys give at a place, and how many have been passed
            auto begin = [&](real origin) {
                state.clear();
#pragma unroll 1
                for (int j = 0; j < NODES; j++) {
                    int some = count_first(keys.count, lane,
                                           [&](int i) { return side.passed(j, true, origin, keys.place(keys.at(i))); });
#pragma unroll
                    for (int k = 0; k < NODES; k++) {
                        if (k == j) passed[k] = some;
                    }
                    int whole = some / cell;
                    Wide moments;
                    shelves[whole].load(moments, lane);
                    move_side<true, 0>(moments, double(origin) - double(side.node[j]) - double(place(whole * cell)), 0.0);
#pragma unroll
                    for (int l = 0; l < POWERS; l++) {
#pragma unroll
                        for (int i = l; i < POWERS; i++) {
                            state.mix(l, moments.at[i - l], moments.extra[i - l],
                                      double(side.below[j][i]) * binomial(i, l));
                        }
                    }
                    walker.absorb(state, keys, whole * cell, some, [&](real t, real(&weight)[SUMS]) {
                        side.weights(j, origin - t - side.node[j], weight, real(1), real(0));
                    });
                }
            };
            Shelf &zero = shelves[cells + 1];
            if (FOLDED) {
                if (warp == 0) {
                    begin(real(0));
                    zero.store(state, lane);
                }
                __syncthreads();
            }
            if (first < last) {
                real origin = classes.place(first);
                begin(origin);
                Wide total;
                shelves[cells].load(total, lane);
                state.mix(0, total.at[0], total.extra[0], constant);
                if (FOLDED) {
                    zero.load(nothing, lane);
                    state.mix(0, nothing.at[0], nothing.extra[0], -1.0);
                    if (origin > real(0)) walker.bend(state, total, origin);
                }
                Classes mine(line_codes + first, last - first, false);
                walker.go<false>(keys, mine, first, state, origin, passed, real(0), nothing, above, total);
            }
        }
        __syncthreads();
    }
}
