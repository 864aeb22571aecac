// The gradients of queries, keys and values, tile by tile, see tiled_block.cu: in float64, of wide heads, of kernels
// that slopes.cu does not serve, and where it has no room.

#include "tiled_block.cu"

#include "tiled_pairs.cu"

#include "tiled_sums.cu"

#include "backward_block.cu"

// KEYS: the gradients of keys and values; otherwise of queries. `moment` becomes the sum of (point - origin) gradient.
template <bool KEYS> inline void backward(const Inputs &in, T *grad_points, T *grad_values, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    long long own_rows = KEYS ? in.columns : in.rows, other_rows = KEYS ? in.rows : in.columns;
    Spot spot(blockIdx.x, own_rows, !KEYS);
    long long p = spot.problem;
    Numbers numbers = in.numbers(p);
    Rows queries(in.query + p * in.rows * in.dims, in.rows, in.dims);
    Rows keys(in.key + p * in.columns * in.dims, in.columns, in.dims);
    Rows values(in.value + p * in.columns * in.channels, in.columns, in.channels);
    Rows grads(in.grad + p * in.rows * in.channels, in.rows, in.channels);
    const Rows &own = KEYS ? keys : queries, &other = KEYS ? queries : keys;
    const Rows &own_vectors = KEYS ? values : grads, &other_vectors = KEYS ? grads : values;
    Place place;
    if (threadIdx.x < OWN) {
        shared.own_mark[threadIdx.x] = mark<KEYS>(in, p, spot.first + threadIdx.x);
        shared.own_norm[threadIdx.x] = 0;
        if (!KEYS) load_query(shared, in, p, spot.first, threadIdx.x);
    }
    __syncthreads();
    int reach = widest<KEYS>(shared);

    T running[CHUNKS][TM][4] = {}, running_values[KEYS ? CHUNKS : 1][TM][4] = {};
    RowSum totals;
#pragma unroll 1
    for (int first = 0; first < other_rows; first += OTHER) {
        bool any = false;
        if (threadIdx.x < OTHER) {
            int yours = mark<!KEYS>(in, p, first + threadIdx.x);
            shared.other_mark[threadIdx.x] = yours;
            any = seen<KEYS>(reach, yours);
            if (KEYS) load_query(shared, in, p, first, threadIdx.x);
        }
        if (!__syncthreads_or(any)) continue;

        // what a gradient by a score is multiplied by, where a kernel is not a sum over dimensions
        T factors[TM][TN];
        if constexpr (KEYS || !ADDITIVE) {
            T scores[TM][TN];
            distances<KEYS>(shared, own, other, spot.first, first, numbers, scores);
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    int m = place.row(i), n = place.column(j);
                    T sum = scores[i][j];
                    T score = whole(sum, shared.own_norm[m], shared.other_norm[n], numbers, in.dims);
                    if constexpr (KIND == LAPLACE) score = exp(score - shared.query_shift[KEYS ? n : m]);
                    if constexpr (KIND == LAPLACE) factors[i][j] = score;
                    if constexpr (KIND == RIESZ) factors[i][j] = sum > 0 ? 1 / sqrt(sum) : T(0);
                    scores[i][j] = seen<KEYS>(shared.own_mark[m], shared.other_mark[n]) ? score : T(0);
                }
            __syncthreads();
            if constexpr (KEYS) {
                keep<false>(shared, scores);
#pragma unroll 1
                for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < in.channels; ++chunk) {
                    if (chunk) __syncthreads();
                    bool ordinary = __syncthreads_or(load<OTHER>(shared.second, grads, first, chunk * WIDTH));
                    add_rows(shared, running_values[chunk], ordinary);
                }
                __syncthreads();
            }
        }

        // the factors lie in a grid
        constexpr bool TENSOR = SINGLE && ADDITIVE;
        T scores[TM][TN];
        score_gradients<KEYS, TENSOR>(shared, own_vectors, other_vectors, spot.first, first, scores);
        __syncthreads();
        if constexpr (KIND == RIESZ) {
            // the derivative of the norms is without the factor
            keep<false>(shared, scores);
            __syncthreads();
            totals.add(shared);
            __syncthreads();
        }
        if constexpr (!ADDITIVE)
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                // a pair that is not seen has no gradient, whatever its factor
                for (int j = 0; j < TN; ++j) scores[i][j] = scores[i][j] == 0 ? T(0) : scores[i][j] * factors[i][j];
        keep<TENSOR>(shared, scores);
        if constexpr (SIGNS) {
            __syncthreads();
            totals.add(shared);
        }
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < in.dims; ++chunk) {
            if (chunk) __syncthreads();
            load<OTHER>(shared.second, other, first, chunk * WIDTH, numbers.scale);
            T mine[TM][4], fresh[TM][4];
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                auto point = own.get<4>(spot.first + place.down * TM + i, chunk * WIDTH + place.across * 4, 0);
                for (int c = 0; c < 4; ++c) mine[i][c] = point.x[c] * numbers.scale;
            }
            __syncthreads();
            spread(shared, fresh, [&](T &sum, T score, T yours, int i, int c) {
                sum += score * slope(difference<KEYS>(mine[i][c], yours), numbers);
            });
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) running[chunk][i][c] += fresh[i][c];
        }
    }

    totals.leave(shared);
    __syncthreads();
    double moments = 0;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            int row = place.down * TM + i, column = chunk * WIDTH + place.across * 4;
            auto point = own.get<4>(spot.first + row, column, 0);
            T total = RowSum::whole(shared, row);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                T gradient = SIGNS ? total - 2 * running[chunk][i][c] : running[chunk][i][c];
                if (KEYS) gradient = -gradient;
                gradient = (gradient + norm_slope(point.x[c], shared.own_norm[row]) * total) / numbers.tau;
                running[chunk][i][c] = gradient;
                bool inside = spot.first + row < own.count && column + c < own.width;
                // an offset of all points changes nothing but the rounding
                T origin = STATIONARY && inside && in.columns ? keys.start[column + c] : T(0);
                if (inside) moments += double(point.x[c] - origin) * double(gradient);
            }
        }
    put<false>(grad_points + p * own_rows * in.dims, spot.first, own_rows, in.dims, running);
    if constexpr (KEYS)
        put<SINGLE>(grad_values + p * own_rows * in.channels, spot.first, own_rows, in.channels, running_values);
    __syncthreads();
    moments = block_sum(moments);
    if (threadIdx.x == 0) moment[blockIdx.x] = moments;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward_query(INPUTS, T *grad_query, double *moment) {
    backward<false>(AS_STRUCT, grad_query, nullptr, moment);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    backward_key(INPUTS, T *grad_key, T *grad_value, double *moment) {
    backward<true>(AS_STRUCT, grad_key, grad_value, moment);
}
