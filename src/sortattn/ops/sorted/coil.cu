// The walk around wound lines: every row of a key is read once, though a kernel has three nodes.
//
// With parts a of a query and b of a key, in cells, a spline with nodes one cell apart gives to a query in cell j from
// the keys it has passed
//     sum over cells i = j - 1, j, j + 1 of (1, -2, 1)  sum over b < a of (a - b) v,
// for which two sums are kept for a cell and a channel. What all keys give before they are passed is known when the
// walk is over, see cells.cu, for which the sums of the keys of every cell are left in `totals`.
//
// Half of the circle is walked upwards and the other half downwards, as if it were mirrored, by the warps of a block
// each, which hand sums on as in relay.cu: a stretch of thirty-two keys has the sums of all cells in registers, and
// goes along its keys and the targets among them cell by cell.
//
// Macros: those of given.cu, CREW (warps of a block), TEAMS (blocks of a multiprocessor) and CELLS.

#include "given.cu"

#include "alike.cu"
#include "stretch.cu"

static_assert(!ORDERED && ADDED && !SLOPES && sizeof(real) == 4, "sums by atomics, in float32");
// Both sums of a lane's channels.
struct alignas(2 * sizeof(Row)) Both {
    Row plain, weighted;

    __device__ void clear() {
#pragma unroll
        for (int c = 0; c < VEC; c++) plain.at[c] = weighted.at[c] = real(0);
    }
    __device__ void add(const Pair &weights, const Row &row) {
#pragma unroll
        for (int c = 0; c < VEC; c++) {
            plain.at[c] += weights.plain * row.at[c];
            weighted.at[c] += weights.weighted * row.at[c];
        }
    }
    __device__ void add(const Both &other, real factor = real(1)) {
#pragma unroll
        for (int c = 0; c < VEC; c++) {
            plain.at[c] += factor * other.plain.at[c];
            weighted.at[c] += factor * other.weighted.at[c];
        }
    }
};

// What is handed on: the sums of all keys before, by cells, those of the extra scalars, and whose turn it is.
struct Baton {
    Both at[CELLS][32];
    Pair extra[CELLS];
    Turn turn;
};

// A key of a list: what it gives to both sums, and where the row of the one behind it is.
struct alignas(16) Listed {
    Pair weights;
    int row;
};
// A target: its part of the circle, its row, and how far in the list, in bytes, the keys are that it has passed.
struct alignas(16) Reader {
    real part;
    int index, after;
};
// targets at a time: seldom are there more among thirty-two keys, if there are as many of both
constexpr int MOST = 64;

// What a warp has: rows of its keys, and lists of these and of targets; what stands behind the last key is read and not
// used.
struct alignas(16) Station {
    Given rows[32 * 32];
    Listed keys[34];
    Reader targets[MOST];
};

// Half of a wound line.
struct Arc {
    const int *points, *order;
    Winding winding;
    int count, step;

    __device__ Arc(const real *places, const int *indices, index_t line, index_t all, bool upper, Winding winding)
        : points(reinterpret_cast<const int *>(places) + line * all), order(indices + line * all), winding(winding),
          count(int(all)), step(upper ? -1 : 1) {
        int half = first_without(0, count, [&](int i) { return word(points[i]) < HALF_AROUND; });
        if (upper) points += count - 1, order += count - 1;
        count = upper ? count - half : half;
    }
    __device__ word at(int i) const {
        word point = word(read_once(points + i * step));
        return step < 0 ? winding.mirrored(point) : point;
    }
    __device__ int index(int i) const { return read_once(order + i * step); }
};

// A list of keys, the row of each being read before its turn, as is what it gives.
struct List {
    // what a lane has of rows, and where its first key stands, in shared memory
    const char *rows;
    const char *keys;
    Listed key;
    Row row;
    int at;

    // by all lanes: those that are `listed`, with what they give
    __device__ static void write(Listed *keys, unsigned listed, Pair weights, int lane) {
        int place = __popc(listed & (1u << lane) - 1);
        __syncwarp();
        if (listed >> lane & 1) keys[place].row = lane * int(32 * sizeof(Given)), keys[place + 1].weights = weights;
        if (lane == 0) keys[__popc(listed)].row = 0;
        __syncwarp();
    }
    __device__ List(const Listed *list, const Given *first, int lane)
        : rows(reinterpret_cast<const char *>(first + lane)), keys(reinterpret_cast<const char *>(list + 1)),
          key(list[1]), row(row_at(list->row)), at(0) {}
    __device__ Row row_at(int place) const { return widened(*reinterpret_cast<const Given *>(rows + place)); }
    // add the keys before `until`, in bytes
    __device__ void pass(int until, Both &sum) {
#pragma unroll 1
        while (at < until) {
            // in this order nothing is copied, for which a load would be waited for
            sum.add(key.weights, row);
            row = row_at(key.row);
            at += int(sizeof(Listed));
            key = *reinterpret_cast<const Listed *>(keys + at);
        }
    }
};

// What the lanes of a warp have of thirty-two targets, one each.
struct Some {
    real part;
    int index, rank, cell;

    // those from `at` on, before `end`, among the keys of a stretch at `point`
    __device__ void read(const Arc &queries, int at, int end, word point, int lane) {
        bool wanted = at + lane < end;
        word s = wanted ? queries.at(at + lane) : ALL;
        index = wanted ? queries.index(at + lane) : 0;
        rank = count_before(point, [&](word t) { return t < s; });
        cell = wanted ? int(s & CELL_MASK) - FIRST_CELL : -FIRST_CELL;
        part = part_of(s);
    }
};

// Add the sums of what queries have passed to `out (heads, number, STRIDE)` and `out_extra (heads, number)`: those of
// lines that are wound, of heads from `first` on, one block for each half of a line. The sums of all keys of a half, as
// it is walked, are left in `totals (channel blocks, heads, dims, 2, CELLS, 2, WIDTH + 1)`.
extern "C" __global__ void __launch_bounds__(32 * CREW, TEAMS)
    coil(const real *key_places, const int *key_order, const real *query_places, const int *query_order,
         const given_t *rows, const real *weights, const Winding *windings, double scale, real *totals, real *out,
         real *out_extra, index_t heads, index_t count, index_t number, index_t dims, index_t first) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Baton baton;
    __shared__ Marks<word> marks;
    int lane = threadIdx.x % 32, warp = own_warp();
    Station &mine = reinterpret_cast<Station *>(shared)[warp];
    index_t channels = blockIdx.y, d = blockIdx.x % dims, p = first + blockIdx.x / dims / 2, line = p * dims + d;
    bool upper = blockIdx.x / dims % 2;
    Winding winding = windings[line];
    if (!winding.cells) return;
    Arc keys(key_places, key_order, line, count, upper, winding);
    Arc queries(query_places, query_order, line, number, upper, winding);
    const char *key_rows = piece_of(rows + p * count * STRIDE + channels * WIDTH, lane);
    Rows output_rows(out + p * number * STRIDE + channels * WIDTH, lane);
    Scalars scalars(weights, p * count);
    out_extra += p * number;
    totals += (((channels * heads + p) * dims + d) * 2 + upper) * (CELLS * 2 * (WIDTH + 1));
    auto query_at = [&](int i) { return queries.at(i); };
    real height = real(scale);
#ifdef __CUDA_ARCH__
    // made once, not for every target; as in `Rows`
    asm("" : "+f"(height), "+l"(out_extra));
#endif
    marks.fill(queries.count, query_at, ALL);
    baton.turn.begin();
    for (int c = warp; c < CELLS; c += CREW) baton.at[c][lane].clear();
    if (threadIdx.x < CELLS) baton.extra[threadIdx.x] = {};
    __syncthreads();
    int stretches = (keys.count + 31) / 32;

    // the keys of the next stretch, on their way while one is walked
    word next_point;
    int next_key;
    auto fetch = [&](int stretch) {
        int i = stretch * 32 + lane;
        next_point = i < keys.count ? keys.at(i) : ALL;
        next_key = i < keys.count ? keys.index(i) : 0;
    };
    fetch(warp);
    // where the targets of the next stretches of this warp begin and end, found lane by lane
    int begins = 0, ends = 0;
    for (int stretch = warp; stretch < stretches; stretch += CREW) {
        int some = min(32, keys.count - stretch * 32), turn = stretch / CREW;
        bool there = lane < some, last = stretch + 1 == stretches;
        word point = next_point;
        bring(mine.rows, key_rows, next_key, lane);
        real scalar = there ? scalars[next_key] : real(0);
        if (turn % 32 == 0) {
            int final = (stretch + lane * CREW) * 32 - 1;
            auto passed = [&](int key) {
                word point = keys.at(max(min(key, keys.count - 1), 0));
                return marks.find(queries.count, query_at, [&](word s) { return s > point; });
            };
            begins = final < 0 ? 0 : passed(final), ends = passed(final + 32);
            __syncwarp();
        }
        // those that have passed the last key before and not the last one here
        int at = __shfl_sync(ALL, begins, turn % 32), end = __shfl_sync(ALL, ends, turn % 32);
        if (last) end = queries.count;
        Some targets[2];
        targets[0].read(queries, at, end, point, lane);
        targets[1].read(queries, at + 32, end, point, lane);
        int cell = there ? int(point & CELL_MASK) - FIRST_CELL : -1;
        Pair given = {real(1), there ? part_of(point) : real(0)};
        // of this lane's number, which keys a cell has
        unsigned own = 0;
#pragma unroll
        for (int c = 0; c < CELLS; c++) {
            unsigned those = __ballot_sync(ALL, cell == c);
            if (lane == c) own = those;
        }
        // the sums of extra scalars of keys of the same cell up to this one
        Pair extra = {scalar, scalar * given.weighted};
        add_alike(extra, last_before(__shfl_sync(ALL, own, cell & 31), lane));
        Pair extra_sum = shuffled(extra, max(last_before(own, 32), 0));
        fetch(stretch + CREW);
        wait_for_copies();
        __syncwarp();
        Both sums[CELLS];
#pragma unroll
        for (int c = 0; c < CELLS; c++) {
            sums[c].clear();
            unsigned those = __ballot_sync(ALL, cell == c);
            if (!those) continue;
            List::write(mine.keys, those, given, lane);
            List(mine.keys, mine.rows, lane).pass(__popc(those) * int(sizeof(Listed)), sums[c]);
        }
        // the baton is taken and handed on
        baton.turn.wait(stretch);
        Pair extra_base = {};
        if (lane < CELLS) {
            extra_base = baton.extra[lane];
            if (own) add_pair(baton.extra[lane], extra_sum);
        }
#pragma unroll
        for (int c = 0; c < CELLS; c++) {
            if (c >= winding.cells) break;
            Both base = baton.at[c][lane];
            sums[c].add(base);
            baton.at[c][lane] = sums[c];
            sums[c] = base;
        }
        baton.turn.pass(stretch);

        for (; at < end; at += MOST) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Some &here = targets[half];
                if (at + half * 32 >= end) continue;
                Pair seen = {};
#pragma unroll
                for (int k = -1; k <= 1; k++) {
                    // no key is in a cell before the first and behind the last
                    int from = here.cell + k & 31;
                    unsigned those = __shfl_sync(ALL, own, from);
                    Pair base = shuffled(extra_base, from);
                    int latest = last_before(those, here.rank);
                    Pair before = shuffled(extra, max(latest, 0));
                    if (latest >= 0) add_pair(base, before);
                    add_pair(seen, base, k ? real(1) : real(-2));
                }
                if (here.cell >= -1 && channels == 0)
                    add_to(out_extra + unsigned(here.index), height * (here.part * seen.plain - seen.weighted));
            }
#pragma unroll
            for (int c = -1; c <= CELLS; c++) {
                unsigned low = __ballot_sync(ALL, targets[0].cell == c),
                         high = __ballot_sync(ALL, targets[1].cell == c);
                if (!(low | high)) continue;
                int away = cell - c;
                unsigned seen = __ballot_sync(ALL, there && away >= -1 && away <= 1);
                real step = away == 0 ? real(-2) : real(1);
                List::write(mine.keys, seen, {step, step * given.weighted}, lane);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Some &here = targets[half];
                    int place = half ? __popc(low) + __popc(high & (1u << lane) - 1) : __popc(low & (1u << lane) - 1);
                    int after = __popc(seen & first_lanes(here.rank)) * int(sizeof(Listed));
                    if (here.cell == c) mine.targets[place] = {here.part, here.index, after};
                }
                __syncwarp();
                Both sum;
                sum.clear();
                // indices are those of cells that there are, whatever the loop is unrolled to
                if (c > 0) sum = sums[max(c - 1, 0)];
                if (c + 1 < CELLS) sum.add(sums[min(c + 1, CELLS - 1)]);
                if (c >= 0 && c < CELLS) sum.add(sums[min(max(c, 0), CELLS - 1)], real(-2));
                List list(mine.keys, mine.rows, lane);
                Cursor<Reader> next(mine.targets, 0), stop(mine.targets, __popc(low) + __popc(high));
#pragma unroll 1
                while (next.before(stop)) {
                    Reader to = next.here();
                    next.step(1);
                    list.pass(to.after, sum);
                    real numbers[VEC];
#pragma unroll
                    for (int v = 0; v < VEC; v++)
                        numbers[v] = height * (to.part * sum.plain.at[v] - sum.weighted.at[v]);
                    add_to(*output_rows.at(to.index), numbers);
                }
            }
            if (at + MOST >= end) break;
            targets[0].read(queries, at + MOST, end, point, lane);
            targets[1].read(queries, at + MOST + 32, end, point, lane);
        }
        __syncwarp();
    }
    __syncthreads();
    for (int c = warp; c < winding.cells; c += CREW) {
        Both all = baton.at[c][lane];
        real *plain = totals + 2 * c * (WIDTH + 1), *weighted = plain + WIDTH + 1;
#pragma unroll
        for (int v = 0; v < VEC; v++)
            plain[lane * VEC + v] = all.plain.at[v], weighted[lane * VEC + v] = all.weighted.at[v];
        if (lane == 0) plain[WIDTH] = baton.extra[c].plain, weighted[WIDTH] = baton.extra[c].weighted;
    }
}
