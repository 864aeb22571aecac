// The walk along lines of classes for piecewise polynomials: sums for every class of queries, stored in a table.
//
// A block has a line. At first its warps sum the rows of classes of keys, and of cells of these; then each of them
// walks along a run of the classes of queries, which begins with what all cells before it give. Warps go by batches of
// at most thirty-two classes of queries and, at every node, thirty-two keys (here that is a class of them), as in
// walk.cu. A batch takes all keys before the first class that has to wait, so it has either as many keys or as many
// classes as there can be.
//
// A folded line (see `kernels.Terms`; there is one node, and the kernel is linear) is walked at once: below zero it is
// what all negative keys give at zero, and a class above zero sees all keys as if they were there.
//
// Macros: those of class_line.cu and order.cu, CELLS (for each warp) and RESIDENT (blocks of a multiprocessor).

#include "class_line.cu"

#include "order.cu"

static_assert(!RATE && FOLDED >= 0, "polynomials");
static_assert(!TURNED || VEC <= 2, "a lane has neighbours");
constexpr int ALL_CELLS = CREW * CELLS;
static_assert(!FOLDED || (NODES == 1 && POWERS == 2), "a folded line has a linear kernel");

// A key of a list, where the one RING before it has its weights.
struct alignas(SUMS == 1 ? 8 : 16) Item {
    real weight[SUMS];
    int index;
};
// A class of a list: what the sums give to it, and how many keys are before it.
struct alignas(8) Class {
    real weight[SUMS];
    int after;
};
struct alignas(16) Station {
    Item items[32 * NODES + 2 * RING];
    Class classes[32];
    int list[64];
};

typedef Numbers<double> Wide;

typedef Shelf<double> Kept;

__device__ inline void add_all(Wide &sums, const Wide &other) {
    sums.add_rows(other);
#pragma unroll
    for (int l = 0; l < SUMS; l++) sums.extra[l] += other.extra[l];
}

// What a warp needs wherever it goes.
struct Walker {
    Station &station;
    const Side &side;
    const Own &own;
    Classes keys;
    half_t *table;
    real *extras;
    int lane;
    real span;

    // Add the keys from `first` to `last` to sums, with weights that `weigh(place, weight)` finds.
    template <typename F> __device__ void absorb(Wide &sums, int first, int last, F weigh) const {
        double extra[SUMS] = {};
        for (int n = first; n < last; n += 32) {
            bool there = n + lane < last;
            int index = min(n + lane, last - 1);
            real scalar = there ? own.extras[index] : real(0), weight[SUMS];
            weigh(keys.place(index), weight);
            __syncwarp();
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                station.items[lane].weight[l] = scalar * weight[l];
                extra[l] += double(scalar * weight[l]);
            }
            __syncwarp();
            Numbers<real> some;
            some.clear();
#pragma unroll 8
            for (int i = 0; i < 32; i++) some.add_row(station.items[i].weight, own.row(min(n + i, last - 1)).row());
            sums.add_rows(some);
        }
        __syncwarp();
#pragma unroll
        for (int l = 0; l < SUMS; l++) sums.extra[l] += sum_lanes(extra[l]);
    }

    // Go along the classes from `at` to `end`, with the sums `state` around `origin`; `passed` are the keys passed at
    // every node. With FOLDED, `total` are the sums of all keys.
    __device__ void go(const Classes &classes, int at, int end, Wide &state, real origin, int (&passed)[NODES],
                       const Wide &total) const {
        bool crossed = FOLDED && origin > real(0);
        real next_s, next_t[NODES];
        auto fetch = [&]() {
            next_s = at + lane < end ? classes.place(at + lane) : infinity();
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                int i = passed[j] + lane;
                next_t[j] = i < keys.count ? keys.place(i) : infinity();
            }
        };
        fetch();
        while (at < end) {
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
            bool in = at + lane < end && s - origin <= span && !(FOLDED && !crossed && s > real(0));
            int rank[NODES], all = 0;
            real t[NODES];
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                t[j] = next_t[j];
                rank[j] = count_before(t[j], [&](real t) { return side.passed(j, true, s, t); });
                in = in && !(rank[j] == 32 && keys.count - passed[j] > 32);
                all += rank[j];
            }
            // the keys in the window of a compact kernel
            int low = passed[NODES - 1] + rank[NODES - 1], window = passed[0] + rank[0] - low;
            unsigned waiting = ~__ballot_sync(ALL, in);
            int taken = waiting ? __ffs(waiting) - 1 : 32;
            // whether a class waits for the next batch
            bool more = taken < 32 && at + taken < end;
            in = lane < taken;
            unsigned few = COMPACT ? __ballot_sync(ALL, in && window <= FEW) : 0;
            real factor[SUMS], slope[SUMS], extra = real(0);
            side.factors(in ? s - origin : real(0), factor, slope, in ? real(1) : real(0));
#pragma unroll
            for (int l = 0; l < SUMS; l++) extra += factor[l] * real(state.extra[l]);
            int some[NODES], listed = 0;
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                some[j] = __shfl_sync(ALL, rank[j], more ? taken : max(taken - 1, 0));
                if (more && lane == taken) rank[j] = some[j];
                listed += some[j];
            }
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                bool here = lane < some[j];
                int where = lane, source = passed[j] + lane;
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
                real weight[SUMS], scalar = here ? own.extras[source] : real(0);
                side.weights(j, here ? origin - t[j] - side.node[j] : real(0), weight, real(1), real(0));
                if (here) station.items[where].index = source;
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
                    if (here) station.items[RING + where].weight[l] = scalar * weight[l];
                    real sum = scan(here ? scalar * weight[l] : real(0), lane);
                    real part = __shfl_sync(ALL, sum, max(rank[j] - 1, 0));
                    if (rank[j]) extra += factor[l] * part;
                    state.extra[l] += double(__shfl_sync(ALL, sum, 31));
                }
                passed[j] += some[j];
            }
            if (in && blockIdx.y == 0) extras[at + lane] = marked(extra, false);
            real share = inverse(extra);
#pragma unroll
            for (int l = 0; l < SUMS; l++) station.classes[lane].weight[l] = share * factor[l];
            station.classes[lane].after = all;
            int before = at;
            at += taken;
            fetch();
            for (int i = lane; i < 2 * RING; i += 32) station.items[listed + i].index = 0;
            if (lane < RING) {
#pragma unroll
                for (int l = 0; l < SUMS; l++) station.items[listed + RING + lane].weight[l] = real(0);
            }
            __syncwarp();

            Numbers<real> base, local;
            base.clear(), local.clear();
            base.add_rows(state);
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
#pragma unroll
                // through a shuffle, as the compiler would convert it for every class again
                for (int c = 0; c < VEC; c++) base.at[l][c] = __shfl_sync(ALL, base.at[l][c], lane);
            }
            int next = 0, due = taken ? station.classes[0].after : NEVER;
            auto write = [&]() {
                Class to = station.classes[next];
                Row sum = {};
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
#pragma unroll
                    for (int c = 0; c < VEC; c++) sum.at[c] += to.weight[l] * (base.at[l][c] + local.at[l][c]);
                }
                store(before + next, sum);
                next++;
                due = next < taken ? station.classes[next].after : NEVER;
            };
            if (listed) {
                Packed row[RING];
#pragma unroll
                for (int i = 0; i < RING; i++) row[i] = own.row(station.items[i].index);
                for (int n = 0; n < listed; n += RING) {
#pragma unroll
                    for (int i = 0; i < RING; i++) {
                        while (due <= n + i) write();
                        Item item = station.items[n + RING + i];
                        local.add_row(item.weight, row[i].row());
                        row[i] = own.row(item.index);
                    }
                }
            }
            while (next < taken) write();
            state.add_rows(local);
            __syncwarp();
            // little is left of the sums for a class with few keys in its window, which are summed one by one
            for (; COMPACT && few; few &= few - 1) {
                int which = __ffs(few) - 1, start = __shfl_sync(ALL, low, which);
                int stop = start + __shfl_sync(ALL, window, which);
                real spot = __shfl_sync(ALL, s, which), sum_extra = real(0);
                Row sum = {};
#pragma unroll 4
                for (int n = start; n < stop; n++) {
                    real weight = side.value(spot, keys.place(n)) * own.extras[n];
                    Row row = own.row(n).row();
#pragma unroll
                    for (int c = 0; c < VEC; c++) sum.at[c] += weight * row.at[c];
                    sum_extra += weight;
                }
                real share = inverse(sum_extra);
#pragma unroll
                for (int c = 0; c < VEC; c++) sum.at[c] *= share;
                store(before + which, sum);
                if (lane == 0 && blockIdx.y == 0) extras[before + which] = marked(sum_extra, false);
            }
        }
    }
    __device__ void store(int i, const Row &sum) const {
        *reinterpret_cast<Packed *>(table + index_t(i) * STRIDE) = Packed::of(sum);
    }

    // A folded line at zero: all keys are seen from there on.
    __device__ void bend(Wide &state, const Wide &total, real origin) const {
        double slope = -double(side.below[0][SUMS - 1]);
        state.mix(0, total.at[0], total.extra[0], slope * double(origin));
        state.mix(SUMS - 1, total.at[0], total.extra[0], slope);
    }
};

// Arguments as in relax.cu; means of classes of keys are in the same table, from `key_offsets` on. Lines that are wound
// are left to spool.cu.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    ascend(const entry_t *entries, const half_t *key_codes, const int *key_counts, const index_t *key_offsets,
           const half_t *codes, const int *counts, const index_t *offsets, const int *rounds, const half_t *values,
           const real *weights, const double *numbers, const double *taus, double tau, double constant,
           const Winding *windings, half_t *table, real *extras, index_t round, index_t count, index_t dims,
           index_t most, index_t key_most) {
    extern __shared__ __align__(16) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    Kept *shelves = reinterpret_cast<Kept *>(stations + CREW);
    __shared__ Cuts<ALL_CELLS> cuts;
    int lane = threadIdx.x % 32, warp = own_warp();
    index_t stop = rounds[round + 1] * dims;
    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        if (is_wound(windings, line)) continue;
        index_t p = line / dims;
        Side side;
        side.read(numbers, taus ? taus[p] : tau, true);
        const entry_t *line_entries = entries + line * count;
        Classes keys = {key_codes + line * key_most, key_counts[line]}, classes = {codes + line * most, counts[line]};
        Own own = {reinterpret_cast<const char *>(values + p * count * STRIDE + blockIdx.y * WIDTH + lane * VEC),
                   table + key_offsets[line] * STRIDE + blockIdx.y * WIDTH + lane * VEC, Scalars(weights, p * count),
                   extras + key_offsets[line], lane};
        Walker walker = {stations[warp],
                         side,
                         own,
                         keys,
                         table + offsets[line] * STRIDE + blockIdx.y * WIDTH + turned(lane * VEC),
                         extras + offsets[line],
                         lane,
                         COMPACT ? (side.node[NODES - 1] - side.node[0]) / 4 : infinity()};
        cuts.make<1>(line_entries, int(count), keys.count);
        auto place = [&](int n) { return keys.place(min(n, keys.count - 1)); };
        for (int c = cuts.take(lane); c < ALL_CELLS; c = cuts.take(lane)) {
            // moments around the end of the cell
            real end = place(cuts.rank[c + 1]);
            Numbers<real> sum_of_cell;
            sum_of_cell.clear();
            auto prepare = [&](int i, int rank) {
                real z = end - keys.place(rank), power = real(1);
#pragma unroll
                for (int l = 0; l < SUMS; l++, power *= z) walker.station.items[i].weight[l] = power;
            };
            collect(own, line_entries, cuts.key[c], cuts.key[c + 1], walker.station.list, prepare,
                    [&](int i, int, const Row &mean, real extra) {
                        Item item = walker.station.items[i];
#pragma unroll
                        for (int l = 0; l < SUMS; l++) {
                            item.weight[l] *= extra;
                            sum_of_cell.extra[l] += item.weight[l];
                        }
                        sum_of_cell.add_row(item.weight, mean);
                    });
            shelves[c].store(sum_of_cell, lane);
        }
        __syncthreads();
        Wide state, sums;
        int passed[NODES] = {};
        // from the moments of a cell to those of all keys before it
        if (warp == 0) {
            sums.clear();
            for (int c = 0; c < ALL_CELLS; c++) {
                Wide part;
                shelves[c].load(part, lane);
                __syncwarp();
                shelves[c].store(sums, lane);
                move_side<true, 0>(sums, double(place(cuts.rank[c + 1])) - double(place(cuts.rank[c])), 0.0);
                add_all(sums, part);
            }
            shelves[ALL_CELLS].store(sums, lane);
        }
        __syncthreads();
        // what all keys give at a place, and how many have been passed
        auto begin = [&](real origin) {
            state.clear();
#pragma unroll 1
            for (int j = 0; j < NODES; j++) {
                int some =
                    first_without(0, keys.count, [&](int i) { return side.passed(j, true, origin, keys.place(i)); });
#pragma unroll
                for (int k = 0; k < NODES; k++) {
                    if (k == j) passed[k] = some;
                }
                // the last cell that begins there or before
                int whole = first_without(0, ALL_CELLS + 1, [&](int c) { return cuts.rank[c] <= some; }) - 1;
                int begun = cuts.rank[whole];
                shelves[whole].load(sums, lane);
                move_side<true, 0>(sums, double(origin) - double(side.node[j]) - double(place(begun)), 0.0);
#pragma unroll
                for (int l = 0; l < POWERS; l++) {
#pragma unroll
                    for (int i = l; i < POWERS; i++) {
                        state.mix(l, sums.at[i - l], sums.extra[i - l], double(side.below[j][i]) * binomial(i, l));
                    }
                }
                walker.absorb(state, begun, some, [&](real t, real(&weight)[SUMS]) {
                    side.weights(j, origin - t - side.node[j], weight, real(1), real(0));
                });
            }
        };
        Kept &zero = shelves[ALL_CELLS + 1];
        if (FOLDED) {
            if (warp == 0) {
                begin(real(0));
                zero.store(state, lane);
            }
            __syncthreads();
        }
        int first = classes.count * warp / CREW, last = classes.count * (warp + 1) / CREW;
        if (first < last) {
            real origin = classes.place(first);
            begin(origin);
            Wide total;
            shelves[ALL_CELLS].load(total, lane);
            state.mix(0, total.at[0], total.extra[0], constant);
            if (FOLDED) {
                zero.load(sums, lane);
                state.mix(0, sums.at[0], sums.extra[0], -1.0);
                if (origin > real(0)) walker.bend(state, total, origin);
            }
            walker.go(classes, first, last, state, origin, passed, total);
        }
        __syncthreads();
    }
}
