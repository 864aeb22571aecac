// Queries and keys at the same part of a wound line, which reel.cu has in the order of their words.
//
// Parts are rounded, so such points may be at a node of each other or close to it. The slope between them is found from
// their coordinates, and what it is more than reel.cu took it for is given to both.
//
// Macros: those of trade.cu, and CELLS.

#include "wheel.cu"

__device__ inline real finite_or_zero(real x) { return x - x == real(0) ? x : real(0); }

// The slope by the query that reel.cu has for a query and a key, in units of the first step of the slope.
__device__ inline real taken_for(word query, word key) {
    int away = int(key & CELL_MASK) - int(query & CELL_MASK);
    bool passed = key <= query;
    return away == 0 ? (passed ? real(-1) : real(1)) : away < 0 ? (passed ? real(0) : real(-1)) : real(passed);
}

// A warp looks for keys that are `tied` among 32 times 32 of them, and has those that are the first of all equal ones.
// Points are `(heads, count or number, dims)`, other arguments as in reel.cu.
extern "C" __global__ void __launch_bounds__(32, 32)
    untie(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
          const real *key_points, const real *query_points, const real *values, const real *weights, const real *grads,
          const real *grad_extra, const Winding *windings, const double *table, const double *taus, double tau,
          const unsigned *tied, real *by_key, real *by_query, index_t count, index_t number, index_t dims) {
    __shared__ Side nodes;
    int lane = threadIdx.x;
    index_t words = (count + 31) / 32, pieces = (words + 31) / 32;
    index_t place = blockIdx.x % pieces * 32 + lane, line = blockIdx.x / pieces, d = line % dims, p = line / dims;
    if (!windings[line].cells) return;
    unsigned mine = place < words ? tied[line * words + place] : 0u;
    if (!__any_sync(ALL, mine)) return;
    if (lane == 0) nodes.read(table, taus ? taus[p] : tau, false);
    __syncwarp();
    Wheel keys(key_places, key_order, line, count), queries(query_places, query_order, line, number);
    Rows key_rows(values + p * count * STRIDE, lane), query_rows(grads + p * number * STRIDE, lane);
    Scalars key_scalars(weights, p * count), query_scalars(grad_extra, p * number);
    key_points += p * count * dims + d, query_points += p * number * dims + d;
    by_key += ALONG ? line * count : p * count * dims + d, by_query += ALONG ? line * number : p * number * dims + d;
    auto coordinate = [&](int key) { return finite_or_zero(key_points[index_t(keys.index(key)) * dims]); };
    auto gradient = [&](real *start, int spot, int index) { return start + (ALONG ? spot : index_t(index) * dims); };
    auto product = [&](const Row &one, const Row &other) {
        real sum = real(0);
#pragma unroll
        for (int v = 0; v < VEC; v++) sum += one.at[v] * other.at[v];
        return sum_lanes(sum);
    };
    auto add_row = [&](Row &to, const Row &row, real factor) {
#pragma unroll
        for (int v = 0; v < VEC; v++) to.at[v] += factor * row.at[v];
    };

    // The keys from `first` on that are equal to it, with all queries of their part, from `low` on.
    auto settle = [&](int first, int low) {
        word point = keys.at(first);
        real t = coordinate(first);
        auto each_key = [&](auto what) {
            for (int i = first; i < keys.count && keys.at(i) == point; i++) {
                if (coordinate(i) == t) what(i, keys.index(i));
            }
        };
        Row sum = {}, others = {};
        real extra = real(0), other_extra = real(0);
        each_key([&](int, int index) {
            add_row(sum, key_rows.load(index), real(1));
            extra += key_scalars[index];
        });
        for (int i = low; i < queries.count; i++) {
            word other = queries.at(i);
            int away = int(other & CELL_MASK) - int(point & CELL_MASK);
            if ((other ^ point) >> CELL_BITS) break;
            if (away < -1 || away > 1) continue;
            int index = queries.index(i);
            real s = finite_or_zero(query_points[index_t(index) * dims]);
            real more = nodes.slope(s, t) - taken_for(other, point) * nodes.below[0][1];
            if (more == real(0)) continue;
            Row row = query_rows.load(index);
            real own = query_scalars[index], all = product(row, sum) + own * extra;
            if (lane == 0) add_to(gradient(by_query, i, index), more * all);
            add_row(others, row, more);
            other_extra += more * own;
        }
        each_key([&](int i, int index) {
            real all = product(key_rows.load(index), others) + key_scalars[index] * other_extra;
            if (lane == 0) add_to(gradient(by_key, i, index), -all);
        });
    };

    while (__any_sync(ALL, mine)) {
        // one a lane at a time
        int key = mine ? int(place) * 32 + __ffs(mine) - 1 : 0, low = 0, high = queries.count;
        bool there = mine;
        mine &= mine - 1;
        word point = keys.at(key), part = point >> CELL_BITS;
        for (int i = key - 1; there && i >= 0 && keys.at(i) == point; i--) there = coordinate(i) != coordinate(key);
        while (there && low < high) {
            int half = (low + high) / 2;
            if (queries.at(half) >> CELL_BITS < part)
                low = half + 1;
            else
                high = half;
        }
        for (unsigned some = __ballot_sync(ALL, there); some; some &= some - 1) {
            int which = __ffs(some) - 1;
            settle(__shfl_sync(ALL, key, which), __shfl_sync(ALL, low, which));
        }
    }
}
