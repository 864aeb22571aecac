// The walk along whole tracks by blocks of warps, for sides with a single node: every row of a source is read once.
//
// A stretch is thirty-two neighbouring sources of a track. A warp brings their rows into shared memory and sums them;
// what it is given from the stretches before it hands on with its own sums, and then writes the targets among its
// sources. So the sums go from warp to warp as a baton does, always in the same order, while rows of the next stretches
// are on their way. All warps of a block are there at a time, so each of them gets its turn.
//
// The walk of a folded line begins with all sources as if they were at zero, but negative: halves.cu sums their rows.
// Those at zero give nothing.
//
// Long heads are walked one by one, by a launch each. With EARLY the next one begins before the last blocks of this one
// end, when none of them has more than a part of its track left: earlier, rows of two heads would share the cache.
//
// Macros: those of given.cu, CREW (warps of a block), TEAMS (blocks of a multiprocessor) and EARLY.

#include "given.cu"
#include "stretch.cu"

static_assert(NODES == 1 && !BOTH && !COMPACT && !RATE && !HALVES && FOLDED >= 0 && ADDED && !SLOPES && !ORDERED,
              "sums of polynomials of sources below, where no tie counts half");

// of a track, one of so many parts is left when the next launch may begin
constexpr int LAST = 8;

// What is handed on: the sums of all sources before, around the first one of the last stretch; and whose turn it is.
struct Baton {
    double at[SUMS][VEC][32];
    double extra[SUMS];
    Turn turn;
};

struct alignas(SUMS % 2 ? sizeof(real) : 2 * sizeof(real)) Weights {
    real at[SUMS];
};

// What a warp has: rows of its sources, and lists of targets and of what sources give to each of the sums.
struct alignas(16) Station {
    Given rows[32 * 32];
    Target targets[32];
    Weights weights[32];
};

// Sum the sources for the targets of whole tracks; arguments as in walk.cu, with the `totals` of a folded line.
extern "C" __global__ void __launch_bounds__(32 * CREW, TEAMS)
    relay(const real *source_places, const int *source_order, const real *target_places, const int *target_order,
          const given_t *rows, const real *weights, const double *table, const double *taus, double tau,
          const real *totals, index_t chunks, real *out, real *out_extra, index_t heads, index_t sides, index_t count,
          index_t number, index_t dims, index_t mirrored, index_t closed, index_t first) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Baton baton;
    // where the targets of stretches end: one for each warp, and the one before
    __shared__ int ends[2][CREW], begins[2];
    __shared__ Marks<real> marks;
    int lane = threadIdx.x % 32, warp = own_warp();
    Station &mine = reinterpret_cast<Station *>(shared)[warp];
    index_t channels = blockIdx.y, d = blockIdx.x % dims, side_number = blockIdx.x / dims % sides,
            p = first + blockIdx.x / dims / sides;
    bool flipped = mirrored >> side_number & 1;
    const char *source_rows = piece_of(rows + p * count * STRIDE + channels * WIDTH, lane);
    Rows output_rows(out + p * number * STRIDE + channels * WIDTH, lane);
    Scalars scalars(weights, p * count);
    out_extra += p * number;
    Side side;
    side.read(table + side_number * TABLE, taus ? taus[p] : tau, closed >> side_number & 1);
    Line source_line(source_places, source_order, p * dims + d, count, flipped);
    Line target_line(target_places, target_order, p * dims + d, number, flipped);
    if (FOLDED) {
        // one warp looks for where the sources begin and another one for the targets: each step of a search is a wait
        if (warp == 0) begins[0] = source_line.half(true);
        if (warp == CREW - 1) begins[1] = target_line.half(false);
        __syncthreads();
        source_line.skip(begins[0]), target_line.skip(begins[1]);
    }
    auto target_place = [&](int i) { return target_line.place(i); };
    marks.fill(target_line.count, target_place, infinity());
    baton.turn.begin();
    __syncthreads();
    int stretches = (source_line.count + 31) / 32, late = stretches - stretches / LAST;

    // the sources of the next stretch, and the first one of the stretch before it, on their way while one is walked
    real next_t, next_before;
    int next_source;
    auto fetch = [&](int stretch) {
        int i = stretch * 32 + lane;
        next_t = i < source_line.count ? source_line.place(i) : infinity();
        next_source = i < source_line.count ? source_line.index(i) : 0;
        next_before = stretch && stretch < stretches ? source_line.place((stretch - 1) * 32) : real(0);
    };
    fetch(warp);
    // where the targets of the next stretches of this warp end, found lane by lane
    int found = 0;
    for (int stretch = warp; stretch < stretches; stretch += CREW) {
        if (stretch >= late && stretch < late + CREW) let_next_begin();
        int some = min(32, source_line.count - stretch * 32), turn = stretch / CREW;
        bool there = lane < some, last = stretch + 1 == stretches;
        real t = next_t, origin = __shfl_sync(ALL, t, 0);
        int source = next_source;
        double distance = double(origin) - double(next_before);
        bring(mine.rows, source_rows, source, lane);
        real scalar = there ? scalars[source] : real(0);
        if (turn % 32 == 0) {
            real final = source_line.place(min((stretch + lane * CREW) * 32 + 31, source_line.count - 1));
            found = marks.find(target_line.count, target_place,
                               [&](real s) { return side.passed(0, side.closed, s, final); });
            __syncwarp();
        }
        // those that have not passed the last source
        int end = last ? target_line.count : __shfl_sync(ALL, found, turn % 32);
        if (lane == 0) ends[turn % 2][warp] = end;
        real weight[SUMS], extras[SUMS];
        real share = !there || (FOLDED && t == real(0)) ? real(0) : real(1);
        side.weights(0, there ? origin - t - side.node[0] : real(0), weight, share, real(0));
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            mine.weights[lane].at[l] = weight[l];
            extras[l] = scan(scalar * weight[l], lane);
        }
        fetch(stretch + CREW);
        wait_for_copies();
        __syncwarp();
        Numbers<real> sum;
        sum.clear();
#pragma unroll 8
        for (int i = 0; i < 32; i++) sum.add_row(mine.weights[i].at, widened(mine.rows[i * 32 + lane]));
#pragma unroll
        for (int l = 0; l < SUMS; l++) sum.extra[l] = __shfl_sync(ALL, extras[l], 31);

        Numbers<double> state;
        state.clear();
        if (FOLDED && !stretch) {
            const real *total =
                totals + (channels * heads + p) * chunks * 2 * dims * (WIDTH + 1) + (flipped * dims + d) * (WIDTH + 1);
            real constant[SUMS];
            side.weights(0, origin - side.node[0], constant, real(1), real(0));
            double all[VEC] = {}, extra = 0.0;
            for (index_t chunk = 0; chunk < chunks; chunk++, total += 2 * dims * (WIDTH + 1)) {
#pragma unroll
                for (int c = 0; c < VEC; c++) all[c] += double(total[lane * VEC + c]);
                extra += double(total[WIDTH]);
            }
#pragma unroll
            for (int l = 0; l < SUMS; l++) state.mix(l, all, extra, -double(constant[l]));
        }
        // the baton is taken and handed on
        baton.turn.wait(stretch);
        int at = 0;
        if (stretch) {
            int before = stretch - 1;
            at = ends[before / CREW % 2][before % CREW];
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
#pragma unroll
                for (int c = 0; c < VEC; c++) state.at[l][c] = baton.at[l][c][lane];
                state.extra[l] = baton.extra[l];
            }
            move_state(state, distance, side.rate);
        }
        __syncwarp();
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) {
                baton.at[l][c][lane] = state.at[l][c] + double(sum.at[l][c]);
            }
            if (lane == 0) baton.extra[l] = state.extra[l] + double(sum.extra[l]);
        }
        baton.turn.pass(stretch);

        Numbers<real> base = rounded(state, lane), local;
        local.clear();
        Cursor<Given> next_row(mine.rows, lane);
        Cursor<Weights> next_weights(mine.weights, 0);
        int passed = 0;
        for (; at < end; at += 32) {
            bool wanted = at + lane < end;
            real s = wanted ? target_line.place(at + lane) : infinity();
            int target = wanted ? target_line.index(at + lane) : 0;
            int rank = count_before(t, [&](real t) { return side.passed(0, side.closed, s, t); });
            real factor[SUMS], slope[SUMS], extra = real(0);
            side.factors(wanted ? s - origin : real(0), factor, slope, real(1));
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
                // beyond the last source of a folded line the kernel is constant
                if (FOLDED && last && rank == some && l > 0) factor[l] = real(0);
                real part = __shfl_sync(ALL, extras[l], max(rank - 1, 0));
                extra += factor[l] * (real(state.extra[l]) + (rank ? part : real(0)));
                mine.targets[lane].weight[l] = factor[l];
            }
            mine.targets[lane].index = target;
            mine.targets[lane].after = rank;
            __syncwarp();
            Cursor<Target> next(mine.targets, 0), stop(mine.targets, min(end - at, 32));
            while (next.before(stop)) {
                Target to = next.here();
                next.step(1);
#pragma unroll 1
                for (; passed < to.after; passed++) {
                    local.add_row(next_weights.here().at, widened(next_row.here()));
                    next_weights.step(1);
                    next_row.step(32);
                }
                real numbers[VEC];
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
#pragma unroll
                    for (int c = 0; c < VEC; c++) {
                        real x = base.at[l][c] + local.at[l][c];
                        numbers[c] = l == 0 ? x : numbers[c] + to.weight[l] * x;
                    }
                }
                add_to(*output_rows.at(to.index), numbers);
            }
            __syncwarp();
            if (wanted && channels == 0) add_to(out_extra + target, extra);
        }
        __syncwarp();
    }
    wait_for_launch_before();
}
