// The walk along lines of sixteen-bit coordinates for a single exponential, whose keys above count as those below do:
// for every class of queries a mean of the values, see class_line.cu. It goes as that of relax.cu, which see, for
// polynomials with an exponential, does; there is less to keep, and it stays in registers (tiles.cu).
//
// What is below a stretch is with the first of every four lanes, what is above the next one with the second. On the
// way down it is the two sums of a stretch that these have, side by side.
//
// Macros: those of class_line.cu, CELLS (runs for each warp) and RESIDENT (blocks of a multiprocessor).

#include "class_line.cu"

#include "power.cu"

#include "tensor.cu"

#include "runs.cu"

#include "tiles.cu"

static_assert(RATE && NODES == 1 && POWERS == 1, "an exponential alone");

// Of 2^-x times rows the sum, as lanes have it: of one channel of every eight, and the extra scalar.
struct Lone {
    real at[EIGHTS + 1];
};
// That of all lanes, by fours of their numbers.
struct alignas(16) Sum {
    struct alignas(16) Four {
        real at[4];
    } of_channel[8][EIGHTS / 4];
    real extra[8];

    __device__ void store(const Lone &own, int channel) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i += 4)
            of_channel[channel][i / 4] = {own.at[i], own.at[i + 1], own.at[i + 2], own.at[i + 3]};
        extra[channel] = own.at[EIGHTS];
    }
    __device__ Lone load(int channel) const {
        Lone own;
#pragma unroll
        for (int i = 0; i < EIGHTS; i += 4) {
            Four four = of_channel[channel][i / 4];
#pragma unroll
            for (int k = 0; k < 4; k++) own.at[i + k] = four.at[k];
        }
        own.at[EIGHTS] = extra[channel];
        return own;
    }
};
struct alignas(128) Station {
    Brought rows[2];
    // what is above the next stretch, as it comes from the notes
    Sum notes[2];
    Keys<real> places;
    // of the sums of a stretch, and of none
    Keys<half_t> weights[3];
    alignas(16) half_t scalars[KEYS];
};

// For every class of queries the sum of the weights, `extras`, and the mean of the rows, in the table, those of a line
// from `offsets` on; for the lines of the heads of a round. `notes (blocks of the grid, channel blocks, stretches)`.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    fade(const entry_t *entries, const half_t *key_codes, const half_t *codes, const int *counts,
         const index_t *offsets, const int *rounds, const half_t *values, const real *weights, const double *numbers,
         const double *taus, double tau, Sum *notes, half_t *table, real *extras, index_t round, index_t count,
         index_t dims, index_t most, index_t key_most) {
    extern __shared__ __align__(128) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    Sum *lower = reinterpret_cast<Sum *>(stations + CREW), *upper = lower + RUNS;
    // where runs begin, and behind the last one; the first class of each
    __shared__ real edges[RUNS + 1];
    __shared__ int firsts[RUNS + 1], next_run;
    int lane = threadIdx.x % 32, warp = own_warp(), own = lane / 4, part = lane % 4;
    Station &station = stations[warp];
    index_t stop = rounds[round + 1] * dims;
    int keys = int(count), stretches = (keys + KEYS - 1) / KEYS;
    notes += (blockIdx.x * gridDim.y + blockIdx.y) * index_t(stretches);
    auto take = [&]() { return take_run(next_run, lane); };
    double rate = numbers[2] * NATURAL;
    // the same for all dimensions, and left to the end
    real height = real(numbers[1]);
    station.weights[2].of(lane) = 0;

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
            Lone above = {}, below = {};
            Stretches walk(Int<-1>(), along.points, along.given, station.rows, last - 1, lane, Coordinate(),
                           [](int, int) {});
            for (int stretch = last - 1; stretch >= first; stretch--) {
                const Brought &here = walk.next(lane);
                walk.look_ahead(lane);
                real t = walk.point;
                int some = min(KEYS, keys - stretch * KEYS);
                bool there = lane < some;
                real origin = __shfl_sync(ALL, t, 0), end = __shfl_sync(ALL, t, some - 1);
                real up = power_of_two((origin - t) * unit), down = power_of_two((t - end) * unit);
                station.weights[0].of(lane) = half_t(narrow(there ? up : real(0), real(0)));
                station.weights[1].of(lane) = half_t(narrow(there ? down : real(0), real(0)));
                Words scalars;
                walk.weigh(scalars.at, station.scalars, there, lane);
                __syncwarp();
                Words weights = words_of(station.weights[min(own, 2)], part);
                real older = power_of_two((origin - before) * unit), newer = power_of_two((end - high) * unit);
                Eight sums;
#pragma unroll
                for (int i = 0; i < 2 * (TILES + 1); i++) {
                    sums.at[i / 2][i % 2 * 2] = older * above.at[min(i, EIGHTS)];
                    sums.at[i / 2][i % 2 * 2 + 1] = real(0);
                }
                each_tile(here, scalars, lane, [&](int i, const Weights &some, int half) {
                    multiply(sums.at[i], some, weights.columns(half));
                });
#pragma unroll
                for (int i = 0; i <= EIGHTS; i++) {
                    above.at[i] = sums.at_eight(i, 0);
                    below.at[i] += newer * sums.at_eight(i, 1);
                }
                before = origin;
                if (part == 0) notes[stretch].store(above, own);
                __syncwarp();
            }
            walk.end();
            if (part == 0) upper[run].store(above, own), lower[run].store(below, own);
        }
        __syncthreads();
        if (threadIdx.x == 0) next_run = 0;
        // what is below a run, around its lower end, and above it, around its upper one
        constexpr int NUMBERS = sizeof(Sum) / sizeof(real);
        for (int i = threadIdx.x; i < 2 * NUMBERS; i += 32 * CREW) {
            bool down = i >= NUMBERS;
            real state = real(0);
            for (int k = 0; k < RUNS; k++) {
                int run = down ? RUNS - 1 - k : k;
                real &here = reinterpret_cast<real *>((down ? upper : lower) + run)[i % NUMBERS];
                real moved = power_of_two((edges[run] - edges[run + 1]) * unit) * state + here;
                here = state, state = moved;
            }
        }
        __syncthreads();

        // up: classes of queries, stretch by stretch
        for (int run = take(); run < RUNS; run = take()) {
            int first = begin_of(run, stretches), last = begin_of(run + 1, stretches);
            if (first == last) continue;
            real high = edges[run + 1];
            // what is below the stretch, or above the run
            Lone held = {};
            if (part < 2) held = (part == 0 ? lower : upper)[run].load(own);
            int at = firsts[run], end = firsts[run + 1];
            real next_s = at + lane < end ? along.classes.place(at + lane) : real(0);
            Stretches walk(Int<1>(), along.points, along.given, station.rows, first, lane, Coordinate(),
                           [&](int to, int stretch) {
                               const Sum &note = notes[min(stretch + 1, stretches - 1)];
                               constexpr int BYTES = sizeof(Sum);
                               if (lane * 16 < BYTES)
                                   begin_copy_around(reinterpret_cast<char *>(station.notes + to) + lane * 16,
                                                     reinterpret_cast<const char *>(&note) + lane * 16);
                           });
            for (int stretch = first; stretch < last; stretch++) {
                const Brought &here = walk.next(lane);
                real t = walk.point;
                int some = min(KEYS, keys - stretch * KEYS);
                bool there = lane < some, final = stretch + 1 == stretches;
                real origin = __shfl_sync(ALL, t, 0), last_key = __shfl_sync(ALL, t, some - 1);
                real next = __shfl_sync(ALL, walk.next_point, 0);
                station.places.of(lane) = there ? t : infinity();
                real down = power_of_two((t - last_key) * unit);
                station.weights[0].of(lane) = half_t(narrow(there ? down : real(0), real(0)));
                Words scalars;
                walk.weigh(scalars.at, station.scalars, there, lane);
                // above the next stretch: of the run, and of those behind it
                real fading = part == 1 && stretch + 1 < last ? power_of_two((next - high) * unit) : real(1);
                real older = part == 0 && !final ? power_of_two((origin - next) * unit) : real(1);
                real newer = part == 0 && !final ? power_of_two((last_key - next) * unit) : real(0);
                if (final) next = infinity();
                bool within = part == 1 && stretch + 1 < last;
                Lone state = station.notes[walk.held].load(own);
#pragma unroll
                for (int i = 0; i <= EIGHTS; i++) state.at[i] = fading * held.at[i] + (within ? state.at[i] : real(0));
                __syncwarp();
                // from where a lane's sum is seen
                real from = part == 0 ? origin : part == 1 ? next : infinity();
                int taken;
                do {
                    real s = next_s;
                    bool in = at + lane < end && s < next;
                    taken = __popc(__ballot_sync(ALL, in));
                    half_t code = at + taken + lane < end ? along.classes.codes[at + taken + lane] : half_t(0);
                    // Where a class is far from all keys their weights are those times a power of two.
                    real nearest = real(0);
                    bool far = __any_sync(ALL, in && fabsf(s - origin) * unit > NEAR);
                    if (far) {
                        nearest = min(in ? (next - s) * unit : real(0), FARTHEST);
                        for (int k = 0; k < some; k++) nearest = min(nearest, fabsf(s - station.places.of(k)) * unit);
                    }
                    for (int sixteen = 0; sixteen < taken; sixteen += TALL) {
                        Keys<real>::Some places = station.places.of_part[part];
                        Weights matrix[2];
                        Shares shares;
#pragma unroll
                        for (int second = 0; second < 2; second++) {
                            int row = sixteen + own + 8 * second;
                            real point = __shfl_sync(ALL, s, row), lift = real(0);
                            if (far) lift = __shfl_sync(ALL, nearest, row);
                            if (row >= taken) point = origin;
                            auto weight = [&](real place) { return power_of_two(lift - fabsf(point - place) * unit); };
#pragma unroll
                            for (int i = 0; i < 4; i++)
                                matrix[i / 2].word[i % 2 * 2 + second] =
                                    narrow(weight(places.at[2 * i]), weight(places.at[2 * i + 1]));
                            shares.at[second] = shares.at[second + 2] = rounded(weight(from));
                        }
                        // What other keys give to some times eight channels.
                        auto give = [&](real(*sums)[4], int from, int some) {
#pragma unroll
                            for (int i = 0; i < some; i++)
                                multiply(sums[i], shares, state.at[from + i], rest_of(state.at[from + i]));
                        };
                        real all[1][4] = {};
                        give(all, EIGHTS, 1);
#pragma unroll
                        for (int half = 0; half < 2; half++) multiply(all[0], matrix[half], scalars.columns(half));
#pragma unroll
                        for (int second = 0; second < 2; second++) {
                            int row = sixteen + own + 8 * second;
                            real total = height * all[0][2 * second];
                            if (far) {
                                // twice, as the whole of it may be too small where the product is not
                                real root = power_of_two(real(-0.5) * __shfl_sync(ALL, nearest, row));
                                total = total * root * root;
                            }
                            if (part == 0 && row < taken && blockIdx.y == 0) along.extras[at + row] = total;
                        }
#pragma unroll
                        for (int from = 0; from < EIGHTS; from += 4) {
                            real sums[4][4] = {};
                            give(sums, from, 4);
                            here.add_some(sums, from, matrix, lane);
#pragma unroll
                            for (int second = 0; second < 2; second++) {
                                int row = sixteen + own + 8 * second;
                                if (row < taken)
                                    store_some(along.table + index_t(at + row) * STRIDE, sums, from, second,
                                               inverse(all[0][2 * second]), lane);
                            }
                        }
                    }
                    at += taken;
                    // before other loads begin, which one that waits for this would wait for too
                    arrive(code);
                    next_s = number_of(code);
                } while (taken == 32);
                walk.look_ahead(lane);
                // keys of the stretch join those below
                Words weights = words_of(station.weights[own ? 2 : 0], part);
                Eight sums = {};
                each_tile(here, scalars, lane, [&](int i, const Weights &some, int half) {
                    multiply(sums.at[i], some, weights.columns(half));
                });
#pragma unroll
                for (int i = 0; i <= EIGHTS; i++) held.at[i] = older * held.at[i] + newer * sums.at_eight(i, 0);
                __syncwarp();
            }
            walk.end();
        }
        __syncthreads();
    }
}
