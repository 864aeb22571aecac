// The forward pass in float32: kernel sums of the values, tile by tile; nothing of size M x N leaves the chip.
//
// A block has 64 queries and walks over the keys, 64 at a time; a warp has 32 of both. A thread holds the scores of 4
// queries and 8 keys where tensor cores want them, so that the product with the values needs no detour. Keys are
// copied while the tile before is summed, and changed on the way into what the scores are made of, or chunks.cu has
// done so before (stream.cu). What a tile adds is summed afresh and then added to the running sum, so that errors grow
// with the number of tiles. Where there are few blocks, two groups of warps share one and have every other tile each,
// or blocks have 32 queries, and a warp 16 keys. The same call has the same bits.
//
// Set by cuda_kernels.py: NUMBER (float), KERNEL (a name of Kind), CHUNKS (blocks of 64 columns, one or at most four:
// then the running sums lie in local memory), SHARED (bytes), BLOCKS (at least, on a multiprocessor), EPSILON (of the
// Riesz kernels), OWN (queries of a block), COARSE (1 for inputs of 16 bits: products of halves alone), REVERSED (1 for
// the gradients of the values: own rows are keys then, the others queries with the gradients of their sums in place of
// values), GROUPS (of warps), ROOMY (1 if there is shared memory for factors of all dimensions), TAUS (1 if problems
// have bandwidths of their own), EARLY (1 if a block may begin before survey.cu ends), STREAM (1 if chunks.cu has
// looked at the inputs, and left keys and values as stream.cu wants them).

#include "kinds.cu"

#include "points.cu"

// of a group, and of all groups
constexpr int THREADS = 128, ALL = GROUPS * THREADS, OTHER = 64;
// warps with rows of their own, those that share these, and the keys of a thread
constexpr int ROW_WARPS = OWN / 32, KEY_WARPS = 4 / ROW_WARPS, EACH = OTHER / KEY_WARPS / 4;
// columns of a tile; four more keep the rows of neighbouring threads in different banks
constexpr int WIDTH = 64, STRIDE = WIDTH + 4;
// Of 16 dimensions, so many are two factors each; the others are points, whose exponential a third pipe takes.
constexpr int GROUP = 16, FACTOR_DIMS = ROOMY ? GROUP : 12, NUMBERS = GROUP + FACTOR_DIMS;
constexpr int POINTS = (FACTORS && !STREAM ? WIDTH / GROUP * NUMBERS : WIDTH) + 4;
constexpr bool WIDE = CHUNKS > 1;
// Floats below 2^-125 are multiples of the least one, and read as integers they say of which: what float instructions
// make of points that small is summed by instructions on integers, and with them.
constexpr bool SMALL = KIND == ADD_RIESZ || KIND == ADD_BUMP;
// One warp reads what survey.cu found, and the others need not wait for each other; `add_bump` is slower with it.
constexpr bool ONE_READS = KIND != ADD_BUMP;

// what a group of warps has of the keys
struct Tile {
    float key[OTHER * POINTS];
    float raw[OTHER * STRIDE], value[OTHER * STRIDE];
    float norm[OTHER];
    int mark[OTHER];
};

#include "ring.cu"

// the power of two that most heads have for their values
constexpr int USUAL = STREAM ? LIFTED : 0;

// parts of a row's sums: some warps of every group have some of its keys
constexpr int PARTS = KEY_WARPS * GROUPS;
struct Shared {
    union {
        struct {
            float query[OWN * POINTS];
            Tile tiles[GROUPS];
        };
        Streamed streamed;
    };
    Ring ring;
    float origin[CHUNKS * WIDTH];
    float own_norm[OWN];
    // one, or NaN
    float spoilt[OWN];
    Found parts[2][ALL / 32];
    int own_mark[OWN];
    // of all marks
    int least, most;
    // of a head's points, measured from the origin, and the power of two for its values
    float reach, mean, lift;
    float total[PARTS][OWN], shift[PARTS][OWN];
};
static_assert(GROUPS == 1 || !WIDE, "groups share the queries");
static_assert(!STREAM || (GROUPS == 1 && OWN == 64 && !WIDE && !REVERSED && !FIXED), "a walk is for these");
static_assert(sizeof(Shared) <= SHARED, "cuda_kernels.py asks for less shared memory than is used");
extern __shared__ __align__(16) unsigned char memory[];

// of the group
inline int group() { return threadIdx.x / THREADS; }
inline int thread() { return threadIdx.x % THREADS; }
inline void barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
inline void meet() { barrier(1 + group(), THREADS); }
// of a tile, if there are several groups
constexpr int MEETINGS = 3;

#include "rows.cu"

#include "scores.cu"

#include "products.cu"

#include "stream.cu"

// ---- the kernel

// what this thread finds in rows of a matrix
inline void look_at(const Rows &rows, const float *origin, Found &found) {
    int count = rows.count * rows.width;
    if (count == 0) return;
    if (rows.whole) {
        // most often a thread has the same columns of all its rows
        bool same = !origin || ALL * 4 % rows.width == 0;
        float from[4] = {};
        for (int e = 0; origin && e < 4; ++e) from[e] = origin[threadIdx.x * 4 % rows.width + e];
#pragma unroll 8
        for (int i = threadIdx.x * 4; i < count; i += ALL * 4) {
            float4 x = *reinterpret_cast<const float4 *>(rows.start + i);
            for (int e = 0; !same && e < 4; ++e) from[e] = origin[i % rows.width + e];
            look(x.x, from[0], found), look(x.y, from[1], found), look(x.z, from[2], found), look(x.w, from[3], found);
        }
    } else
        for (int i = threadIdx.x; i < count; i += ALL)
            look(rows.start[i], origin ? origin[i % rows.width] : 0.0f, found);
}

// The extent of the head's points and of its values, and which rows hold what is no number: from what survey.cu found
// or, in a short head, by looking at all of it. A barrier follows.
inline void look_around(Shared &shared, const Found *found, const Rows &queries, const Rows &keys, const Rows &values,
                        int first, int each, int heads, int slices) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x;
    Found points = {}, numbers = {};
    bool alone = ONE_READS && found;
    if (found) {
        if (alone && warp) return;
        wait_for_launch_before();
        int parts = (heads + 2) * slices;
        for (int i = lane; warp == 0 && i < parts; i += 32) {
            bool value = i >= parts - slices;
            // of grouped heads, which have their own queries, below
            Found part = found[i];
            if (heads > 1 && i < heads * slices) part.largest = 0;
            join(value ? numbers : points, part);
        }
    } else {
        const float *origin = ORIGIN && keys.count ? keys.start : nullptr;
        look_at(queries, origin, points);
        look_at(keys, origin, points);
        look_at(values, nullptr, numbers);
    }
    points = join_lanes(points), numbers = join_lanes(numbers);
    if (!alone) {
        if (lane == 0) shared.parts[0][warp] = points, shared.parts[1][warp] = numbers;
        __syncthreads();
        for (int w = 0; w < ALL / 32; ++w)
            if (w != warp) join(points, shared.parts[0][w]), join(numbers, shared.parts[1][w]);
    }
    auto spoil = [&](int i) {
        float most = fmaxf(points.largest, numbers.largest);
        int row = min(first + i, queries.count - 1);
        if (heads > 1) most = fmaxf(most, largest(found + row / each * slices, slices));
        shared.spoilt[i] = poison(most);
    };
    if (thread < OWN) spoil(thread);
    if constexpr (ONE_READS && OWN > 32)
        if (alone) spoil(thread + 32);
    if (thread == 0) {
        int exponent;
        frexp(numbers.largest, &exponent);
        exponent += USUAL;
        shared.lift = exponent > 0 && exponent < 16 ? float(1 << USUAL) : ldexp(1.0f, min(12 + USUAL - exponent, 126));
        shared.reach = points.reach;
        shared.mean = points.sum / (float(queries.count + keys.count) * keys.width);
    }
}

// The edge of a bump times 2^-125, from the bits of an argument by integers: so it stays in a register that all threads
// share, and which an instruction reads beside those of its own.
inline float small_edge(double tau) {
    long long rounded = __double_as_longlong(tau) + (1 << 28);
    return __int_as_float((int(rounded >> 29) & 0x7fffff) | 1 << 23);
}

inline Setting settle(const Shared &shared, Numbers numbers, int dims, double tau) {
    Setting setting{numbers, false, 1, 1, dims};
    if constexpr (FIXED) settle_fixed(setting, shared.reach, shared.mean);
    if constexpr (KIND == ADD_BUMP) {
        setting.quick = dims >= FEWEST_DIMS;
        // times 2^-125; not as a product, which would become one of every term
        setting.edge = TAUS ? __int_as_float(__float_as_int(numbers.edge) - (125 << 23)) : small_edge(tau);
        setting.back = 0x1p-24f;
    }
    // not `>`, which is false for a NaN
    if constexpr (FACTORS && !STREAM) setting.quick = shared.reach * numbers.rate <= REACH;
    return setting;
}

extern "C" __global__ void __launch_bounds__(ALL, BLOCKS)
    forward(const float *query, const float *key, const float *value, const float *weight, const float *bandwidth,
            const float *table, const Found *found, const float *chunks, float *out, float *copy_out, float *total_out,
            float *shift_out, long long rows, long long columns, long long dims, long long channels, long long each,
            long long causal, long long count, long long normalised, long long slices, double tau) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Tile &tile = shared.tiles[group()];
    unsigned tiles = (rows + OWN - 1) / OWN;
    long long p = blockIdx.x / tiles;
    // the last tiles first: with a causal mask they have the most to do
    int first = (tiles - 1 - blockIdx.x % tiles) * OWN;
    int heads = REVERSED ? 1 : unsigned(rows) / unsigned(each);
    Rows queries(query + p * rows * dims, rows, dims), keys(key + p * columns * dims, columns, dims);
    Rows values(value + p * columns * channels, columns, channels);
    const float *weights = weight ? weight + p * (REVERSED ? rows : columns) : nullptr;
    // of one head, the queries that see the first key of the block
    int begin = REVERSED && causal && each == columns ? max(first + int(each - rows), 0) / OTHER * OTHER : 0;
    begin += group() * OTHER;
    if constexpr (!WIDE) {
        if (group() == 0) queries.fetch(tile.value, first, 0);
        if (!STREAM) keys.fetch(tile.raw, begin, 0);
    }
    for (int d = threadIdx.x; ORIGIN && d < CHUNKS * WIDTH; d += ALL)
        shared.origin[d] = d < dims && columns ? keys.start[d] : 0.0f;
    if (threadIdx.x < OWN) {
        // rows beyond the last see what it sees, and are not written
        int row = min(first + int(threadIdx.x), int(rows) - 1);
        shared.own_mark[threadIdx.x] = own_mark(row, rows, columns, each, causal, weights);
    }
    Numbers numbers(bandwidth ? bandwidth[p] : float(tau), table, count);
    if constexpr (STREAM) {
        make(shared.ring);
        arrive();
        __syncthreads();
        // while the launch before may still be at work, as if the head were quick
        change_queries(shared, tile.value, {numbers, true, 1, 1, int(dims)});
    }
    look_around(shared, found ? found + p * (heads + 2) * slices : nullptr, queries, keys, values, first, each, heads,
                slices);
    arrive();
    __syncthreads();
    Setting setting = settle(shared, numbers, dims, tau);
    if (threadIdx.x < 32) {
        int least = min(shared.own_mark[threadIdx.x], shared.own_mark[threadIdx.x + OWN - 32]);
        int most = max(shared.own_mark[threadIdx.x], shared.own_mark[threadIdx.x + OWN - 32]);
        least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
        if (threadIdx.x == 0) shared.least = least, shared.most = most;
    }
    auto mark_keys = [&](int start) {
        if (thread() < OTHER) tile.mark[thread()] = other_mark(start + thread(), rows, columns, each, causal, weights);
    };
    // not `>`, which is false for a NaN
    bool suits = FACTORS ? shared.reach * setting.numbers.rate <= REACH : setting.quick;
    bool streamed = STREAM && suits && shared.lift == float(1 << USUAL);
    if constexpr (STREAM) {
        if (streamed)
            let_copies_see();
        else {
            keys.fetch(tile.raw, begin, 0);
            arrive();
            meet();
        }
    }
    if constexpr (!WIDE)
        if (!streamed) {
            if (group() == 0) change<false>(shared, tile, tile.value, 0, setting);
            change<true>(shared, tile, tile.raw, 0, setting);
            mark_keys(begin);
        }
    __syncthreads();
    int least = shared.least, end = REVERSED ? columns : shared.most;
    bool always = weights || (REVERSED && causal);
    if (REVERSED) least = columns;
    if (weights && !REVERSED) {
        // keys behind the last that takes part need no look
        int last = 0;
        for (int n = threadIdx.x; n < end; n += ALL)
            if (weights[n] != 0) last = n + 1;
        last = __reduce_max_sync(~0u, last);
        // nobody reads these before the next barrier
        if (threadIdx.x % 32 == 0) shared.total[0][threadIdx.x / 32] = last;
        __syncthreads();
        end = 0;
        for (int w = 0; w < ALL / 32; ++w) end = max(end, int(shared.total[0][w]));
    }

    float running[CHUNKS][2][8][4] = {}, total[4] = {}, shift[4];
    for (int r = 0; r < 4; ++r) shift[r] = -infinity();
    int start = begin;
    if constexpr (STREAM)
        if (streamed) {
            int tiles = (end + OTHER - 1) / OTHER, all = (columns + OTHER - 1) / OTHER, size = chunks_of(dims);
            Walk walk{shared.streamed, shared.ring, chunks + p * all * size * CHUNK, tiles * size};
            auto mark = [&](int n) { return other_mark(n, rows, columns, each, causal, weights); };
            stream(walk, shared, setting, end, rows - first, always ? 0 : least, mark, total, running[0]);
            start = end;
        }
#pragma unroll 1
    for (; start < end; start += GROUPS * OTHER) {
        float scores[4][EACH];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < EACH; ++j) scores[r][j] = 0;
        int next = start + GROUPS * OTHER;
        Place place;
        Part part{int(rows) - first - place.down, end - start - place.across};
        if constexpr (!WIDE) {
            values.fetch(tile.value, start, 0);
            if (next < end) keys.fetch(tile.raw, next, 0);
            add_terms(shared, tile, TABLE ? int(dims) : int(dims + 3) / 4 * 4, setting, part, scores);
        } else {
#pragma unroll 1
            for (int d = 0; d < dims; d += WIDTH) {
                meet();
                queries.fetch(tile.value, first, d);
                keys.fetch(tile.raw, start, d);
                arrive();
                meet();
                change<false>(shared, tile, tile.value, d, setting);
                change<true>(shared, tile, tile.raw, d, setting);
                if (d == 0) mark_keys(start);
                meet();
                int left = min(int(dims) - d, WIDTH);
                add_terms(shared, tile, TABLE ? left : (left + 3) / 4 * 4, setting, part, scores);
            }
        }
        if (!part.empty()) {
            finish(shared, tile, setting, always || start + OTHER > least, scores);
            if constexpr (KIND == LAPLACE) exponentiate(scores, shift, total, running, normalised);
#pragma unroll
            for (int r = 0; r < 4; ++r) total[r] += sum_of(scores[r]);
        }
        if constexpr (!WIDE) {
            arrive();
            meet();
            if (next < end) {
                change<true>(shared, tile, tile.raw, 0, setting);
                mark_keys(next);
            }
            split_values(shared, tile);
            if (!part.empty()) add_rows(tile, scores, running[0]);
            meet();
        } else {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < channels; ++chunk) {
                meet();
                values.fetch(tile.value, start, chunk * WIDTH);
                arrive();
                meet();
                split_values(shared, tile);
                if (!part.empty()) add_rows(tile, scores, running[chunk]);
            }
        }
    }

    // A group that has had one tile less meets as often as the other one, while it waits for it: after different
    // numbers of barriers racecheck takes what lies before and behind one of the whole block for a race.
    if (GROUPS > 1 && start - group() * OTHER < end) {
#pragma unroll 1
        for (int i = 0; i < MEETINGS; ++i) meet();
    }

    // warps that share rows put their parts together
    Place place;
    int mine = KEY_WARPS * group() + place.across / (4 * EACH);
    auto part_at = [&](int part) {
        Tile &tile = shared.tiles[part / KEY_WARPS];
        return (part % 2 ? tile.raw : tile.value) + part % KEY_WARPS / 2 * OWN * STRIDE;
    };
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        for (int x = 1; x < 4; x *= 2) total[r] += __shfl_xor_sync(~0u, total[r], x);
        if (place.t == 0) shared.total[mine][place.row(r)] = total[r], shared.shift[mine][place.row(r)] = shift[r];
    }
    float scale = unit(setting.numbers) / shared.lift;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk && chunk * WIDTH >= channels) break;
        if (chunk) __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                *reinterpret_cast<float2 *>(part_at(mine) + place.row(r) * STRIDE + j * 8 + 2 * place.t) = {
                    running[chunk][r / 2][j][r % 2 * 2], running[chunk][r / 2][j][r % 2 * 2 + 1]};
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < OWN * 16; i += ALL) {
            int row = i / 16, at = i % 16 * 4, column = chunk * WIDTH + at;
            if (first + row >= rows) break;
            float from = 0, whole = 0, x[4] = {};
            if constexpr (KIND == LAPLACE) {
                float most = -infinity();
                for (int part = 0; part < PARTS; ++part) most = fmaxf(most, shared.shift[part][row]);
                from = most == -infinity() ? 0.0f : most;
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float share = KIND == LAPLACE ? expf(shared.shift[part][row] - from) : 1.0f;
                whole = fmaf(shared.total[part][row], share, whole);
                float4 more = *reinterpret_cast<const float4 *>(part_at(part) + row * STRIDE + at);
                x[0] = fmaf(more.x, share, x[0]), x[1] = fmaf(more.y, share, x[1]);
                x[2] = fmaf(more.z, share, x[2]), x[3] = fmaf(more.w, share, x[3]);
            }
            whole *= unit(setting.numbers);
            // as in normalise.py; what divides is made after the sums, which may be as small
            bool empty = fabsf(whole) < 0x1p-126f;
            float inverse = normalised ? (empty ? 0.0f : 1 / whole) : 1.0f;
            inverse *= shared.spoilt[row];
            for (int e = 0; e < 4; ++e) x[e] = x[e] * inverse * scale;
            long long place = p * rows + first + row;
            auto write = [&](float *to) {
                to += place * channels + column;
                if (values.whole && column + 4 <= channels)
                    *reinterpret_cast<float4 *>(to) = {x[0], x[1], x[2], x[3]};
                else
                    for (int e = 0; e < 4; ++e)
                        if (column + e < channels) to[e] = x[e];
            };
            write(out);
            // for the backward pass, whatever becomes of the rows
            if (copy_out) write(copy_out);
            if (column) continue;
            if (total_out) total_out[place] = whole * shared.spoilt[row];
            if (KIND == LAPLACE && shift_out) shift_out[place] = from;
        }
    }
}
