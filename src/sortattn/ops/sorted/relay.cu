// The walk along whole tracks by blocks of warps, for sides with a single node: every row of a source is read once.
//
// A stretch is thirty-two neighbouring sources of a track. A warp brings their rows into shared memory and sums them;
// what it is given from the stretches before, it hands on with its own sums, and then writes the targets among its
// sources. So the sums go from warp to warp as a baton does, always in the same order, while rows of the next stretches
// are on their way. All warps of a block are there at a time, so each of them gets its turn.
//
// Where ties count half, targets that have some are written twice with half their share: once without the ties and once
// with them, which may be in different stretches.
//
// Macros: those of track.cu, CREW (warps of a block) and TEAMS (blocks of a multiprocessor).

#include "track.cu"

static_assert(NODES == 1 && !BOTH && !COMPACT && !RATE && !ORDERED, "one node, and polynomials of sources below");

// ---- what comes before

// dimensions of a block, and of one of its threads; sources that it has at a time
constexpr int DIMS = 64, FOUR = 4, TILE = 32;
// of a thread's neighbours, those with other channels; the last ones have the extra scalar
constexpr int COLUMNS = WIDTH / FOUR + 1, SUMMERS = COLUMNS * DIMS / FOUR;

// The sums of all rows whose coordinates are above zero, and below: `totals (channel blocks, heads, chunks, 2, dims,
// WIDTH + 1)`. A chunk has every so manieth source: neighbours are often alike, and their sums large.
extern "C" __global__ void __launch_bounds__(SUMMERS)
    sum_halves(const real *points, const real *rows, const real *weights, real *totals, index_t heads, index_t count,
               index_t dims, index_t chunks) {
    __shared__ real values[TILE][COLUMNS * FOUR];
    // one or zero: whether they are above, and below
    __shared__ real shares[2][TILE][DIMS];
    index_t groups = (dims + DIMS - 1) / DIMS;
    index_t first_dim = blockIdx.x % groups * DIMS, chunk = blockIdx.x / groups % chunks, p = blockIdx.x / groups / chunks;
    int column = threadIdx.x % COLUMNS * FOUR, row = threadIdx.x / COLUMNS * FOUR;
    Scalars scalars(weights, p * count);
    real sum[2][FOUR][FOUR] = {};
    for (index_t first = chunk; first < count; first += TILE * chunks) {
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * DIMS; i += blockDim.x) {
            index_t n = first + i / DIMS * chunks, d = first_dim + i % DIMS;
            real x = n < count && d < dims ? points[(p * count + n) * dims + d] : real(0);
            // what is no finite number stands at zero
            if (!(x - x == real(0))) x = real(0);
            shares[0][i / DIMS][i % DIMS] = real(x > real(0));
            shares[1][i / DIMS][i % DIMS] = real(x < real(0));
        }
        for (int i = threadIdx.x; i < TILE * COLUMNS * FOUR; i += blockDim.x) {
            int c = i % (COLUMNS * FOUR);
            index_t n = first + i / (COLUMNS * FOUR) * chunks;
            real x = real(0);
            if (n < count && c < WIDTH) x = rows[(p * count + n) * STRIDE + blockIdx.y * WIDTH + c];
            if (n < count && c == WIDTH) x = scalars[int(n)];
            values[i / (COLUMNS * FOUR)][c] = x;
        }
        __syncthreads();
#pragma unroll 4
        for (int n = 0; n < TILE; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < FOUR; i++) {
#pragma unroll
                    for (int k = 0; k < FOUR; k++) sum[half][i][k] += shares[half][n][row + i] * values[n][column + k];
                }
            }
        }
    }
    totals += ((blockIdx.y * heads + p) * chunks + chunk) * 2 * dims * (WIDTH + 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < FOUR; i++) {
#pragma unroll
            for (int k = 0; k < FOUR; k++) {
                index_t d = first_dim + row + i;
                if (d < dims && column + k <= WIDTH) {
                    totals[(half * dims + d) * (WIDTH + 1) + column + k] = sum[half][i][k];
                }
            }
        }
    }
}

// ---- the walk

// What is handed on: the sums of all sources before, around `origin`, where their targets end, and whose turn it is.
struct Baton {
    double at[SUMS][VEC][32];
    double extra[SUMS];
    real origin;
    int ends[EACH_NODE];
    int turn;
};

struct alignas(SUMS % 2 ? sizeof(real) : 2 * sizeof(real)) Weights {
    real at[SUMS];
};

// What a warp has: rows of its sources, then those of targets that sums are multiplied with, and lists of both.
struct alignas(16) Station {
    Row rows[(MULTIPLIED ? 2 : 1) * 32 * 32];
    Target targets[32];
    Weights weights[32];
};

// Rows that the first lanes want, one each, on their way to shared memory, sixteen bytes at a time.
__device__ inline void bring(Row *to, const Rows &rows, int index, int some, int lane) {
    constexpr int PIECES = Copies::BYTES / 16;
    const char *start = reinterpret_cast<const char *>(rows.start - lane * VEC) + lane % PIECES * 16;
#pragma unroll
    for (int i = 0; i < 32; i += 32 / PIECES) {
        int which = __shfl_sync(ALL, index, i + lane / PIECES);
        if (i + lane / PIECES < some) {
#if defined __CUDA_ARCH__ && PASSING
            asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                             unsigned(__cvta_generic_to_shared(reinterpret_cast<char *>(to) + i * Copies::BYTES + lane * 16))),
                         "l"(start + index_t(unsigned(which)) * (STRIDE * sizeof(real))), "l"(passing())
                         : "memory");
#else
            Copies::piece(reinterpret_cast<char *>(to) + i * Copies::BYTES + lane * 16,
                          start + index_t(unsigned(which)) * (STRIDE * sizeof(real)));
#endif
        }
    }
}
__device__ inline void nap() {
#if defined __CUDA_ARCH__ && NAP
    __nanosleep(NAP);
#endif
}
__device__ inline void wait_for_rows() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncwarp();
}

// Sum the sources for the targets of a whole track; arguments as in walk.cu, with the `totals` of a folded line.
extern "C" __global__ void __launch_bounds__(32 * CREW, TEAMS)
    relay(const real *source_places, const int *source_order, const real *target_places, const int *target_order,
          const real *rows, const real *weights, const double *table, const double *taus, double tau,
          const real *totals, index_t chunks, real *out, real *out_extra, const real *others, const real *other_extra,
          real *products, index_t heads, index_t sides, index_t count, index_t number, index_t dims, index_t mirrored,
          index_t closed, index_t negated) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Baton baton;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Station &mine = reinterpret_cast<Station *>(shared)[warp];
    Row *slots = mine.rows + 32 * 32;
    index_t channels = blockIdx.y, d = blockIdx.x % dims, rest = blockIdx.x / dims, side_number = rest % sides,
            p = rest / sides;
    Rows source_rows(rows + p * count * STRIDE + channels * WIDTH, lane);
    Rows other_rows(others + p * number * STRIDE + channels * WIDTH, lane);
    Rows output_rows(out + p * number * STRIDE + channels * WIDTH, lane);
    Scalars scalars(weights, p * count), target_scalars(other_extra, p * number);
    bool negative = negated >> side_number & 1;
    Side side;
    side.read(table + side_number * TABLE, taus ? taus[p] : tau, closed >> side_number & 1);
    Line source_line(source_places, source_order, p * dims + d, count, mirrored >> side_number & 1);
    Line target_line(target_places, target_order, p * dims + d, number, mirrored >> side_number & 1);
    if (FOLDED) {
        source_line.keep_half(false, lane);
        target_line.keep_half(FOLDED < 0 || SLOPES, lane);
    }
    if (threadIdx.x == 0) {
        baton.turn = 0;
        for (int j = 0; j < EACH_NODE; j++) baton.ends[j] = 0;
    }
    __syncthreads();
    int stretches = (source_line.count + 31) / 32;

    // the sources of the next stretch, on their way while one is walked
    real next_t = infinity();
    int next_source = 0;
    auto fetch = [&](int stretch) {
        int i = stretch * 32 + lane;
        next_t = i < source_line.count ? source_line.place(i) : infinity();
        next_source = i < source_line.count ? source_line.index(i) : 0;
    };
    fetch(warp);
    for (int stretch = warp; stretch < stretches; stretch += CREW) {
        int first = stretch * 32, some = min(32, source_line.count - first);
        bool there = lane < some, last = stretch + 1 == stretches;
        real t = next_t;
        int source = next_source;
        bring(mine.rows, source_rows, source, 32, lane);
        real scalar = there ? scalars[source] : real(0);
        real origin = __shfl_sync(ALL, t, 0), final = __shfl_sync(ALL, t, 31);
        // the targets before the next stretch: those that have not passed the last source, and with ties
        int ends[EACH_NODE];
#pragma unroll
        for (int j = 0; j < EACH_NODE; j++) {
            bool tie = HALVES ? j == 1 : side.closed;
            ends[j] = j ? ends[0] : target_line.count;
            if (last || (j && !(ends[0] && side.beyond(0, target_line.place(ends[0] - 1), final) == real(0)))) continue;
            ends[j] = count_first(ends[j], lane,
                                  [&](int i) { return !side.passed(0, tie, target_line.place(i), final); });
        }
        real weight[SUMS], extras[SUMS];
        side.weights(0, there ? origin - t - side.node[0] : real(0), weight, real(there), real(0));
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
            mine.weights[lane].at[l] = weight[l];
            extras[l] = scan(scalar * weight[l], lane);
        }
        // the last source before, of which targets may be ties
        real before = HALVES && stretch ? source_line.place(first - 1) : infinity();
        fetch(stretch + CREW);
        wait_for_rows();
        Numbers<real> sum;
        sum.clear();
#pragma unroll 8
        for (int i = 0; i < 32; i++) sum.add_row(mine.weights[i].at, mine.rows[i * 32 + lane]);

        // the baton is taken and handed on
        while (__shfl_sync(ALL, *static_cast<volatile int *>(&baton.turn), 0) != stretch) nap();
        __syncwarp();
        Numbers<double> state;
        int begins[EACH_NODE];
        real came_from = baton.origin;
#pragma unroll
        for (int j = 0; j < EACH_NODE; j++) begins[j] = baton.ends[j];
        if (stretch) {
#pragma unroll
            for (int l = 0; l < SUMS; l++) {
#pragma unroll
                for (int c = 0; c < VEC; c++) state.at[l][c] = baton.at[l][c][lane];
                state.extra[l] = baton.extra[l];
            }
            move_state(state, double(origin) - double(came_from), side.rate);
        } else {
            state.clear();
        }
        if (FOLDED && !stretch) {
            // all sources as if they were at zero, but negative
            const real *total = totals + (channels * heads + p) * chunks * 2 * dims * (WIDTH + 1) +
                                ((mirrored >> side_number & 1) * dims + d) * (WIDTH + 1);
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
        __syncwarp();
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) baton.at[l][c][lane] = state.at[l][c] + double(sum.at[l][c]);
            real extra = __shfl_sync(ALL, extras[l], 31);
            if (lane == 0) baton.extra[l] = state.extra[l] + double(extra);
        }
        if (lane == 0) {
            baton.origin = origin;
#pragma unroll
            for (int j = 0; j < EACH_NODE; j++) baton.ends[j] = ends[j];
        }
        __threadfence_block();
        __syncwarp();
        if (lane == 0) *static_cast<volatile int *>(&baton.turn) = stretch + 1;

        Numbers<real> base;
        base.clear();
        base.add_rows(state);
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            // through a shuffle, as the compiler would convert it for every target again
            for (int c = 0; c < VEC; c++) base.at[l][c] = __shfl_sync(ALL, base.at[l][c], lane);
        }
        // Write the targets that have passed some sources of the stretch, or of those with ties the others; returns
        // whether there were ties.
        auto write = [&](auto again) {
            constexpr int AGAIN = decltype(again)::value;
            Numbers<real> local;
            local.clear();
            int passed = 0;
            unsigned ties = 0;
            for (int at = begins[AGAIN]; at < ends[AGAIN]; at += 32) {
                bool wanted = at + lane < ends[AGAIN];
                real s = wanted ? target_line.place(at + lane) : infinity();
                int target = wanted ? target_line.index(at + lane) : 0;
                int rank = count_before(t, [&](real t) { return side.passed(0, HALVES ? AGAIN : side.closed, s, t); });
                bool tied = false;
                if (HALVES) {
                    real next = __shfl_sync(ALL, t, AGAIN ? max(rank - 1, 0) : min(rank, 31));
                    if (AGAIN && rank == 0) next = before;
                    tied = wanted && side.beyond(0, s, next) == real(0);
                    ties |= __ballot_sync(ALL, tied);
                }
                unsigned listed = __ballot_sync(ALL, AGAIN ? tied : wanted);
                bool in = listed >> lane & 1;
                real share = (FOLDED && s == real(0) ? real(0.5) : real(1)) * (tied ? real(0.5) : real(1));
                real factor[SUMS], slope[SUMS], extra = real(0), extra_slope = real(0);
                side.factors(in ? s - origin : real(0), factor, slope, share);
#pragma unroll
                for (int l = 0; l < SUMS; l++) {
                    // beyond the last source of a folded line the kernel is constant
                    if (FOLDED && last && rank == some && l >= (FOLDED > 0)) factor[l] = real(0);
                    if (FOLDED && last && rank == some) slope[l] = real(0);
                    real part = __shfl_sync(ALL, extras[l], max(rank - 1, 0)), all = real(state.extra[l]);
                    extra += factor[l] * all, extra_slope += slope[l] * all;
                    if (rank) extra += factor[l] * part, extra_slope += slope[l] * part;
                }
                int place = __popc(listed & ((1u << lane) - 1)), written = __popc(listed);
                if (in) {
                    mine.targets[place].index = target;
                    mine.targets[place].after = rank;
#pragma unroll
                    for (int l = 0; l < SUMS; l++) {
                        mine.targets[place].weight[l] = factor[l];
#if SLOPES
                        mine.targets[place].slope[l] = slope[l];
#endif
                    }
                }
                if (MULTIPLIED) {
                    __syncwarp();
                    bring(slots, other_rows, lane < written ? mine.targets[lane].index : 0, written, lane);
                    wait_for_rows();
                }
                __syncwarp();
                for (int k = 0; k < written; k++) {
                    Target to = mine.targets[k];
#pragma unroll 1
                    for (; passed < to.after; passed++) local.add_row(mine.weights[passed].at, mine.rows[passed * 32 + lane]);
                    real numbers[VEC], derivative[VEC];
#pragma unroll
                    for (int l = 0; l < SUMS; l++) {
#pragma unroll
                        for (int c = 0; c < VEC; c++) {
                            real x = base.at[l][c] + local.at[l][c];
                            numbers[c] = l == 0 ? (HALVES || FOLDED < 0 ? to.weight[0] * x : x)
                                                : numbers[c] + to.weight[l] * x;
#if SLOPES
                            derivative[c] = l == 0 ? real(0) : derivative[c] + to.slope[l] * x;
#endif
                        }
                    }
                    if (ADDED) add_to(*output_rows.at(to.index), numbers);
                    if (MULTIPLIED) {
                        Row &slot = slots[k * 32 + lane];
                        real product = real(0);
#pragma unroll
                        for (int c = 0; c < VEC; c++) product += (SLOPES ? derivative[c] : numbers[c]) * slot.at[c];
                        // what the lanes have is summed below, all targets side by side
                        slot.at[0] = product;
                    }
                }
                __syncwarp();
                if (MULTIPLIED && in) {
                    real product = real(0);
                    // each lane starts elsewhere, so that they meet in few banks
                    for (int i = 0; i < 32; i++) product += slots[place * 32 + (i + lane) % 32].at[0];
                    // the extra scalar belongs to the first block of channels
                    if (channels == 0) product += (SLOPES ? extra_slope : extra) * target_scalars[target];
                    add_to(products + (p * number + target) * dims + d, negative ? -product : product);
                }
                if (ADDED && in && channels == 0) add_to(out_extra + p * number + target, extra);
                __syncwarp();
            }
            return ties != 0;
        };
        bool ties = write(Int<0>());
        if constexpr (HALVES) {
            if (ties || begins[0] != begins[1] || ends[0] != ends[1]) write(Int<1>());
        }
        __syncwarp();
    }
}
