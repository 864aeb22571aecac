// The last step of a causal call whose tables stay in registers: what the keys of a chunk give its queries, pair by
// pair, and what march.cu has left of those before it.
//
// A block has a chunk, and a warp two tiles of 16 queries, one as far from the begin of the chunk as the other from its
// end, so that all warps have as many pairs. A warp takes the keys one by one: a thread has a quarter of the dimensions
// of two queries of a tile and of a key, and makes two terms at a time, of which terms_riesz.cu and terms_centred.cu
// tell. They are the first factor of a product; the second is one in the column of the key. So tensor cores add terms
// up in float32, and sums of 16 queries and 8 keys lie where the product with the values takes them from. Where points
// are too far out for numbers of 16 bits, the terms of a tile are in float32.
//
// Set by finish.py: DIMS, CHUNK (points), GP (nodes), SHARED (bytes), SHORT (whether points and outputs are bfloat16),
// KIND (RIESZ, BUMP or LAPLACE).

#include "halves.cu"

#include "kinds.cu"

constexpr int CHANNELS = 64, THREADS = CHUNK, TILES = CHUNK / 16;
// two dimensions in a word; a thread has a quarter of them, and of add_laplace as many words again
constexpr int WORDS = DIMS / 8, ALL = KIND == LAPLACE ? 2 * WORDS : WORDS;
// bytes of a row in shared memory: eight rows have banks of their own
constexpr int KEY = ALL * 16 + 16, ROW = CHANNELS * 2 + 16;
// behind keys and values a number for every key of add_riesz, or for every dimension
constexpr int ROWS = CHUNK * KEY, SUMS = ROWS + CHUNK * ROW, ROOM = SUMS + (KIND != RIESZ ? DIMS : CHUNK) * 4;
static_assert(ROOM + CHUNK / 2 * ROW <= SHARED, "finish.py asks for less shared memory than is used");
// of a multiprocessor, as shared memory and registers have room for
constexpr int BLOCKS = 128 / CHUNK * ((DIMS > 64 ? 3 : 4) - (KIND == LAPLACE));

#if DIMS % 32
typedef uint2 Piece;
#else
typedef uint4 Piece;
#endif

extern __shared__ __align__(128) unsigned char memory[];

struct Lane {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // of 16 x 16 halves in shared memory, by blocks of 8 x 8: the row and the column of this lane's eight
    int row = lane % 16, column = lane / 16 * 8;
};

// Two numbers of the output.
inline unsigned given(float x, float y) { return SHORT ? pack_short(x, y) : pack(x, y); }
// Two numbers as they came.
inline float2 point(unsigned both) { return SHORT ? unpack_short(both) : unpack(both); }
inline void load_words(unsigned *words, const void *from) {
    constexpr int EACH = sizeof(Piece) / 4;
#pragma unroll
    for (int i = 0; i < WORDS / EACH; ++i)
        *reinterpret_cast<Piece *>(words + i * EACH) = reinterpret_cast<const Piece *>(from)[i];
}
// of what points became, in shared memory
inline void load_all_words(unsigned (&words)[ALL], const unsigned char *from) {
    load_words(words, from);
    if (ALL > WORDS) load_words(words + ALL - WORDS, from + DIMS * 2);
}
// Where a thread has its quarter of point n, as it came; of so many.
inline const unsigned *own(const uint4 *points, int n, long long number, const Lane &lane) {
    return reinterpret_cast<const unsigned *>(points + (n < number ? n : 0) * (DIMS / 8)) + lane.t * WORDS;
}
inline float sum_of_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

#if KIND == RIESZ
#include "terms_riesz.cu"
#else
#include "terms_centred.cu"
#endif

// ---- sums

// 16 queries: a thread has those g and g + 8 of them.
struct Tile {
    alignas(16) unsigned points[2][ALL];
    // what their sums begin with
    float begin[2] = {};
    float found[8][4] = {}, total[2] = {};
    // in the chunk
    int first;

    Tile(int number) : first(16 * number) {}
    // points as they came, of a chunk with so many queries
    void load(const uint4 *queries, long long number, const Lane &lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) load_words(points[h], own(queries, first + lane.g + 8 * h, number, lane));
    }
    // what was summed with weights that had a scale, of rows that are times `power`
    void unscale(float by, float power) {
        float both = by / power;
#pragma unroll
        for (int e = 0; e < 32; ++e) found[e / 4][e % 4] *= both;
#pragma unroll
        for (int h = 0; h < 2; ++h) total[h] *= by;
    }
};

// To the sums of a tile and eight keys what a key gives, in its column.
inline void add_terms(float (&sums)[4], const Tile &tile, const unsigned (&key)[ALL], const unsigned (&column)[2]) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
        unsigned a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = term(tile.points[h], key, i);
            a[2 + h] = term(tile.points[h], key, i + 1);
        }
        multiply_terms(sums, a, column);
    }
}
// The same in float32, of points as they came; key `at` of eight.
inline void add_far_terms(float (&sums)[4], const Tile &tile, const unsigned (&key)[ALL], const Scale &scale, int at,
                          int t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            float2 x = point(tile.points[h][i]), y = point(key[i]);
            sum += scale.far_term(x.x, y.x) + scale.far_term(x.y, y.y);
        }
        sum = scale.far_sum(sum_of_four(sum));
#pragma unroll
        for (int c = 0; c < 2; ++c) sums[2 * h + c] += at == 2 * t + c ? sum : 0;
    }
}

// To a tile its sums with 16 keys from `n` on, as scores, times their values.
inline void add_scores(Tile &tile, const float (&sums)[2][4], const Scale &scale, int n, const Lane &lane) {
    unsigned a[4];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
        float x[2];
        int h = e / 2 % 2;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            x[c] = scale.score(sums[e / 4][e % 4 + c]);
            // keys that the query does not see are in the last 16 alone
            if (n == tile.first && e / 4 * 8 + 2 * lane.t + c > lane.g + 8 * h) x[c] = 0;
            tile.total[h] += x[c];
        }
        a[e / 2] = pack(x[0], x[1]);
    }
    unsigned at = shared_address(memory) + ROWS + (n + lane.row) * ROW + lane.column * 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        unsigned rows[4];
        load_turned(rows, at + j * 16);
        unsigned one[2] = {rows[0], rows[1]}, other[2] = {rows[2], rows[3]};
        multiply_halves(tile.found[j], a, one);
        multiply_halves(tile.found[j + 1], a, other);
    }
}

// To a tile what 16 keys from `n` on give it, of a chunk with so many `keys`.
template <bool FAR>
inline void add_keys(Tile &tile, const uint4 *keys, int n, long long number, const Scale &scale, const Lane &lane) {
    // with keys eight apart
    float sums[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const float *less = reinterpret_cast<const float *>(memory + SUMS) + n + 8 * part + 2 * lane.t;
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[part][e] = FAR || KIND != RIESZ ? 0 : tile.begin[e / 2] + less[e % 2];
    }
    const unsigned char *changed = memory + n * KEY + lane.t * WORDS * 4;
#pragma unroll(FAR ? 1 : 8)
    for (int j = 0; j < 8; ++j) {
        unsigned one = lane.g == j ? ONES : 0, column[2] = {one, one};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            alignas(16) unsigned key[ALL];
            // in shared memory they are changed
            if (FAR && KIND != RIESZ)
                load_words(key, own(keys, n + 8 * part + j, number, lane));
            else
                load_all_words(key, changed + (8 * part + j) * KEY);
            if (FAR)
                add_far_terms(sums[part], tile, key, scale, j, lane.t);
            else
                add_terms(sums[part], tile, key, column);
        }
    }
    add_scores(tile, sums, scale, n, lane);
}

// ---- the output

// What march.cu has left of a head, in units from `first` to `stop`: see there.
struct Units {
    const uint4 *sums;
    const float *totals, *unscale;
    long long first, stop, length;
};

// To a tile, whose query g has the place m in its head, what the units have.
inline void add_units(Tile &tile, const Units &units, long long m, const Lane &lane) {
    bool there[2] = {m < units.length, m + 8 < units.length};
#pragma unroll 2
    for (long long unit = units.first; unit < units.stop; ++unit) {
        float by = units.unscale[unit];
        uint4 parts[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 *from = units.sums + (unit * units.length + (there[h] ? m + 8 * h : 0)) * 8 + lane.t;
            parts[h][0] = from[0], parts[h][1] = from[4];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4 &part = parts[h][j / 4];
                float2 x = unpack(j % 4 == 0 ? part.x : j % 4 == 1 ? part.y : j % 4 == 2 ? part.z : part.w);
                tile.found[j][2 * h] = fmaf(x.x, by, tile.found[j][2 * h]);
                tile.found[j][2 * h + 1] = fmaf(x.y, by, tile.found[j][2 * h + 1]);
            }
        }
    }
    for (long long unit = units.first + lane.t; unit < units.stop; unit += 4)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (there[h]) tile.total[h] += units.totals[unit * units.length + m + 8 * h];
}

// The output of a tile to the 16 rows of shared memory `at`, and its totals to those of its head.
inline void close(Tile &tile, unsigned at, float *totals, long long m, long long length, bool normalise, bool broken,
                  const Lane &lane) {
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = sum_of_four(tile.total[h]);
        if (lane.t == 0 && m + 8 * h < length) totals[m + 8 * h] = total;
        by[h] = !normalise ? 1 : fabsf(total) < 1.1754943508222875e-38f ? 0 : 1 / total;
        if (broken) by[h] = __int_as_float(0x7fffffff);
    }
    at += lane.row * ROW + lane.column * 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float *x = tile.found[j], *y = tile.found[j + 1];
        store_four(at + j * 16, given(x[0] * by[0], x[1] * by[0]), given(x[2] * by[1], x[3] * by[1]),
                   given(y[0] * by[0], y[1] * by[0]), given(y[2] * by[1], y[3] * by[1]));
    }
}

// Of chunk x of head `first` + y: to `out (heads, length, 64)` and `totals (heads, length)` what the keys up to its own
// place give a query, `queries` and `keys (heads, length, DIMS)`, `rows (heads, length, 64)`. The sums of earlier
// chunks are in `sums (units, length, 64)`, times `unscale (units)`, and `parts (units, length)`, those of this head in
// the `each` units from y `each` on. Rows have been multiplied with `powers (heads)`, if it is there. Where `flags` or
// `others (heads)` are raised the output is NaN.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    finish(const uint4 *queries, const uint4 *keys, const uint4 *rows, const float *nodes, const float *bandwidth,
           const uint4 *sums, const float *parts, const float *unscale, const float *powers, const int *flags,
           const int *others, uint4 *out, float *totals, long long first, long long each, long long length,
           long long count, long long normalise, double epsilon) {
    // what was written last comes first: it may still be in the cache
    long long unit = (gridDim.y - 1 - blockIdx.y) * each, head = first + gridDim.y - 1 - blockIdx.y;
    long long chunk = gridDim.x - 1 - blockIdx.x;
    long long start = head * length + chunk * CHUNK, left = length - chunk * CHUNK;
    Lane lane;
    constexpr int PIECES = DIMS / 8;
    unsigned shared = shared_address(memory);
    for (int i = threadIdx.x; i < CHUNK * PIECES; i += THREADS) {
        int n = i / PIECES, part = i % PIECES;
        copy(shared + n * KEY + part * 16, keys + (start + (n < left ? n : 0)) * PIECES + part, n < left);
    }
    for (int i = threadIdx.x; i < CHUNK * 8; i += THREADS) {
        int n = i / 8;
        copy(shared + ROWS + n * ROW + i % 8 * 16, rows + (start + (n < left ? n : 0)) * 8 + i % 8, n < left);
    }
    Scale scale(nodes + head * DIMS * GP, count, bandwidth[head], epsilon);
    wait_for_all_copies();
    __syncthreads();
    bool far_keys = scale.change_keys(lane);
    Units units{sums, parts, unscale, unit, unit + each, length};
    bool broken = flags[head] + others[head] > 0;
    float power = powers ? powers[head] : 1;
    int warp = of_warp(threadIdx.x / 32), room = ROOM + warp * 16 * ROW;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        Tile tile(i ? TILES - 1 - warp : warp);
        if (tile.first >= left) continue;
        tile.load(queries + start * PIECES, left, lane);
        bool far = scale.change(tile.points, tile.begin, lane) && far_keys;
        // points as they came, once more
        if (KIND != RIESZ && far) tile.load(queries + start * PIECES, left, lane);
#pragma unroll 1
        for (int n = 0; n <= tile.first; n += 16) {
            if (far)
                add_keys<true>(tile, keys + start * PIECES, n, left, scale, lane);
            else
                add_keys<false>(tile, keys + start * PIECES, n, left, scale, lane);
        }
        tile.unscale(1 / scale.scale, power);
        long long m = chunk * CHUNK + tile.first + lane.g;
        add_units(tile, units, m, lane);
        close(tile, shared + room, totals + head * length, m, length, normalise, broken, lane);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int n = j * 4 + lane.lane / 8, column = lane.lane % 8;
            const uint4 *from = reinterpret_cast<const uint4 *>(memory + room + n * ROW + column * 16);
            if (tile.first + n < left) out[(start + tile.first + n) * 8 + column] = *from;
        }
        __syncwarp();
    }
}
