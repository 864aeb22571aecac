// The gradients of the numbers of a kernel made by the user, tile by tile, see tiled_block.cu.

#include "tiled_block.cu"

#include "tiled_pairs.cu"

#include "backward_block.cu"

// what a pair with this gradient adds to `sums`, see below
inline void add_to_table(T gradient, T difference, int piece, const Numbers &numbers, T (&sums)[2]) {
    if constexpr (KIND == POLYNOMIAL_EXPONENTIAL) {
        T x = distance(difference, numbers), power = decay(x, difference, numbers);
#pragma unroll 1
        for (int i = 0; i < piece; ++i) power *= x;
        sums[0] += gradient * power;
    } else {
        T u = in_bandwidths(difference, numbers);
        Pieces pieces(u, numbers);
        T share = gradient * (T(pieces.at == piece) + T(pieces.past == piece)) / 2;
        sums[0] += share;
        // a distance may be infinite where the share is zero
        sums[1] += share == 0 ? T(0) : share * (u - line(numbers, 2 * piece).anchor);
    }
}

// Of the table of a kernel. Coefficients: the sum of gradient x^i e^-x for coefficient i = blockIdx.y. Splines: the
// sums of gradient and of gradient (u - anchor) over piece blockIdx.y; a node counts half for the pieces on both sides.
extern "C" __global__ void __launch_bounds__(THREADS) backward_table(INPUTS, double *moments) {
    if constexpr (TABLE) {
        Inputs in = AS_STRUCT;
        Shared &shared = *reinterpret_cast<Shared *>(memory);
        Spot spot(blockIdx.x, rows, true);
        long long p = spot.problem;
        int piece = blockIdx.y;
        Numbers numbers = in.numbers(p);
        Rows queries(query + p * rows * dims, rows, dims), keys(key + p * columns * dims, columns, dims);
        Rows values(value + p * columns * channels, columns, channels);
        Rows grads(grad + p * rows * channels, rows, channels);
        if (threadIdx.x < OWN) {
            shared.own_mark[threadIdx.x] = mark<false>(in, p, spot.first + threadIdx.x);
            load_query(shared, in, p, spot.first, threadIdx.x);
        }
        __syncthreads();
        int reach = widest<false>(shared);
        double constant = 0, linear = 0;
#pragma unroll 1
        for (int first = 0; first < columns; first += OTHER) {
            int yours = NOWHERE;
            if (threadIdx.x < OTHER) shared.other_mark[threadIdx.x] = yours = mark<true>(in, p, first + threadIdx.x);
            if (!__syncthreads_or(yours < reach)) continue;
            T scores[TM][TN];
            score_gradients<false, false>(shared, grads, values, spot.first, first, scores);
#pragma unroll 1
            for (int d = 0; d < dims; d += WIDTH) {
                __syncthreads();
                load<OWN>(shared.scores, queries, spot.first, d);
                load<OTHER>(shared.second, keys, first, d);
                __syncthreads();
                int count = dims - d < WIDTH ? dims - d : WIDTH;
                // few at a time, as these sums cancel
                for (int e = 0; e < count; e += 4) {
                    T fresh[2] = {};
                    combine<1>(shared.scores + e, shared.second + e, count - e < 4 ? count - e : 4, scores,
                               [&](T &score, const Vector<1> &own, const Vector<1> &other) {
                                   add_to_table(score, own.x[0] - other.x[0], piece, numbers, fresh);
                               });
                    constant += fresh[0];
                    linear += fresh[1];
                }
            }
        }
        __syncthreads();
        constant = block_sum(constant);
        __syncthreads();
        linear = block_sum(linear);
        if (threadIdx.x == 0) {
            long long place = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * 2;
            moments[place] = constant;
            moments[place + 1] = linear;
        }
    }
}
