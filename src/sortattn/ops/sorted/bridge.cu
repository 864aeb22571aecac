// What the walk of trade.cu leaves to be done for the gradients of queries and keys.
//
// A query has been multiplied, at each of its nodes, with the rows of keys from the beginning of the leg that the node
// is in. `bridge` multiplies it with those of the legs between its nodes. Where its window has few keys even what a leg
// sums would cost digits: these are then multiplied one by one, and take the place of what has been added before.
// `settle` is for ties, and comes first.
//
// Macros: those of trade.cu.

#include "begin.cu"
#include "equal.cu"

// A warp has `length` sorted queries; other arguments are as in trade.cu.
extern "C" __global__ void __launch_bounds__(32, 16)
    bridge(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
           const real *values, const real *weights, const real *grads, const real *grad_extra, const double *table,
           const double *taus, double tau, const real *totals, real *by_query, index_t heads, index_t count,
           index_t number, index_t dims, index_t leg, index_t length, const Winding *windings) {
    __shared__ Side nodes;
    int lane = threadIdx.x;
    index_t channels = blockIdx.y, legs = (count + leg - 1) / leg, pieces = (number + length - 1) / length;
    index_t piece = blockIdx.x % pieces, d = blockIdx.x / pieces % dims, p = blockIdx.x / pieces / dims;
    if (is_wound(windings, p * dims + d)) return;
    Side side;
    side.read(table, taus ? taus[p] : tau, false);
    if (lane == 0) nodes = side;
    __syncwarp();
    Line keys(key_places, key_order, p * dims + d, count, true);
    Line queries(query_places, query_order, p * dims + d, number, true);
    Rows rows(grads + p * number * STRIDE + channels * WIDTH, lane);
    Scalars scalars(grad_extra, p * number), key_scalars(weights, p * count);
    Column column(by_query, query_places, p, number, d, dims);
    totals += ((channels * heads + p) * dims + d) * legs * (WIDTH + 1);
    int at = int(piece * length), end = min(at + int(length), queries.count);

    // the legs that the nodes of the next query are in, the last keys of these, and what the legs before give
    int where[NODES];
    real border[NODES];
    Numbers<double, 1> sum;
    sum.clear();
    // whether a query at s is beyond that key at node j
    auto beyond = [&](int j, real s, real key) { return !side.passed(j, false, key, s); };
    auto find_border = [&](int j) {
        int behind = (where[j] + 1) * int(leg);
        border[j] = behind < keys.count ? keys.place(behind - 1) : infinity();
    };
    auto add_leg = [&](int which, double factor) {
        const real *from = totals + which * (WIDTH + 1);
#pragma unroll
        for (int c = 0; c < VEC; c++) sum.at[0][c] += factor * double(from[c * 32 + lane]);
        sum.extra[0] += factor * double(from[WIDTH]);
    };
    real start = queries.place(at);
#pragma unroll
    for (int j = 0; j < NODES; j++) {
        where[j] = first_without(0, int(legs) - 1,
                                 [&](int i) { return beyond(j, start, keys.place((i + 1) * int(leg) - 1)); });
        find_border(j);
        // only what is not common to all nodes
        for (int i = where[0]; i < where[j]; i++) add_leg(i, double(side.below[j][1]));
    }

    // The gradient of a query with `some` keys in its window, from `first` on.
    auto multiply = [&](int index, real spot, int first, int some) {
        real sum_slopes = real(0), result = real(0);
        for (int part = 0; part < PARTS; part++) {
            Rows query_rows(grads + p * number * STRIDE + part * WIDTH, lane);
            Rows key_rows(values + p * count * STRIDE + part * WIDTH, lane);
            Row other = query_rows.load(index);
#pragma unroll 4
            for (int n = first; n < first + some; n++) {
                int key = keys.index(n);
                real slope = nodes.slope(keys.place(n), spot);
                Row row = key_rows.load(key);
#pragma unroll
                for (int c = 0; c < VEC; c++) result += slope * row.at[c] * other.at[c];
                if (part == 0) sum_slopes += slope * key_scalars[key];
            }
        }
        return sum_lanes(result) + sum_slopes * scalars[index];
    };
    while (at < end) {
        real s = at + lane < end ? queries.place(at + lane) : infinity();
        bool in = at + lane < end;
#pragma unroll
        for (int j = 0; j < NODES; j++) in = in && !beyond(j, s, border[j]);
        unsigned waiting = ~__ballot_sync(ALL, in);
        int taken = waiting ? __ffs(waiting) - 1 : 32, apart = where[NODES - 1] - where[0];
        in = lane < taken;
        int index = in ? queries.index(at + lane) : 0, low = 0, window = FEW + 1;
        // a whole leg in between is more than a few
        if (taken && (apart == 0 || (apart == 1 && leg <= 32 * FEW))) {
            auto first_with = [&](auto holds) {
                int low = where[0] * int(leg), high = min((where[NODES - 1] + 1) * int(leg), keys.count);
                // equal keys may lie before
                if (in && low && holds(keys.place(low - 1))) low = 0;
                if (in && high < keys.count && !holds(keys.place(high - 1))) high = keys.count;
                while (in && low < high) {
                    int half = (low + high) / 2;
                    if (holds(keys.place(half)))
                        high = half;
                    else
                        low = half + 1;
                }
                return low;
            };
            low = first_with([&](real t) { return nodes.beyond(0, t, s) >= real(0); });
            window = first_with([&](real t) { return nodes.beyond(NODES - 1, t, s) > real(0); }) - low;
        }
        unsigned few = __ballot_sync(ALL, in && window <= FEW);
        // where all nodes are in the same leg there is nothing in between
        if (taken && apart) {
            real product = real(0), scalar = in ? scalars[index] : real(0);
            real factor[VEC];
#pragma unroll
            for (int c = 0; c < VEC; c++) factor[c] = __shfl_sync(ALL, real(sum.at[0][c]), lane);
#pragma unroll 1
            for (int i = 0; i < taken; i += DEEP) {
                Row row[DEEP];
#pragma unroll
                for (int k = 0; k < DEEP; k++) row[k] = rows.load(__shfl_sync(ALL, index, i + k));
#pragma unroll
                for (int first = 0; first < DEEP; first += SOME) {
                    real part[SOME];
#pragma unroll
                    for (int k = 0; k < SOME; k++) {
                        part[k] = real(0);
#pragma unroll
                        for (int c = 0; c < VEC; c++) part[k] += factor[c] * row[first + k].at[c];
                    }
                    real mine = __shfl_sync(ALL, sum_parts(part, lane), lane % SOME * (32 / SOME));
                    if (lane / SOME == (i + first) / SOME) product = mine;
                }
            }
            if (channels == 0) product += real(sum.extra[0]) * scalar;
            if (in && !(few >> lane & 1)) add_to(column.of(queries, at + lane, index), -product);
        }
        for (; few && channels == 0; few &= few - 1) {
            int which = __ffs(few) - 1;
            real result = multiply(__shfl_sync(ALL, index, which), __shfl_sync(ALL, s, which),
                                   __shfl_sync(ALL, low, which), __shfl_sync(ALL, window, which));
            if (lane == which) *column.of(queries, at + lane, index) = result;
        }
        at += taken;
        if (taken == 32) continue;
        real next = at < end ? queries.place(at) : real(0);
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            while (at < end && beyond(j, next, border[j])) {
                add_leg(where[j], double(side.below[j][1]));
                where[j]++;
                find_border(j);
            }
        }
    }
}

// Give to the keys and take from the queries that are at a node of each other half of the step there; a warp looks for
// keys that are `tied` among 32 times 32 of them, and has the groups of equal ones whose first is there.
extern "C" __global__ void __launch_bounds__(32, 32)
    settle(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
           const real *values, const real *weights, const real *grads, const real *grad_extra, const double *table,
           const double *taus, double tau, const unsigned *tied, real *by_key, real *by_query, index_t heads,
           index_t count, index_t number, index_t dims) {
    __shared__ Side nodes;
    int lane = threadIdx.x;
    index_t channels = blockIdx.y, words = (count + 31) / 32, pieces = (words + 31) / 32;
    index_t word = blockIdx.x % pieces * 32 + lane, d = blockIdx.x / pieces % dims, p = blockIdx.x / pieces / dims;
    unsigned mine = word < words ? tied[((channels * heads + p) * dims + d) * words + word] : 0u;
    if (!__any_sync(ALL, mine)) return;
    Side side;
    side.read(table, taus ? taus[p] : tau, false);
    if (lane == 0) nodes = side;
    __syncwarp();
    Line keys(key_places, key_order, p * dims + d, count, true);
    Line queries(query_places, query_order, p * dims + d, number, true);
    Rows key_rows(values + p * count * STRIDE + channels * WIDTH, lane);
    Rows query_rows(grads + p * number * STRIDE + channels * WIDTH, lane);
    Scalars key_scalars(weights, p * count), query_scalars(grad_extra, p * number);
    Column key_column(by_key, key_places, p, count, d, dims), query_column(by_query, query_places, p, number, d, dims);
    auto go = [&](const Line &line, const Rows &rows, const Scalars &scalars, int first, real place,
                  Numbers<real, 1> *sum, const Numbers<real, 1> *others, real share, const Column &products) {
        go_through(line, rows, scalars, first, place, sum, others, share, products, channels == 0, lane);
    };

    while (__any_sync(ALL, mine)) {
        // one a lane at a time
        int key = mine ? int(word) * 32 + __ffs(mine) - 1 : 0;
        real place = keys.place(key);
        bool there = mine && (!key || keys.place(key - 1) != place);
        mine &= mine - 1;
#pragma unroll 1
        for (int j = 0; j < NODES; j++) {
            int low = 0, high = queries.count;
            while (there && low < high) {
                int half = (low + high) / 2;
                if (nodes.passed(j, false, place, queries.place(half)))
                    low = half + 1;
                else
                    high = half;
            }
            bool tie = there && low < queries.count && nodes.beyond(j, place, queries.place(low)) == real(0);
            for (unsigned ties = __ballot_sync(ALL, tie); ties; ties &= ties - 1) {
                int which = __ffs(ties) - 1, query = __shfl_sync(ALL, low, which), first = __shfl_sync(ALL, key, which);
                real spot = __shfl_sync(ALL, place, which), other = queries.place(query);
                real half = real(0.5) * nodes.below[j][1];
                Numbers<real, 1> key_sum, query_sum;
                key_sum.clear(), query_sum.clear();
                go(keys, key_rows, key_scalars, first, spot, &key_sum, nullptr, real(0), key_column);
                go(queries, query_rows, query_scalars, query, other, &query_sum, &key_sum, half, query_column);
                go(keys, key_rows, key_scalars, first, spot, nullptr, &query_sum, -half, key_column);
            }
        }
    }
}
