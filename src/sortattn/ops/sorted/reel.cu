// All gradients around wound lines in one walk along queries and keys: every row of either is read once.
//
// As in coil.cu, with parts a of a query and b of a key in cells of a circle. What the keys before a query on the
// circle change of its gradient is a sum over cells i = j - 1, j, j + 1 of (1, -2, 1) times their rows; a query begins
// with what whole cells give, see tally.cu. So for every cell of queries one sum of keys' rows is kept, to which a
// key of a cell around is added as it is passed, and which the row of a query is multiplied with. For every cell of
// keys there are two sums of queries' rows, plain and times the parts a, of which the gradients of values and keys are
//     b plain - weighted  and  the product of plain with the row of the key.
//
// A stretch is thirty-two neighbours among queries and keys in their common order on the circle. The warps of a block
// hand sums on as in relay.cu: each brings the rows of its items into shared memory and sums them by kind and cell;
// with the sums of all items before, it goes through its own.
//
// A query and a key at the same part count as if the key came first, unless the query has the lesser cell; what is
// wrong with that is put right by ties.cu, for keys whose bit in `tied` is set here.
//
// Macros: those of track.cu, with SLOPES, CREW (warps of a block, one of a multiprocessor) and CELLS.

#include "kept.cu"

static_assert(PARTS == 1 && SLOPES && !ORDERED && sizeof(real) == 4, "all channels of a row, in float32");
constexpr int ROW_BYTES = 32 * sizeof(Row);

// A point before items are in their common order.
struct Staged {
    word point;
    int index;
};
// An item: its part of the circle, of a query times the height of the spline, and minus twice that; its index, and the
// number of its class.
struct alignas(16) Item {
    real part, twice;
    int index, number;
};
// One of a list, class by class: where its row is, in bytes, with the number of its class, and its part as above.
struct alignas(8) Listed {
    int row;
    real part;
};
// What a warp has; behind the last row and the last item is read and not used.
struct alignas(16) Station {
    Row rows[32 * 32];
    union {
        Staged staged[2][32];
        Item items[32];
    };
    Listed list[32];
    unsigned classes[32];
};
// What all warps of a block need once for every stretch: there are no registers for it.
struct Places {
    const real *key_scalars, *query_scalars;
    real *by_weight, *by_key, *by_query;
    unsigned *tied;
    real key_slope, query_slope;
};

// Of what lanes have of a row, a word of each lane, such that all are in other banks: a sum of bits, one for each of
// those of the lane.
__device__ inline int own_word(int lane) { return VEC == 2 ? lane * 2 | lane >> 4 : lane; }

// Bring the rows that lanes want, one each, into shared memory, sixteen bytes at a time.
__device__ inline void bring(Row *to, const Row *from, int lane) {
    constexpr int PIECES = ROW_BYTES / 16;
    char *there = reinterpret_cast<char *>(to) + lane * 16;
#pragma unroll
    for (int i = 0; i < 32; i += 32 / PIECES, there += 512) {
        const char *here = reinterpret_cast<const char *>(
            __shfl_sync(ALL, reinterpret_cast<unsigned long long>(from), i + lane / PIECES));
        here += lane % PIECES * 16;
        begin_copy<16>(there, here);
    }
}

// Of two sorted lists, how many of the first one are among the first `all` of both, where equals of it come first.
template <typename F, typename G> __device__ inline int first_among(int all, int low, int high, F one, G other) {
    while (low < high) {
        int half = (low + high) / 2;
        if (one(half) <= other(all - 1 - half))
            low = half + 1;
        else
            high = half;
    }
    return low;
}

// Add the gradients of lines that are wound, of heads from `first` on: of queries and keys to `by_query` and `by_key`,
// see `Column`, of values and weights to `by_value (heads, keys, STRIDE)` and `by_weight (heads, keys)`. The ends of
// the spline are `pitch` bandwidths away, and `starts (heads, dims, STARTS, WIDTH + 1)` is what walks begin with. `tied
// (heads, dims, keys / 32)`, zero before, gets a bit for every key at the part of a query.
extern "C" __global__ void __launch_bounds__(32 * CREW, 1)
    reel(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
         const real *values, const real *weights, const real *grads, const real *grad_extra, const Winding *windings,
         const double *starts, const double *table, const double *taus, double tau, double pitch, real *by_value,
         real *by_weight, real *by_key, real *by_query, unsigned *tied, index_t count, index_t number, index_t dims,
         index_t first) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Baton baton;
    __shared__ Places places;
    int lane = threadIdx.x % 32, warp = own_warp();
    Station &mine = reinterpret_cast<Station *>(shared)[warp];
    index_t d = blockIdx.x % dims, p = first + blockIdx.x / dims, line = p * dims + d;
    Winding winding = windings[line];
    if (!winding.cells) return;
    Wheel keys(key_places, key_order, line, count), queries(query_places, query_order, line, number);
    Rows key_rows(values + p * count * STRIDE, 0), query_rows(grads + p * number * STRIDE, 0);
    Rows output_rows(by_value + p * count * STRIDE, lane);
    // from memory, as the compiler would convert an argument for every item again
    double scale = table[NODES + 1] * pitch;
    real height = real(scale), minus_twice = real(-2) * height;
    unsigned step = ALONG ? 1u : unsigned(dims);
    int first_cell = (CELLS - winding.cells) / 2;
    if (threadIdx.x == 0) {
        // sums of queries have the height of the spline, those of keys have not
        real slope = real(1.0 / (pitch * (taus ? taus[p] : tau)));
        places = {weights ? weights + p * count : nullptr,
                  grad_extra ? grad_extra + p * number : nullptr,
                  by_weight + p * count,
                  by_key + (ALONG ? line * count : p * count * dims + d),
                  by_query + (ALONG ? line * number : p * number * dims + d),
                  tied + line * ((count + 31) / 32),
                  slope,
                  height * slope};
    }
    baton.begin(starts + line * STARTS * (WIDTH + 1), first_cell, scale, lane, warp);
    __syncthreads();
    int everything = keys.count + queries.count, stretches = (everything + 31) / 32;

    // where the keys of the next stretches of this warp begin, found lane by lane
    int found = 0;
    // the points that the items of the next stretch are among, on their way while one is walked, and the query before
    Staged next_key, next_query;
    word next_last;
    int next_key_at;
    auto fetch = [&](int stretch) {
        int turn = stretch / CREW;
        if (turn % 32 == 0) {
            int before = min(min(stretch + lane * CREW, stretches) * 32, everything);
            found = first_among(
                before, max(before - queries.count, 0), min(before, keys.count), [&](int i) { return keys.at(i); },
                [&](int i) { return queries.at(i); });
            __syncwarp();
        }
        next_key_at = __shfl_sync(ALL, found, turn % 32);
        int query_at = stretch * 32 - next_key_at, k = next_key_at + lane, q = query_at + lane;
        bool key_in = k < keys.count, query_in = q < queries.count;
        next_key = {key_in ? keys.at(k) : ALL, key_in ? keys.index(k) : 0};
        next_query = {query_in ? queries.at(q) : ALL, query_in ? queries.index(q) : 0};
        next_last = query_at ? queries.at(query_at - 1) : ALL;
    };
    if (warp < stretches) fetch(warp);
    for (int stretch = warp; stretch < stretches; stretch += CREW) {
        int taken = min(32, everything - stretch * 32), key_at = next_key_at, query_at = stretch * 32 - key_at;
        word last = next_last;
        mine.staged[0][lane] = next_key, mine.staged[1][lane] = next_query;
        mine.classes[lane] = 0;
        __syncwarp();
        // items in their common order, one a lane: what it is, and where on its line
        int k = first_among(
            lane, 0, lane, [&](int i) { return mine.staged[0][i].point; },
            [&](int i) { return mine.staged[1][i].point; });
        int q = lane - k;
        Staged key = mine.staged[0][k], query = mine.staged[1][q];
        bool asks = query.point < key.point;
        word point = asks ? query.point : key.point, before = q ? mine.staged[1][q - 1].point : last;
        int kind = lane < taken ? class_of(point, first_cell, asks) : NOBODY, spot = asks ? query_at + q : key_at + k;
        int index = kind == NOBODY ? 0 : asks ? query.index : key.index;
        real part = part_of(point), own_height = asks ? height : real(1), given = own_height * part;
        bool equal = (before ^ point) >> CELL_BITS == 0 || (query.point ^ point) >> CELL_BITS == 0;
        if (kind < QUERY && equal) atomicOr(places.tied + unsigned(spot) / 32, 1u << spot % 32);
        asks = asks && kind != NOBODY;
        __syncwarp();
        mine.items[lane] = {given, real(-2) * given, index, number_of(kind)};
        atomicOr(mine.classes + kind, 1u << lane);
        bring(mine.rows, asks ? query_rows.at(index) : key_rows.at(index), lane);
        const real *scalars = asks ? places.query_scalars : places.key_scalars;
        real scalar = kind == NOBODY ? real(0) : scalars ? scalars[unsigned(index)] : real(1);
        __syncwarp();
        // of the class of this lane's number: its items, and where it begins and ends on the list
        unsigned own = lane < NOBODY ? mine.classes[lane] : 0u;
        int ends = __popc(own);
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            int others = __shfl_up_sync(ALL, ends, offset);
            if (lane >= offset) ends += others;
        }
        int begins = ends - __popc(own);
        unsigned alike = __shfl_sync(ALL, own, kind);
        int place = __shfl_sync(ALL, begins, kind) + __popc(alike & (1u << lane) - 1);
        if (kind != NOBODY) mine.list[place] = {lane * ROW_BYTES + number_of(kind), given};
        // the sums of extra scalars of the same class up to each item
        Pair extra = {own_height * scalar, given * scalar};
        add_alike(extra, last_before(alike, lane));
        Pair extra_sum = shuffled(extra, max(last_before(own, 32), 0));
        if (!own) extra_sum = {};
        // what that changes for the cells around
        Pair extra_more = shuffled(extra_sum, (lane + 31) % 32);
        add_pair(extra_more, shuffled(extra_sum, (lane + 1) % 32)), add_pair(extra_more, extra_sum, real(-2));
        if (stretch + CREW < stretches) fetch(stretch + CREW);
        wait_for_copies();
        __syncwarp();

        // sums of this stretch by cells, and what they change of those that are kept
        Row kept[STARTS];
        Row *keys_kept = kept;
        auto queries_kept = reinterpret_cast<Row(*)[2]>(kept + CELLS + 2);
        {
            Row key_sums[CELLS] = {}, query_sums[CELLS + 2][2] = {};
            const char *start = reinterpret_cast<const char *>(mine.rows + lane);
            auto from = [&](int kind) { return __shfl_sync(ALL, begins, kind); };
            auto add_key = [&](auto cell, const Row &row) { add_row(key_sums[decltype(cell)::value], row); };
            auto add_query = [&](auto cell, const Row &row, real part) {
                Row(&both)[2] = query_sums[decltype(cell)::value + 1];
                add_row(both[0], row, height), add_row(both[1], row, part);
            };
            // those of a class that has many, whose number is known
            auto add_class = [&](int kind, int number, auto add) {
                int stop = from(kind + 1);
#pragma unroll 4
                for (int i = from(kind); i < stop; i++) {
                    Listed item = mine.list[i];
                    Row row = *reinterpret_cast<const Row *>(start + item.row - number);
                    add(row, item.part);
                }
            };
            auto add_keys = [&](auto cell) {
                constexpr int kind = decltype(cell)::value + 1;
                add_class(kind, number_of(kind), [&](const Row &row, real) { add_key(cell, row); });
            };
            auto add_queries = [&](auto cell) {
                constexpr int kind = QUERY + decltype(cell)::value + 1;
                add_class(kind, number_of(kind), [&](const Row &row, real part) { add_query(cell, row, part); });
            };
            // and those of others, one by one
            auto add_others = [&](int first, int stop) {
#pragma unroll 1
                for (int i = first; i < stop; i++) {
                    Listed item = mine.list[i];
                    int number = item.row & ROW_BYTES - 1;
                    Row row = *reinterpret_cast<const Row *>(start + item.row - number);
                    with_class(
                        number, [&](auto cell) { add_key(cell, row); },
                        [&](auto cell) { add_query(cell, row, item.part); });
                }
            };
            add_others(0, from(MIDDLE + 1));
            add_keys(Int<MIDDLE>()), add_keys(Int<MIDDLE + 1>());
            add_others(from(MIDDLE + 3), from(QUERY + MIDDLE + 1));
            add_queries(Int<MIDDLE>()), add_queries(Int<MIDDLE + 1>());
            add_others(from(QUERY + MIDDLE + 3), from(NOBODY));
#pragma unroll
            for (int c = 0; c < CELLS + 2; c++) {
                // indices are those of cells that there are, whatever the loop is unrolled to
                Row &sum = keys_kept[c];
                sum = c > 1 ? key_sums[max(c - 2, 0)] : Row{};
                if (c > 0 && c <= CELLS) add_row(sum, key_sums[min(max(c - 1, 0), CELLS - 1)], real(-2));
                if (c < CELLS) add_row(sum, key_sums[min(c, CELLS - 1)]);
            }
#pragma unroll
            for (int i = 0; i < 2 * CELLS; i++) {
                Row &sum = queries_kept[i / 2][i % 2];
                sum = query_sums[i / 2][i % 2];
                add_row(sum, query_sums[i / 2 + 1][i % 2], real(-2)), add_row(sum, query_sums[i / 2 + 2][i % 2]);
            }
        }
        // the baton is taken and handed on
        baton.turn.wait(stretch);
        if (warp == 0 && stretch) baton.fold(lane);
        Pair extra_base = baton.exchange(kept, extra_more, lane);
        baton.turn.pass(stretch);

        Cursor<Row> slot(mine.rows, lane);
        Cursor<real> product_at(reinterpret_cast<real *>(mine.rows), own_word(lane));
        Cursor<Item> next_item(mine.items, 0), stop(mine.items, taken);
        Row row = slot.here();
        Item item = next_item.here();
        while (next_item.before(stop)) {
            real product = real(0);
            auto pass_key = [&](auto cell) {
                constexpr int c = decltype(cell)::value;
                real sum[VEC];
#pragma unroll
                for (int v = 0; v < VEC; v++) {
                    real plain = queries_kept[c][0].at[v];
                    sum[v] = item.part * plain - queries_kept[c][1].at[v];
                    product += plain * row.at[v];
                }
                add_to(*output_rows.at(item.index), sum);
                add_row(keys_kept[c], row), add_row(keys_kept[c + 1], row, real(-2)), add_row(keys_kept[c + 2], row);
            };
            auto pass_query = [&](auto cell) {
                constexpr int c = decltype(cell)::value;
#pragma unroll
                for (int v = 0; v < VEC; v++) product += keys_kept[c + 1].at[v] * row.at[v];
#pragma unroll
                for (int i = max(c - 1, 0); i <= min(c + 1, CELLS - 1); i++) {
                    add_row(queries_kept[i][0], row, i == c ? minus_twice : height);
                    add_row(queries_kept[i][1], row, i == c ? item.twice : item.part);
                }
            };
            // most are in the two cells in the middle
            if (item.number == number_of_key(MIDDLE))
                pass_key(Int<MIDDLE>());
            else if (unknown(item.number) == number_of_key(MIDDLE + 1))
                pass_key(Int<MIDDLE + 1>());
            else if (unknown(item.number) == number_of_query(MIDDLE))
                pass_query(Int<MIDDLE>());
            else if (unknown(item.number) == number_of_query(MIDDLE + 1))
                pass_query(Int<MIDDLE + 1>());
            else
                with_class(unknown(item.number), pass_key, pass_query);
            // what the lanes have is summed below, all items side by side
            product_at.here() = product;
            slot.step(32), product_at.step(32 * VEC), next_item.step(1);
            row = slot.here(), item = next_item.here();
        }
        __syncwarp();
        const real *products = reinterpret_cast<const real *>(mine.rows) + lane * 32 * VEC;
        real product = real(0);
#pragma unroll
        for (int i = 0; i < 32; i++) product += products[own_word(i) ^ own_word(lane)];
        // of the extra scalars of the other kind, what the cells around have
        Pair seen = shuffled(extra_base, kind ^ QUERY);
#pragma unroll
        for (int away = -1; away <= 1; away++) {
            int latest = last_before(__shfl_sync(ALL, own, (kind ^ QUERY) + away & 31), lane);
            Pair some = shuffled(extra, max(latest, 0));
            if (latest >= 0) add_pair(seen, some, away ? real(1) : real(-2));
        }
        if (kind != NOBODY) {
            real *to = (asks ? places.by_query : places.by_key) + index_t(unsigned(ALONG ? spot : index)) * step;
            add_to(to, (asks ? places.query_slope : places.key_slope) * (product + seen.plain * scalar));
            if (!asks) add_to(places.by_weight + unsigned(index), part * seen.plain - seen.weighted);
        }
        __syncwarp();
    }
}
