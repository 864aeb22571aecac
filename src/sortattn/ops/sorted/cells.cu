// What whole cells give to queries, before any key is passed; see coil.cu.
//
// With W_i, the sum of all rows of keys in cell i, and B_i, that of rows times their parts, a query at part a of cell j
// has from keys that it has not passed
//     W_j - B_j + B_j-1 + a (W_j - W_j-1).
// So every cell of a line has two rows, of which a query takes one of each in every dimension. Those of a few
// dimensions are in shared memory at a time, while the next ones are on their way.
//
// Sums of whole cells cancel for a query that sees little of what is in the cells around it: such queries are noted,
// and summed key by key, see mend.cu.
//
// Macros: those of given.cu, and CELLS.

#include "given.cu"

static_assert(sizeof(real) == 4, "float32");
// threads of a block, queries of a warp, one for each lane, and dimensions at a time; rows of a line, for either half
constexpr int THREADS = 512, ADDERS = THREADS / 32, DIMS = 4, SLOTS = CELLS + 2, ROWS_OF_LINE = 2 * SLOTS;
// lanes that have a row, and queries at a time
constexpr int ACROSS = WIDTH / 4, TOGETHER = 32 / ACROSS;
// numbers of a cell: a row for each of its sums; behind those of a line are extra scalars, and what is in the cells
// around
constexpr int TWICE = 2 * WIDTH, SCALARS = 4, LINE = ROWS_OF_LINE * (TWICE + SCALARS);
// numbers of a half of a line, as coil.cu leaves them
constexpr int TOTAL = CELLS * 2 * (WIDTH + 1);

struct alignas(16) Four {
    real at[4];
};
// What a query takes: its part of the circle, and where the rows are.
struct alignas(8) Taken {
    real part;
    int place;
};
struct alignas(16) Table {
    // two of them; a line has its extra scalars behind its rows
    real lines[2][DIMS * LINE];
    // for queries that take nothing
    real zeros[TWICE];
    Taken taken[ADDERS][DIMS][32];
};

// Make the `table (channel blocks, heads, dims, LINE)` of what queries take from the `totals` of coil.cu; a block has a
// line, and a thread one channel, or the extra scalars. There are zeros for cells that a line has not, and for all of a
// line that is not wound: `add_cells` copies whole lines, of whatever kind.
extern "C" __global__ void __launch_bounds__(WIDTH + 32)
    begin_cells(const Winding *windings, const real *totals, real *table, index_t lines) {
    int cells = windings[blockIdx.x % lines].cells, column = threadIdx.x;
    if (column > WIDTH) return;
    const real *lower = totals + index_t(blockIdx.x) * 2 * TOTAL + column, *upper = lower + TOTAL;
    table += index_t(blockIdx.x) * LINE;
    // extra scalars of a cell are neighbours
    bool extra = column == WIDTH;
    table += extra ? ROWS_OF_LINE * TWICE : column;
    int apart = extra ? SCALARS : TWICE, second = extra ? 1 : WIDTH;
    for (int half = 0; half < 2; half++, table += SLOTS * apart) {
        auto pair = [&](const real *sums, int c) {
            return Pair{sums[2 * c * (WIDTH + 1)], sums[(2 * c + 1) * (WIDTH + 1)]};
        };
        auto total = [&](int c) {
            if (c < 0 || c >= cells) return Pair{};
            // those of the other half are as if the line went the other way: a part there is what is left here
            Pair here = pair(half ? upper : lower, c), there = pair(half ? lower : upper, cells - 1 - c);
            return Pair{here.plain + there.plain, here.weighted + (there.plain - there.weighted)};
        };
        Pair before = {}, here = {};
        // from the cell before the first one with keys to the one behind the last, and those that are not there
        for (int j = -1; j <= CELLS; j++) {
            Pair next = total(j + 1);
            real *to = table + (j + 1) * apart;
            to[0] = here.plain - here.weighted + before.weighted;
            to[second] = here.plain - before.plain;
            if (extra) to[2] = before.plain + here.plain + next.plain, to[3] = real(0);
            before = here, here = next;
        }
    }
}

// Where a query finds its two rows; a negative place is none.
__device__ inline Taken take(const Winding &winding, real x) {
    if (!winding.cells) return {real(0), -1};
    word point = winding.wound(x);
    bool upper = point >= HALF_AROUND;
    if (upper) point = winding.mirrored(point);
    int cell = int(point & CELL_MASK) - FIRST_CELL;
    return {part_of(point), cell < -1 ? -1 : upper * SLOTS + cell + 1};
}

// Bring the tables of some lines, by all threads of a block.
__device__ inline void bring(real *to, const real *from, int numbers) {
    for (int i = threadIdx.x * 4; i < numbers; i += THREADS * 4) begin_copy_around(to + i, from + i);
}

// Add to `out (heads, number, STRIDE)` and `out_extra (heads, number)` what cells give to the queries
// `points (heads, number, dims)`, times `scale`; and say of each, in `unsure (heads, number)`, whether its sums cancel.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_cells(const given_t *points, const Winding *windings, double scale, const real *tables, real *out,
              real *out_extra, bool *unsure, index_t heads, index_t number, index_t dims) {
    extern __shared__ __align__(16) char shared[];
    Table &table = *reinterpret_cast<Table *>(shared);
    static_assert(LINE % 4 == 0 && TWICE % 4 == 0, "sixteen bytes at a time");
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    index_t channels = blockIdx.y, blocks = (number + THREADS - 1) / THREADS, p = blockIdx.x / blocks;
    index_t first = blockIdx.x % blocks * THREADS + warp * 32, mine = first + lane;
    bool here = mine < number;
    points += (p * number + (here ? mine : 0)) * dims;
    windings += p * dims;
    tables += (channels * heads + p) * dims * LINE;
    if (threadIdx.x < TWICE) table.zeros[threadIdx.x] = real(0);
    auto some_dims = [&](index_t d) { return int(max(min(dims - d, index_t(DIMS)), index_t(0))); };
    real extra = real(0), around = real(0);
    Four sums[ACROSS] = {};
    bring(table.lines[0], tables, some_dims(0) * LINE);
    for (index_t d = 0; d < dims; d += DIMS) {
        real *lines = table.lines[d / DIMS % 2];
        int some = some_dims(d), zeros = int(reinterpret_cast<char *>(table.zeros) - reinterpret_cast<char *>(lines));
        for (int k = 0; k < some; k++) table.taken[warp][k][lane] = take(windings[d + k], widen(points[d + k]));
        // these are there, and the others have been read
        wait_for_copies();
        __syncthreads();
        bring(table.lines[(d / DIMS + 1) % 2], tables + (d + DIMS) * LINE, some_dims(d + DIMS) * LINE);
        for (int k = 0; k < some; k++) {
            Taken &taken = table.taken[warp][k][lane];
            const real *scalars = lines + k * LINE + ROWS_OF_LINE * TWICE + SCALARS * taken.place;
            if (taken.place >= 0) extra += scalars[0] + taken.part * scalars[1], around += scalars[2];
            // in bytes
            taken.place = taken.place < 0 ? zeros : 4 * (k * LINE + taken.place * TWICE);
        }
        __syncwarp();
        const char *start = reinterpret_cast<const char *>(lines + lane % ACROSS * 4);
        for (int k = 0; k < some; k++) {
#pragma unroll
            for (int i = 0; i < ACROSS; i++) {
                Taken taken = table.taken[warp][k][i * TOGETHER + lane / ACROSS];
                const Four *both = reinterpret_cast<const Four *>(start + taken.place);
                Four one = both[0], other = both[ACROSS];
#pragma unroll
                for (int c = 0; c < 4; c++) sums[i].at[c] += one.at[c] + taken.part * other.at[c];
            }
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < ACROSS; i++) {
        index_t n = first + i * TOGETHER + lane / ACROSS;
        if (n >= number) break;
        Four *row = reinterpret_cast<Four *>(out + (p * number + n) * STRIDE + channels * WIDTH) + lane % ACROSS;
        Four before = *row;
#pragma unroll
        for (int c = 0; c < 4; c++) before.at[c] += real(scale) * sums[i].at[c];
        *row = before;
    }
    if (!here || channels) return;
    extra = out_extra[p * number + mine] += real(scale) * extra;
    unsure[p * number + mine] = fabsf(extra) < EDGE * fabsf(real(scale)) * around;
}
