// The forward pass in float64: sums over all pairs of a query and a key, tile by tile, see tiled_block.cu; nothing of
// size M x N leaves the chip.

#include "tiled_block.cu"

#include "tiled_pairs.cu"

#include "tiled_sums.cu"

// reduce over the threads that share rows, then over the two halves of the tile; read `halves` after a barrier
template <class Op> inline void meet(Shared &shared, T (&part)[TM], Op op) {
    Place place;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        for (int lane = 4; lane; lane /= 2) part[i] = op(part[i], __shfl_xor_sync(~0u, part[i], lane));
        if (place.across % 8 == 0) shared.halves[place.across / 8][place.row(i)] = part[i];
    }
}

// the same arguments as that of forward.cu; there are no chunks for this one
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(const T *query, const T *key, const T *value, const T *weight, const T *bandwidth, const T *table,
            const Found *found, const void *chunks, T *sums, T *copy, T *total, T *shift, long long rows,
            long long columns, long long dims, long long channels, long long each, long long causal, long long count,
            long long normalised, long long slices, double tau) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Spot spot(blockIdx.x, rows, true);
    long long p = spot.problem;
    Numbers numbers(bandwidth ? bandwidth[p] : T(tau), table, count);
    Rows queries(query + p * rows * dims, rows, dims), keys(key + p * columns * dims, columns, dims);
    Rows values(value + p * columns * channels, columns, channels);
    const T *weights = weight ? weight + p * columns : nullptr;
    Place place;
    if (threadIdx.x < OWN)
        shared.own_mark[threadIdx.x] = query_mark(spot.first + threadIdx.x, rows, columns, each, causal);
    __syncthreads();
    int reach = widest<false>(shared);

    T running[CHUNKS][TM][4] = {}, shifts[TM];
    RowSum totals;
    for (int i = 0; i < TM; ++i) shifts[i] = -infinity();
#pragma unroll 1
    for (int first = 0; first < columns; first += OTHER) {
        int mark = NOWHERE;
        if (threadIdx.x < OTHER)
            shared.other_mark[threadIdx.x] = mark = key_mark(first + threadIdx.x, columns, weights);
        if (!__syncthreads_or(mark < reach)) continue;
        T scores[TM][TN];
        distances<false>(shared, queries, keys, spot.first, first, numbers, scores);
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            int mine = shared.own_mark[place.row(i)];
            T norm = shared.own_norm[place.row(i)];
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                T score = whole(scores[i][j], norm, shared.other_norm[place.column(j)], numbers, dims);
                scores[i][j] = shared.other_mark[place.column(j)] < mine ? score : KIND == LAPLACE ? -infinity() : T(0);
            }
        }
        if constexpr (KIND == LAPLACE) {
            T largest[TM];
            for (int i = 0; i < TM; ++i) {
                largest[i] = scores[i][0];
                for (int j = 1; j < TN; ++j) largest[i] = fmax(largest[i], scores[i][j]);
            }
            meet(shared, largest, [](T a, T b) { return fmax(a, b); });
            __syncthreads();
            for (int i = 0; i < TM; ++i) {
                int row = place.row(i);
                T after = fmax(shifts[i], fmax(shared.halves[0][row], shared.halves[1][row]));
                if (!normalised) after = 0;
                // a row that has seen nothing yet has no scale to change
                T change = shifts[i] == -infinity() ? T(0) : exp(shifts[i] - after);
                if (place.across == 0) shared.change[row] = change;
                shifts[i] = after;
                for (int j = 0; j < TN; ++j) scores[i][j] = exp(scores[i][j] - (after == -infinity() ? T(0) : after));
            }
        }
        __syncthreads();
        keep<false>(shared, scores);
        __syncthreads();
        if constexpr (KIND == LAPLACE) totals.running *= shared.change[totals.row];
        totals.add(shared);
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < channels; ++chunk) {
            if (chunk) __syncthreads();
            bool ordinary = __syncthreads_or(load<OTHER>(shared.second, values, first, chunk * WIDTH));
            if constexpr (KIND == LAPLACE)
                for (int i = 0; i < TM; ++i)
                    for (int c = 0; c < 4; ++c) running[chunk][i][c] *= shared.change[Held<SINGLE>::row(i, c)];
            add_rows(shared, running[chunk], ordinary);
        }
    }

    totals.leave(shared);
    // the last tile may not be done with `change`
    __syncthreads();
    if (KIND == LAPLACE && place.across == 0)
        for (int i = 0; i < TM; ++i) shared.change[place.row(i)] = shifts[i] == -infinity() ? T(0) : shifts[i];
    __syncthreads();
    int row = threadIdx.x, group = rows / each;
    if (row < OWN && spot.first + row < rows) {
        T whole = RowSum::whole(shared, row);
        const Found *parts = found + p * (group + 2) * slices;
        float most = largest(parts + (spot.first + row) / each * slices, slices);
        T poisoned = poison(fmaxf(most, largest(parts + group * slices, 2 * slices)));
        if (total) total[p * rows + spot.first + row] = whole * poisoned;
        if (KIND == LAPLACE && shift) shift[p * rows + spot.first + row] = shared.change[row];
        // as in normalise.py
        T inverse = fabs(whole) < T(0x1p-1022) ? T(0) : 1 / whole;
        shared.own_norm[row] = (normalised ? inverse : T(1)) * poisoned;
    }
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) running[chunk][i][c] *= shared.own_norm[Held<SINGLE>::row(i, c)];
    put<SINGLE>(sums + p * rows * channels, spot.first, rows, channels, running);
    if (copy) put<SINGLE>(copy + p * rows * channels, spot.first, rows, channels, running);
}
