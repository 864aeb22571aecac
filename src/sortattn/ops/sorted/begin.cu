// How a walk begins in the middle of a track: with sums of all sources before, made of the moments of their blocks.

#include "track.cu"

// Add to the state, around `origin`, the sources `first ... last - 1`, with weights that `weigh(n, t, weight)` finds;
// `list` has room for thirty-two of them.
template <typename F> __device__ inline void absorb(Numbers<double> &state, const Line &line, const Rows &rows,
                                                    const Scalars &scalars, real origin, int first, int last,
                                                    Source *list, int lane, F weigh) {
    double extra[SUMS];
#pragma unroll
    for (int l = 0; l < SUMS; l++) extra[l] = 0.0;
    for (int n = first; n < last; n += 32) {
        bool there = n + lane < last;
        int index = there ? line.index(n + lane) : 0;
        real scalar = there ? scalars[index] : real(0), weight[SUMS];
        weigh(n + lane, there ? line.place(n + lane) : origin, weight);
        __syncwarp();
        list[lane].index = index;
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            list[lane].weight[l] = there ? weight[l] : real(0);
            extra[l] += double(scalar * weight[l]);
        }
        __syncwarp();
        Numbers<real> some;
        some.clear();
#pragma unroll 1
        for (int i = 0; i < 32 && n + i < last; i += DEEP) {
            Row row[DEEP];
#pragma unroll
            for (int k = 0; k < DEEP; k++) row[k] = rows.load(list[i + k].index);
#pragma unroll
            for (int k = 0; k < DEEP; k++) some.add_row(list[i + k].weight, row[k]);
        }
        state.add_rows(some);
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < SUMS; l++) state.extra[l] += sum_lanes(extra[l]);
}

// Add to the state, from FIRST on, moments of sources at least `distance` below the origin, or above it, with the
// coefficients there.
template <int FIRST> __device__ inline void add_moments(Numbers<double> &state, const real *place, double distance,
                                                        real rate, const real *coefficients, int lane) {
    Numbers<double, POWERS> moments;
    moments.load(place, lane);
    move_side<true, 0>(moments, distance, rate);
#pragma unroll
    for (int l = 0; l < POWERS; l++) {
        if (RATE) {
            state.mix(FIRST + l, moments.at[l], moments.extra[l], 1.0);
            continue;
        }
#pragma unroll
        for (int i = l; i < POWERS; i++) {
            state.mix(FIRST + l, moments.at[i - l], moments.extra[i - l], double(coefficients[i]) * binomial(i, l));
        }
    }
}

// Those of all sources of a folded line, as if they were at zero, but negative.
__device__ inline void take_away_all(Numbers<double> &state, const real *place, const Side &side, real origin,
                                     int lane) {
    Numbers<double> all;
    real weight[SUMS];
    all.load(place, lane);
    side.weights(0, origin - side.node[0], weight, real(1), real(0));
#pragma unroll
    for (int l = 0; l < POWERS; l++) state.mix(l, all.at[0], all.extra[0], -double(weight[l]));
}

// Sources on both sides of the origin, of which `passed` are below it and those up to `tied` count half; `before` are
// the moments of the track.
__device__ inline void begin_between(Numbers<double> &state, const real *before, const Line &line, const Rows &rows,
                                     const Scalars &scalars, const Side &side, real origin, int passed, int tied,
                                     Source *list, int lane) {
    // the block that the origin is in, or more where ties reach further, is absorbed
    int low = min(passed, line.count - 1) / BLOCK, high = (tied + BLOCK - 1) / BLOCK;
    auto distance = [&](int block) { return double(origin) - double(line.place(block * BLOCK)); };
    if (low > 0) add_moments<0>(state, before + low * SIZE, distance(low), side.rate, side.below[0], lane);
    if (high * BLOCK < line.count) {
        add_moments<SUMS - POWERS>(state, before + high * SIZE + HALF, -distance(high), side.rate, side.above, lane);
    }
    absorb(state, line, rows, scalars, origin, low * BLOCK, min(high * BLOCK, line.count), list, lane,
           [&](int n, real t, real(&weight)[SUMS]) {
               real share = n < passed ? real(1) : n < tied ? real(0.5) : real(0);
               side.weights(0, origin - t, weight, share, real(1) - share);
           });
}

// Sources `first ... last - 1` of a compact kernel, below the origin at node j and in its window: all but what is left
// at the ends by the moments of blocks, and of groups of them, if `before`, those of the track, are there.
__device__ inline void begin_window(Numbers<double> &state, const real *before, const Line &line, const Rows &rows,
                                    const Scalars &scalars, const Side &side, int j, real origin, index_t blocks,
                                    int first, int last, Source *list, int lane) {
    auto absorb_some = [&](int first, int last) {
        absorb(state, line, rows, scalars, origin, first, last, list, lane, [&](int, real t, real(&weight)[SUMS]) {
            side.weights(j, origin - t - side.node[j], weight, real(1), real(0));
        });
    };
    int low = (first + BLOCK - 1) / BLOCK, high = last / BLOCK;
    if (before && low < high) {
        absorb_some(first, low * BLOCK);
        for (int i = low; i < high;) {
            // of a whole group together
            bool many = i % GROUP == 0 && i + GROUP <= high;
            const real *here = before + (many ? blocks + 1 + i / GROUP : i) * SIZE;
            i += many ? GROUP : 1;
            real place = line.place(min(i * BLOCK, line.count - 1));
            add_moments<0>(state, here, double(origin) - double(place) - double(side.node[j]), side.rate, side.below[j],
                           lane);
        }
        first = high * BLOCK;
    }
    absorb_some(first, last);
}
