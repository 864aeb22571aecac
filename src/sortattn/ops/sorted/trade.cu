// All gradients of a compact, continuous spline in one walk along the keys.
//
// Tracks are mirrored, as where walk.cu sums over the queries for the keys: a query is a source at every node, and the
// keys that have passed it there are those behind. Its own gradient is the sum over the nodes of the slope's steps
// there, times the inner product of its row with those of all keys that are not behind, or, as these steps add up to
// zero, less that of all keys before. So a source that is added to the sums of the keys is multiplied with the sum of
// the keys' rows so far, and none is read once more for the queries.
//
// The keys' rows are summed from the beginning of a leg of a run, which leaves them their digits; the rows of whole
// legs between the nodes of a query are for bridge.cu. A tie counts as if the key came first; half of the step is given
// and taken there too, for keys that have some.
//
// Macros: those of track.cu, with SLOPES, and mirrored tracks.

#include "ledger.cu"

static_assert(NODES > 1 && POWERS == 2 && COMPACT && HALVES && SLOPES && !ORDERED && WAY < 0 && sizeof(real) == 4,
              "steps of the slope at several nodes, and none of the value");

// The gradients of queries and keys are added to `by_query` and `by_key`, see `Column`, those of values and weights to
// `by_value (heads, keys, STRIDE)` and `by_weight (heads, keys)`; `grads` and `grad_extra` are those of the sums of the
// queries, and `sums` those of `accumulate` for them, or null if every run is a whole track. `totals (channel blocks,
// heads, dims, legs, WIDTH + 1)` become the sums of the keys of every leg, and `tied (channel blocks, heads, dims, keys
// / 32)`, zero before, gets a bit for every key at a node of a query. Other arguments are as in walk.cu; a run has
// `length` keys, a multiple of the `leg` that its legs have.
extern "C" __global__ void __launch_bounds__(32, RESIDENT)
    trade(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
          const real *values, const real *weights, const real *grads, const real *grad_extra, const double *table,
          const double *taus, double tau, const real *sums, real *by_value, real *by_weight, real *by_key,
          real *by_query, real *totals, unsigned *tied, index_t heads, index_t count, index_t number, index_t dims,
          index_t length, index_t leg, const Winding *windings) {
    __shared__ Event events[ROOM + 2 * CHUNK];
    __shared__ Aim aims[32];
    alignas(16) __shared__ Row slots[32 * ACROSS];
    __shared__ Part parts[TOGETHER];
    // where on its line a source is
    __shared__ int spots[ALONG ? ROOM : 1];
    // for loops over the nodes that are not unrolled
    __shared__ Side nodes;
    __shared__ int places[NODES];
    int lane = threadIdx.x;
    index_t channels = blockIdx.y, runs = (count + length - 1) / length;
    index_t run = blockIdx.x % runs, d = blockIdx.x / runs % dims, p = blockIdx.x / runs / dims;
    if (is_wound(windings, p * dims + d)) return;
    Rows query_rows(grads + p * number * STRIDE + channels * WIDTH, lane);
    Rows key_rows(values + p * count * STRIDE + channels * WIDTH, lane);
    Rows output_rows(by_value + p * count * STRIDE + channels * WIDTH, lane);
    Scalars query_scalars(grad_extra, p * number), key_scalars(weights, p * count);
    by_weight += p * count;
    Column key_column(by_key, key_places, p, count, d, dims), query_column(by_query, query_places, p, number, d, dims);
    Side side;
    side.read(table, taus ? taus[p] : tau, false);
    if (lane == 0) nodes = side;
    Line keys(key_places, key_order, p * dims + d, count, true);
    Line queries(query_places, query_order, p * dims + d, number, true);
    real support = side.node[NODES - 1] - side.node[0], span = support / 4;

    int at = int(run * length), end = min(at + int(length), keys.count);
    // how many queries have been passed, at every node, and what they give around `origin`
    int passed[NODES];
    Numbers<double> state;
    // of the keys of this leg so far
    double key_state[VEC] = {}, key_extra = 0.0;
    int leg_end = min(at + int(leg), end);
    tied += ((channels * heads + p) * dims + d) * ((count + 31) / 32);
    totals += (((channels * heads + p) * dims + d) * ((count + leg - 1) / leg) + run * (length / leg)) * (WIDTH + 1);
    // of the key before
    real behind = at ? keys.place(at - 1) : -infinity();
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < NODES; j++) {
        int place = at ? first_without(0, queries.count,
                                       [&](int i) { return nodes.passed(j, false, behind, queries.place(i)); })
                       : 0;
        if (lane == 0) places[j] = place;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < NODES; j++) passed[j] = places[j];
    real origin = keys.place(at), renewed = origin;

    // Sum what has been passed, with the help of the moments of blocks; sources behind the last node cancel.
    auto begin = [&]() {
        state.clear();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            if (lane == 0) places[j] = passed[j];
        }
        __syncwarp();
        index_t blocks = (number + BLOCK - 1) / BLOCK;
        const real *before = sums ? sums + ((channels * heads + p) * dims + d) * moment_places(blocks) * SIZE : nullptr;
#pragma unroll 1
        for (int j = 0; j < NODES - 1; j++) {
            begin_window(state, before, queries, query_rows, query_scalars, nodes, j, origin, blocks, places[NODES - 1],
                         places[j], reinterpret_cast<Source *>(events), lane);
        }
        __syncwarp();
    };

    // What the next batch begins with is on its way while the last one is walked, see walk.cu.
    real next_place, next_t[NODES][SPREAD];
    int next_index;
    auto fetch = [&]() {
        next_place = at + lane < end ? keys.place(at + lane) : infinity();
        next_index = at + lane < end ? keys.index(at + lane) : 0;
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            int n = passed[j] + lane * SPREAD;
            // mostly all are there, for lanes that need not look
            bool whole = !__any_sync(ALL, passed[j] + 32 * SPREAD > queries.count);
            if (whole) {
#pragma unroll
                for (int k = 0; k < SPREAD; k++) next_t[j][k] = queries.place(n + k);
            } else {
#pragma unroll
                for (int k = 0; k < SPREAD; k++)
                    next_t[j][k] = n + k < queries.count ? queries.place(n + k) : infinity();
            }
        }
    };

    // The next keys and, at every node, the next sources. Alone, sources that the next key has passed, or all if there
    // is none, are multiplied and not added; returns false if there is none of them.
    auto batch = [&](bool alone) {
        real s = next_place;
        int target = next_index;
        bool wanted = at + lane < end;
        // how many sources a key has passed; one that may have passed more than there is room for waits
        bool in = at + lane < leg_end && !alone && s - origin <= span, equal = false;
        int rank[NODES], all = 0, busy = -1;
        // Below this sources are passed whatever rounding did to the bound, and up to twice as far they may be.
        auto doubt = [&](int j) { return real(1.2e-7) * (abs(s - side.node[j]) + abs(side.node[j])); };
        auto before = [&](int j, real t) { return t < s - side.node[j] - doubt(j); };
        // the lanes whose last source is; of all nodes side by side, as each step waits for the one before
        int lanes[NODES] = {};
#pragma unroll
        for (int step = 16; step; step >>= 1) {
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                if (before(j, __shfl_sync(ALL, next_t[j][SPREAD - 1], lanes[j] + step - 1))) lanes[j] += step;
            }
        }
        bool unsure = false;
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            int left = queries.count - passed[j], most = min(left, 32 * SPREAD);
            // the first source that is not: of the lane that is left, or behind it
            real next = __shfl_sync(ALL, next_t[j][SPREAD - 1], lanes[j]);
            bool whole = before(j, next);
            rank[j] = SPREAD * lanes[j] + (whole ? SPREAD : 0);
#pragma unroll
            for (int k = SPREAD - 2; k >= 0; k--) {
                real t = __shfl_sync(ALL, next_t[j][k], lanes[j]);
                if (!before(j, t))
                    next = t;
                else if (!whole)
                    rank[j]++;
            }
            rank[j] = wanted ? min(rank[j], most) : most;
            unsure = unsure || (wanted && rank[j] < most && next <= s - side.node[j] + doubt(j));
        }
        if (__any_sync(ALL, unsure)) {
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                int most = min(queries.count - passed[j], 32 * SPREAD);
                auto there = [&](int i) { return queries.place(passed[j] + i); };
                while (unsure && rank[j] < most && side.passed(j, false, s, there(rank[j]))) rank[j]++;
                equal = equal || (unsure && rank[j] < most && side.beyond(j, s, there(rank[j])) == real(0));
            }
            __syncwarp();
        }
#pragma unroll
        for (int j = NODES - 1; j >= 0; j--) {
            all += rank[j];
            in = in && !(rank[j] >= 32 * SPREAD && queries.count - passed[j] > 32 * SPREAD);
            // a node with sources for the first key
            if (__shfl_sync(ALL, rank[j], 0)) busy = j;
        }
        in = in && all <= ROOM;
        // those before the first that waits
        unsigned waiting = ~__ballot_sync(ALL, in);
        int taken = waiting ? __ffs(waiting) - 1 : 32;
        in = lane < taken;
        if (taken == 0 && busy < 0) return false;
        if (__any_sync(ALL, in && equal)) {
            if (in && equal) atomicOr(tied + (at + lane) / 32, 1u << (at + lane) % 32);
        }

        // a key with few sources in its window is summed by itself
        int low = passed[NODES - 1] + rank[NODES - 1], window = passed[0] + rank[0] - low;
        unsigned listed = __ballot_sync(ALL, in), few = __ballot_sync(ALL, in && window <= FEW);
        // of the extra scalar: the sum and its derivative, and the keys so far
        real y = in ? s - origin : real(0), extra_slope = real(state.extra[1]);
        real extra = real(state.extra[0]) + y * extra_slope, scalar = in ? key_scalars[target] : real(0);
        real key_sums = scan(scalar, lane), key_sum = real(key_extra);
        __syncwarp();
        if (in) aims[lane] = {y, few >> lane & 1 ? ~target : target};
#pragma unroll
        for (int i = 0; i < 32; i += CHUNK) {
            if (i >= taken) break;
#pragma unroll
            for (int k = i; k < i + CHUNK; k++) {
                begin_copy<sizeof(Row)>(slots + k * ACROSS + lane, key_rows.at(__shfl_sync(ALL, target, k)));
            }
        }

        // how many sources of every node a key has passed, a byte each; without any key, those of one node that the
        // first has passed
        unsigned ranks[(NODES + 3) / 4] = {};
        if (taken == 0) all = 0;
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            if (taken == 0) rank[j] = j == busy ? rank[j] : 0, all += rank[j];
            ranks[j / 4] |= unsigned(rank[j]) << j % 4 * 8;
        }
        // the list of sources, each before the first key that has passed it: lanes have both in their common order
        int total = __shfl_sync(ALL, all, max(taken - 1, 0)), keys_so_far = 0, spot = all + lane;
        auto look = [&](int first) {
            Found found;
            unsigned bits = __reduce_or_sync(ALL, in && spot >= first && spot < first + 32 ? 1u << (spot - first) : 0u);
            int before = keys_so_far + __popc(bits & ((1u << lane) - 1)), behind = max(before - 1, 0), source = 0;
            keys_so_far += __popc(bits);
            found.before = before;
            found.where = first + lane - before;
            found.here = !(bits >> lane & 1) && found.where < total;
            // of the sources between the last key and the next, in the order of their nodes
            int last = __shfl_sync(ALL, all, behind), rest = found.where - (before ? last : 0);
            unsigned passed_before = 0, between = 0;
            bool open = true;
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                if (j % 4 == 0) {
                    passed_before = __shfl_sync(ALL, ranks[j / 4], behind);
                    if (!before) passed_before = 0;
                    between = __shfl_sync(ALL, ranks[j / 4], min(before, 31)) - passed_before;
                }
                if (open) {
                    source = passed[j] + int(passed_before >> j % 4 * 8 & 255u) + rest;
                    found.node = side.node[j], found.step = side.below[j][1];
                }
                int some = int(between >> j % 4 * 8 & 255u);
                open = open && rest >= some;
                rest -= some;
            }
            found.spot = source;
            found.place = found.here ? queries.place(source) : real(0);
            found.index = found.here ? queries.index(source) : 0;
            return found;
        };
        real sums_so_far[SUMS] = {};
        Found next_found = look(0);
#pragma unroll 1
        for (int first = 0; first < total + taken; first += 32) {
            Found found = next_found;
            real own = found.here ? query_scalars[found.index] : real(0);
            // what is read is on its way while another one is listed
            if (first + 32 < total + taken) next_found = look(first + 32);
            real weight[SUMS] = {found.step * (origin - found.place - found.node), found.step};
            real keys_before = __shfl_sync(ALL, key_sums, max(found.before - 1, 0));
            if (found.here) {
                events[found.where].index = found.index;
                if (ALONG) spots[found.where] = found.spot;
                events[found.where].extra = own * (found.before ? key_sum + keys_before : key_sum);
            }
            // the extra scalar of the keys
            int mine = spot - first;
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                if (found.here) events[CHUNK + found.where].weight[l] = weight[l];
                real sum = scan(found.here ? own * weight[l] : real(0), lane);
                real part = sums_so_far[l] + __shfl_sync(ALL, sum, max(min(mine, 31), 0));
                if (mine >= 0 && mine < 32) extra += l ? y * part : part, extra_slope += l ? part : real(0);
                sums_so_far[l] += __shfl_sync(ALL, sum, 31);
            }
        }
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            if (!alone) state.extra[l] += double(sums_so_far[l]);
        }
#pragma unroll
        for (int j = 0; j < NODES; j++) passed[j] += __shfl_sync(ALL, rank[j], max(taken - 1, 0));
        key_extra += double(__shfl_sync(ALL, key_sums, 31));
        if (taken) behind = __shfl_sync(ALL, s, taken - 1);
        int key_at = at + lane;
        at += taken;
        fetch();
        if (lane < 2 * CHUNK) events[total + lane].index = 0;
        if (lane < CHUNK) {
#pragma unroll
            for (int l = 0; l < SUMS; l++) events[total + CHUNK + lane].weight[l] = real(0);
        }
        wait_for_copies();
        __syncwarp();

        Numbers<real> base = rounded(state, lane), local;
        local.clear();
        real key_rows_so_far[VEC], key_local[VEC] = {};
#pragma unroll
        for (int c = 0; c < VEC; c++) key_rows_so_far[c] = __shfl_sync(ALL, real(key_state[c]), lane);
        // of the keys in their order, those behind which another one has passed as many sources
        int following = __shfl_down_sync(ALL, all, 1);
        unsigned together = __ballot_sync(ALL, lane + 1 < taken && following == all);
        Cursor<Aim> next(aims, 0), last(aims, taken);
        Cursor<Row> slot_of_next(slots, lane);
        auto write = [&]() {
            Aim to = next.here();
            next.step(1);
            Row &slot = slot_of_next.here();
            slot_of_next.step(ACROSS);
            Row row = slot;
            real sum[VEC], product = real(0);
#pragma unroll
            for (int c = 0; c < VEC; c++) {
                real slope = base.at[1][c] + local.at[1][c];
                sum[c] = base.at[0][c] + local.at[0][c] + to.distance * slope;
                product += slope * row.at[c];
                key_rows_so_far[c] += row.at[c];
                key_local[c] += row.at[c];
            }
            if (to.index >= 0) add_to(*output_rows.at(to.index), sum);
            // what the lanes have is summed below, all keys side by side
            slot.at[0] = product;
        };
        auto due = [&](int first) {
            return __reduce_or_sync(ALL, in && all >= first && all < first + 32 ? 1u << (all - first) : 0u);
        };
        // Inner products of the TOGETHER sources from `first` on, of which there are `some`: two lanes have one.
        auto deliver = [&](int first, int some) {
            __syncwarp();
            int mine = lane / 2;
            // four sums, which need not wait for each other
            real four[4] = {};
#pragma unroll
            for (int i = 0; i < 16; i++) four[i % 4] += parts[mine].of[lane % 2 * 16 + i];
            real product = (four[0] + four[1]) + (four[2] + four[3]);
            product += __shfl_xor_sync(ALL, product, 1);
            if (lane % 2 == 0 && mine < some) {
                Event own = events[first + mine];
                if (channels == 0) product += own.extra;
                add_to(query_column.of(queries, ALONG ? spots[first + mine] : 0, own.index),
                       -events[first + CHUNK + mine].weight[1] * product);
            }
            __syncwarp();
        };
        int some = __reduce_max_sync(ALL, total);
        if (some) {
            // a ring: the place of a row that has been added is for the one CHUNK behind it
            Row row[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) row[i] = query_rows.load(events[i].index);
            Event ahead = events[CHUNK];
            unsigned bits = 0;
            for (int first = 0; first < some; first += CHUNK, bits >>= CHUNK) {
                if (first % 32 == 0) bits = due(first);
                Cursor<Part> part(parts, first % TOGETHER);
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    if (bits & 1u << i) {
                        bool more = true;
                        while (more) {
                            write();
                            more = together & 1;
                            together >>= 1;
                        }
                    }
                    Event now = ahead;
                    ahead = events[first + CHUNK + i + 1];
                    local.add_row(now.weight, row[i]);
                    real product = real(0);
#pragma unroll
                    for (int c = 0; c < VEC; c++) product += key_rows_so_far[c] * row[i].at[c];
                    (&part.here())[i].of[lane] = product;
                    row[i] = query_rows.load(now.index);
                }
                int done = first + CHUNK, start = first / TOGETHER * TOGETHER;
                if (done % TOGETHER == 0 || done >= some) deliver(start, some - start);
            }
        }
        while (next.before(last)) write();
        if (!alone) state.add_rows(local);
#pragma unroll
        for (int c = 0; c < VEC; c++) key_state[c] += double(key_local[c]);
        __syncwarp();
        real product = real(0);
        if (in) {
            real four[4] = {};
#pragma unroll
            for (int i = 0; i < 32; i++) four[i % 4] += slots[lane * ACROSS + i].at[0];
            product = (four[0] + four[1]) + (four[2] + four[3]);
        }
        while (few) {
            int which = __ffs(few) - 1, first = __shfl_sync(ALL, low, which), index = __shfl_sync(ALL, target, which);
            int stop = first + __shfl_sync(ALL, window, which);
            real spot = __shfl_sync(ALL, s, which), result = real(0);
            Row other = key_rows.load(index), row;
            real sum[VEC] = {}, sum_extra = real(0), sum_slope = real(0);
#pragma unroll 4
            for (int n = first; n < stop; n++) {
                int source = queries.index(n);
                real t = queries.place(n), own = query_scalars[source], weight = real(0), derivative = real(0);
#pragma unroll
                for (int j = 0; j < NODES; j++) {
                    if (!nodes.passed(j, false, spot, t)) continue;
                    weight += nodes.below[j][1] * (spot - t - nodes.node[j]);
                    derivative += nodes.below[j][1];
                }
                row = query_rows.load(source);
#pragma unroll
                for (int c = 0; c < VEC; c++) {
                    sum[c] += weight * row.at[c];
                    result += derivative * row.at[c] * other.at[c];
                }
                sum_extra += weight * own;
                sum_slope += derivative * own;
            }
            add_to(*output_rows.at(index), sum);
            result = sum_lanes(result);
            if (lane == which) extra = sum_extra, extra_slope = sum_slope, product = result;
            few &= few - 1;
        }
        if (in) {
            // the extra scalar belongs to the first block of channels
            if (channels == 0) product += extra_slope * scalar;
            // a track is mirrored, and so is its slope
            add_to(key_column.of(keys, key_at, target), -product);
            if (channels == 0) add_to(by_weight + target, extra);
        }
        __syncwarp();
        return true;
    };

    auto end_leg = [&]() {
#pragma unroll
        for (int c = 0; c < VEC; c++) {
            totals[c * 32 + lane] = real(key_state[c]);
            key_state[c] = 0.0;
        }
        if (lane == 0) totals[WIDTH] = real(key_extra);
        key_extra = 0.0;
        totals += WIDTH + 1;
    };

    fetch();
    bool fresh = true;
    // until all keys are walked, and behind the last one all sources multiplied
    while (at < end || end == keys.count) {
        bool alone = at == end;
        if (!alone) {
            real from = __shfl_sync(ALL, next_place, 0);
            // sources in between have left the window of all keys before and may be far from the next
            alone = from - behind > support;
            // what has left the window cancels but for rounding, which grows with the distance: sum it afresh
            fresh = fresh || from - renewed > FAR * support;
            if (!alone && fresh) {
                origin = renewed = from;
                begin();
                fresh = false;
            } else if (!alone && from != origin) {
                move_state(state, double(from) - double(origin), side.rate);
                origin = from;
            }
        }
        if (batch(alone)) {
            if (alone || at < leg_end || at == end) continue;
            end_leg();
            leg_end = min(at + int(leg), end);
            continue;
        }
        if (at == end) break;
        // none is left in between
        behind = infinity(), fresh = true;
    }
    end_leg();
}
