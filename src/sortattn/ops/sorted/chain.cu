// The walk of mutual.cu along whole tracks of a folded line by blocks of warps, as in relay.cu: every row is read once.
//
// A stretch is thirty-two neighbours among queries and keys in their common order. A warp brings their rows into shared
// memory and sums them by kind; what it is given from the stretches before it hands on with its own sums, and then goes
// through its items as mutual.cu does.
//
// Macros: those of track.cu, with SLOPES, CREW (warps of a block) and TEAMS (blocks of a multiprocessor).

#include "track.cu"

static_assert(NODES == 1 && !BOTH && !COMPACT && !RATE && FOLDED > 0 && SLOPES && !ORDERED && SUMS == 2 &&
                  sizeof(real) == 4,
              "a folded kernel, linear between its node and zero");

// What is handed on: of the keys, the slope that they give, of the queries, sum and slope; around the first item of the
// last stretch.
struct Baton {
    double key_slope[VEC][32];
    double query[SUMS][VEC][32];
    double key_extra, query_extra[SUMS];
    real origin;
    Turn turn;
};
// What a query or a key gives to each of the sums, and each of them to it.
struct alignas(16) Item {
    real weight[SUMS];
    real factor, slope;
};
// An item in its place: its coordinate, and its index, or for a query what is left of -1 without it.
struct Spot {
    real place;
    int index;
};
struct alignas(16) Station {
    Row rows[32 * 32];
    Item items[32];
    // of the gradients of keys
    Row *outputs[32];
    Spot spots[32];
    unsigned long long arrival;
};

extern "C" __global__ void __launch_bounds__(32 * CREW, TEAMS)
    chain(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
          const real *values, const real *weights, const real *grads, const real *grad_extra, const double *table,
          const double *taus, double tau, const real *key_totals, const real *query_totals, index_t key_chunks,
          index_t query_chunks, real *by_value, real *by_weight, real *by_key, real *by_query, unsigned *tied,
          index_t heads, index_t sides, index_t count, index_t number, index_t dims, index_t mirrored, index_t negated,
          index_t first) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Baton baton;
    int lane = threadIdx.x % 32, warp = own_warp();
    Station &mine = reinterpret_cast<Station *>(shared)[warp];
    index_t channels = blockIdx.y, d = blockIdx.x % dims, side_number = blockIdx.x / dims % sides,
            p = first + blockIdx.x / dims / sides;
    bool flipped = mirrored >> side_number & 1, negative = negated >> side_number & 1;
    Side side;
    side.read(table + side_number * TABLE, taus ? taus[p] : tau, false);
    Line keys(key_places, key_order, p * dims + d, count, flipped);
    Line queries(query_places, query_order, p * dims + d, number, flipped);
    keys.keep_half(true), queries.keep_half(true);
    Rows key_rows(values + p * count * STRIDE + channels * WIDTH, 0);
    Rows query_rows(grads + p * number * STRIDE + channels * WIDTH, 0);
    Rows output_rows(by_value + p * count * STRIDE + channels * WIDTH, 0);
    Scalars key_scalars(weights, p * count), query_scalars(grad_extra, p * number);
    by_weight += p * count;
    Column key_column(by_key, key_places, p, count, d, dims), query_column(by_query, query_places, p, number, d, dims);
    baton.turn.begin();
    Copies copies(&mine.arrival, lane);
    __syncthreads();
    int everything = keys.count + queries.count, stretches = (everything + 31) / 32;
    // where the keys of the next stretches of this warp begin, found lane by lane
    int found = 0;
    tied += ((blockIdx.y * heads + first) * sides * dims + blockIdx.x) * ((number + 31) / 32);
    for (int stretch = warp; stretch < stretches; stretch += CREW) {
        int turn = stretch / CREW, taken = min(32, everything - stretch * 32);
        if (turn % 32 == 0) {
            int before = min(stretch + lane * CREW, stretches) * 32;
            before = min(before, everything);
            int low = max(before - queries.count, 0), high = min(before, keys.count);
            while (low < high) {
                int half = (low + high) / 2;
                if (queries.place(before - 1 - half) >= keys.place(half))
                    low = half + 1;
                else
                    high = half;
            }
            found = low;
            __syncwarp();
        }
        int key_at = __shfl_sync(ALL, found, turn % 32), query_at = stretch * 32 - key_at;
        bool key_in = key_at + lane < keys.count, query_in = query_at + lane < queries.count;
        real key = key_in ? keys.place(key_at + lane) : infinity();
        real query = query_in ? queries.place(query_at + lane) : infinity();
        int key_index = key_in ? keys.index(key_at + lane) : 0,
            query_index = query_in ? queries.index(query_at + lane) : 0;
        // of the key before, if it comes right before
        real last_key = key_at ? keys.place(key_at - 1) : infinity();
        if (query_at && queries.place(query_at - 1) >= last_key) last_key = infinity();
        // places in the common order
        int key_rank = lane + count_before(query, [&](real other) { return other < key; });
        int query_rank = lane + count_before(key, [&](real other) { return other <= query; });
        if (key_in && key_rank < 32) mine.spots[key_rank] = {key, key_index};
        if (query_in && query_rank < 32) mine.spots[query_rank] = {query, ~query_index};
        __syncwarp();
        // one item a lane
        Spot spot = mine.spots[lane];
        bool there = lane < taken, asks = there && spot.index < 0;
        unsigned asking = __ballot_sync(ALL, asks), giving = __ballot_sync(ALL, there && !asks);
        real origin = __shfl_sync(ALL, spot.place, 0), x = there ? spot.place : origin;
        int index = !there ? 0 : asks ? ~spot.index : spot.index;
        const Row *row = asks ? query_rows.at(index) : key_rows.at(index);
        copies.start(ALL, lane, mine.rows + lane * 32, row);
        real scalar = !there ? real(0) : asks ? query_scalars[index] : key_scalars[index];
        bool zero = x == real(0);
        real weight[SUMS], share = !there || zero ? real(0) : real(1);
        side.weights(0, origin - x, weight, share, real(0));
        real factor[SUMS], slope[SUMS];
        side.factors(x - origin, factor, slope, zero ? real(0.5) : real(1));
        // beyond the last source the kernel is constant
        unsigned earlier = (1u << lane) - 1;
        int keys_before = key_at + __popc(giving & earlier), queries_before = query_at + __popc(asking & earlier);
        if (asks ? keys_before == keys.count : queries_before == queries.count) factor[1] = slope[1] = real(0);
        // where on its line the item is
        int spot_at = asks ? queries_before : keys_before;
        mine.items[lane] = {{weight[0], weight[1]}, factor[1], slope[1]};
        mine.outputs[lane] = output_rows.at(index);
        real key_sum = scan(asks ? real(0) : scalar * weight[1], lane), query_sums[SUMS];
#pragma unroll
        for (int l = 0; l < SUMS; l++) query_sums[l] = scan(asks ? scalar * weight[l] : real(0), lane);
        // where queries follow keys that they equal, and that give something
        real before = __shfl_up_sync(ALL, x, 1);
        bool equal = asks && !zero && (lane ? giving >> (lane - 1) & 1 && before == x : last_key == x);
        if (equal) atomicOr(tied + spot_at / 32, 1u << spot_at % 32);

        copies.wait(ALL);
        __syncwarp();
        real key_local[VEC] = {};
        Numbers<real> query_local;
        query_local.clear();
#pragma unroll 8
        for (int i = 0; i < 32; i++) {
            Row item = mine.rows[i * 32 + lane];
            Item own = mine.items[i];
            if (giving >> i & 1) {
#pragma unroll
                for (int c = 0; c < VEC; c++) key_local[c] += own.weight[1] * item.at[c];
            } else {
                query_local.add_row(own.weight, item);
            }
        }
        double key_slope[VEC], key_extra = 0.0;
        Numbers<double> state;
        state.clear();
#pragma unroll
        for (int c = 0; c < VEC; c++) key_slope[c] = 0.0;
        if (!stretch) {
            // all sources as if they were at zero, but negative
            real constant[SUMS];
            side.weights(0, origin, constant, real(1), real(0));
            index_t line = (flipped * dims + d) * (WIDTH + 1), step = 2 * dims * (WIDTH + 1);
            const real *total = key_totals + (channels * heads + p) * key_chunks * step + line;
            for (index_t chunk = 0; chunk < key_chunks; chunk++, total += step) {
#pragma unroll
                for (int c = 0; c < VEC; c++) key_slope[c] -= double(constant[1]) * double(total[lane * VEC + c]);
                key_extra -= double(constant[1]) * double(total[WIDTH]);
            }
            total = query_totals + (channels * heads + p) * query_chunks * step + line;
            for (index_t chunk = 0; chunk < query_chunks; chunk++, total += step) {
                double all[VEC];
#pragma unroll
                for (int c = 0; c < VEC; c++) all[c] = double(total[lane * VEC + c]);
#pragma unroll
                for (int l = 0; l < SUMS; l++) state.mix(l, all, double(total[WIDTH]), -double(constant[l]));
            }
        }
        // the baton is taken and handed on
        baton.turn.wait(stretch);
        if (stretch) {
#pragma unroll
            for (int c = 0; c < VEC; c++) {
                key_slope[c] = baton.key_slope[c][lane];
#pragma unroll
                for (int l = 0; l < SUMS; l++) state.at[l][c] = baton.query[l][c][lane];
            }
            key_extra = baton.key_extra;
#pragma unroll
            for (int l = 0; l < SUMS; l++) state.extra[l] = baton.query_extra[l];
            move_state(state, double(origin) - double(baton.origin), side.rate);
        }
        __syncwarp();
#pragma unroll
        for (int c = 0; c < VEC; c++) {
            baton.key_slope[c][lane] = key_slope[c] + double(key_local[c]);
#pragma unroll
            for (int l = 0; l < SUMS; l++) baton.query[l][c][lane] = state.at[l][c] + double(query_local.at[l][c]);
        }
        if (lane == 31) {
            baton.key_extra = key_extra + double(key_sum);
#pragma unroll
            for (int l = 0; l < SUMS; l++) baton.query_extra[l] = state.extra[l] + double(query_sums[l]);
            baton.origin = origin;
        }
        baton.turn.pass(stretch);

        Numbers<real> base = rounded(state, lane);
        real key_base[VEC];
        query_local.clear();
#pragma unroll
        for (int c = 0; c < VEC; c++) {
            key_base[c] = __shfl_sync(ALL, real(key_slope[c]), lane);
            key_local[c] = real(0);
        }
        Cursor<Row> next_row(mine.rows, lane);
        Cursor<Item> next_item(mine.items, 0);
        for (int first = 0; first < taken; first += 8, next_row.step(8 * 32), next_item.step(8)) {
            unsigned some = giving >> first;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                Row item = (&next_row.here())[i * 32];
                Item own = (&next_item.here())[i];
                real product = real(0);
                if (some & 1u << i) {
                    real sum[VEC];
#pragma unroll
                    for (int c = 0; c < VEC; c++) {
                        real slope = base.at[1][c] + query_local.at[1][c];
                        sum[c] = base.at[0][c] + query_local.at[0][c] + own.factor * slope;
                        product += own.slope * slope * item.at[c];
                        key_local[c] += own.weight[1] * item.at[c];
                    }
                    add_to(*(mine.outputs[first + i] + lane), sum);
                } else {
#pragma unroll
                    for (int c = 0; c < VEC; c++) product += own.slope * (key_base[c] + key_local[c]) * item.at[c];
                    query_local.add_row(own.weight, item);
                }
                // what the lanes have is summed below, all items side by side
                (&next_row.here())[i * 32].at[0] = product;
            }
        }
        __syncwarp();
        if (there) {
            real product = real(0);
#pragma unroll
            for (int i = 0; i < 32; i++) product += mine.rows[lane * 32 + (i ^ lane)].at[0];
            if (channels == 0) {
                real slopes = asks ? real(key_extra) + key_sum : real(state.extra[1]) + query_sums[1];
                product += slope[1] * slopes * scalar;
                if (!asks)
                    add_to(by_weight + index, factor[0] * (real(state.extra[0]) + query_sums[0]) + factor[1] * slopes);
            }
            real *place = asks ? query_column.of(queries, spot_at, index) : key_column.of(keys, spot_at, index);
            add_to(place, negative ? -product : product);
        }
        __syncwarp();
    }
}
