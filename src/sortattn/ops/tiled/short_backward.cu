// The backward pass of short sequences, see short.cu.

#include "short.cu"

#include "short_slopes.cu"

// of queries: what divides their sums, and the inner product of a row of the output and its gradient
__shared__ float inverse[MOST], inner[MOST];

// `inverse` and `inner` of some queries from the rows of the output and their gradients
template <bool WHOLE>
inline void quotients(const Matrix<Stored> &grads, const Matrix<float> &results, const float *total, bool normalised) {
    constexpr int N = WHOLE ? BATCH : 1;
#pragma unroll 1
    for (int start = 0; start < grads.count; start += N * GROUPS) {
        int row = start + threadIdx.x / COLUMNS;
        float sums[N] = {};
#pragma unroll
        for (int b = 0; b < N; ++b) {
            Vector grad = grads.get<WHOLE>(row + b * GROUPS, column());
            Vector result = results.get<WHOLE>(row + b * GROUPS, column());
            for (int e = 0; e < 4; ++e) sums[b] = fmaf(grad.x[e], result.x[e], sums[b]);
        }
#pragma unroll
        for (int b = 0; b < N; ++b) {
            for (int lane = COLUMNS / 2; lane; lane /= 2) sums[b] += __shfl_xor_sync(~0u, sums[b], lane);
            int place = row + b * GROUPS;
            if (column() || place >= grads.count) continue;
            inverse[place] = normalised ? reciprocal(total[place]) : 1.0f;
            inner[place] = sums[b];
        }
    }
}

// The first blocks have keys, `key_part` of them, and make their gradients and those of their values; the others have
// queries. `result` are the rows of the output in float32, not needed if they are not normalised.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    short_backward(const Stored *query, const Stored *key, const Stored *value, const Stored *grad, const float *result,
                   const float *total, Stored *grad_query, Stored *grad_key, Stored *grad_value, long long query_batch,
                   long long query_head, long long query_row, long long key_batch, long long key_head,
                   long long key_row, long long value_batch, long long value_head, long long value_row,
                   long long grad_batch, long long grad_head, long long grad_row, long long grad_query_batch,
                   long long grad_query_head, long long grad_query_row, long long grad_key_batch,
                   long long grad_key_head, long long grad_key_row, long long grad_value_batch,
                   long long grad_value_head, long long grad_value_row, long long heads, long long problems,
                   long long rows, long long columns, long long dims, long long channels, long long query_part,
                   long long key_part, long long scores_at, long long vectors_at, long long normalised, double tau) {
    unsigned key_parts = unsigned(columns + key_part - 1) / unsigned(key_part), key_blocks = problems * key_parts;
    bool reversed = blockIdx.x < key_blocks;
    unsigned block = reversed ? blockIdx.x : blockIdx.x - key_blocks;
    unsigned parts = reversed ? key_parts : unsigned(rows + query_part - 1) / unsigned(query_part), p = block / parts;
    int part = reversed ? key_part : query_part, first = block % parts * part;
    int own = min(int(reversed ? columns : rows) - first, part), others = reversed ? rows : columns;
    float *points_tile = reinterpret_cast<float *>(memory), *scores = points_tile + scores_at;
    float *vectors = points_tile + vectors_at;
    long long query_place = place_of(p, heads, query_batch, query_head);
    long long key_place = place_of(p, heads, key_batch, key_head);
    long long value_place = place_of(p, heads, value_batch, value_head);
    long long grad_place = place_of(p, heads, grad_batch, grad_head);
    Points points = points_of(Matrix<Stored>(key, key_place, key_row, 0, columns, dims), dims, tau);
    // points, and what the gradients by the scores are products of
    Matrix<Stored> own_points(reversed ? key : query, reversed ? key_place : query_place,
                              reversed ? key_row : query_row, first, own, dims);
    Matrix<Stored> other_points(reversed ? query : key, reversed ? query_place : key_place,
                                reversed ? query_row : key_row, 0, others, dims);
    Matrix<Stored> own_vectors(reversed ? value : grad, reversed ? value_place : grad_place,
                               reversed ? value_row : grad_row, first, own, channels);
    Matrix<Stored> other_vectors(reversed ? grad : value, reversed ? grad_place : value_place,
                                 reversed ? grad_row : value_row, 0, others, channels);
    Place place(own, others);

    int first_query = reversed ? 0 : first, queries = reversed ? others : own;
    Matrix<Stored> grads(grad, grad_place, grad_row, first_query, queries, channels);
    Matrix<float> results(result, (long long)p * rows * channels, channels, first_query, normalised ? queries : 0,
                          channels);
    const float *totals = total + (long long)p * rows + first_query;
    if (grads.whole && results.whole)
        quotients<true>(grads, results, totals, normalised);
    else
        quotients<false>(grads, results, totals, normalised);
    float sums[TM][TN];
    if (reversed) {
        scores_of(scores, points_tile, points, own_points, other_points, place, sums);
        __syncthreads();
        // the gradients of values are sums of scores and gradients
        float size = unit(points.numbers);
        keep(scores, place, others, sums,
             [&](float sum, int, int n) { return score_of(sum, points) * inverse[n] * size; });
        load(vectors, other_vectors, place.others());
        __syncthreads();
        float made[ROWS][4] = {}, unused[ROWS] = {};
        multiply(scores, vectors, others, made, unused);
        Matrix<Stored> to(grad_value, place_of(p, heads, grad_value_batch, grad_value_head), grad_value_row, first, own,
                          channels);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) to.put(own_row(i), column(), made[i]);
        __syncthreads();
    } else {
        float spoilt = 0;
        points.load<true>(points_tile, other_points, place.others(), spoilt);
        if constexpr (FACTORS) {
            each(own_points, own, [&](int, const Vector &x) {
                Vector exponent = points.exponents(x);
                for (int e = 0; e < 4; ++e) points.largest = fmaxf(points.largest, fabsf(exponent.x[e]));
            });
            points.far = __syncthreads_or(points.largest > REACH);
        }
        load(vectors, other_vectors, place.others());
    }
    load(scores, own_vectors, place.rows());
    __syncthreads();
    products(scores, vectors, channels, place, sums);
    __syncthreads();
    keep(scores, place, others, sums, [&](float sum, int m, int n) {
        int row = reversed ? n : m;
        return (sum - inner[row]) * inverse[row];
    });
    // points that are not factors serve as they are
    if constexpr (FACTORS) load(vectors, other_points, place.others());
    __syncthreads();
    Matrix<Stored> to(reversed ? grad_key : grad_query,
                      reversed ? place_of(p, heads, grad_key_batch, grad_key_head)
                               : place_of(p, heads, grad_query_batch, grad_query_head),
                      reversed ? grad_key_row : grad_query_row, first, own, dims);
    slopes(scores, FACTORS ? vectors : points_tile, FACTORS ? STRIDE : POINTS, points_tile, others, points, own_points,
           to);
}
