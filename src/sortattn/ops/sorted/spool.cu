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

static_assert(NODES == 3 && POWERS == 2 && COMPACT, "a spline with three nodes");

// cells of queries, of which those of keys are all but the first and the last
constexpr int SEEN = TALL / 2;
// what is far from all of them
constexpr real NOWHERE = 100.0f;

// of what is in the cells around, what a class has to see at least for its digits, and what is no more than rounding
constexpr real FEW_SEEN = 1.0f / 128.0f, LOST = 1e-6f;
// of a number of sixteen bits; bfloat16 has room for more
constexpr real LARGEST = BFLOAT ? 3e38f : 65000.0f;

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
    Two slopes[SEEN][COLUMNS], values[SEEN][COLUMNS];
};
struct alignas(128) Station {
    Brought rows[2];
    State state;
    alignas(16) real parts[KEYS];
    alignas(16) real cells[KEYS];
    alignas(16) half_t scalars[KEYS];
};

__device__ inline real clamped(real x) {
#ifdef __CUDA_ARCH__
    return __saturatef(x);
#else
    return fminf(fmaxf(x, 0.0f), 1.0f);
#endif
}
// 1, -2 and 1 for the cell before, the same and the one behind, else zero.
__device__ inline real change(real cell, real other) {
    real away = fabsf(cell - other);
    return clamped(2.0f - away) - 3.0f * clamped(1.0f - away);
}

// For every class of queries the sum of the weights, `extras`, and the mean of the rows, in the table, those of a line
// from `offsets` on; for the lines of the heads of a round that are wound. Codes are places in `spots`; lines with
// classes that have lost digits are `doubtful`.
extern "C" __global__ void __launch_bounds__(32 * CREW, RESIDENT)
    spool(const entry_t *entries, const half_t *key_codes, const half_t *codes, const int *counts,
          const index_t *offsets, const int *rounds, const half_t *values, const real *weights, const Winding *windings,
          const Spot *spots, double scale, int *doubtful, half_t *table, real *extras, index_t round, index_t count,
          index_t dims, index_t most, index_t key_most) {
    extern __shared__ __align__(128) char shared[];
    Station *stations = reinterpret_cast<Station *>(shared);
    // where runs begin, and behind the last one; the first class of each; keys in the cells around each
    __shared__ real edges[CREW + 1], around[SEEN];
    __shared__ int firsts[CREW + 1];
    __shared__ Strays strays;
    // a lane has the slope and the value of a cell, and of every eight channels two
    int lane = threadIdx.x % 32, warp = own_warp(), own = lane / 4, part = lane % 4;
    Station &station = stations[warp];
    Spots circle = {spots};
    index_t stop = rounds[round + 1] * dims;
    int keys = int(count), stretches = (keys + KEYS - 1) / KEYS;
    auto begin_of = [&](int run) { return int(index_t(stretches) * run / CREW); };
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
        auto prepare = [&](Columns(&columns)[2], const auto &walk, int stretch) {
            bool there = stretch * KEYS + lane < keys;
            int cell = walk.point.cell - first_cell;
            station.parts[lane] = there ? walk.point.part : real(0);
            station.cells[lane] = there && cell > 0 && cell < SEEN - 1 ? real(cell) : NOWHERE;
            walk.weigh(columns, station.scalars, there, lane);
            __syncwarp();
        };
        // two of the keys that a lane has
        auto keys_of = [&](const real *numbers, int i) { return reinterpret_cast<const Two *>(numbers)[i * 4 + part]; };
        // where the next stretch begins
        auto end_of = [&](const auto &walk, int stretch) {
            real next = __shfl_sync(ALL, walk.next_point.part, 0);
            return stretch + 1 < last ? next : edges[warp + 1];
        };
        // What passing a key does to the slope of a lane's cell.
        auto slopes_of = [&](unsigned (&words)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Two cells = keys_of(station.cells, i);
                words[i] = narrow(change(real(own), cells.at[0]), change(real(own), cells.at[1]));
            }
        };
        // Add what passing all keys of a stretch does to slopes, and to values at `end`.
        auto pass = [&](Sixteen &state, const unsigned (&slopes)[4], const Columns(&columns)[2], const Brought &rows,
                        real end) {
            Weights matrix[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Two parts = keys_of(station.parts, i);
                matrix[i / 2].word[i % 2 * 2] = slopes[i];
                matrix[i / 2].word[i % 2 * 2 + 1] = times(slopes[i], narrow(end - parts.at[0], end - parts.at[1]));
            }
            rows.add_to(state, matrix, columns, lane);
        };
        auto load = [&](Sixteen &state) {
#pragma unroll
            for (int i = 0; i <= EIGHTS; i++) {
                Two slope = station.state.slopes[own][i * 4 + part], value = station.state.values[own][i * 4 + part];
                state.at[i][0] = slope.at[0], state.at[i][1] = slope.at[1];
                state.at[i][2] = value.at[0], state.at[i][3] = value.at[1];
            }
        };
        auto store = [&](const Sixteen &state) {
#pragma unroll
            for (int i = 0; i <= EIGHTS; i++) {
                station.state.slopes[own][i * 4 + part] = {state.at[i][0], state.at[i][1]};
                station.state.values[own][i * 4 + part] = {state.at[i][2], state.at[i][3]};
            }
        };

        // what the run adds
        {
            Sixteen state = {};
            Stretches walk(Int<1>(), along.points, along.given, station.rows, first, lane, circle, [](int, int) {});
            for (int stretch = first; stretch < last; stretch++) {
                const Brought &rows = walk.next(lane);
                Columns columns[2];
                prepare(columns, walk, stretch);
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
                unsigned slopes[4];
                slopes_of(slopes);
                pass(state, slopes, columns, rows, edges[warp + 1]);
                __syncwarp();
            }
            walk.end();
            store(state);
        }
        __syncthreads();
        int lost = min(strays.count, KEYS);
        if (warp == CREW - 1 && lost) {
            strays.rows.bring(along.given.start, strays.indices[min(lane, lost - 1)], lane);
            if (lane >= lost) strays.scalars[lane] = 0;
            wait_for_copies();
        }
        // sums at the begin of every run, a column for each thread
        if (threadIdx.x < 2 * COLUMNS) {
            int column = threadIdx.x;
            auto slope_of = [&](int run, int cell) -> real & {
                return reinterpret_cast<real *>(stations[run].state.slopes[cell])[column];
            };
            auto value_of = [&](int run, int cell) -> real & {
                return reinterpret_cast<real *>(stations[run].state.values[cell])[column];
            };
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
        int at = firsts[warp], stop_at = firsts[warp + 1];
        auto code_of = [&](int i) { return i < stop_at ? along.classes.codes[i] : half_t(0); };
        // of the next thirty-two classes, and the codes of as many behind them
        Spot spot = circle(code_of(at + lane));
        half_t code = code_of(at + 32 + lane);
        Stretches walk(Int<1>(), along.points, along.given, station.rows, first, lane, circle, [](int, int) {});
        real begin = edges[warp];
        for (int stretch = first; stretch < last; stretch++) {
            const Brought &rows = walk.next(lane);
            Columns columns[2];
            prepare(columns, walk, stretch);
            real end = end_of(walk, stretch);
            unsigned slopes[4];
            slopes_of(slopes);
            int taken;
            do {
                bool in = lane < TALL && at + lane < stop_at && spot.part < end;
                taken = __ffs(~__ballot_sync(ALL, in)) - 1;
                // those behind the ones that are taken, on their way
                Spot now = spot, moved = {__shfl_sync(ALL, spot.part, (lane + taken) % 32),
                                          __shfl_sync(ALL, spot.cell, (lane + taken) % 32)};
                half_t behind = half_t(__shfl_sync(ALL, int(code), (lane + taken) % 32));
                spot = lane + taken < 32 ? moved : circle(behind);
                code = code_of(at + taken + 32 + lane);
                int cell = now.cell - first_cell;
                Sixteen sums;
                Weights matrix[2];
                bool sees[2];
                real here[2];
#pragma unroll
                for (int second = 0; second < 2; second++) {
                    int row = own + 8 * second, mine = __shfl_sync(ALL, cell, row);
                    real place = __shfl_sync(ALL, now.part, row), beyond = place - begin;
                    // what is left where no key is near is rounding
                    sees[second] = unsigned(mine) < unsigned(SEEN) && around[mine] > real(0);
                    int seen = sees[second] ? mine : 0;
                    here[second] = sees[second] ? around[seen] : real(0);
#pragma unroll
                    for (int i = 0; i <= EIGHTS; i++) {
                        Two slope = station.state.slopes[seen][i * 4 + part];
                        Two value = station.state.values[seen][i * 4 + part];
#pragma unroll
                        for (int c = 0; c < 2; c++) sums.at[i][2 * second + c] = value.at[c] + beyond * slope.at[c];
                    }
                    if (__any_sync(ALL, !sees[second])) {
#pragma unroll
                        for (int i = 0; i < 2 * (EIGHTS + 1); i++) {
                            real &sum = sums.at[i / 2][2 * second + i % 2];
                            sum = sees[second] ? sum : real(0);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        // as what a key does to the slope of the cell
                        Two parts = keys_of(station.parts, i);
                        unsigned change = __shfl_sync(ALL, slopes[i], seen * 4 + part);
                        unsigned passed = narrow(clamped(place - parts.at[0]), clamped(place - parts.at[1]));
                        matrix[i / 2].word[i % 2 * 2 + second] = sees[second] ? times(change, passed) : 0u;
                    }
                }
                rows.add_to(sums, matrix, columns, lane);
                if (lost && __any_sync(ALL, in && (cell < 2 || cell >= SEEN - 2))) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        int row = own + i % 2 * 8;
                        Spot query = {__shfl_sync(ALL, now.part, row), __shfl_sync(ALL, now.cell, row)};
                        real weight[2];
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            int n = i / 2 * 8 + part * 2 + k;
                            Spot key = strays.spots[min(n, lost - 1)];
                            real away = fabsf(real(query.cell - key.cell) + (query.part - key.part));
                            weight[k] = n < lost ? clamped(1.0f - away) : real(0);
                        }
                        matrix[i / 4].word[i % 4] = narrow(weight[0], weight[1]);
                    }
                    Columns others[2];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        others[i / 2].word[i % 2] = own == 0 ? two_of(strays.scalars, i, lane) : 0u;
                    strays.rows.add_to(sums, matrix, others, lane);
                }
#pragma unroll
                for (int second = 0; second < 2; second++) {
                    int row = own + 8 * second;
                    real extra = __shfl_sync(ALL, sums.at[EIGHTS][2 * second], lane & ~3);
                    // less than that is rounding
                    if (extra < LOST * here[second]) extra = real(0);
                    bool unsure = row < taken && extra < FEW_SEEN * here[second];
                    if (__any_sync(ALL, unsure)) {
                        if (lane == 0) doubtful[line] = 1;
                        // a mean of values is no larger than they are, but for what was lost
                        real bound = extra * LARGEST;
#pragma unroll
                        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
                            for (int c = 0; c < 2; c++) {
                                real &sum = sums.at[i][2 * second + c];
                                sum = fminf(fmaxf(sum, -bound), bound);
                            }
                        }
                    }
                    if (row >= taken) continue;
                    store_means(along.table + index_t(at + row) * STRIDE, sums, second, inverse(extra), lane);
                    if (part == 0 && blockIdx.y == 0) along.extras[at + row] = marked(real(scale) * extra, unsure);
                }
                at += taken;
                arrive(code), arrive(spot);
            } while (taken == TALL);
            Sixteen state;
            load(state);
#pragma unroll
            for (int i = 0; i < 2 * (EIGHTS + 1); i++)
                state.at[i / 2][i % 2 + 2] += (end - begin) * state.at[i / 2][i % 2];
            pass(state, slopes, columns, rows, end);
            begin = end;
            __syncwarp();
            store(state);
            __syncwarp();
        }
        walk.end();
    }
}
