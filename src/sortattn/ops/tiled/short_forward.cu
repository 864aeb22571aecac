// The forward pass of short sequences, see short.cu.

#include "short.cu"

// A block has `part` queries. `copy`, the same rows in float32, may be null, and so may `total`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    short_forward(const Stored *query, const Stored *key, const Stored *value, Stored *out, float *copy, float *total,
                  long long query_batch, long long query_head, long long query_row, long long key_batch,
                  long long key_head, long long key_row, long long value_batch, long long value_head,
                  long long value_row, long long out_batch, long long out_head, long long out_row, long long heads,
                  long long rows, long long columns, long long dims, long long channels, long long part,
                  long long scores_at, long long vectors_at, long long normalised, double tau) {
    unsigned parts = unsigned(rows + part - 1) / unsigned(part), p = blockIdx.x / parts;
    int first = blockIdx.x % parts * part, own = min(int(rows) - first, int(part));
    float *points_tile = reinterpret_cast<float *>(memory), *scores = points_tile + scores_at;
    float *vectors = points_tile + vectors_at;
    Matrix<Stored> queries(query, place_of(p, heads, query_batch, query_head), query_row, first, own, dims);
    Matrix<Stored> keys(key, place_of(p, heads, key_batch, key_head), key_row, 0, columns, dims);
    Matrix<Stored> values(value, place_of(p, heads, value_batch, value_head), value_row, 0, columns, channels);
    Points points = points_of(keys, dims, tau);
    Place place(own, columns);
    float sums[TM][TN], spoilt = 0;
    bool bad = scores_of(scores, points_tile, points, queries, keys, place, sums);
    __syncthreads();
    keep(scores, place, columns, sums, [&](float sum, int, int) { return score_of(sum, points); });
    auto look = [&](int, const Vector &x) {
        for (int e = 0; e < 4; ++e) spoilt = fmaf(x.x[e], 0.0f, spoilt);
    };
    each(values, columns, [&](int row, const Vector &x) {
        look(row, x);
        *reinterpret_cast<Vector *>(vectors + row * STRIDE + column()) = x;
    });
    // queries of other blocks count as well
    if (parts > 1) {
        Matrix<Stored> all(query, place_of(p, heads, query_batch, query_head), query_row, 0, rows, dims);
        each(all, rows, look);
    }
    bad |= __syncthreads_or(spoilt != 0);

    float made[ROWS][4] = {}, totals[ROWS] = {};
    multiply(scores, vectors, columns, made, totals);
    Matrix<Stored> results(out, place_of(p, heads, out_batch, out_head), out_row, first, own, channels);
    Matrix<float> copies(copy, (long long)p * rows * channels, channels, first, copy ? own : 0, channels);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float whole = totals[i] * unit(points.numbers);
        float scale = normalised ? reciprocal(whole) : 1.0f;
        if (bad) scale = whole = infinity() - infinity();
#pragma unroll
        for (int e = 0; e < 4; ++e) made[i][e] = made[i][e] * scale * unit(points.numbers);
        results.put(own_row(i), column(), made[i]);
        copies.put(own_row(i), column(), made[i]);
        if (total && column() == 0 && own_row(i) < own) total[p * rows + first + own_row(i)] = whole;
    }
}
