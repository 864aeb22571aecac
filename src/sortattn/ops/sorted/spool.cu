// The walk around wound lines (wind.cu) of sixteen-bit coordinates, for splines with three nodes a cell apart: for
// every class of queries a mean of the values, see class_line.cu.
//
// What a query at part a of a cell sees is linear in a between two keys on the circle; a key changes the slope at its
// part by its row times 1, -2 and 1, in the cell before its own, in its own and in the one behind. So each of eight
// cells has a value and a slope, sixteen sums, as many as a product on tensor cores. A block has a line, whose keys go
// by stretches of thirty-two, and a warp a run of these. It sums what its run adds to all sums; the sums at the begin
// follow from those of the whole circle, as a cell begins where the one before it ends, and are found from the end that
// is nearer, so that they are as small as what is there to be seen. Then classes of queries are served stretch by
// stretch: values and slopes at its begin, and a product with the rows of its keys.
//
// A query that sees little of what is in the cells around it loses digits; the last bit of the extra scalar says so. A
// few keys may stray beyond these cells: they are left out, and multiplied with what those see of them that are near.
//
// Macros: those of class_line.cu and RESIDENT (blocks of a multiprocessor).

#include "class_line.cu"

#include "tensor.cu"

#include "tiles.cu"

static_assert(NODES == 3 && POWERS == 2 && COMPACT, "a spline with three nodes");

// cells of queries, of which those of keys are all but the first and the last
constexpr int SEEN = 8;

// of what is in the cells around, what a class has to see at least for its digits, and what is no more than rounding
constexpr real FEW_SEEN = 1.0f / 128.0f, LOST = 1e-6f;
// of a number of sixteen bits; bfloat16 has room for more
constexpr real LARGEST = BFLOAT ? 3e38f : 65000.0f;
// up to this part of the circle a stretch may be long where first digits of slopes are enough: what a class then
// misses, seen from the begin, is less than the last digit of a half of what it sees at least
constexpr real NARROW = FEW_SEEN;

// A point on the circle, of those that there can be.
struct alignas(8) Spot {
    real part;
    int cell;
};
__device__ inline void arrive(Spot &spot) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(spot.part), "+r"(spot.cell));
#endif
}
struct Spots {
    const Spot *start;

    __device__ Spot operator()(half_t code) const { return start[code]; }
};

// Keys in other cells.
struct Strays {
    Brought rows;
    Spot spots[KEYS];
    int indices[KEYS], count;
    alignas(16) half_t scalars[KEYS];
};

// Slopes of all cells, and their values.
struct alignas(16) State {
    real slopes[SEEN][2 * COLUMNS], values[SEEN][2 * COLUMNS];
};
static_assert(sizeof(State) >= 32 * 2 * sizeof(Weights), "weights of a product have room there");
struct alignas(128) Station {
    Brought rows[2];
    State state;
    // what passing a key does to the slope of every cell, and to none
    Keys<half_t> changes[SEEN + 1];
    Keys<real> parts;
    alignas(16) half_t scalars[KEYS];
};

__device__ inline real clamped(real x) {
#ifdef __CUDA_ARCH__
    return __saturatef(x);
#else
    return fminf(fmaxf(x, 0.0f), 1.0f);
#endif
}

// For every class of queries the sum of the weights, `extras`, and the mean of the rows, in the table, those of a line
// from `offsets` on; for the lines of the heads of a round that are wound. Codes are places in `spots`.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    spool(const entry_t *entries, const half_t *key_codes, const half_t *codes, const int *counts,
          const index_t *offsets, const int *rounds, const half_t *values, const real *weights, const Winding *windings,
          const Spot *spots, double scale, half_t *table, real *extras, index_t round, index_t count, index_t dims,
          index_t most, index_t key_most) {
    extern __shared__ __align__(128) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    // where runs begin, and behind the last one; the first class of each; keys in the cells around each
    __shared__ real edges[CREW + 1], around[SEEN + 1];
    __shared__ int firsts[CREW + 1];
    __shared__ Strays strays;
    // a lane has the slopes and the values of two cells, and of every eight channels one
    int lane = threadIdx.x % 32, warp = own_warp(), own = lane / 4, part = lane % 4;
    Station &station = stations[warp];
    Spots circle = {spots};
    index_t stop = rounds[round + 1] * dims;
    int keys = int(count), stretches = (keys + KEYS - 1) / KEYS;
    auto begin_of = [&](int run) { return int(index_t(stretches) * run / CREW); };
    station.changes[SEEN].of(lane) = 0;
    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        if (!windings[line].cells) continue;
        int first_cell = windings[line].first - 1, half = windings[line].cells / 2 + 1;
        Route along(entries, key_codes, codes, counts, offsets, values, weights, table, extras, line, dims, count, most,
                    key_most, lane);
        __syncthreads();
        if (threadIdx.x <= CREW) {
            int i = threadIdx.x, first = begin_of(i), low = 0, high = along.classes.count;
            real edge = first == 0           ? real(0)
                        : first == stretches ? real(1)
                                             : circle(along.points.code(along.points.entry(first * KEYS))).part;
            edges[i] = edge;
            while (low < high) {
                int middle = (low + high) / 2;
                if (circle(along.classes.codes[middle]).part >= edge)
                    high = middle;
                else
                    low = middle + 1;
            }
            firsts[i] = first == stretches ? along.classes.count : low;
        }
        if (threadIdx.x == 0) strays.count = 0;
        __syncthreads();

        int first = begin_of(warp), last = begin_of(warp + 1);
        auto prepare = [&](Words &scalars, const auto &walk, int stretch) {
            bool there = stretch * KEYS + lane < keys;
            int cell = walk.point.cell - first_cell;
            reinterpret_cast<Keys<half_t>::Some *>(station.changes)[lane] = {};
            station.parts.of(lane) = there ? walk.point.part : real(0);
            walk.weigh(scalars.at, station.scalars, there, lane);
            __syncwarp();
            if (there && cell > 0 && cell < SEEN - 1) {
                half_t once = half_t(narrow(real(1), real(0))), twice = half_t(narrow(real(-2), real(0)));
                station.changes[cell - 1].of(lane) = once, station.changes[cell + 1].of(lane) = once;
                station.changes[cell].of(lane) = twice;
            }
            __syncwarp();
        };
        // what passing a key does to the slope of a cell
        auto changes_of = [&](int cell) { return words_of(station.changes[cell], part); };
        // where the next stretch begins
        auto end_of = [&](const auto &walk, int stretch) {
            real next = __shfl_sync(ALL, walk.next_point.part, 0);
            return stretch + 1 < last ? next : edges[warp + 1];
        };
        // Add what passing all keys of a stretch does to slopes, and to values at `end`.
        auto pass = [&](Eight &slopes, Eight &values, const Words &scalars, const Brought &rows, real end) {
            Words changes = changes_of(own), until;
            Keys<real>::Some parts = station.parts.of_part[part];
#pragma unroll
            for (int i = 0; i < 4; i++)
                until.at[i] = times(changes.at[i], narrow(end - parts.at[2 * i], end - parts.at[2 * i + 1]));
            each_tile(rows, scalars, lane, [&](int i, const Weights &some, int half) {
                multiply(slopes.at[i], some, changes.columns(half));
                multiply(values.at[i], some, until.columns(half));
            });
        };
        // A number of the state for each that a lane has.
        auto each = [&](auto visit) {
#pragma unroll
            for (int i = 0; i <= TILES; i++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    int cell = part * 2 + k % 2, column = i < TILES ? i * TILE + own + k / 2 * 8 : WIDTH;
                    visit(i, k, station.state.slopes[cell][column], station.state.values[cell][column]);
                }
            }
        };

        // what the run adds
        {
            Eight slopes = {}, values = {};
            Stretches walk(Int<1>(), along.points, along.given, station.rows, first, lane, circle, [](int, int) {});
            for (int stretch = first; stretch < last; stretch++) {
                const Brought &rows = walk.next(lane);
                walk.look_ahead(lane);
                Words scalars;
                prepare(scalars, walk, stretch);
                int cell = walk.point.cell - first_cell;
                bool strayed = stretch * KEYS + lane < keys && (cell <= 0 || cell >= SEEN - 1);
                if (__any_sync(ALL, strayed) && strayed) {
                    int n = atomicAdd(&strays.count, 1);
                    if (n < KEYS) {
                        strays.spots[n] = walk.point;
                        strays.indices[n] = Ordered::index(along.points.entry(stretch * KEYS + lane));
                        strays.scalars[n] = half_t(narrow(walk.scalar, real(0)));
                    }
                }
                pass(slopes, values, scalars, rows, edges[warp + 1]);
                __syncwarp();
            }
            walk.end();
            each([&](int i, int k, real &slope, real &value) { slope = slopes.at[i][k], value = values.at[i][k]; });
        }
        __syncthreads();
        int lost = min(strays.count, KEYS);
        if (warp == CREW - 1 && lost) {
            strays.rows.bring(along.given.start, strays.indices[min(lane, lost - 1)], lane);
            if (lane >= lost) strays.scalars[lane] = 0;
            wait_for_copies();
        }
        // sums at the begin of every run, a column for each thread
        if (threadIdx.x <= WIDTH) {
            int column = threadIdx.x;
            auto slope_of = [&](int run, int cell) -> real & { return stations[run].state.slopes[cell][column]; };
            auto value_of = [&](int run, int cell) -> real & { return stations[run].state.values[cell][column]; };
            real slopes[SEEN] = {}, values[SEEN] = {};
            for (int run = 0; run < CREW; run++) {
                real length = edges[run + 1] - edges[run];
#pragma unroll
                for (int j = 0; j < SEEN; j++) {
                    values[j] += length * slopes[j] + value_of(run, j);
                    slopes[j] += slope_of(run, j);
                }
            }
            // from once around to where it begins: cells below the middle from the first one on, others from the last
            real slope = real(0), value = real(0), slope_above = real(0), value_above = real(0), number = real(0);
            real begin_slopes[SEEN], begin_values[SEEN], numbers[SEEN + 2];
#pragma unroll
            for (int j = 0; j < SEEN; j++) {
                int i = SEEN - 1 - j;
                slope_above -= slopes[i], value_above -= slope_above + values[i];
                if (j < half) begin_slopes[j] = slope, begin_values[j] = value;
                if (i >= half) begin_slopes[i] = slope_above, begin_values[i] = value_above;
                value += slope + values[j], slope += slopes[j];
            }
            if (column == WIDTH) {
                // a slope at the begin is what its cell has less what the one before it has
                numbers[0] = numbers[SEEN + 1] = real(0);
#pragma unroll
                for (int j = 0; j < SEEN; j++) numbers[j + 1] = number += begin_slopes[j];
#pragma unroll
                for (int j = 0; j < SEEN; j++) around[j] = numbers[j] + numbers[j + 1] + numbers[j + 2];
                around[SEEN] = real(0);
            }
            for (int run = 0; run < CREW; run++) {
                real length = edges[run + 1] - edges[run];
#pragma unroll
                for (int j = 0; j < SEEN; j++) {
                    real &more = value_of(run, j), &steeper = slope_of(run, j);
                    real next = begin_values[j] + length * begin_slopes[j] + more;
                    more = begin_values[j], begin_values[j] = next;
                    next = begin_slopes[j] + steeper;
                    steeper = begin_slopes[j], begin_slopes[j] = next;
                }
            }
        }
        __syncthreads();

        // classes of queries, stretch by stretch
        Eight slopes, values;
        each([&](int i, int k, real &slope, real &value) { slopes.at[i][k] = slope, values.at[i][k] = value; });
        Weights(&far)[2] = reinterpret_cast<Weights(&)[32][2]>(station.state)[lane];
        int at = firsts[warp], stop_at = firsts[warp + 1];
        auto code_of = [&](int i) { return i < stop_at ? along.classes.codes[i] : half_t(0); };
        // of the next thirty-two classes, and the codes of as many behind them
        Spot spot = circle(code_of(at + lane));
        half_t code = code_of(at + 32 + lane);
        Stretches walk(Int<1>(), along.points, along.given, station.rows, first, lane, circle, [](int, int) {});
        real begin = edges[warp];
        for (int stretch = first; stretch < last; stretch++) {
            const Brought &rows = walk.next(lane);
            Words scalars;
            prepare(scalars, walk, stretch);
            real end = end_of(walk, stretch);
            int taken;
            do {
                bool in = at + lane < stop_at && spot.part < end;
                taken = __popc(__ballot_sync(ALL, in));
                // those behind the ones that are taken, on their way
                Spot now = spot, moved = {__shfl_sync(ALL, spot.part, (lane + taken) % 32),
                                          __shfl_sync(ALL, spot.cell, (lane + taken) % 32)};
                half_t behind = half_t(__shfl_sync(ALL, int(code), (lane + taken) % 32));
                spot = lane + taken < 32 ? moved : circle(behind);
                code = code_of(at + taken + 32 + lane);
                // what is left where no key is near is rounding, and nothing is seen
                int cell = now.cell - first_cell;
                int seen = unsigned(cell) < unsigned(SEEN) && around[cell] > real(0) ? cell : SEEN;
                bool stray = lost && __any_sync(ALL, in && (cell < 2 || cell >= SEEN - 2));
                for (int sixteen = 0; sixteen < taken; sixteen += TALL) {
                    if (stray) {
                        // what classes see of strays, where sums were
#pragma unroll 1
                        for (int i = 0; i < 8; i++) {
                            Spot query = circle(code_of(at + sixteen + own + i % 2 * 8));
                            real weight[2];
#pragma unroll
                            for (int k = 0; k < 2; k++) {
                                int n = i / 2 * 8 + part * 2 + k;
                                Spot key = strays.spots[min(n, lost - 1)];
                                real away = fabsf(real(query.cell - key.cell) + (query.part - key.part));
                                weight[k] = n < lost ? clamped(1.0f - away) : real(0);
                            }
                            far[i / 4].word[i % 4] = narrow(weight[0], weight[1]);
                        }
                    }
                    Weights matrix[2];
                    Shares at_begin, steep;
                    Keys<real>::Some parts = station.parts.of_part[part];
#pragma unroll
                    for (int second = 0; second < 2; second++) {
                        int row = sixteen + own + 8 * second, mine = __shfl_sync(ALL, seen, row);
                        real place = __shfl_sync(ALL, now.part, row), beyond = rounded(place - begin);
                        Words changes = changes_of(mine);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            unsigned passed =
                                narrow(clamped(place - parts.at[2 * i]), clamped(place - parts.at[2 * i + 1]));
                            matrix[i / 2].word[i % 2 * 2 + second] = times(changes.at[i], passed);
                        }
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            bool same = mine == part * 2 + k;
                            at_begin.at[2 * k + second] = same ? real(1) : real(0);
                            steep.at[2 * k + second] = same ? beyond : real(0);
                        }
                    }
                    // What a class sees at the begin of the stretch, of some times eight channels.
                    auto see = [&](real(*sums)[4], int from, int some) {
#pragma unroll
                        for (int k = 0; k < 3; k++) {
#pragma unroll
                            for (int i = 0; i < some; i++) {
                                const Eight &state = k == 1 ? slopes : values;
                                real low = state.at_eight(from + i, 0), high = state.at_eight(from + i, 1);
                                if (k == 0) low = rest_of(low), high = rest_of(high);
                                multiply(sums[i], k == 1 ? steep : at_begin, low, high);
                            }
                        }
                        if (end - begin <= NARROW) return;
                        // where keys are few, or tied, first digits are not enough; registers are full, so places are
                        // looked up again
                        Shares rest;
#pragma unroll
                        for (int second = 0; second < 2; second++) {
                            real place = __shfl_sync(ALL, now.part, sixteen + own + 8 * second) - begin;
#pragma unroll
                            for (int k = 0; k < 2; k++) {
                                int n = 2 * k + second;
                                rest.at[n] = at_begin.at[n] * (place - seen_of(rounded(place)));
                            }
                        }
#pragma unroll
                        for (int i = 0; i < some; i++) {
                            real low = slopes.at_eight(from + i, 0), high = slopes.at_eight(from + i, 1);
                            multiply(sums[i], steep, rest_of(low), rest_of(high));
                            multiply(sums[i], rest, low, high);
                        }
                    };
                    real all[1][4] = {};
                    see(all, EIGHTS, 1);
#pragma unroll
                    for (int half = 0; half < 2; half++) multiply(all[0], matrix[half], scalars.columns(half));
                    if (stray) {
#pragma unroll
                        for (int half = 0; half < 2; half++)
                            multiply(
                                all[0], far[half],
                                {{two_of(strays.scalars, 2 * half, lane), two_of(strays.scalars, 2 * half + 1, lane)}});
                    }
                    real extra[2];
                    bool unsure[2];
#pragma unroll
                    for (int second = 0; second < 2; second++) {
                        int row = sixteen + own + 8 * second;
                        real here = around[__shfl_sync(ALL, seen, row)];
                        // less than that is rounding
                        extra[second] = all[0][2 * second] < LOST * here ? real(0) : all[0][2 * second];
                        unsure[second] = row < taken && extra[second] < FEW_SEEN * here;
                        if (part == 0 && row < taken)
                            along.extras[at + row] = marked(real(scale) * extra[second], unsure[second]);
                    }
                    bool doubt = __any_sync(ALL, unsure[0] || unsure[1]);
                    real shares[2] = {inverse(extra[0]), inverse(extra[1])};
#pragma unroll
                    for (int from = 0; from < EIGHTS; from += 4) {
                        real sums[4][4] = {};
                        see(sums, from, 4);
                        rows.add_some(sums, from, matrix, lane);
                        if (stray) strays.rows.add_some(sums, from, far, lane);
                        if (doubt) {
                            // a mean of values is no larger than they are, but for what was lost
#pragma unroll
                            for (int i = 0; i < 16; i++) {
                                real &sum = sums[i / 4][i % 4], bound = extra[i % 4 / 2] * LARGEST;
                                sum = fminf(fmaxf(sum, -bound), bound);
                            }
                        }
#pragma unroll
                        for (int second = 0; second < 2; second++) {
                            int row = sixteen + own + 8 * second;
                            if (row < taken)
                                store_some(along.table + index_t(at + row) * STRIDE, sums, from, second, shares[second],
                                           lane);
                        }
                    }
                }
                at += taken;
                arrive(code), arrive(spot);
            } while (taken == 32);
            walk.look_ahead(lane);
#pragma unroll
            for (int i = 0; i < 4 * (TILES + 1); i++)
                values.at[i / 4][i % 4] += (end - begin) * slopes.at[i / 4][i % 4];
            pass(slopes, values, scalars, rows, end);
            begin = end;
            __syncwarp();
        }
        walk.end();
    }
}
