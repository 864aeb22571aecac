// The walker on the GPU: sums over sorted points of one side of a sided kernel, see walk.py for the mathematics.
//
// A line is one dimension of one head, its coordinates in sorted order. `summarise` sums the moments of blocks of
// sources, `accumulate` carries them along each line in double precision, and `walk` starts anywhere from what they
// left: one warp takes a run of sorted targets, a lane a few channels of every row.
//
// A walk goes by batches of at most thirty-two targets and, at every node, thirty-two sources, in the order of the
// line. All that is a number of its own (the order, weights, the extra scalar) is found by the lanes side by side, one
// item each; only then do all of them go through the batch, row by row. Coordinates are only ever subtracted, and
// distances are taken from an origin close by, so an offset of the inputs costs nothing.
//
// Sources are those below the target. For those above, and for transposed sums, lines are mirrored: read from the
// other end, with all coordinates negated. Where a tie counts half, its node is there twice with half the coefficients,
// once with the tie and once without.
//
// Macros: REAL and VEC (channels of a lane), NODES and POWERS (coefficients of a polynomial), TIES (bit j: a tie at
// node j counts), RATE (whether there is an exponential), COMPACT, PRODUCTS (inner products instead of scattered sums),
// ORDERED (no atomics: one dimension of a head at a time).

typedef REAL real;
typedef long long index_t;

constexpr unsigned ALL = 0xffffffffu;
// of a block that sums moments; one that walks has a single warp, as some walks take longer than others
constexpr int WARPS = 4;
// items of a batch, and those whose rows are in shared memory at a time
constexpr int BATCH = 32 * (NODES + 1);
constexpr int STAGE = 32;
constexpr int WIDTH = 32 * VEC;
// sources of a block of `summarise`
constexpr int BLOCK = 256;
// a compact window with at most so many sources is summed one by one
constexpr int FEW = 32;
// numbers that describe a block: moments of every channel and of the extra scalar
constexpr int SIZE = POWERS * (WIDTH + 1);

#if COMPACT
// what has left the window of a compact kernel cancels, but for rounding that grows with the distance
typedef double partial;
#else
typedef real partial;
#endif

__device__ constexpr double binomial(int n, int k) {
    double result = 1.0;
    for (int i = 0; i < k; i++) result = result * (n - i) / (i + 1);
    return result;
}

__device__ inline real infinity() { return real(__int_as_float(0x7f800000)); }

__device__ inline float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}
__device__ inline double exponential(double x) { return exp(x); }

struct alignas(VEC * sizeof(real)) Row {
    real at[VEC];
};

// One sorted line of points: dimension d of a head, perhaps mirrored.
struct Line {
    const real *places;
    const int *order;
    index_t count;
    bool mirrored;

    __device__ int index(index_t i) const { return order[mirrored ? count - 1 - i : i]; }
    __device__ real place(index_t i) const { return mirrored ? -places[count - 1 - i] : places[i]; }
};

__device__ inline Line line_of(const real *places, const int *order, index_t line, index_t count, bool mirrored) {
    return {places + line * count, order + line * count, count, mirrored};
}

// A side of the kernel: H(u - x_j) b_j(u - x_j) e^(-rate (u - x_j)), summed over the nodes j.
struct Side {
    real node[NODES];
    real below[NODES][POWERS];
    real rate;

    // table: nodes, coefficients, rate; all for a bandwidth of one
    __device__ Side(const double *table, double tau) {
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            node[j] = real(table[j] * tau);
            double scale = 1.0;
#pragma unroll
            for (int i = 0; i < POWERS; i++, scale /= tau) below[j][i] = real(table[NODES + j * POWERS + i] * scale);
        }
        rate = real(table[NODES + NODES * POWERS] / tau);
    }

    // whether a source at t counts for a target at s, at node j
    __device__ bool passed(int j, real s, real t) const { return TIES >> j & 1 ? s - t >= node[j] : s - t > node[j]; }
    // the kernel itself, where there is no exponential
    __device__ real value(real s, real t) const {
        real sum = real(0);
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            real z = s - t - node[j], term = below[j][POWERS - 1];
#pragma unroll
            for (int i = POWERS - 2; i >= 0; i--) term = term * z + below[j][i];
            sum += passed(j, s, t) ? term : real(0);
        }
        return sum;
    }
    // what a source at z below the origin gives to the factors of y^l
    __device__ void weights(int j, real z, real (&weight)[POWERS]) const {
        real decay = RATE ? exponential(-rate * z) : real(1);
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
            real sum = below[j][POWERS - 1] * real(binomial(POWERS - 1, l));
#pragma unroll
            for (int i = POWERS - 2; i >= l; i--) sum = sum * z + below[j][i] * real(binomial(i, l));
            weight[l] = sum * decay;
        }
    }
};

// POWERS numbers for each channel of a lane, and for the extra scalar.
template <typename T> struct Numbers {
    T at[POWERS][VEC];
    T extra[POWERS];

    __device__ void clear() {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] = T(0);
            extra[l] = T(0);
        }
    }
    template <typename S> __device__ void add(const Numbers<S> &other) {
        add_rows(other);
#pragma unroll
        for (int l = 0; l < POWERS; l++) extra[l] += T(other.extra[l]);
    }
    __device__ void add_row(const T (&weight)[POWERS], const Row &row, T scalar) {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] += weight[l] * T(row.at[c]);
            extra[l] += weight[l] * scalar;
        }
    }
    template <typename S> __device__ void add_rows(const Numbers<S> &other) {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] += T(other.at[l][c]);
        }
    }
    // at[to] += factor * at[from]
    __device__ void mix(int to, int from, double factor) {
#pragma unroll
        for (int c = 0; c < VEC; c++) at[to][c] += factor * at[from][c];
        extra[to] += factor * extra[from];
    }
    __device__ void scale(int l, double factor) {
#pragma unroll
        for (int c = 0; c < VEC; c++) at[l][c] *= factor;
        extra[l] *= factor;
    }
    __device__ void load(const double *place, int lane) {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c] = place[l * (WIDTH + 1) + c * 32 + lane];
            extra[l] = place[l * (WIDTH + 1) + WIDTH];
        }
    }
    __device__ void store(double *place, int lane) const {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) place[l * (WIDTH + 1) + c * 32 + lane] = at[l][c];
            if (lane == 0) place[l * (WIDTH + 1) + WIDTH] = extra[l];
        }
    }
};

// Factors of y^l e^(-rate y) around an origin, when that moves up by `distance`.
__device__ inline void move_factors(Numbers<double> &factors, double distance, double rate) {
    double decay = RATE ? exp(-rate * distance) : 1.0;
#pragma unroll
    for (int l = 0; l < POWERS; l++) {
        double power = 1.0;
#pragma unroll
        for (int i = l + 1; i < POWERS; i++) {
            power *= distance;
            factors.mix(l, i, power * binomial(i, l));
        }
        if (RATE) factors.scale(l, decay);
    }
}

// Moments sum z^k e^(-rate z) v of sources at z below an origin, when that moves up by `distance`.
__device__ inline void move_moments(Numbers<double> &moments, double distance, double rate) {
    double decay = RATE ? exp(-rate * distance) : 1.0;
#pragma unroll
    for (int k = POWERS - 1; k >= 0; k--) {
        double power = 1.0;
#pragma unroll
        for (int i = k - 1; i >= 0; i--) {
            power *= distance;
            moments.mix(k, i, power * binomial(k, i));
        }
        if (RATE) moments.scale(k, decay);
    }
}

__device__ inline Row load_row(const real *rows, index_t stride, int index, int lane) {
    return *reinterpret_cast<const Row *>(rows + index * stride + lane * VEC);
}

// ---- what comes before the walk

// Moments of every block of sources around the first source behind it: (channel blocks, lines, blocks, SIZE).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    summarise(const real *places, const int *order, const real *rows, const real *scalars, const double *table,
              const double *taus, double *moments, index_t lines, index_t count, index_t dims, index_t stride,
              index_t mirrored) {
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    index_t job = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (job >= lines * blocks) return;
    index_t block = job % blocks, number = job / blocks, p = number / dims;
    Line line = line_of(places, order, number, count, mirrored);
    rows += p * count * stride + blockIdx.y * WIDTH;
    real rate = real(table[NODES + NODES * POWERS] / taus[p]);
    index_t start = block * BLOCK, stop = min(start + BLOCK, count);
    real origin = line.place(min(stop, count - 1));
    Numbers<double> total;
    total.clear();
    for (index_t first = start; first < stop; first += 32) {
        bool there = first + lane < stop;
        int mine = there ? line.index(first + lane) : 0;
        partial z = there ? partial(origin) - partial(line.place(first + lane)) : partial(0);
        partial decay = !there ? partial(0) : RATE ? exponential(-partial(rate) * z) : partial(1);
        real scalar = there ? scalars[p * count + mine] : real(1);
        Numbers<partial> sum;
        sum.clear();
#pragma unroll 8
        for (int i = 0; i < 32; i++) {
            // behind the last source the weight is zero
            Row row = load_row(rows, stride, __shfl_sync(ALL, mine, i), lane);
            partial weight[POWERS], distance = __shfl_sync(ALL, z, i);
            weight[0] = __shfl_sync(ALL, decay, i);
#pragma unroll
            for (int l = 1; l < POWERS; l++) weight[l] = weight[l - 1] * distance;
            sum.add_row(weight, row, partial(__shfl_sync(ALL, scalar, i)));
        }
        total.add(sum);
    }
    total.store(moments + ((blockIdx.y * lines + number) * blocks + block) * SIZE, lane);
}

// From the moments of every block to those of all sources before it, around its first source; in place.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    accumulate(const real *places, const int *order, const double *table, const double *taus, double *moments,
               index_t lines, index_t count, index_t dims, index_t mirrored) {
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    index_t number = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (number >= lines) return;
    Line line = line_of(places, order, number, count, mirrored);
    double rate = table[NODES + NODES * POWERS] / taus[number / dims];
    double *place = moments + (blockIdx.y * lines + number) * blocks * SIZE;
    Numbers<double> state, next;
    state.clear();
    next.load(place, lane);
    double origin = line.place(0), end = line.place(min(index_t(BLOCK), count - 1));
    for (index_t block = 0; block < blocks; block++, place += SIZE) {
        Numbers<double> here = next;
        double distance = end - origin;
        origin = end;
        // the next block is on its way while this one is added
        if (block + 1 < blocks) {
            next.load(place + SIZE, lane);
            end = line.place(min((block + 2) * BLOCK, count - 1));
        }
        __syncwarp();
        state.store(place, lane);
        move_moments(state, distance, rate);
        state.add(here);
    }
}

// ---- the walk

// Lane by lane, how many of the 32 numbers held by the lanes come before: `before(number)` is true for the first ones.
template <typename F> __device__ inline int count_before(real numbers, F before) {
    int count = 0;
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        if (before(__shfl_sync(ALL, numbers, count + step - 1))) count += step;
    }
    return count + (before(__shfl_sync(ALL, numbers, count)) ? 1 : 0);
}

// The number of sources of a line that a target at s has passed, at node j; all lanes search together.
__device__ index_t count_passed(const Line &line, const Side &side, int j, real s, int lane) {
    index_t low = 0, high = line.count;
    while (low < high) {
        index_t step = (high - low + 31) / 32, probe = low + (lane + 1) * step - 1;
        bool yes = probe < high && side.passed(j, s, line.place(probe));
        index_t whole = __popc(__ballot_sync(ALL, yes));
        high = min(high, low + (whole + 1) * step - 1);
        low = min(low + whole * step, high);
    }
    return low;
}

// The sums over the lanes up to and including each.
__device__ inline real scan(real x, int lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        real other = __shfl_up_sync(ALL, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

// An item of a batch: a source, with what it gives to the factors of y^l; or a target, with y^l e^(-rate y).
struct Item {
    // the index of a source, or the complement of a target's
    int tag;
    real weight[POWERS];
};

// The window of a target of a compact kernel: its sources, if they are few (-1 if not), are summed one by one.
struct Few {
    index_t first;
    int number;
    real place;
};

__device__ inline void add_to(real *place, const real (&sum)[VEC]) {
#if ORDERED
#pragma unroll
    for (int c = 0; c < VEC; c++) place[c] += sum[c];
#else
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(real) == 4 && VEC == 2) {
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(place), "f"(float(sum[0])), "f"(float(sum[1 % VEC]))
                     : "memory");
        return;
    }
    if constexpr (sizeof(real) == 4 && VEC == 4) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "f"(float(sum[0])),
                     "f"(float(sum[1 % VEC])), "f"(float(sum[2 % VEC])), "f"(float(sum[3 % VEC]))
                     : "memory");
        return;
    }
#endif
#pragma unroll
    for (int c = 0; c < VEC; c++) atomicAdd(place + c, sum[c]);
#endif
}

__device__ inline void add_to(real *place, real sum) {
#if ORDERED
    *place += sum;
#else
    atomicAdd(place, sum);
#endif
}

// Sum the sources for a run of sorted targets.
//
// Without PRODUCTS the sums are added to `out (heads, targets, stride)` and `out_extra (heads, targets)`; with it they
// are multiplied with those rows and scalars, and the inner products are added to `products (heads, targets, dims)`.
extern "C" __global__ void __launch_bounds__(32, NODES < 3 ? 24 : 18)
    walk(const real *source_places, const int *source_order, const real *target_places, const int *target_order,
         const real *rows, const real *scalars, const double *table, const double *taus, const double *sums, real *out,
         real *out_extra, real *products, index_t heads, index_t count, index_t number, index_t dims, index_t stride,
         index_t mirrored, index_t length, index_t first_dim, index_t some_dims) {
    __shared__ alignas(16) Row slots[STAGE * 32];
    __shared__ Item items[BATCH];
    __shared__ Few windows[COMPACT ? BATCH : 1];
    index_t segments = (number + length - 1) / length;
    int lane = threadIdx.x;
    index_t segment = blockIdx.x % segments, p = blockIdx.x / segments / some_dims;
    index_t d = first_dim + blockIdx.x / segments % some_dims;
    rows += p * count * stride + blockIdx.y * WIDTH;
    out += p * number * stride + blockIdx.y * WIDTH;
    out_extra += p * number;
    scalars += p * count;
    Side side(table, taus[p]);
    Line source_line = line_of(source_places, source_order, p * dims + d, count, mirrored);
    Line target_line = line_of(target_places, target_order, p * dims + d, number, mirrored);
    real support = side.node[NODES - 1] - side.node[0];
    // a batch reaches no further than this, so that an exponential neither overflows nor loses digits
    real span = RATE ? real(4) / side.rate : COMPACT ? support : infinity();

    index_t at = segment * length, end = min(at + length, number);
    // how many sources have been passed, at every node, and what they give around `origin`
    index_t passed[NODES];
    Numbers<double> state;
    real origin = target_line.place(at), renewed = origin;
    state.clear();

    auto absorb = [&](int j, index_t first, index_t last) {
        for (index_t n = first; n < last; n += 32) {
            // behind the last source the weight is zero
            bool there = n + lane < last;
            int index = there ? source_line.index(n + lane) : 0;
            real scalar = there ? scalars[index] : real(1), weight[POWERS];
            side.weights(j, there ? origin - source_line.place(n + lane) - side.node[j] : real(0), weight);
            Numbers<real> some;
            some.clear();
#pragma unroll 8
            for (int i = 0; i < 32; i++) {
                real each[POWERS];
#pragma unroll
                for (int l = 0; l < POWERS; l++) each[l] = __shfl_sync(ALL, there ? weight[l] : real(0), i);
                some.add_row(each, load_row(rows, stride, __shfl_sync(ALL, index, i), lane),
                             __shfl_sync(ALL, scalar, i));
            }
            state.add(some);
        }
    };

    index_t blocks = (count + BLOCK - 1) / BLOCK;
    sums += (blockIdx.y * heads * dims + p * dims + d) * blocks * SIZE;
#pragma unroll
    for (int j = 0; j < NODES; j++) {
        passed[j] = count_passed(source_line, side, j, origin, lane);
        // the blocks before give their moments, the rest of the block is absorbed
        index_t block = min(passed[j] / BLOCK, max(blocks - 1, index_t(0)));
        if (block > 0) {
            Numbers<double> moments;
            moments.load(sums + block * SIZE, lane);
            move_moments(moments, double(origin) - double(source_line.place(block * BLOCK)) - double(side.node[j]),
                         side.rate);
#pragma unroll
            for (int l = 0; l < POWERS; l++) {
#pragma unroll
                for (int i = l; i < POWERS; i++) {
                    double factor = double(side.below[j][i]) * binomial(i, l);
#pragma unroll
                    for (int c = 0; c < VEC; c++) state.at[l][c] += factor * moments.at[i - l][c];
                    state.extra[l] += factor * moments.extra[i - l];
                }
            }
        }
        absorb(j, block * BLOCK, passed[j]);
    }

    while (at < end) {
        // the next targets and, at every node, the next sources
        bool wanted = at + lane < end;
        real s = wanted ? target_line.place(at + lane) : infinity();
        int target = wanted ? target_line.index(at + lane) : 0;
        real from = __shfl_sync(ALL, s, 0);
        if (from != origin) {
            if (COMPACT && (from - renewed > 2 * support || from - origin > support)) {
                // what has left the window cancels but for rounding, which grows with the distance: sum it afresh
                state.clear();
                origin = renewed = from;
#pragma unroll
                for (int j = 0; j < NODES; j++) passed[j] = count_passed(source_line, side, j, from, lane);
#pragma unroll
                for (int j = 0; j < NODES - 1; j++) absorb(j, passed[NODES - 1], passed[j]);
            } else {
                move_factors(state, double(from) - double(origin), side.rate);
                origin = from;
            }
        }
        real t[NODES];
        int source[NODES], rank[NODES];
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            index_t i = passed[j] + lane;
            t[j] = i < count ? source_line.place(i) : infinity();
            source[j] = i < count ? source_line.index(i) : 0;
        }
        // how many sources a target has passed; one that may have passed more than there are here waits
        bool in = wanted && s - origin <= span;
        int place = lane, filled = NODES;
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            rank[j] = count_before(t[j], [&](real t) { return side.passed(j, s, t); });
            place += rank[j];
            bool more = rank[j] == 32 && passed[j] + 32 < count;
            in = in && !more;
            // the first node at which the first target waits
            if (filled == NODES && __shfl_sync(ALL, more, 0)) filled = j;
        }
        // those before the first that waits
        unsigned waiting = ~__ballot_sync(ALL, in);
        int taken = waiting ? __ffs(waiting) - 1 : 32, total = taken;
        __syncwarp();
        if (lane < taken) {
            items[place].tag = ~target;
            real y = s - origin, factor = RATE ? exponential(-side.rate * y) : real(1);
#pragma unroll
            for (int l = 0; l < POWERS; l++, factor *= y) items[place].weight[l] = factor;
            index_t low = passed[NODES - 1] + rank[NODES - 1], high = passed[0] + rank[0];
            if (COMPACT) windows[place] = {low, high - low <= FEW ? int(high - low) : -1, s};
        }
        // a source comes before the first target that has passed it, behind the targets before
        int before[NODES];
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            before[j] = count_before(s, [&](real s) { return !side.passed(j, s, t[j]); });
        }
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            int where = before[j] + lane;
#pragma unroll
            for (int k = 0; k < NODES; k++) {
                if (k == j) continue;
                // of the sources at other nodes: those of earlier targets, and of the same one those at earlier nodes
                int last = k < j ? before[j] : before[j] - 1, others = __shfl_sync(ALL, rank[k], max(min(last, 31), 0));
                where += last < 0 ? 0 : others;
            }
            // without any target, sources are taken up to the node that makes the first one wait
            bool here = before[j] < taken || (taken == 0 && before[j] == 0 && j <= filled);
            if (here) {
                items[where].tag = source[j];
                side.weights(j, origin - t[j] - side.node[j], items[where].weight);
            }
            int many = __popc(__ballot_sync(ALL, here));
            passed[j] += many;
            total += many;
        }
        at += taken;
        __syncwarp();

        for (int first = 0; first < total; first += STAGE) {
            Item mine = items[first + lane];
            bool is_source = first + lane < total && mine.tag >= 0, is_target = first + lane < total && mine.tag < 0;
            int staged = min(total - first, STAGE);

            // rows of sources, and with PRODUCTS those of targets, sixteen bytes at a time
            constexpr int PIECES = sizeof(Row) * 32 / 16;
#pragma unroll
            for (int i = 0; i < STAGE; i += 32 / PIECES) {
                int l = i + lane / PIECES, tag = __shfl_sync(ALL, mine.tag, l);
                if (l < staged && (PRODUCTS || tag >= 0)) {
                    const real *row = tag >= 0 ? rows + tag * stride : out + ~tag * stride;
                    unsigned slot = unsigned(__cvta_generic_to_shared(slots + l * 32)) + lane % PIECES * 16;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slot),
                                 "l"(reinterpret_cast<const char *>(row) + lane % PIECES * 16)
                                 : "memory");
                }
            }
            asm volatile("cp.async.commit_group;");

            // the extra scalar, while they are on their way
            real scalar = !is_source ? real(0) : scalars[mine.tag], extra = real(0);
#pragma unroll
            for (int l = 0; l < POWERS; l++) {
                real sum = scan(is_source ? scalar * mine.weight[l] : real(0), lane);
                extra += mine.weight[l] * (real(state.extra[l]) + sum);
                state.extra[l] += double(__shfl_sync(ALL, sum, 31));
            }
            if (COMPACT && is_target) {
                Few window = windows[first + lane];
                if (window.number >= 0) extra = real(0);
                for (index_t n = window.first; n < window.first + window.number; n++) {
                    extra += side.value(window.place, source_line.place(n)) * scalars[source_line.index(n)];
                }
            }

            Numbers<real> base, local;
            base.clear(), local.clear();
            base.add(state);
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncwarp();
#pragma unroll 4
            for (int l = 0; l < staged; l++) {
                Item item = items[first + l];
                if (item.tag >= 0) {
                    local.add_row(item.weight, slots[l * 32 + lane], real(0));
                    continue;
                }
                real sum[VEC];
#pragma unroll
                for (int c = 0; c < VEC; c++) sum[c] = real(0);
                Few window = COMPACT ? windows[first + l] : Few{0, -1, real(0)};
                if (window.number >= 0) {
                    for (index_t n = window.first; n < window.first + window.number; n++) {
                        real weight = side.value(window.place, source_line.place(n));
                        Row row = load_row(rows, stride, source_line.index(n), lane);
#pragma unroll
                        for (int c = 0; c < VEC; c++) sum[c] += weight * row.at[c];
                    }
                } else {
#pragma unroll
                    for (int k = 0; k < POWERS; k++) {
#pragma unroll
                        for (int c = 0; c < VEC; c++) sum[c] += item.weight[k] * (base.at[k][c] + local.at[k][c]);
                    }
                }
                if (PRODUCTS) {
                    Row other = slots[l * 32 + lane];
                    real product = real(0);
#pragma unroll
                    for (int c = 0; c < VEC; c++) product += sum[c] * other.at[c];
                    // what the lanes have is summed below, all targets side by side
                    __syncwarp();
                    reinterpret_cast<real *>(slots + l * 32)[lane] = product;
                } else {
                    add_to(out + ~item.tag * stride + lane * VEC, sum);
                }
            }
            state.add_rows(local);
            __syncwarp();
            if (PRODUCTS) {
                real sum = real(0);
                const real *parts = reinterpret_cast<const real *>(slots + lane * 32);
                // each lane starts elsewhere, so that they meet in no bank
                if (is_target) {
                    for (int i = 0; i < 32; i++) sum += parts[(i + lane) % 32];
                    // the extra scalar belongs to the first block of channels
                    if (blockIdx.y == 0) sum += extra * out_extra[~mine.tag];
                    add_to(products + (p * number + ~mine.tag) * dims + d, sum);
                }
            } else if (is_target && blockIdx.y == 0) {
                add_to(out_extra + ~mine.tag, extra);
            }
            __syncwarp();
        }
    }
}
