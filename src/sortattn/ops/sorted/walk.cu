// The walker on the GPU: sums over sorted points of the sides of a sided kernel, see walk.py for the mathematics.
//
// A line is one dimension of one head, its coordinates in sorted order; a track is a line seen from one side. One warp
// walks along a run of the sorted targets of a track, a lane having a few channels of every row. A run that starts in
// the middle needs what the sources before give: `summarise` sums the moments of blocks of sources, and `accumulate`
// carries them along each track in double precision, or, where only those in a window count, sums groups of blocks.
//
// A walk goes by batches of at most thirty-two targets and, at every node, thirty-two sources. All that is a number of
// its own (the order, weights, the extra scalar) is found by the lanes side by side, one item each, and left in shared
// memory as a list of sources and one of targets. Only then do all lanes go through the lists, row by row: rows of
// sources are added, those of targets written once the sources they have passed are in. Coordinates are only ever
// subtracted, and distances are taken from an origin close by, so an offset of the inputs costs nothing.
//
// Sources are those below the target. For transposed sums tracks are mirrored: read from the other end, with all
// coordinates negated. Where sources above count as well (BOTH), a source that is passed leaves them as it joins those
// below. What is left of them is a difference that grows as the targets come closer, so it is summed afresh before it
// has lost digits. Where ties count half, every node is there twice with half the coefficients, once with the tie and
// once without; in batches with few ties a node is there once, and a tie is given its half by itself.
//
// A folded line has two tracks, one from zero upwards and one from zero downwards, see `kernels.Terms`.

#include "begin.cu"

// ---- the walk

// Sum the sources for a run of sorted targets.
//
// They are added to `out (heads, targets, STRIDE)` and `out_extra (heads, targets)`. With PRODUCTS they are multiplied
// instead with such rows `others` and scalars `other_extra`, and the inner products are added to `products (heads,
// targets, dims)`. With SLOPES the sums are added, and their derivatives by the targets multiplied.
// Weights and bandwidths may be null, for ones and for `tau`. Bits of `mirrored`, `closed` (ties count) and `negated`
// are for the sides; a block has one block of channels, from `first_part` on. `sums` are those of `accumulate`, or null
// if every run is a whole track; lines that are wound, if `windings` are not null, are left out.
extern "C" __global__ void __launch_bounds__(32, RESIDENT)
    walk(const real *source_places, const int *source_order, const real *target_places, const int *target_order,
         const real *rows, const real *weights, const double *table, const double *taus, double tau, const real *sums,
         real *out, real *out_extra, const real *others, const real *other_extra, real *products, index_t heads,
         index_t sides, index_t count, index_t number, index_t dims, index_t mirrored, index_t closed, index_t negated,
         index_t length, index_t first_dim, index_t some_dims, index_t first_part, const Winding *windings) {
    // where a source has its index, the one CHUNK before it has its weights: what is needed at a time is read at a
    // time; behind the last source of a list stand some with a weight of zero
    __shared__ Source sources[LIST + 2 * CHUNK];
    __shared__ Target targets[32];
    // rows of targets that sums are multiplied with
    alignas(16) __shared__ Row slots[MULTIPLIED ? 32 * 32 : 1];
    __shared__ unsigned long long arrival;
    // for loops over the nodes that are not unrolled
    __shared__ Side nodes;
    __shared__ int places[KEPT];
    int lane = threadIdx.x;
    index_t channels = first_part + blockIdx.y;
    index_t runs = (number + length - 1) / length;
    int run = int(blockIdx.x % runs);
    index_t d = first_dim + blockIdx.x / runs % some_dims, rest = blockIdx.x / runs / some_dims;
    index_t side_number = rest % sides, p = rest / sides;
    // by coil.cu
    if (is_wound(windings, p * dims + d)) return;
    Rows source_rows(rows + p * count * STRIDE + channels * WIDTH, lane);
    Rows other_rows(others + p * number * STRIDE + channels * WIDTH, lane);
    Rows output_rows(out + p * number * STRIDE + channels * WIDTH, lane);
    out_extra += p * number;
    Scalars target_scalars(other_extra, p * number);
    Copies copies(&arrival, lane);
    Scalars scalars(weights, p * count);
    bool negative = negated >> side_number & 1;
    Side side;
    side.read(table + side_number * TABLE, taus ? taus[p] : tau, closed >> side_number & 1);
    if (lane == 0) nodes = side;
    Line source_line(source_places, source_order, p * dims + d, count, mirrored >> side_number & 1);
    Line target_line(target_places, target_order, p * dims + d, number, mirrored >> side_number & 1);
    if (FOLDED) {
        source_line.keep_half(false);
        // a target at zero is on both sides of an odd kernel or derivative, and an even one vanishes there
        target_line.keep_half(FOLDED < 0 || SLOPES);
    }
    real support = side.node[NODES - 1] - side.node[0];
    // a batch reaches no further than this: an exponential neither overflows nor loses digits, and little cancels
    real span = RATE ? real(BOTH ? REACH : 4) / side.rate : COMPACT ? support / 4 : infinity();

    int at = run * int(length), end = min(at + int(length), target_line.count);
    if (at >= end) return;
    // how many sources have been passed, at every node, and what they give around `origin`
    int passed[KEPT];
    Numbers<double> state;
    real origin = target_line.place(at), renewed = origin;

    // Go through the first `some` sources of the list; `due(first)` says bit by bit before which of thirty-two of them
    // `write()` is to be called. Both are the same in all lanes, and known to be: without divergence to expect a branch
    // takes two instructions less.
    auto add_listed = [&](int some, Numbers<real> &sum, auto due, auto write) {
        if (!some) return;
        // a ring: the place of a row that has been added is for the one CHUNK behind it
        Row row[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) row[i] = source_rows.load(sources[i].index);
        // read one source ahead
        Source ahead = sources[CHUNK];
        unsigned bits = 0;
        for (int first = 0; first < some; first += CHUNK, bits >>= CHUNK) {
            if (first % 32 == 0) bits = due(first);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                if (bits & 1u << i) write();
                Source next = ahead;
                ahead = sources[first + CHUNK + i + 1];
                sum.add_row(next.weight, row[i]);
                row[i] = source_rows.load(next.index);
            }
        }
    };

    auto absorb_some = [&](int first, int last, auto weigh) {
        absorb(state, source_line, source_rows, scalars, origin, first, last, sources, lane, weigh);
    };

    // Begin in the middle: find the places and sum what has been passed, with the help of the moments of blocks.
    // Sources behind the last node of a compact kernel cancel and are left out.
    auto begin = [&]() {
        state.clear();
#pragma unroll 1
        for (int j = 0; j < KEPT; j++) {
            int node = j / EACH_NODE;
            bool tie = HALVES ? j % 2 == 0 : nodes.closed;
            int place = first_without(0, source_line.count,
                                      [&](int i) { return nodes.passed(node, tie, origin, source_line.place(i)); });
            if (lane == 0) places[j] = place;
        }
        __syncwarp();
        index_t blocks = (count + BLOCK - 1) / BLOCK, track = (p * sides + side_number) * dims + d;
        const real *before = sums + (channels * heads * sides * dims + track) * moment_places(blocks) * SIZE;
        if (FOLDED && sums) {
            take_away_all(state, before + blocks * SIZE, nodes, origin, lane);
        }
        if constexpr (BOTH) {
            begin_between(state, before, source_line, source_rows, scalars, nodes, origin, places[strict(0)],
                          places[loose(0)], sources, lane);
        }
        // the sources of a folded line at zero, those passed at every node, and their ties
#pragma unroll 1
        for (int part = FOLDED && !sums ? -1 : 0; part < (BOTH ? 0 : KEPT); part++) {
            int j = max(part, 0) / EACH_NODE, first = COMPACT ? places[KEPT - 1] : 0, last = places[strict(j)];
            bool ties = HALVES && part % 2 == 1;
            auto distance = [&](int j, real center) { return double(origin) - double(center) - double(nodes.node[j]); };
            if (part < 0) {
                last = source_line.count;
            } else if (ties) {
                first = last, last = places[loose(j)];
            } else if (COMPACT) {
                begin_window(state, sums ? before : nullptr, source_line, source_rows, scalars, nodes, j, origin,
                             blocks, first, last, sources, lane);
                continue;
            } else if (sums) {
                // what is left of the last block is absorbed
                int high = last / BLOCK;
                if (high > 0) {
                    // behind the last source there is no block
                    high = min(high, (source_line.count - 1) / BLOCK);
                    first = high * BLOCK;
                    if (high > 0) {
                        add_moments<0>(state, before + high * SIZE, distance(j, source_line.place(first)), nodes.rate,
                                       nodes.below[j], lane);
                    }
                }
            }
            absorb_some(first, last, [&](int, real t, real(&weight)[SUMS]) {
                nodes.weights(j, origin - (part < 0 ? real(0) : t) - nodes.node[j], weight,
                              part < 0 ? real(-1)
                              : ties   ? real(0.5)
                                       : real(1),
                              real(0));
            });
        }
        // the same in all lanes, and known to be
#pragma unroll
        for (int j = 0; j < KEPT; j++) passed[j] = __shfl_sync(ALL, places[j], 0);
        __syncwarp();
    };

    // What the next batch begins with is on its way while the last one is walked: targets, and at every node sources,
    // SPREAD neighbours a lane, and the index of one.
    real next_s, next_t[NODES][SPREAD];
    int next_target, next_source[NODES];
    auto fetch = [&]() {
        next_s = at + lane < end ? target_line.place(at + lane) : infinity();
        next_target = at + lane < end ? target_line.index(at + lane) : 0;
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            int i = passed[strict(j)] + lane;
            next_source[j] = i < source_line.count ? source_line.index(i) : 0;
#pragma unroll
            for (int k = 0; k < SPREAD; k++) {
                int n = passed[strict(j)] + lane * SPREAD + k;
                next_t[j][k] = n < source_line.count ? source_line.place(n) : infinity();
            }
        }
    };

    // A batch. Lane by lane its target: whether it is in, its place and index, how many sources it has passed in all,
    // from where on and how many lie in the window of a compact kernel, and where in the list it stands; for the extra
    // scalar the sum and, with SLOPES, its derivative; and the sum, the slope and the product that ties have been
    // denied so far, with nodes that are there once.
    bool in;
    real s, extra, extra_slope, tie_extra, tie_slope, tie_product;
    int target, all, low, window, place;
    // Targets with ties, those with few sources in a window, which are left for later, and those of the list; how many
    // these are, how many targets are done with, and how many sources there are in the list.
    unsigned ties, few, listed;
    int written, taken, total;

    // The next targets and, at every node, the next sources, as lists; returns false, having done nothing, if a node is
    // there once and there are many ties.
    auto collect = [&](auto each) {
        constexpr int EACH = decltype(each)::value, NN = NODES * EACH;
        // the doubled way of many nodes is rare, and takes the compiler longer than all else unless its nodes are
        // loops; these have copies, as what a loop indexes is in no register
        constexpr bool LOOPED = EACH == 2 && NODES > 3;
        constexpr int COPIES = LOOPED ? 1 : NN;
        int copied[LOOPED ? KEPT : 1];
        auto &place_at = choose<LOOPED>(copied, passed);
        const Side &kernel = choose<LOOPED>(nodes, side);
        if constexpr (LOOPED) {
#pragma unroll
            for (int j = 0; j < KEPT; j++) copied[j] = passed[j];
        }
        // ties are rare enough to look for them one by one
        constexpr int WIDE = EACH == 1 ? SPREAD : 1;
        auto passes = [&](int j, real s, real t) {
            return kernel.passed(j / EACH, EACH == 2 ? j % 2 == 0 : BOTH && !HALVES && kernel.closed, s, t);
        };
        // with several nodes places are found by a comparison, which rounding may have moved by a few
        constexpr bool ROUGH = NODES > 1 && EACH == 1;
        auto slot = [](int j) { return EACH == 1 ? strict(j) : j; };
        s = next_s, target = next_target;
        bool wanted = at + lane < end;
        // how many sources a target has passed; one that may have passed more than there is room for waits
        bool tied = false;
        in = wanted && s - (BOTH ? renewed : origin) <= span;
        int rank[NN], busy = NN - 1;
        all = 0;
#pragma unroll COPIES
        for (int j = NN - 1; j >= 0; j--) {
            int left = source_line.count - place_at[slot(j)];
            // the last that a lane has
            real mark = infinity();
            if constexpr (!LOOPED) mark = next_t[j / EACH][SPREAD - 1];
            if (EACH == 2 && (SPREAD > 1 || j % 2 == 0)) {
                mark = lane < left ? source_line.place(place_at[slot(j)] + lane) : infinity();
            }
            real bound = s - kernel.node[j / EACH];
            auto before = [&](real t) { return ROUGH ? t < bound : passes(j, s, t); };
            int lanes = count_before(mark, before);
            rank[j] = WIDE * lanes;
            // the others of the lane behind
#pragma unroll
            for (int k = 0; k < WIDE - 1; k++) {
                real t = __shfl_sync(ALL, next_t[j / EACH][k], min(lanes, 31));
                if (lanes < 32 && before(t)) rank[j]++;
            }
            if (!wanted) rank[j] = min(left, 32 * WIDE);
            // where the sides of a node differ rounding must not decide
            real next = infinity();
            if (HALVES && ROUGH) {
                int most = wanted ? min(left, 32 * WIDE) : 0;
                auto there = [&](int i) { return source_line.place(place_at[slot(j)] + i); };
                next = rank[j] < most ? there(rank[j]) : infinity();
                real last = wanted && rank[j] ? there(rank[j] - 1) : -infinity();
                if (__any_sync(ALL, wanted && (passes(j, s, next) || !passes(j, s, last)))) {
                    while (wanted && rank[j] && !passes(j, s, there(rank[j] - 1))) rank[j]--;
                    while (rank[j] < most && passes(j, s, there(rank[j]))) rank[j]++;
                    next = rank[j] < most ? there(rank[j]) : infinity();
                    __syncwarp();
                }
            }
            all += rank[j];
            // beyond the last source of a folded line a batch begins
            bool more = (rank[j] >= 32 * WIDE && left > 32 * WIDE) || (FOLDED && rank[j] > 0 && rank[j] == left);
            in = in && !more;
            // a node with sources for the first target
            if (__shfl_sync(ALL, rank[j], 0)) busy = j;
            if (HALVES && EACH == 1) {
                if (!ROUGH) next = __shfl_sync(ALL, mark, min(rank[j], 31));
                tied = tied || (wanted && rank[j] < min(left, 32 * WIDE) && kernel.beyond(j, s, next) == real(0));
            }
        }
        ties = HALVES && EACH == 1 ? __ballot_sync(ALL, tied) : 0;
        if (__popc(ties) > SETTLED) return false;
        in = in && all <= LIST;
        // those before the first that waits
        unsigned waiting = ~__ballot_sync(ALL, in);
        taken = waiting ? __ffs(waiting) - 1 : 32;
        in = lane < taken;

        real factor[SUMS], slope[SUMS];
        extra = extra_slope = real(0);
        nodes.factors(in ? s - origin : real(0), factor, slope,
                      !in                      ? real(0)
                      : FOLDED && s == real(0) ? real(0.5)
                                               : real(1));
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            extra += factor[l] * real(state.extra[l]);
            extra_slope += slope[l] * real(state.extra[l]);
        }

        low = passed[KEPT - 1] + rank[NN - 1], window = passed[0] + rank[0] - low;
        few = COMPACT ? __ballot_sync(ALL, in && window <= FEW) : 0;
        listed = __ballot_sync(ALL, in) & ~few;
        tie_extra = tie_slope = tie_product = real(0);
        unsigned unsettled = ties & listed;
        while (HALVES && EACH == 1 && unsettled) {
            int which = __ffs(unsettled) - 1, index = __shfl_sync(ALL, target, which);
            real spot = __shfl_sync(ALL, s, which), result = real(0), sum_extra = real(0), sum_slope = real(0);
            real sum[VEC] = {};
            Row other = {};
            if (MULTIPLIED) other = other_rows.load(index);
#pragma unroll
            for (int j = 0; j < NN; j++) {
                int n = passed[slot(j)] + __shfl_sync(ALL, rank[j], which);
                // half of what a source just below gives more than one just above
                real value = real(0.5) * (nodes.below[j / EACH][0] - (BOTH ? nodes.above[0] : real(0)));
                real derivative = RATE         ? nodes.slope_below[0] - nodes.slope_above[0]
                                  : POWERS > 1 ? nodes.below[j / EACH][POWERS > 1]
                                               : real(0);
                derivative = SLOPES ? real(0.5) * derivative : value;
                for (; n < source_line.count && nodes.beyond(j / EACH, spot, source_line.place(n)) == real(0); n++) {
                    int source = source_line.index(n);
                    Row row = source_rows.load(source);
#pragma unroll
                    for (int c = 0; c < VEC; c++) {
                        sum[c] += value * row.at[c];
                        result += derivative * row.at[c] * other.at[c];
                    }
                    sum_extra += value * scalars[source];
                    sum_slope += derivative * scalars[source];
                }
            }
            if (ADDED) add_to(*output_rows.at(index), sum);
            if (MULTIPLIED) result = sum_lanes(result);
            if (lane == which) tie_extra = sum_extra, tie_slope = sum_slope, tie_product = result;
            unsettled &= unsettled - 1;
        }
        place = __popc(listed & ((1u << lane) - 1)), written = __popc(listed);
        __syncwarp();
        if (listed >> lane & 1) {
            targets[place].index = target;
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                targets[place].weight[l] = factor[l];
#if SLOPES
                targets[place].slope[l] = slope[l];
#endif
            }
        }
        if (MULTIPLIED) {
            // from the first lane's channels on
            copies.start(listed, lane, slots + place * 32, other_rows.at(target) - lane);
        }

        // the list of sources: each before the first target that has passed it
        total = 0;
#pragma unroll COPIES
        for (int j = 0; j < NN; j++) {
            // without any target, those of one node that the first has passed
            int some = __shfl_sync(ALL, rank[j], max(taken - 1, 0));
            if (taken == 0 && j != busy) some = 0;
            real sums_before[SUMS];
#pragma unroll
            for (int l = 0; l < SUMS; l++) sums_before[l] = real(0);
            int upcoming = 0;
            if constexpr (!LOOPED) upcoming = next_source[j / EACH];
#pragma unroll 1
            for (int first = 0; first < some; first += 32) {
                int i = first + lane, where = i, source = upcoming;
                bool here = i < some;
                real t;
                if constexpr (!LOOPED) {
                    t = next_t[j / EACH][0];
                    // unsigned, as a signed division takes more instructions
                    unsigned holder = unsigned(i) / SPREAD;
                    if (SPREAD > 1) t = __shfl_sync(ALL, t, holder);
#pragma unroll
                    for (int k = 1; k < SPREAD; k++) {
                        real other = __shfl_sync(ALL, next_t[j / EACH][k], holder);
                        if (unsigned(lane) % SPREAD == k) t = other;
                    }
                }
                if (EACH == 2 && (SPREAD > 1 || j % 2 == 0)) {
                    t = here ? source_line.place(place_at[slot(j)] + i) : real(0);
                    source = here ? source_line.index(place_at[slot(j)] + i) : 0;
                }
                if (i + 32 < some) upcoming = source_line.index(place_at[slot(j)] + i + 32);
                if (NN > 1 && taken > 0) {
                    // the targets before, that is, those which have not passed it
                    int before = count_before(rank[j], [&](int rank) { return rank <= i; });
#pragma unroll COPIES
                    for (int k = 0; k < NN; k++) {
                        if (k == j) continue;
                        // the sources at other nodes of earlier targets, and of the same one those at earlier nodes
                        int last = k < j ? before : before - 1;
                        int others = __shfl_sync(ALL, rank[k], max(min(last, 31), 0));
                        where += last < 0 ? 0 : others;
                    }
                }
                real weight[SUMS], scalar = here ? scalars[source] : real(0), share = EACH == 2 ? real(0.5) : real(1);
                // what joins the sources below leaves those above
                kernel.weights(j / EACH, here ? origin - t - kernel.node[j / EACH] : real(0), weight, share, -share);
                if (here) sources[where].index = source;
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
                    if (here) sources[CHUNK + where].weight[l] = weight[l];
                    // the extra scalar of the targets: sums over the sources of this node that they have passed
                    real sum = scan(here ? scalar * weight[l] : real(0), lane);
                    int mine = min(rank[j] - first, 32);
                    real part = __shfl_sync(ALL, sum, max(mine - 1, 0));
                    if (mine > 0) extra += factor[l] * part, extra_slope += slope[l] * part;
                    sums_before[l] += __shfl_sync(ALL, sum, 31);
                }
            }
#pragma unroll
            for (int l = 0; l < SUMS; l++) state.extra[l] += double(sums_before[l]);
            total += some;
            place_at[slot(j)] += some;
            if (HALVES && EACH == 1) place_at[loose(j)] += some;
        }
        if constexpr (LOOPED) {
#pragma unroll
            for (int j = 0; j < KEPT; j++) passed[j] = copied[j];
        }
        return true;
    };

    // Go through the lists, and fetch what the next batch begins with.
    auto finish = [&]() {
        at += taken;
        fetch();
        if (lane < 2 * CHUNK) sources[total + lane].index = 0;
        if (lane < CHUNK) {
#pragma unroll
            for (int l = 0; l < SUMS; l++) sources[total + CHUNK + lane].weight[l] = real(0);
        }
        if (MULTIPLIED) copies.wait(listed);
        __syncwarp();

        Numbers<real> base = rounded(state, lane), local;
        local.clear();
        // of the targets in their order, those behind which another one has passed as many sources
        bool asked = listed >> lane & 1;
        unsigned later = listed & ~((2u << lane) - 1);
        int following = __shfl_sync(ALL, all, later ? __ffs(later) - 1 : lane);
        unsigned together = __reduce_or_sync(ALL, asked && later && following == all ? 1u << place : 0u);
        Cursor<Target> next(targets, 0), last(targets, written);
        Cursor<Row> slot_of_next(slots, lane);
        auto write = [&]() {
            Target to = next.here();
            next.step(1);
            real sum[VEC], derivative[VEC];
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
#pragma unroll
                for (int c = 0; c < VEC; c++) {
                    real number = base.at[l][c] + local.at[l][c];
                    sum[c] =
                        l == 0 ? (RATE || FOLDED < 0 ? to.weight[0] * number : number) : sum[c] + to.weight[l] * number;
#if SLOPES
                    // without an exponential there is none of a constant
                    if (l == 0)
                        derivative[c] = RATE ? to.slope[0] * number : real(0);
                    else
                        derivative[c] += to.slope[l] * number;
#endif
                }
            }
            if (ADDED) add_to(*output_rows.at(to.index), sum);
            if (MULTIPLIED) {
                Row &slot = slot_of_next.here();
                real product = real(0);
#pragma unroll
                for (int c = 0; c < VEC; c++) product += (SLOPES ? derivative[c] : sum[c]) * slot.at[c];
                // what the lanes have is summed below, all targets side by side
                slot.at[0] = product;
                slot_of_next.step(32);
            }
        };
        auto due = [&](int first) {
            return __reduce_or_sync(ALL, asked && all >= first && all < first + 32 ? 1u << (all - first) : 0u);
        };
        add_listed(__reduce_max_sync(ALL, total), local, due, [&]() {
            bool more = true;
            while (more) {
                write();
                more = together & 1;
                together >>= 1;
            }
        });
        while (next.before(last)) write();
        state.add_rows(local);
        __syncwarp();
        real product = real(0);
        if (MULTIPLIED && listed >> lane & 1) {
            // each lane starts elsewhere, so that they meet in few banks
            for (int i = 0; i < 32; i++) product += slots[place * 32 + (i ^ lane)].at[0];
        }
        while (COMPACT && few) {
            int which = __ffs(few) - 1, first = __shfl_sync(ALL, low, which), index = __shfl_sync(ALL, target, which);
            int last = first + __shfl_sync(ALL, window, which);
            real spot = __shfl_sync(ALL, s, which), result = real(0);
            // with nodes that are there once, ties at the first one are not among those passed
            if (HALVES && ties >> which & 1) {
                while (last < source_line.count && nodes.beyond(0, spot, source_line.place(last)) == real(0)) last++;
            }
            Row other = {}, row;
            if (MULTIPLIED) other = other_rows.load(index);
            real sum[VEC] = {}, sum_extra = real(0), sum_slope = real(0);
#pragma unroll 4
            for (int n = first; n < last; n++) {
                int source = source_line.index(n);
                real t = source_line.place(n), scalar = scalars[source], weight = nodes.value(spot, t);
                real derivative = SLOPES ? nodes.slope(spot, t) : weight;
                row = source_rows.load(source);
#pragma unroll
                for (int c = 0; c < VEC; c++) {
                    sum[c] += weight * row.at[c];
                    if (MULTIPLIED) result += derivative * row.at[c] * other.at[c];
                }
                sum_extra += weight * scalar;
                sum_slope += derivative * scalar;
            }
            if (ADDED) add_to(*output_rows.at(index), sum);
            if (MULTIPLIED) result = sum_lanes(result);
            if (lane == which) extra = sum_extra, extra_slope = sum_slope, product = result;
            few &= few - 1;
        }
        extra += tie_extra, extra_slope += tie_slope, product += tie_product;
        // the extra scalar belongs to the first block of channels
        if (MULTIPLIED && in) {
            if (channels == 0) product += (SLOPES ? extra_slope : extra) * target_scalars[target];
            add_to(products + (p * number + target) * dims + d, negative ? -product : product);
        }
        if (ADDED && in && channels == 0) add_to(out_extra + target, extra);
        __syncwarp();
    };

    bool fresh = true;
    while (at < end) {
        if (!fresh) {
            real from = __shfl_sync(ALL, next_s, 0);
            // what has left the window, or the sources above, cancels but for rounding, which grows with the distance:
            // sum it afresh; by votes, as all lanes go together
            fresh = __any_sync(ALL, (COMPACT && (from - renewed > FAR * support || from - origin > support)) ||
                                        (BOTH && from - renewed > span));
            if (__any_sync(ALL, from != origin) && !fresh) move_state(state, double(from) - double(origin), side.rate);
            origin = from;
        }
        if (fresh) {
            renewed = origin;
            __syncwarp();
            begin();
            fetch();
            fresh = false;
        }
        if (FOLDED && passed[KEPT - 1] == source_line.count) {
            // beyond the last source the kernel is constant
#pragma unroll
            for (int l = FOLDED > 0; l < POWERS; l++) state.clear(l);
        }
        if constexpr (HALVES) {
            bool even = true;
#pragma unroll
            for (int j = 0; j < NODES; j++) even = even && passed[loose(j)] == passed[strict(j)];
            if (!even || !collect(Int<1>())) collect(Int<2>());
        } else {
            collect(Int<1>());
        }
        finish();
    }
}
