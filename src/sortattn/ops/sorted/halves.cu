// The sums of all rows on either side of zero in every dimension, with which walks of a folded line begin.
//
// That is a product of two matrices: whether a coordinate is above zero, or below, and the rows. Tensor cores have it,
// of rows that are cut into three numbers of eight digits each, which are exact, as ones and zeros are, but for rows
// below 1e-33, whose last digits bfloat16 does not have.
//
// Macros: those of given.cu.

#include "given.cu"

static_assert(sizeof(real) == 4, "float32 is three times bfloat16");

// of a block: sources at a time, dimensions, of which a warp has sixteen, and channels
constexpr int TILE = 32, DIMS = 64, TALL = 16, COLUMNS = WIDTH < 64 ? WIDTH : 64;
// warps for those above zero, and as many for those below
constexpr int WARPS_OF_SIDE = DIMS / TALL, THREADS = 2 * 32 * WARPS_OF_SIDE;
// pairs of sources, that stand in a word; from one pair to the next, such that lanes meet in no bank; products of eight
// channels, of which the last one has the extra scalar; and parts of a number
constexpr int PAIRS = TILE / 2, DIMS_APART = DIMS + 8, COLUMNS_APART = COLUMNS + 8, EIGHTS = COLUMNS / 8 + 1,
              PIECES = 3;
// words that a thread makes
constexpr int POINTS = PAIRS * DIMS / THREADS, ROWS = PAIRS * COLUMNS / THREADS;

// Two numbers of bfloat16 in a word: the upper halves of two of float32.
__device__ inline unsigned pack(float low, float high) {
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}
// What the upper half of a number says, which is taken from it.
__device__ inline float take_upper(float &x) {
    float upper = __uint_as_float(__float_as_uint(x) & 0xffff0000u);
    x -= upper;
    return upper;
}

// Add a product of 16 x 16 and 16 x 8 numbers: of rows lane / 4 and eight behind, and columns lane % 4 * 2 and behind.
__device__ inline void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    // what all lanes hold, for each of them to read
    static unsigned held[32][32][6];
    unsigned (&warp)[32][6] = held[threadIdx.x / 32];
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 6; i++) warp[lane][i] = i < 4 ? a[i] : b[i - 4];
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            auto number = [&](unsigned word) { return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16); };
            unsigned left = warp[row * 4 + k % 8 / 2][k / 8 * 2 + i / 2];
            sum[i] += number(left) * number(warp[column * 4 + k % 8 / 2][4 + k / 8]);
        }
    }
    __syncwarp();
#endif
}

// `totals (channel blocks, heads, chunks, 2, dims, WIDTH + 1)`, above zero and below, and of all rows, `alls (channel
// blocks, heads, chunks, WIDTH + 1)`, unless that is null. A chunk has every so manieth source: neighbours are often
// alike, and their sums large. Heads whose rows are not all finite are marked in `unfit (heads, group)`, unless that is
// null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sum_halves(const given_t *points, const given_t *rows, const real *weights, real *totals, real *alls, int *unfit,
               index_t heads, index_t group, index_t count, index_t dims, index_t chunks) {
    // by pairs of sources: of dimensions, whether they are above zero and below; and parts of rows
    __shared__ unsigned sides[2][PAIRS][DIMS_APART], parts[PIECES][PAIRS][COLUMNS_APART];
    index_t groups = (dims + DIMS - 1) / DIMS, first_dim = blockIdx.x % groups * DIMS;
    index_t chunk = blockIdx.x / groups % chunks, p = blockIdx.x / groups / chunks;
    index_t channels = blockIdx.y / (WIDTH / COLUMNS), first_column = blockIdx.y % (WIDTH / COLUMNS) * COLUMNS;
    int lane = threadIdx.x % 32, side = threadIdx.x / 32 / WARPS_OF_SIDE;
    int first_row = threadIdx.x / 32 % WARPS_OF_SIDE * TALL + lane / 4;
    Scalars scalars(weights, p * count);
    int some = int((count - chunk + chunks - 1) / chunks);

    // what a thread reads of the next tile, on its way while one is multiplied: two sources each time
    real next_points[POINTS][2], next_rows[ROWS][2], next_scalars[2];
    int dim = threadIdx.x % DIMS, point_pair = threadIdx.x / DIMS;
    bool dim_there = first_dim + dim < dims;
    int column = threadIdx.x % COLUMNS, row_pair = threadIdx.x / COLUMNS;
    unsigned point_step = unsigned(chunks * dims), row_step = unsigned(chunks * STRIDE);
    points += (p * count + chunk) * dims + first_dim + dim + point_pair * 2 * index_t(point_step);
    rows += (p * count + chunk) * STRIDE + channels * WIDTH + first_column + column + row_pair * 2 * index_t(row_step);
    auto fetch = [&](int first) {
        auto load = [&](auto there) {
#pragma unroll
            for (int k = 0; k < POINTS * 2; k++) {
                unsigned n = k / 2 * (THREADS / DIMS * 2) + k % 2;
                bool in = there(first + point_pair * 2 + int(n)) && dim_there;
                next_points[k / 2][k % 2] = in ? widen(points[index_t(n * point_step)]) : real(0);
            }
#pragma unroll
            for (int k = 0; k < ROWS * 2; k++) {
                unsigned n = k / 2 * (THREADS / COLUMNS * 2) + k % 2;
                bool in = there(first + row_pair * 2 + int(n));
                next_rows[k / 2][k % 2] = in ? widen(rows[index_t(n * row_step)]) : real(0);
            }
        };
        // without a choice for each, where all are there
        if (first + TILE <= some)
            load([](int) { return true; });
        else
            load([&](int n) { return n < some; });
        points += TILE * index_t(point_step), rows += TILE * index_t(row_step);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int n = first + threadIdx.x % PAIRS * 2 + i;
            next_scalars[i] = n < some ? scalars[int(chunk + n * chunks)] : real(0);
        }
    };
    auto store = [&](int pair, int column, const real(&two)[2]) {
        real low = two[0], high = two[1];
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            real low_part = take_upper(low), high_part = take_upper(high);
            parts[piece][pair][column] = pack(low_part, high_part);
        }
    };
    // beside the extra scalar there is nothing
    for (int i = threadIdx.x; i < PIECES * PAIRS * 8; i += THREADS) {
        parts[i / (PAIRS * 8)][i / 8 % PAIRS][COLUMNS + i % 8] = 0;
    }
    // of a tile and, by steps, as rounding would add up, of all; and of all rows, those of the words of a thread
    real total[EIGHTS][4] = {}, all[ROWS] = {}, all_scalars = real(0);
    // no longer, if a row of this thread is not finite
    real zero = real(0);
    fetch(0);
    for (int first = 0; first < some; first += TILE) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < POINTS; k++) {
            int pair = point_pair + k * (THREADS / DIMS);
            // what is no finite number stands at zero, and what is there on neither side
            auto one = [](bool holds) { return holds ? real(1) : real(0); };
            real x = next_points[k][0], y = next_points[k][1];
            x = x - x == real(0) ? x : real(0), y = y - y == real(0) ? y : real(0);
            sides[0][pair][dim] = pack(one(x > real(0)), one(y > real(0)));
            sides[1][pair][dim] = pack(one(x < real(0)), one(y < real(0)));
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            store(row_pair + k * (THREADS / COLUMNS), column, next_rows[k]);
            all[k] += next_rows[k][0] + next_rows[k][1];
            zero += real(0) * next_rows[k][0], zero += real(0) * next_rows[k][1];
        }
        if (threadIdx.x < PAIRS) {
            store(threadIdx.x, COLUMNS, next_scalars);
            all_scalars += next_scalars[0] + next_scalars[1];
        }
        __syncthreads();
        fetch(first + TILE);
        real sum[EIGHTS][4] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair += 8) {
            int here = pair + lane % 4;
            unsigned ones[4];
#pragma unroll
            for (int i = 0; i < 4; i++) ones[i] = sides[side][here + i / 2 * 4][first_row + i % 2 * 8];
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++) {
                    unsigned part[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) part[i] = parts[piece][here + i * 4][n * 8 + lane / 4];
                    multiply(sum[n], ones, part);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; i++) total[i / 4][i % 4] += sum[i / 4][i % 4];
    }
    if (unfit && zero != real(0)) {
        for (index_t g = 0; g < group; g++) unfit[p * group + g] = 1;
    }
    index_t place = (channels * heads + p) * chunks + chunk;
    totals += place * 2 * dims * (WIDTH + 1);
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
        int here = i / 4 * 8 + lane % 4 * 2 + i % 2;
        index_t line = first_dim + first_row + i % 4 / 2 * 8;
        if (line >= dims || here > COLUMNS || (here == COLUMNS && first_column)) continue;
        here = here < COLUMNS ? here + int(first_column) : WIDTH;
        totals[(side * dims + line) * (WIDTH + 1) + here] = total[i / 4][i % 4];
    }
    if (!alls || first_dim) return;
    __syncthreads();
    real *shared = reinterpret_cast<real *>(parts);
#pragma unroll
    for (int k = 0; k < ROWS; k++) shared[threadIdx.x + k * THREADS] = all[k];
    if (threadIdx.x < PAIRS) shared[PAIRS * COLUMNS + threadIdx.x] = all_scalars;
    __syncthreads();
    alls += place * (WIDTH + 1);
    if (threadIdx.x > COLUMNS || (threadIdx.x == COLUMNS && first_column)) return;
    bool last = threadIdx.x == COLUMNS;
    real all_rows = real(0);
    for (int i = 0; i < PAIRS; i++) all_rows += shared[last ? PAIRS * COLUMNS + i : i * COLUMNS + threadIdx.x];
    alls[last ? WIDTH : first_column + threadIdx.x] = all_rows;
}

constexpr int FOUR = 4;
struct alignas(FOUR * sizeof(real)) Four {
    real at[FOUR];
};

// Fill `out (heads, number, channels)` and `out_extra (heads, number)` with the sums of all rows times `factor`; a
// block has one of `slices` parts of a head, and its channels.
extern "C" __global__ void __launch_bounds__(256) fill(const real *alls, real *out, real *out_extra, index_t heads,
                                                       index_t number, index_t chunks, index_t slices, double factor) {
    alignas(sizeof(Four)) __shared__ real row[WIDTH + FOUR];
    index_t p = blockIdx.x / slices, slice = blockIdx.x % slices, share = (number + slices - 1) / slices;
    index_t end = min((slice + 1) * share, number);
    alls += (blockIdx.y * heads + p) * chunks * (WIDTH + 1);
    if (threadIdx.x <= WIDTH) {
        double sum = 0.0;
        for (index_t chunk = 0; chunk < chunks; chunk++) sum += double(alls[chunk * (WIDTH + 1) + threadIdx.x]);
        row[threadIdx.x] = real(sum * factor);
    }
    __syncthreads();
    constexpr int QUADS = WIDTH / FOUR, STEP = 256 / QUADS;
    int quad = threadIdx.x % QUADS * FOUR;
    Four mine = *reinterpret_cast<const Four *>(row + quad);
    for (index_t m = slice * share + threadIdx.x / QUADS; m < end; m += STEP) {
        *reinterpret_cast<Four *>(out + (p * number + m) * STRIDE + blockIdx.y * WIDTH + quad) = mine;
    }
    if (blockIdx.y) return;
    for (index_t m = slice * share + threadIdx.x; m < end; m += 256) out_extra[p * number + m] = row[WIDTH];
}
