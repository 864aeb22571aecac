// The sums of all rows of every cell of a wound line, with which reel.cu begins.
//
// A warp has a line, and all warps of a block the same rows, which are in shared memory while the next ones are on
// their way. It lists them cell by cell, and sums those of a cell two at a time.
//
// Macros: those of track.cu, CELLS and WEIGHTED (whether sums of rows times parts are wanted too).

#include "wheel.cu"

static_assert(sizeof(real) == 4, "float32");
// warps of a block, a line each, and rows at a time, four for each lane
constexpr int LINES = 16, THREADS = 32 * LINES, EACH_LANE = 4, TILE = 32 * EACH_LANE;
// cells, from that before the first one with keys to that behind the last, and sums of each
constexpr int AROUND_ALL = CELLS + 2, KINDS = WEIGHTED ? 2 : 1;
// channels of a lane: half a warp has a row
constexpr int CHANNELS = WIDTH / 16;
// numbers of a line
constexpr int TOTAL = AROUND_ALL * KINDS * (WIDTH + 1);

struct alignas(CHANNELS * sizeof(real)) Piece {
    real at[CHANNELS];
};
// A row of a tile, by its first piece, and its part of the circle.
struct alignas(8) Listed {
    int piece;
    real part;
};
struct alignas(16) Tiles {
    Piece rows[2][TILE * 16];
    Listed lists[LINES][TILE];
    // sums of the extra scalars that each lane has met
    real extra[LINES][AROUND_ALL * KINDS][32];
};

// `totals (heads, dims, chunks, CELLS + 2, KINDS, WIDTH + 1)` of `rows (heads, count, STRIDE)` and `weights (heads,
// count)` at `points (heads, count, dims)`; a chunk has `length` of them.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tally(const real *points, const Winding *windings, const real *rows, const real *weights, real *totals,
          index_t count, index_t dims, index_t chunks, index_t length) {
    extern __shared__ __align__(16) char shared[];
    Tiles &tiles = *reinterpret_cast<Tiles *>(shared);
    int lane = threadIdx.x % 32, warp = own_warp();
    bool upper = lane >= 16;
    index_t groups = (dims + LINES - 1) / LINES, d = blockIdx.x % groups * LINES + warp;
    index_t chunk = blockIdx.x / groups % chunks, p = blockIdx.x / groups / chunks;
    index_t first = chunk * length, end = min(first + length, count);
    bool here = d < dims;
    Winding winding = windings[p * dims + (here ? d : 0)];
    here = here && winding.cells;
    Scalars scalars(weights, p * count);
    points += p * count * dims + (here ? d : 0);
    rows += p * count * STRIDE;
    Listed *list = tiles.lists[warp];
    auto extra = tiles.extra[warp];
#pragma unroll
    for (int i = 0; i < AROUND_ALL * KINDS; i++) extra[i][lane] = real(0);

    real next_point[EACH_LANE], next_scalar[EACH_LANE];
    auto fetch = [&](index_t tile) {
        Piece *to = tiles.rows[(tile - first) / TILE % 2];
#pragma unroll
        for (int e = 0; e < EACH_LANE; e++) {
            index_t row = tile + e * 32 + threadIdx.x / 16, mine = tile + e * 32 + lane;
            // behind the last row is another, which is on no list
            const real *from = rows + (row < end ? row : first) * STRIDE;
            begin_copy<sizeof(Piece)>(to + e * THREADS + threadIdx.x,
                                      reinterpret_cast<const Piece *>(from) + threadIdx.x % 16);
            next_point[e] = mine < end ? points[mine * dims] : real(0);
            next_scalar[e] = mine < end ? scalars[int(mine)] : real(0);
        }
    };
    Piece sums[AROUND_ALL][KINDS] = {};
    fetch(first);
    for (index_t start = first; start < end; start += TILE) {
        const Piece *those = tiles.rows[(start - first) / TILE % 2] + lane % 16;
        int cell[EACH_LANE];
        real part[EACH_LANE];
#pragma unroll
        for (int e = 0; e < EACH_LANE; e++) {
            // what is no finite number stands at zero
            real x = next_point[e] - next_point[e] == real(0) ? next_point[e] : real(0);
            word point = winding.wound(x);
            bool there = here && start + e * 32 + lane < end;
            cell[e] = there ? int(point & CELL_MASK) - FIRST_CELL : -FIRST_CELL;
            part[e] = part_of(point);
            if (cell[e] >= -1) {
                extra[(cell[e] + 1) * KINDS][lane] += next_scalar[e];
                if (WEIGHTED) extra[(cell[e] + 1) * KINDS + 1][lane] += next_scalar[e] * part[e];
            }
        }
        // rows are there, and others have been read
        wait_for_copies();
        __syncthreads();
        if (start + TILE < end) fetch(start + TILE);
        if (!here) continue;
        // rows cell by cell, and where on the list those of a cell end
        int ends[AROUND_ALL], some = 0;
#pragma unroll
        for (int c = 0; c < AROUND_ALL; c++) {
            ends[c] = some;
            if (c >= winding.cells + 2) continue;
#pragma unroll
            for (int e = 0; e < EACH_LANE; e++) {
                bool mine = cell[e] == c - 1;
                unsigned alike = __ballot_sync(ALL, mine);
                if (mine) list[some + __popc(alike & (1u << lane) - 1)] = {(e * 32 + lane) * 16, part[e]};
                some += __popc(alike);
            }
            ends[c] = some;
        }
        __syncwarp();
        int from = 0;
#pragma unroll
        for (int c = 0; c < AROUND_ALL; c++) {
            if (from == ends[c]) continue;
            Piece sum[KINDS] = {};
#pragma unroll 4
            for (int i = from + upper; i < ends[c]; i += 2) {
                Listed item = list[i];
                Piece piece = those[item.piece];
#pragma unroll
                for (int v = 0; v < CHANNELS; v++) {
                    sum[0].at[v] += piece.at[v];
                    if (WEIGHTED) sum[KINDS - 1].at[v] += item.part * piece.at[v];
                }
            }
            from = ends[c];
#pragma unroll
            for (int l = 0; l < KINDS; l++) {
#pragma unroll
                for (int v = 0; v < CHANNELS; v++) sums[c][l].at[v] += sum[l].at[v];
            }
        }
        __syncwarp();
    }
    if (!here) return;
    totals += ((p * dims + d) * chunks + chunk) * TOTAL;
#pragma unroll
    for (int i = 0; i < AROUND_ALL * KINDS; i++, totals += WIDTH + 1) {
#pragma unroll
        for (int v = 0; v < CHANNELS; v++) {
            real sum = sums[i / KINDS][i % KINDS].at[v];
            sum += __shfl_xor_sync(ALL, sum, 16);
            if (!upper) totals[lane * CHANNELS + v] = sum;
        }
        real all = sum_lanes(extra[i][lane]);
        if (lane == 0) totals[WIDTH] = all;
    }
}

// From the `totals` of keys (not WEIGHTED) or queries what walks begin with, `starts (heads, dims, STARTS, WIDTH + 1)`,
// see reel.cu; a block has a line, and a thread one channel, or the extra scalars.
extern "C" __global__ void __launch_bounds__(WIDTH + 32)
    begin_reel(const Winding *windings, const real *totals, double *starts, index_t chunks) {
    int column = threadIdx.x;
    if (!windings[blockIdx.x].cells || column > WIDTH) return;
    totals += index_t(blockIdx.x) * chunks * TOTAL + column;
    starts += index_t(blockIdx.x) * STARTS * (WIDTH + 1) + column;
    double sums[AROUND_ALL][KINDS] = {};
    for (index_t chunk = 0; chunk < chunks; chunk++) {
#pragma unroll
        for (int i = 0; i < AROUND_ALL * KINDS; i++, totals += WIDTH + 1) sums[i / KINDS][i % KINDS] += double(*totals);
    }
    if (!WEIGHTED) {
#pragma unroll
        for (int c = 0; c < AROUND_ALL; c++) starts[c * (WIDTH + 1)] = sums[c][0] - (c ? sums[max(c - 1, 0)][0] : 0.0);
        return;
    }
    starts += AROUND_ALL * (WIDTH + 1);
#pragma unroll
    for (int c = 1; c <= CELLS; c++, starts += 2 * (WIDTH + 1)) {
        double plain = sums[c][0], weighted = sums[c][KINDS - 1];
        starts[0] = plain - sums[c - 1][0];
        starts[WIDTH + 1] = weighted - plain - sums[c - 1][KINDS - 1];
    }
}
