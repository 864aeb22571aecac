// The walk along lines of sixteen-bit coordinates for polynomials with an exponential, whose keys above count as those
// below do: for every class of queries a mean of the values, see class_line.cu. An exponential alone has fade.cu.
//
// A block has a line, whose keys go by stretches of thirty-two, and these by runs. What keys of other stretches give to
// a class is known by two sums, of those below the stretch, around its first key, and of those above, around the first
// key of the next one; what its own keys give is a product of a matrix of weights with their rows, which tensor cores
// have. So have they the sums of a stretch. On the way down those above each stretch, within its run, are left in
// `notes`; then the sums of whole runs are summed, and classes are served on the way up.
//
// Distances are in units in which the exponential is 2^-x. Weights are rounded to sixteen bits, so they are never
// small: where a class is far from all keys they are those times a power of two.
//
// Macros: those of class_line.cu, CELLS (runs for each warp) and RESIDENT (blocks of a multiprocessor).

#include "class_line.cu"

#include "power.cu"

#include "tensor.cu"

#include "runs.cu"

static_assert(RATE && NODES == 1 && POWERS > 1 && POWERS <= 8, "a polynomial with an exponential, and few sums of it");

// classes of a product, whose last rows are the sums of the stretch
constexpr int CLASSES = TALL - POWERS;

// Sums of x^l 2^-x times rows, for every power l.
struct alignas(16) Sum {
    Two at[POWERS][COLUMNS];
};
struct alignas(128) Station {
    Brought rows[2];
    // what is above the next stretch, as it comes from the notes
    Sum notes[2];
    // what is below the stretch, and above it, and above the run
    Sum below, above, over;
    alignas(16) real places[KEYS];
    alignas(16) half_t weights[2 * POWERS][KEYS];
    alignas(16) half_t scalars[KEYS];
};

// The kernel, sum_i at[i] x^i 2^-x.
struct Polynomial {
    real at[POWERS];

    // without the power of two
    __device__ real operator()(real x) const {
        real sum = at[POWERS - 1];
#pragma unroll
        for (int i = POWERS - 2; i >= 0; i--) sum = sum * x + at[i];
        return sum;
    }
    // what sums of x^l 2^-x give from a distance: the factors of x^l of the polynomial at x + distance, times a share
    __device__ void expand(real distance, real share, real (&factor)[POWERS]) const {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
            real sum = at[POWERS - 1] * real(binomial(POWERS - 1, l));
#pragma unroll
            for (int i = POWERS - 2; i >= l; i--) sum = sum * distance + at[i] * real(binomial(i, l));
            factor[l] = share == real(0) ? real(0) : share * sum;
        }
    }
};

// What sums of x^l 2^-x become that are farther away by a distance.
struct Fading {
    real decay, power[POWERS];

    __device__ Fading(real distance) : decay(power_of_two(-distance)) {
        power[0] = real(1);
#pragma unroll
        for (int l = 1; l < POWERS; l++) power[l] = decay == real(0) ? real(0) : power[l - 1] * distance;
    }
    // the l-th, from those up to it
    __device__ real of(int l, const real (&sums)[POWERS]) const {
        real sum = real(0);
#pragma unroll
        for (int k = 0; k < POWERS; k++) {
            real factor = real(0);
#pragma unroll
            for (int n = k; n < POWERS; n++) factor = n == l ? real(binomial(n, k)) * power[n - k] : factor;
            sum += factor * sums[k];
        }
        return decay * sum;
    }
};

// The same number of all powers, each of which a lane of every four has: the first one from lane / 4 = `first` on, the
// others `way` from one to the next.
__device__ inline void of_powers(real mine, int first, int way, int lane, real (&all)[POWERS]) {
#pragma unroll
    for (int l = 0; l < POWERS; l++) all[l] = __shfl_sync(ALL, mine, (first + way * l) * 4 + lane % 4);
}

// For every class of queries the sum of the weights, `extras`, and the mean of the rows, in the table, those of a line
// from `offsets` on; for the lines of the heads of a round. `notes (blocks of the grid, channel blocks, stretches)`.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    relax(const entry_t *entries, const half_t *key_codes, const half_t *codes, const int *counts,
          const index_t *offsets, const int *rounds, const half_t *values, const real *weights, const double *numbers,
          const double *taus, double tau, Sum *notes, half_t *table, real *extras, index_t round, index_t count,
          index_t dims, index_t most, index_t key_most) {
    extern __shared__ __align__(128) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    Sum *lower = reinterpret_cast<Sum *>(stations + CREW), *upper = lower + RUNS;
    // where runs begin, and behind the last one; the first class of each
    __shared__ real edges[RUNS + 1];
    __shared__ int firsts[RUNS + 1], next_run;
    // a lane has two sums of a product, and of every eight channels two
    int lane = threadIdx.x % 32, warp = own_warp(), own = lane / 4, part = lane % 4;
    Station &station = stations[warp];
    index_t stop = rounds[round + 1] * dims;
    int keys = int(count), stretches = (keys + KEYS - 1) / KEYS;
    notes += (blockIdx.x * gridDim.y + blockIdx.y) * index_t(stretches);
    auto take = [&]() { return take_run(next_run, lane); };
    double rate = numbers[1 + POWERS] * NATURAL;
    Polynomial kernel;
    double scale = 1.0;
#pragma unroll
    for (int i = 0; i < POWERS; i++, scale /= rate) kernel.at[i] = real(numbers[1 + i] * scale);

    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        Route along(entries, key_codes, codes, counts, offsets, values, weights, table, extras, line, dims, count, most,
                    key_most, lane);
        real unit = unit_of(rate, taus ? taus[line / dims] : tau);
        __syncthreads();
        if (threadIdx.x == 0) next_run = 0;
        find_runs(along, stretches, edges, firsts);
        __syncthreads();

        // down: what is above each stretch, and all of the run, seen from both its ends
        for (int run = take(); run < RUNS; run = take()) {
            int first = begin_of(run, stretches), last = begin_of(run + 1, stretches);
            real high = edges[run + 1], before = high;
            // of the power that a lane has, what is above, and below
            Sixteen sums = {};
            auto store = [&](Sum &to, int second) {
                if (own >= POWERS) return;
#pragma unroll
                for (int i = 0; i <= EIGHTS; i++)
                    to.at[own][i * 4 + part] = {sums.at[i][2 * second], sums.at[i][2 * second + 1]};
            };
            Stretches walk(Int<-1>(), along.points, along.given, station.rows, last - 1, lane, Coordinate(),
                           [](int, int) {});
            for (int stretch = last - 1; stretch >= first; stretch--) {
                const Brought &here = walk.next(lane);
                walk.look_ahead(lane);
                real t = walk.point;
                int some = min(KEYS, keys - stretch * KEYS);
                bool there = lane < some;
                real origin = __shfl_sync(ALL, t, 0), end = __shfl_sync(ALL, t, some - 1);
                real x = (t - origin) * unit, y = (end - t) * unit;
                real up = there ? power_of_two(-x) : real(0), down = there ? power_of_two(-y) : real(0);
#pragma unroll
                for (int l = 0; l < POWERS; l++) {
                    station.weights[l][lane] = half_t(narrow(up, real(0)));
                    station.weights[POWERS + l][lane] = half_t(narrow(down, real(0)));
                    up = up == real(0) ? real(0) : up * x, down = down == real(0) ? real(0) : down * y;
                }
                Columns columns[2];
                walk.weigh(columns, station.scalars, there, lane);
                __syncwarp();
                Weights matrix[2];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    // of eight keys, what counts above and what counts below
                    int power = min(own, POWERS - 1) + i % 2 * POWERS;
                    unsigned word = two_of(station.weights[power], i / 2, lane);
                    matrix[i / 4].word[i % 4] = own < POWERS ? word : 0u;
                }
                Sixteen fresh = {};
                here.add_to(fresh, matrix, columns, lane);
                Fading above((before - origin) * unit), below((high - end) * unit);
#pragma unroll
                for (int i = 0; i <= EIGHTS; i++) {
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        real old[POWERS], young[POWERS];
                        of_powers(sums.at[i][c], 0, 1, lane, old);
                        of_powers(fresh.at[i][c + 2], 0, 1, lane, young);
                        sums.at[i][c] = above.of(own, old) + fresh.at[i][c];
                        sums.at[i][c + 2] += below.of(own, young);
                    }
                }
                before = origin;
                store(notes[stretch], 0);
                __syncwarp();
            }
            walk.end();
            store(upper[run], 0);
            store(lower[run], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) next_run = 0;
        // what is below a run, around its lower end, and above it, around its upper one
        for (int i = threadIdx.x; i < 4 * COLUMNS; i += 32 * CREW) {
            bool down = i >= 2 * COLUMNS;
            real state[POWERS] = {};
            for (int k = 0; k < RUNS; k++) {
                int run = down ? RUNS - 1 - k : k;
                Fading fading((edges[run + 1] - edges[run]) * unit);
                real moved[POWERS];
#pragma unroll
                for (int l = 0; l < POWERS; l++) {
                    real &here = reinterpret_cast<real *>((down ? upper : lower)[run].at[l])[i % (2 * COLUMNS)];
                    moved[l] = fading.of(l, state) + here;
                    here = state[l];
                }
#pragma unroll
                for (int l = 0; l < POWERS; l++) state[l] = moved[l];
            }
        }
        __syncthreads();

        // up: classes of queries, stretch by stretch
        for (int run = take(); run < RUNS; run = take()) {
            int first = begin_of(run, stretches), last = begin_of(run + 1, stretches);
            if (first == last) continue;
            real high = edges[run + 1];
            for (int i = lane; i < POWERS * COLUMNS; i += 32) {
                station.below.at[0][i] = lower[run].at[0][i];
                station.over.at[0][i] = upper[run].at[0][i];
            }
            int at = firsts[run], end = firsts[run + 1];
            real next_s = at + lane < end ? along.classes.place(at + lane) : real(0);
            Stretches walk(Int<1>(), along.points, along.given, station.rows, first, lane, Coordinate(),
                           [&](int to, int stretch) {
                               const Sum &note = notes[min(stretch + 1, stretches - 1)];
                               constexpr int BYTES = sizeof(Sum);
                               for (int i = lane * 16; i < BYTES; i += 512)
                                   begin_copy_around(reinterpret_cast<char *>(station.notes + to) + i,
                                                     reinterpret_cast<const char *>(&note) + i);
                           });
            for (int stretch = first; stretch < last; stretch++) {
                const Brought &here = walk.next(lane);
                real t = walk.point;
                int some = min(KEYS, keys - stretch * KEYS);
                bool there = lane < some, final = stretch + 1 == stretches;
                real origin = __shfl_sync(ALL, t, 0), last_key = __shfl_sync(ALL, t, some - 1);
                real next = final ? infinity() : __shfl_sync(ALL, walk.next_point, 0);
                station.places[lane] = there ? t : infinity();
                Columns columns[2];
                walk.weigh(columns, station.scalars, there, lane);
                // above the next stretch: of the run, and of those behind it
                bool within = stretch + 1 < last;
                Fading fading(within ? (high - next) * unit : real(0));
#pragma unroll
                for (int i = 0; i < (COLUMNS + 31) / 32 * 32; i += 32) {
                    int column = min(i + lane, COLUMNS - 1);
                    Two sum[POWERS];
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        real over[POWERS];
#pragma unroll
                        for (int l = 0; l < POWERS; l++) over[l] = station.over.at[l][column].at[c];
#pragma unroll
                        for (int l = 0; l < POWERS; l++) {
                            real more = within ? station.notes[walk.held].at[l][column].at[c] : real(0);
                            sum[l].at[c] = fading.of(l, over) + more;
                        }
                    }
#pragma unroll
                    for (int l = 0; l < POWERS; l++) station.above.at[l][column] = sum[l];
                }
                __syncwarp();
                // of the keys that a lane has
                Two x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = reinterpret_cast<const Two *>(station.places)[i * 4 + part];
                Sixteen sums;
                // up to so many classes, each of which a lane has: its place, how far that is from the first key, and
                // the next stretch from there
                auto serve = [&](int taken, real spot, real mine, real rest, auto far) {
                    constexpr bool FAR = decltype(far)::value;
                    real nearest = real(0);
                    if (FAR) {
                        nearest = rest;
                        for (int k = 0; k < some; k++) nearest = min(nearest, fabsf(spot - station.places[k]) * unit);
                        nearest = min(nearest, FARTHEST);
                    }
                    // such that no weight is much larger than one
                    real room = real(1) / kernel(nearest + real(3));
                    real from_below[POWERS], from_above[POWERS];
                    kernel.expand(mine, mine < real(0) ? real(0) : room * power_of_two(nearest - mine), from_below);
                    kernel.expand(rest, final ? real(0) : room * power_of_two(nearest - rest), from_above);
                    real shares[2][2][POWERS];
                    Weights matrix[2];
#pragma unroll
                    for (int second = 0; second < 2; second++) {
                        int row = own + 8 * second;
                        bool state = second && row >= CLASSES;
#pragma unroll
                        for (int l = 0; l < POWERS; l++) {
                            real low = __shfl_sync(ALL, from_below[l], row), top = __shfl_sync(ALL, from_above[l], row);
                            shares[second][0][l] = state ? real(0) : low, shares[second][1][l] = state ? real(0) : top;
                        }
                        real point = __shfl_sync(ALL, spot, row), lift = FAR ? __shfl_sync(ALL, nearest, row) : real(0);
                        real fitting = __shfl_sync(ALL, room, row);
                        if (state) point = last_key, lift = real(0);
                        auto weight = [&](real place) {
                            real away = min(fabsf(point - place) * unit, FARTHEST);
                            real raised = real(1);
#pragma unroll
                            for (int l = 1; l < POWERS; l++) raised *= l < TALL - row ? away : real(1);
                            return power_of_two(lift - away) * (state ? raised : fitting * kernel(away));
                        };
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            matrix[i / 2].word[i % 2 * 2 + second] = narrow(weight(x[i].at[0]), weight(x[i].at[1]));
                    }
#pragma unroll
                    for (int i = 0; i <= EIGHTS; i++) {
#pragma unroll
                        for (int k = 0; k < 4; k++) sums.at[i][k] = real(0);
#pragma unroll
                        for (int l = 0; l < POWERS; l++) {
                            Two low = station.below.at[l][i * 4 + part], top = station.above.at[l][i * 4 + part];
#pragma unroll
                            for (int k = 0; k < 4; k++) {
                                sums.at[i][k] += shares[k / 2][0][l] * low.at[k % 2];
                                sums.at[i][k] += shares[k / 2][1][l] * top.at[k % 2];
                            }
                        }
                    }
                    here.add_to(sums, matrix, columns, lane);
#pragma unroll
                    for (int second = 0; second < 2; second++) {
                        int row = own + 8 * second;
                        real extra = __shfl_sync(ALL, sums.at[EIGHTS][2 * second], lane & ~3);
                        real all = extra / __shfl_sync(ALL, room, row);
                        if (FAR) {
                            // twice, as the whole of it may be too small where the product is not
                            real root = power_of_two(real(-0.5) * __shfl_sync(ALL, nearest, row));
                            all = all * root * root;
                        }
                        if (row >= taken) continue;
                        store_means(along.table + index_t(at + row) * STRIDE, sums, second, inverse(extra), lane);
                        if (part == 0 && blockIdx.y == 0) along.extras[at + row] = all;
                    }
                };
                int taken;
                do {
                    real s = next_s;
                    bool in = lane < CLASSES && at + lane < end && s < next;
                    taken = __ffs(~__ballot_sync(ALL, in)) - 1;
                    half_t code = at + taken + lane < end ? along.classes.codes[at + taken + lane] : half_t(0);
                    real mine = in ? (s - origin) * unit : real(0), rest = in ? (next - s) * unit : real(0);
                    if (__any_sync(ALL, fabsf(mine) > NEAR))
                        serve(taken, in ? s : origin, mine, rest, Int<1>());
                    else
                        serve(taken, in ? s : origin, mine, rest, Int<0>());
                    at += taken;
                    // before other loads begin, which one that waits for this would wait for too
                    arrive(code);
                    next_s = number_of(code);
                } while (taken == CLASSES);
                walk.look_ahead(lane);
                // keys of the stretch join those below: the power of a lane is that of its second row
                int power = 7 - own;
                Fading older(final ? real(0) : (next - origin) * unit);
                Fading newer(final ? real(0) : (next - last_key) * unit);
                Two joined[EIGHTS + 1];
#pragma unroll
                for (int i = 0; i <= EIGHTS; i++) {
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        real old[POWERS], young[POWERS];
#pragma unroll
                        for (int l = 0; l < POWERS; l++) old[l] = station.below.at[l][i * 4 + part].at[c];
                        of_powers(sums.at[i][c + 2], 7, -1, lane, young);
                        joined[i].at[c] = older.of(power, old) + newer.of(power, young);
                    }
                }
                __syncwarp();
                if (power < POWERS) {
#pragma unroll
                    for (int i = 0; i <= EIGHTS; i++) station.below.at[power][i * 4 + part] = joined[i];
                }
                __syncwarp();
            }
            walk.end();
        }
        __syncthreads();
    }
}
