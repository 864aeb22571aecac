// The walker on the GPU: sums over sorted points of one side of a sided kernel, see walk.py for the mathematics.
//
// A line is one dimension of one head. `summarise` sums the moments of blocks of sources, `accumulate` carries them
// along each line in double precision, and `walk` starts anywhere from what they left: one warp takes a run of sorted
// targets, a lane two or so channels. Coordinates are only ever subtracted, and distances are taken from an origin
// close by, so an offset of the inputs costs nothing.
//
// Sources are those below the target. For those above, and for transposed sums, lines are mirrored: read from the
// other end, with all coordinates negated.
//
// Macros: REAL and VEC (channels of a lane), NODES and POWERS (coefficients of a polynomial), RATE (whether there is an
// exponential), COMPACT, TIES (STRICT, HALF or INCLUSIVE), PRODUCTS (inner products instead of scattered sums),
// WEIGHTED (whether sources have weights other than one), ORDERED (no atomics: one dimension of a head at a time),
// WARPS (of a block) and RING (rows on their way from memory, a power of two).

#define STRICT 0
#define HALF 1
#define INCLUSIVE 2

typedef REAL real;
typedef long long index_t;

constexpr unsigned ALL = 0xffffffffu;
// sources that are summed in the working precision before double takes over
constexpr int FOLD = 64;
// sources of a block of `summarise`
constexpr int BLOCK = 128;
// a compact window with at most so many sources is summed one by one
constexpr int FEW = 32;

__device__ constexpr double binomial(int n, int k) { return k == 0 || k == n ? 1.0 : binomial(n - 1, k - 1) + binomial(n - 1, k); }

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
    const real* points;
    const int* order;
    index_t count, stride;
    bool mirrored;

    __device__ int index(index_t i) const { return order[mirrored ? count - 1 - i : i]; }
    __device__ real place(int index) const {
        real x = points[index * stride];
        // what is no finite number stands at zero, as in the sort
        x = x - x == real(0) ? x : real(0);
        return mirrored ? -x : x;
    }
    __device__ real place_of(index_t i) const { return place(index(i)); }
};

__device__ inline Line line_of(const real* points, const int* order, index_t p, index_t d, index_t count, index_t dims, bool mirrored) {
    return {points + p * count * dims + d, order + (p * dims + d) * count, count, dims, mirrored};
}

// A side of the kernel: H(u - x_j) b_j(u - x_j) e^(-rate (u - x_j)), summed over the nodes j.
struct Side {
    real node[NODES];
    real below[NODES][POWERS];
    real rate;
    real support;

    // table: nodes, coefficients, rate; all for a bandwidth of one
    __device__ Side(const double* table, double tau) {
        for (int j = 0; j < NODES; j++) {
            node[j] = real(table[j] * tau);
            double scale = 1.0;
            for (int i = 0; i < POWERS; i++, scale /= tau) below[j][i] = real(table[NODES + j * POWERS + i] * scale);
        }
        rate = real(table[NODES + NODES * POWERS] / tau);
        support = node[NODES - 1] - node[0];
    }

    // whether a source at t counts for a target at s, at node j
    __device__ bool passed(int j, real s, real t) const {
        return TIES == INCLUSIVE ? s - t >= node[j] : s - t > node[j];
    }
};

// Factors of y^l e^(-rate y), for all channels of a lane and for the extra scalar.
template <typename T> struct Polynomial {
    T at[POWERS][VEC];
    T extra[POWERS];

    __device__ void clear() {
        for (int l = 0; l < POWERS; l++) {
            for (int c = 0; c < VEC; c++) at[l][c] = T(0);
            extra[l] = T(0);
        }
    }
    template <typename S> __device__ void add(const Polynomial<S>& other) {
        for (int l = 0; l < POWERS; l++) {
            for (int c = 0; c < VEC; c++) at[l][c] += T(other.at[l][c]);
            extra[l] += T(other.extra[l]);
        }
    }
    template <typename S> __device__ void round(const Polynomial<S>& other) {
        clear();
        add(other);
    }
    __device__ void add_row(const T (&weight)[POWERS], const Row& row, T scalar) {
        for (int l = 0; l < POWERS; l++) {
            for (int c = 0; c < VEC; c++) at[l][c] += weight[l] * T(row.at[c]);
            extra[l] += weight[l] * scalar;
        }
    }
    // y becomes y + distance: what were factors around an origin are factors around one further up
    __device__ void move(double distance, double rate) {
        double decay = RATE ? exp(-rate * distance) : 1.0;
        for (int l = 0; l < POWERS; l++) {
            double factor = decay;
            for (int c = 0; c < VEC; c++) at[l][c] *= decay;
            extra[l] *= decay;
            for (int i = l + 1; i < POWERS; i++) {
                factor *= distance;
                double term = factor * binomial(i, l);
                for (int c = 0; c < VEC; c++) at[l][c] += term * at[i][c];
                extra[l] += term * extra[i];
            }
        }
    }
};

// Moments sum z^k e^(-rate z) v: of a Polynomial they have the layout, but another origin's shift.
__device__ inline void shift_moments(Polynomial<double>& moments, double distance, double rate) {
    double decay = RATE ? exp(-rate * distance) : 1.0;
    for (int k = POWERS - 1; k >= 0; k--) {
        for (int c = 0; c < VEC; c++) moments.at[k][c] *= decay;
        moments.extra[k] *= decay;
        double factor = decay;
        for (int i = k - 1; i >= 0; i--) {
            factor *= distance;
            double term = factor * binomial(k, i);
            for (int c = 0; c < VEC; c++) moments.at[k][c] += term * moments.at[i][c];
            moments.extra[k] += term * moments.extra[i];
        }
    }
}

__device__ inline Row load_row(const real* rows, index_t stride, int index, int lane) {
    return *reinterpret_cast<const Row*>(rows + index * stride + lane * VEC);
}

// ---- moments of blocks of sources, and their running sums

#if COMPACT
typedef double partial;
#else
typedef real partial;
#endif

// Moments of every block of BLOCK sources around the first source behind it: (lines, blocks, POWERS, width + 1).
//
// For a compact kernel in double: what has left its window cancels, but for rounding that grows with the distance.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
summarise(const real* points, const int* order, const real* rows, const real* weights, const double* table,
          const double* taus, double* moments, index_t heads, index_t count, index_t dims, index_t stride, index_t mirrored) {
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    index_t job = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (job >= heads * dims * blocks) return;
    index_t block = job % blocks, line_number = job / blocks, p = line_number / dims, d = line_number % dims;
    Line line = line_of(points, order, p, d, count, dims, mirrored);
    rows += p * count * stride + blockIdx.y * (32 * VEC);
    real rate = real(table[NODES + NODES * POWERS] / taus[p]);
    index_t start = block * BLOCK, stop = min(start + BLOCK, count);
    real origin = line.place_of(min(stop, count - 1));
    Polynomial<double> total;
    total.clear();
    Polynomial<partial> sum;
    sum.clear();
    for (index_t first = start; first < stop; first += 32) {
        int number = int(min(index_t(32), stop - first));
        int mine = lane < number ? line.index(first + lane) : 0;
        partial z = lane < number ? partial(origin) - partial(line.place(mine)) : partial(0);
        real scalar = WEIGHTED && lane < number ? weights[p * count + mine] : real(1);
        partial decay = RATE ? exponential(-rate * z) : partial(1);
        for (int i = 0; i < number; i++) {
            Row row = load_row(rows, stride, __shfl_sync(ALL, mine, i), lane);
            partial weight[POWERS];
            weight[0] = __shfl_sync(ALL, decay, i);
            partial distance = __shfl_sync(ALL, z, i);
            for (int l = 1; l < POWERS; l++) weight[l] = weight[l - 1] * distance;
            sum.add_row(weight, row, partial(__shfl_sync(ALL, scalar, i)));
        }
        total.add(sum);
        sum.clear();
    }
    double* out = moments + ((blockIdx.y * heads * dims + line_number) * blocks + block) * index_t(POWERS * (32 * VEC + 1));
    for (int l = 0; l < POWERS; l++) {
        for (int c = 0; c < VEC; c++) out[l * (32 * VEC + 1) + c * 32 + lane] = total.at[l][c];
        if (lane == 0) out[l * (32 * VEC + 1) + 32 * VEC] = total.extra[l];
    }
}

// From the moments of every block to those of all sources before it, around its first source; in place.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
accumulate(const real* points, const int* order, const double* table, const double* taus, double* moments,
           index_t heads, index_t count, index_t dims, index_t mirrored) {
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    index_t line_number = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (line_number >= heads * dims) return;
    index_t p = line_number / dims, d = line_number % dims;
    Line line = line_of(points, order, p, d, count, dims, mirrored);
    double rate = table[NODES + NODES * POWERS] / taus[p];
    constexpr int SIZE = POWERS * (32 * VEC + 1);
    index_t base = (blockIdx.y * heads * dims + line_number) * blocks;
    Polynomial<double> state;
    state.clear();
    real origin = count ? line.place_of(0) : real(0);
    for (index_t block = 0; block < blocks; block++) {
        double* place = moments + (base + block) * SIZE;
        real next = line.place_of(min((block + 1) * BLOCK, count - 1));
        Polynomial<double> here;
        for (int l = 0; l < POWERS; l++) {
            for (int c = 0; c < VEC; c++) {
                here.at[l][c] = place[l * (32 * VEC + 1) + c * 32 + lane];
                place[l * (32 * VEC + 1) + c * 32 + lane] = state.at[l][c];
            }
            here.extra[l] = place[l * (32 * VEC + 1) + 32 * VEC];
            __syncwarp();
            if (lane == 0) place[l * (32 * VEC + 1) + 32 * VEC] = state.extra[l];
        }
        shift_moments(state, double(next) - double(origin), rate);
        state.add(here);
        origin = next;
    }
}

// ---- the walk

// Thirty-two sorted points in the lanes of a warp, and the thirty-two behind them.
struct Window {
    Line line;
    const real* weights;
    real place, next_place;
    real weight, next_weight;
    int index, next_index;

    __device__ void fetch(index_t i, int lane, real& place, int& index, real& weight) const {
        bool there = i + lane < line.count;
        index = there ? line.index(i + lane) : 0;
        // no target ever passes infinity
        place = there ? line.place(index) : infinity();
        weight = WEIGHTED && there && weights ? weights[index] : real(1);
    }
    __device__ void open(index_t i, int lane) {
        index_t start = i & ~index_t(31);
        fetch(start, lane, place, index, weight);
        fetch(start + 32, lane, next_place, next_index, next_weight);
    }
    __device__ void turn(index_t start, int lane) {
        place = next_place, index = next_index, weight = next_weight;
        fetch(start + 32, lane, next_place, next_index, next_weight);
    }
};

// Rows on their way into shared memory; a lane reads only what it has asked for itself.
struct Ring {
    Row* slots;
    const real* rows;
    index_t stride;
    index_t count;

    __device__ void ask(index_t n, int index, int lane) {
        if (n < count) {
            unsigned place = unsigned(__cvta_generic_to_shared(slots + (n % RING) * 32 + lane));
            const real* row = rows + index * stride + lane * VEC;
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(row), "n"(sizeof(Row)));
        }
        asm volatile("cp.async.commit_group;");
    }
    __device__ Row take(index_t n, int lane) {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1));
        return slots[(n % RING) * 32 + lane];
    }
};

// The sources at one node: how many have been passed, the next of them, and their rows.
struct Stream {
    Window window;
    Ring ring;
    index_t passed;
    real head;

    __device__ int index_ahead(index_t n) const {
        // a branch and no choice: the points behind the present ones may still be on their way
        if ((n ^ passed) < 32) return __shfl_sync(ALL, window.index, int(n & 31));
        return __shfl_sync(ALL, window.next_index, int(n & 31));
    }
    __device__ void open(index_t n, int lane) {
        passed = n;
        window.open(n, lane);
        for (int i = 0; i < RING - 1; i++) ring.ask(n + i, index_ahead(n + i), lane);
        head = __shfl_sync(ALL, window.place, int(n & 31));
    }
    // the row and the weight of the next source; it is then passed
    __device__ Row take(int lane, real& weight) {
        ring.ask(passed + RING - 1, index_ahead(passed + RING - 1), lane);
        Row row = ring.take(passed, lane);
        weight = WEIGHTED ? __shfl_sync(ALL, window.weight, int(passed & 31)) : real(1);
        passed++;
        if ((passed & 31) == 0) window.turn(passed, lane);
        head = __shfl_sync(ALL, window.place, int(passed & 31));
        return row;
    }
};

// The number of sources of a line that a target at s has passed, at node j.
__device__ index_t count_passed(const Line& line, const Side& side, int j, real s, int lane) {
    index_t low = 0, high = line.count;
    while (low < high) {
        index_t step = (high - low + 31) / 32, probe = low + (lane + 1) * step - 1;
        bool yes = probe < high && side.passed(j, s, line.place_of(probe));
        index_t whole = __popc(__ballot_sync(ALL, yes));
        high = min(high, low + (whole + 1) * step - 1);
        low = min(low + whole * step, high);
    }
    return low;
}

// What a source at distance z below the origin gives to the factors of y^l.
__device__ inline void source_weights(const Side& side, int j, real z, real (&weight)[POWERS]) {
    real decay = RATE ? exponential(-side.rate * z) : real(1);
    for (int l = 0; l < POWERS; l++) {
        real sum = side.below[j][POWERS - 1] * real(binomial(POWERS - 1, l));
        for (int i = POWERS - 2; i >= l; i--) sum = sum * z + side.below[j][i] * real(binomial(i, l));
        weight[l] = sum * decay;
    }
}

// The state of a walk: factors around an origin, in double up to the last fold and in the working precision since.
struct State {
    Polynomial<double> wide;
    Polynomial<real> base, local;
    real origin;
    int pending;

    __device__ void clear(real at) {
        wide.clear(), base.clear(), local.clear();
        origin = at;
        pending = 0;
    }
    __device__ void fold(real at, real rate) {
        wide.add(local);
        if (at != origin) wide.move(double(at) - double(origin), rate);
        origin = at;
        base.round(wide);
        local.clear();
        pending = 0;
    }
    __device__ void absorb(const Side& side, int j, real place, const Row& row, real scalar) {
        real weight[POWERS];
        source_weights(side, j, origin - place - side.node[j], weight);
        local.add_row(weight, row, scalar);
        if (++pending >= FOLD) fold(origin, side.rate);
    }
};

// the row's lanes are summed into lane zero's total, and all the others'
__device__ inline real sum_lanes(real x) {
    for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(ALL, x, offset);
    return x;
}

__device__ inline void add_to(real* place, const real (&sum)[VEC]) {
#if ORDERED
    for (int c = 0; c < VEC; c++) place[c] += sum[c];
#else
    if constexpr (sizeof(real) == 4 && VEC == 2) {
#if __CUDA_ARCH__ >= 900
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(place), "f"(float(sum[0])), "f"(float(sum[1])) : "memory");
        return;
#endif
    }
    if constexpr (sizeof(real) == 4 && VEC == 4) {
#if __CUDA_ARCH__ >= 900
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "f"(float(sum[0])), "f"(float(sum[1 % VEC])),
                     "f"(float(sum[2 % VEC])), "f"(float(sum[3 % VEC])) : "memory");
        return;
#endif
    }
    for (int c = 0; c < VEC; c++) atomicAdd(place + c, sum[c]);
#endif
}

// Sum the sources for a run of sorted targets.
//
// Without PRODUCTS the sums are added to `out (heads, targets, stride)` and `out_extra (heads, targets)`; with it they
// are multiplied with those rows and scalars, and the inner products are added to `products (heads, targets, dims)`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
walk(const real* source_points, const int* source_order, const real* target_points, const int* target_order,
     const real* rows, const real* weights, const double* table, const double* taus, const double* sums, real* out,
     real* out_extra, real* products, index_t heads, index_t count, index_t number, index_t dims, index_t stride,
     index_t mirrored, index_t length, index_t first_dim, index_t some_dims) {
    __shared__ Row slots[WARPS][NODES + PRODUCTS][RING * 32];
    index_t segments = (number + length - 1) / length;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    index_t job = blockIdx.x * index_t(WARPS) + warp;
    if (job >= heads * some_dims * segments) return;
    index_t segment = job % segments, p = job / segments / some_dims, d = first_dim + job / segments % some_dims;
    int channel = blockIdx.y * (32 * VEC);
    rows += p * count * stride + channel;
    out += p * number * stride + channel;
    out_extra += p * number;
    if (weights) weights += p * count;
    Side side(table, taus[p]);
    Line source_line = line_of(source_points, source_order, p, d, count, dims, mirrored);
    Line target_line = line_of(target_points, target_order, p, d, number, dims, mirrored);
    // a tile spans at most this much, so that an exponential neither overflows nor loses digits
    real span = RATE ? real(4) / side.rate : COMPACT ? side.support : infinity();

    index_t begin = segment * length, end = min(begin + length, number);
    Window targets{target_line, nullptr};
    targets.open(begin, lane);
    Ring others{slots[warp][NODES], out, stride, number};
    if (PRODUCTS) {
        for (int i = 0; i < RING - 1; i++) others.ask(begin + i, __shfl_sync(ALL, targets.index, i), lane);
    }
    State state;
    real s = __shfl_sync(ALL, targets.place, 0);
    state.clear(s);
    Stream stream[NODES];
    constexpr int SIZE = POWERS * (32 * VEC + 1);
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    sums += (blockIdx.y * heads * dims + p * dims + d) * blocks * SIZE;
#pragma unroll
    for (int j = 0; j < NODES; j++) {
        index_t passed = count ? count_passed(source_line, side, j, s, lane) : 0;
        // the blocks before give their moments, the rest of the block is absorbed
        index_t block = min(passed / BLOCK, max(blocks - 1, index_t(0)));
        if (block > 0) {
            Polynomial<double> moments;
            for (int l = 0; l < POWERS; l++) {
                for (int c = 0; c < VEC; c++) moments.at[l][c] = sums[block * SIZE + l * (32 * VEC + 1) + c * 32 + lane];
                moments.extra[l] = sums[block * SIZE + l * (32 * VEC + 1) + 32 * VEC];
            }
            double distance = double(s) - double(source_line.place_of(block * BLOCK)) - double(side.node[j]);
            shift_moments(moments, distance, side.rate);
            for (int l = 0; l < POWERS; l++) {
                for (int i = l; i < POWERS; i++) {
                    double factor = double(side.below[j][i]) * binomial(i, l);
                    for (int c = 0; c < VEC; c++) state.wide.at[l][c] += factor * moments.at[i - l][c];
                    state.wide.extra[l] += factor * moments.extra[i - l];
                }
            }
        }
        for (index_t n = block * BLOCK; n < passed; n++) {
            int index = source_line.index(n);
            state.absorb(side, j, source_line.place(index), load_row(rows, stride, index, lane), WEIGHTED ? weights[index] : real(1));
        }
        stream[j].window.line = source_line;
        stream[j].window.weights = weights;
        stream[j].ring = Ring{slots[warp][j], rows, stride, count};
        stream[j].open(passed, lane);
    }
    state.fold(s, side.rate);

    real renewed = s, last = s;
#if TIES == HALF
    // sources that tie with the present target: half of them counts
    Polynomial<real> tied;
    Polynomial<double> tied_before;
    tied.clear(), tied_before.clear();
    int ties = 0;
    bool met = false;
#endif
    real mine = real(0);
    for (index_t i = begin; i < end; i++) {
        s = __shfl_sync(ALL, targets.place, int(i & 31));
        int m = __shfl_sync(ALL, targets.index, int(i & 31));
        bool same = i > begin && s == last;
        if (!same) {
#if TIES == HALF
            if (ties) {
                tied_before.add(tied);
                state.wide.add(tied_before);
                tied.clear(), tied_before.clear();
                ties = 0;
                state.fold(s, side.rate);
            }
#endif
            if (s - state.origin > span || state.pending >= FOLD / 2) state.fold(s, side.rate);
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                while (side.passed(j, s, stream[j].head)) {
                    real place = stream[j].head, weight;
                    Row row = stream[j].take(lane, weight);
                    state.absorb(side, j, place, row, weight);
                }
            }
            // what has left the window cancels but for rounding, which grows with the distance: sum it afresh
            if (COMPACT && (s - renewed > 2 * side.support || s - last > side.support)) {
                state.clear(s);
                for (int j = 0; j < NODES - 1; j++) {
                    for (index_t n = stream[NODES - 1].passed; n < stream[j].passed; n++) {
                        int index = source_line.index(n);
                        state.absorb(side, j, source_line.place(index), load_row(rows, stride, index, lane),
                                     WEIGHTED ? weights[index] : real(1));
                    }
                }
                state.fold(s, side.rate);
                renewed = s;
            }
#if TIES == HALF
#pragma unroll
            for (int j = 0; j < NODES; j++) {
                while (s - stream[j].head == side.node[j]) {
                    real place = stream[j].head, scalar, weight[POWERS];
                    Row row = stream[j].take(lane, scalar);
                    source_weights(side, j, state.origin - place - side.node[j], weight);
                    tied.add_row(weight, row, scalar);
                    if (++ties % FOLD == 0) tied_before.add(tied), tied.clear();
                }
            }
#endif
            last = s;
        }
        real sum[VEC], extra;
        for (int c = 0; c < VEC; c++) sum[c] = real(0);
        extra = real(0);
        bool sparse = COMPACT && TIES != HALF && stream[0].passed - stream[NODES - 1].passed <= FEW;
        if (sparse) {
            for (index_t n = stream[NODES - 1].passed; n < stream[0].passed; n++) {
                int index = source_line.index(n);
                real u = s - source_line.place(index), weight = real(0);
                for (int j = 0; j < NODES; j++) {
                    real z = u - side.node[j], term = side.below[j][POWERS - 1];
                    for (int k = POWERS - 2; k >= 0; k--) term = term * z + side.below[j][k];
                    weight += z > real(0) ? term : real(0);
                }
                Row row = load_row(rows, stride, index, lane);
                for (int c = 0; c < VEC; c++) sum[c] += weight * row.at[c];
                extra += weight * (WEIGHTED ? weights[index] : real(1));
            }
        } else {
            real y = s - state.origin, factor = RATE ? exponential(-side.rate * y) : real(1);
            for (int l = 0; l < POWERS; l++, factor *= y) {
#if TIES == HALF
                for (int c = 0; c < VEC; c++)
                    sum[c] += factor * (state.base.at[l][c] + state.local.at[l][c] +
                                        real(0.5) * (real(tied_before.at[l][c]) + tied.at[l][c]));
                extra += factor * (state.base.extra[l] + state.local.extra[l] +
                                   real(0.5) * (real(tied_before.extra[l]) + tied.extra[l]));
#else
                for (int c = 0; c < VEC; c++) sum[c] += factor * (state.base.at[l][c] + state.local.at[l][c]);
                extra += factor * (state.base.extra[l] + state.local.extra[l]);
#endif
            }
        }
        if (PRODUCTS) {
            index_t ahead = i + RING - 1;
            int next = (ahead ^ i) < 32 ? targets.index : targets.next_index;
            others.ask(ahead, __shfl_sync(ALL, next, int(ahead & 31)), lane);
            Row other = others.take(i, lane);
            real product = real(0);
            for (int c = 0; c < VEC; c++) product += sum[c] * other.at[c];
            product = sum_lanes(product);
            // the extra scalar belongs to the first block of channels
            if (blockIdx.y == 0) product += extra * out_extra[m];
            if (int(i & 31) == lane) mine = product;
            if ((i & 31) == 31 || i + 1 == end) {
                index_t at = (i & ~index_t(31)) + lane;
                if (at >= begin && at <= i) {
                    real* place = products + (p * number + targets.index) * dims + d;
#if ORDERED
                    *place += mine;
#else
                    atomicAdd(place, mine);
#endif
                }
            }
        } else {
            add_to(out + m * stride + lane * VEC, sum);
            if (blockIdx.y == 0 && lane == 0) {
#if ORDERED
                out_extra[m] += extra;
#else
                atomicAdd(out_extra + m, extra);
#endif
            }
        }
        if ((i & 31) == 31) targets.turn(i + 1, lane);
    }
}
