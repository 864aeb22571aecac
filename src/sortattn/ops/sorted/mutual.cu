// The walk in which queries and keys are sources of each other, for all gradients of a symmetric kernel with one node.
//
// The gradient of a value is a sum over the queries, that of a key the slope of this sum, and that of a query the slope
// of the sum over the keys: walks in which the same rows are sources here and targets there. So one warp goes along a
// run of queries and keys in their common order, by batches of thirty-two, and every row is read once: it is multiplied
// with what the points of the other kind give, and then added to what its own kind gives to those.
//
// Of equal points the keys come first, and have then been passed by the queries, but not the queries by the keys. As a
// slope is the mean of both sides there, half of the jump is given and taken afterwards, by `settle`, on runs that
// have such points.
//
// Macros: those of track.cu, with SLOPES.

#include "begin.cu"
#include "equal.cu"

static_assert(NODES == 1 && !COMPACT && SLOPES && !ORDERED && (BOTH ? !FOLDED : FOLDED > 0),
              "sums and slopes of a kernel that is its own transpose");
static_assert(SUMS == 2 && sizeof(real) == 4, "sixteen bytes for an item");

// Of the first `at` queries and keys in their common order, how many are keys.
__device__ inline int keys_before(const Line &keys, const Line &queries, int at) {
    return first_without(0, min(keys.count, at), [&](int i) {
        int other = at - 1 - i;
        return other >= queries.count || queries.place(other) >= keys.place(i);
    });
}

// Points of one kind on a track, in their order, and what those that have been passed give to the others.
struct Party {
    Line line;
    // the line without those at zero, if it is folded: they give nothing
    Line sources;
    Rows rows;
    Scalars scalars;
    // see `accumulate`
    const real *moments;
    Numbers<double> state;
    int passed;
    // the next ones of the lanes, on their way while a batch is walked
    real next_place;
    int next_index;

    __device__ Party(const real *places, const int *order, const real *rows, const real *scalars, const real *moments,
                     index_t count, index_t p, index_t track, index_t d, index_t dims, index_t channels, bool mirrored,
                     int lane)
        : line(places, order, p * dims + d, count, mirrored), sources(line),
          rows(rows + p * count * STRIDE + channels * WIDTH, lane), scalars(scalars, p * count),
          moments(moments + track * moment_places((count + BLOCK - 1) / BLOCK) * SIZE) {
        if (FOLDED) {
            line.keep_half(true);
            sources.keep_half(false);
        }
    }
    __device__ void begin(const Side &side, real origin, index_t blocks, Source *list, int lane) {
        state.clear();
        int some = max(passed - (line.count - sources.count), 0);
        if (BOTH) {
            begin_between(state, moments, sources, rows, scalars, side, origin, some, some, list, lane);
            return;
        }
        take_away_all(state, moments + blocks * SIZE, side, origin, lane);
        // behind the last source there is no block
        int block = min(some, sources.count - 1) / BLOCK;
        if (block > 0) {
            add_moments<0>(state, moments + block * SIZE, double(origin) - double(sources.place(block * BLOCK)),
                           side.rate, side.below[0], lane);
        }
        absorb(state, sources, rows, scalars, origin, max(block, 0) * BLOCK, some, list, lane,
               [&](int, real t, real(&weight)[SUMS]) { side.weights(0, origin - t, weight, real(1), real(0)); });
    }
    __device__ void fetch(int lane) {
        bool there = passed + lane < line.count;
        next_place = there ? line.place(passed + lane) : infinity();
        next_index = there ? line.index(passed + lane) : 0;
    }
};

// Where an item has the address of its row, the one CHUNK before it has its weights. In words, as the compiler would
// read it in parts.
struct alignas(16) Item {
    unsigned weight[SUMS], row[2];
};
// What each of the sums gives to an item, and the derivative of that.
struct alignas(16) Aim {
    struct {
        real factor, slope;
    } of[SUMS];
};
// What the channels of each lane give to the inner product of an item; as wide as lets lanes meet in few banks.
struct Part {
    real of[36];
};
// An item in its place: its coordinate, and its index, or for a query what is left of -1 without it.
struct Spot {
    real place;
    int index;
};

// The row of an item, from a lane's channels on.
__device__ inline Row *row_of(const Item &item, unsigned lane) {
    unsigned long long place = (index_t(item.row[1]) << 32 | item.row[0]) + lane * unsigned(sizeof(Row));
#ifdef __CUDA_ARCH__
    return static_cast<Row *>(__cvta_global_to_generic(place));
#else
    return reinterpret_cast<Row *>(place);
#endif
}

// The gradients of queries and keys are added to `by_query` and `by_key`, see `Column`, those of values and weights to
// `by_value (heads, keys, STRIDE)` and `by_weight (heads, keys)`; `grads` and `grad_extra` are those of the sums of the
// queries. `key_sums` and `query_sums` are those of `accumulate`. Of equal queries that are equal to keys the first one
// gets a bit in `tied (channel blocks, heads, sides, dims, queries / 32)`, zero before. Other arguments are as in
// walk.cu; a run has `length` queries and keys.
extern "C" __global__ void __launch_bounds__(32, RESIDENT)
    mutual(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
           const real *values, const real *weights, const real *grads, const real *grad_extra, const double *table,
           const double *taus, double tau, const real *key_sums, const real *query_sums, real *by_value,
           real *by_weight, real *by_key, real *by_query, unsigned *tied, index_t heads, index_t sides, index_t count,
           index_t number, index_t dims, index_t mirrored, index_t negated, index_t length) {
    __shared__ Source list[32];
    __shared__ Item items[32 + 2 * CHUNK];
    __shared__ Aim aims[32];
    __shared__ Spot spots[32];
    // by item and lane, what the channels of a lane give to an inner product
    alignas(16) __shared__ Part parts[32];
    int lane = threadIdx.x;
    index_t channels = blockIdx.y, runs = (count + number + length - 1) / length;
    index_t d = blockIdx.x / runs % dims, side_number = blockIdx.x / runs / dims % sides,
            p = blockIdx.x / runs / dims / sides, track = ((channels * heads + p) * sides + side_number) * dims + d;
    bool flipped = mirrored >> side_number & 1, negative = negated >> side_number & 1;
    Side side;
    side.read(table + side_number * TABLE, taus ? taus[p] : tau, false);
    Party keys(key_places, key_order, values, weights, key_sums, count, p, track, d, dims, channels, flipped, lane);
    Party queries(query_places, query_order, grads, grad_extra, query_sums, number, p, track, d, dims, channels,
                  flipped, lane);
    // from the row of a key to that of its gradient
    index_t away = (by_value - values) * index_t(sizeof(real));
#ifdef __CUDA_ARCH__
    // the compiler would subtract for every key again
    asm("" : "+l"(away));
#endif
    by_weight += p * count;
    Column key_column(by_key, key_places, p, count, d, dims), query_column(by_query, query_places, p, number, d, dims);
    tied += track * ((number + 31) / 32);
    real span = BOTH ? real(REACH) / side.rate : infinity();

    int at = int(blockIdx.x % runs * length), end = min(at + int(length), keys.line.count + queries.line.count);
    if (at >= end) return;
    keys.passed = keys_before(keys.line, queries.line, at);
    queries.passed = at - keys.passed;
    keys.fetch(lane), queries.fetch(lane);
    // of the key that was passed last, if no query has been passed since
    real last_key = infinity();
    if (keys.passed) {
        real place = keys.line.place(keys.passed - 1);
        if (!queries.passed || queries.line.place(queries.passed - 1) < place) last_key = place;
    }

    auto load = [&](const Item &item) {
        Row *row = row_of(item, lane);
#if defined __CUDA_ARCH__ && PASSING
        if constexpr (VEC == 2) {
            float2 two;
            asm volatile("ld.global.L2::cache_hint.v2.f32 {%0, %1}, [%2], %3;"
                         : "=f"(two.x), "=f"(two.y)
                         : "l"(row), "l"(passing()));
            Row both;
            both.at[0] = two.x, both.at[VEC > 1] = two.y;
            return both;
        }
#endif
        return *row;
    };
    real origin = real(0), renewed = real(0);
    bool fresh = true;
    while (at < end) {
        real key = keys.next_place, query = queries.next_place;
        real from = min(__shfl_sync(ALL, key, 0), __shfl_sync(ALL, query, 0));
        if (fresh || (BOTH && from - renewed > span)) {
            fresh = false;
            renewed = from;
            __syncwarp();
            keys.begin(side, from, (count + BLOCK - 1) / BLOCK, list, lane);
            queries.begin(side, from, (number + BLOCK - 1) / BLOCK, list, lane);
        } else if (from != origin) {
            move_state(keys.state, double(from) - double(origin), side.rate);
            move_state(queries.state, double(from) - double(origin), side.rate);
        }
        origin = from;
        if (FOLDED) {
            // beyond the last source the kernel is constant
            if (keys.passed == keys.line.count) keys.state.clear(1);
            if (queries.passed == queries.line.count) queries.state.clear(1);
        }
        // places in the common order
        int key_rank = lane + count_before(query, [&](real other) { return other < key; });
        int query_rank = lane + count_before(key, [&](real other) { return other <= query; });
        int left = min(32, end - at);
        bool key_in = keys.passed + lane < keys.line.count && key_rank < left && key - renewed <= span;
        bool query_in = queries.passed + lane < queries.line.count && query_rank < left && query - renewed <= span;
        if (FOLDED) {
            // beyond the last source a batch begins
            unsigned last = __ballot_sync(ALL, key_in && keys.passed + lane == keys.line.count - 1);
            if (last) left = min(left, __shfl_sync(ALL, key_rank, __ffs(last) - 1) + 1);
            last = __ballot_sync(ALL, query_in && queries.passed + lane == queries.line.count - 1);
            if (last) left = min(left, __shfl_sync(ALL, query_rank, __ffs(last) - 1) + 1);
            key_in = key_in && key_rank < left, query_in = query_in && query_rank < left;
        }
        int some_keys = __popc(__ballot_sync(ALL, key_in)), some_queries = __popc(__ballot_sync(ALL, query_in));
        int taken = some_keys + some_queries;
        if (key_in) spots[key_rank] = {key, keys.next_index};
        if (query_in) spots[query_rank] = {query, ~queries.next_index};
        __syncwarp();
        // one item a lane
        Spot spot = spots[lane];
        bool there = lane < taken, asks = there && spot.index < 0;
        unsigned asking = __ballot_sync(ALL, asks), giving = __ballot_sync(ALL, there && !asks);
        real x = there ? spot.place : origin;
        int index = !there ? 0 : asks ? ~spot.index : spot.index;
        real scalar = !there ? real(0) : asks ? queries.scalars[index] : keys.scalars[index];
        bool zero = FOLDED && x == real(0);
        real weight[SUMS], share = !there || zero ? real(0) : real(1);
        side.weights(0, origin - x, weight, share, -share);
        real factor[SUMS], slope[SUMS];
        side.factors(x - origin, factor, slope, zero ? real(0.5) : real(1));
        // sums and slopes of the extra scalar
        real extra = real(0), extra_slope = real(0);
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            real own = scalar * weight[l], by_keys = scan(asks ? real(0) : own, lane),
                 by_queries = scan(asks ? own : real(0), lane);
            real other = asks ? real(keys.state.extra[l]) + by_keys : real(queries.state.extra[l]) + by_queries;
            extra += factor[l] * other;
            extra_slope += slope[l] * other;
            keys.state.extra[l] += double(__shfl_sync(ALL, by_keys, 31));
            queries.state.extra[l] += double(__shfl_sync(ALL, by_queries, 31));
        }
        // from the first lane's channels on
        auto row = reinterpret_cast<unsigned long long>((asks ? queries.rows.at(index) : keys.rows.at(index)) - lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            items[lane].row[half] = unsigned(row >> 32 * half);
            if (lane < 2 * CHUNK) items[32 + lane].row[half] = unsigned(row >> 32 * half);
        }
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            items[CHUNK + lane].weight[l] = __float_as_uint(weight[l]);
            aims[lane].of[l] = {factor[l], slope[l]};
        }
        // where queries follow keys that they equal, and that give something
        real before = __shfl_up_sync(ALL, x, 1);
        bool equal = asks && !zero && (lane ? giving >> (lane - 1) & 1 && before == x : last_key == x);
        last_key = giving >> (taken - 1) & 1 ? __shfl_sync(ALL, x, taken - 1) : infinity();
        // where on its line the item is
        unsigned earlier = (1u << lane) - 1;
        int key_at = keys.passed + __popc(giving & earlier), query_at = queries.passed + __popc(asking & earlier);
        if (equal) atomicOr(tied + query_at / 32, 1u << query_at % 32);
        keys.passed += some_keys, queries.passed += some_queries;
        at += taken;
        keys.fetch(lane), queries.fetch(lane);
        __syncwarp();

        Numbers<real> key_base = rounded(keys.state, lane), query_base = rounded(queries.state, lane);
        Numbers<real> key_local, query_local;
        key_local.clear(), query_local.clear();
        // a ring: the place of a row that has been added is for the one CHUNK behind it
        Row ring[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) ring[i] = load(items[i]);
        Cursor<Part> next_parts(parts, 0);
        for (int first = 0; first < taken; first += CHUNK, next_parts.step(CHUNK)) {
            unsigned some = giving >> first;
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                Item next = items[first + CHUNK + i];
                Row item = ring[i];
                real weight[SUMS], sum[VEC], product = real(0);
#pragma unroll
                for (int l = 0; l < SUMS; l++) weight[l] = __uint_as_float(next.weight[l]);
                // the sum, and its derivative times the row
                auto multiply = [&](const Numbers<real> &base, const Numbers<real> &local) {
                    Aim to = aims[first + i];
#pragma unroll
                    for (int c = 0; c < VEC; c++) {
                        real derivative = real(0);
#pragma unroll
                        for (int l = 0; l < SUMS; l++) {
                            real number = base.at[l][c] + local.at[l][c];
                            sum[c] =
                                l == 0 ? (RATE ? to.of[0].factor * number : number) : sum[c] + to.of[l].factor * number;
                            // without an exponential there is none of a constant
                            if (RATE || l) derivative += to.of[l].slope * number;
                        }
                        product += derivative * item.at[c];
                    }
                };
                if (some & 1u << i) {
                    multiply(query_base, query_local);
                    char *place = reinterpret_cast<char *>(row_of(items[first + i], lane));
                    add_to(*reinterpret_cast<Row *>(place + away), sum);
                    key_local.add_row(weight, item);
                } else {
                    // a query, or none with a weight of zero
                    multiply(key_base, key_local);
                    query_local.add_row(weight, item);
                }
                (&next_parts.here())[i].of[lane] = product;
                ring[i] = load(next);
            }
        }
        keys.state.add_rows(key_local), queries.state.add_rows(query_local);
        __syncwarp();
        if (there) {
            real product = channels == 0 ? extra_slope * scalar : real(0);
#pragma unroll
            for (int i = 0; i < 32; i++) product += parts[lane].of[i];
            real *place =
                asks ? query_column.of(queries.line, query_at, index) : key_column.of(keys.line, key_at, index);
            add_to(place, negative ? -product : product);
            if (!asks && channels == 0) add_to(by_weight + index, extra);
        }
        __syncwarp();
    }
}

// Give to the keys and take from the queries that are equal half of the jump which they have too little or too much; a
// warp looks for queries that are `tied` among 32 times 32 of them.
extern "C" __global__ void __launch_bounds__(32, 32)
    settle(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
           const real *values, const real *weights, const real *grads, const real *grad_extra, const double *table,
           const double *taus, double tau, const unsigned *tied, real *by_key, real *by_query, index_t heads,
           index_t sides, index_t count, index_t number, index_t dims, index_t mirrored, index_t negated) {
    int lane = threadIdx.x;
    index_t channels = blockIdx.y, words = (number + 31) / 32, pieces = (words + 31) / 32;
    index_t word = blockIdx.x % pieces * 32 + lane, track = blockIdx.x / pieces, d = track % dims,
            side_number = track / dims % sides, p = track / dims / sides;
    unsigned mine = word < words ? tied[(channels * heads * sides * dims + track) * words + word] : 0u;
    if (!__any_sync(ALL, mine)) return;
    bool flipped = mirrored >> side_number & 1;
    Side side;
    side.read(table + side_number * TABLE, taus ? taus[p] : tau, false);
    // half of what the slope of a source just below is more than that of one just above
    real jump = real(0.5) * (RATE ? side.slope_below[0] - side.slope_above[0] : side.below[0][POWERS - 1]);
    if (negated >> side_number & 1) jump = -jump;
    Line keys(key_places, key_order, p * dims + d, count, flipped);
    Line queries(query_places, query_order, p * dims + d, number, flipped);
    if (FOLDED) keys.keep_half(true), queries.keep_half(true);
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
        int query = int(word) * 32 + __ffs(mine) - 1, low = 0, high = keys.count;
        bool there = mine;
        real place = there ? queries.place(query) : infinity();
        mine &= mine - 1;
        while (there && low < high) {
            int half = (low + high) / 2;
            if (keys.place(half) < place)
                low = half + 1;
            else
                high = half;
        }
        for (unsigned ties = __ballot_sync(ALL, there); ties; ties &= ties - 1) {
            int which = __ffs(ties) - 1, key = __shfl_sync(ALL, low, which), first = __shfl_sync(ALL, query, which);
            real spot = __shfl_sync(ALL, place, which);
            Numbers<real, 1> key_sum, query_sum;
            key_sum.clear(), query_sum.clear();
            go(keys, key_rows, key_scalars, key, spot, &key_sum, nullptr, real(0), key_column);
            go(queries, query_rows, query_scalars, first, spot, &query_sum, &key_sum, -jump, query_column);
            go(keys, key_rows, key_scalars, key, spot, nullptr, &query_sum, jump, key_column);
        }
    }
}
