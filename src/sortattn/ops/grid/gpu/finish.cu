// The last step of a causal call whose tables stay in registers: what the keys of a chunk give its queries, pair by
// pair, and what march.cu has left of those before it.
//
// A block has a chunk, and a warp two tiles of 16 queries, one as far from the begin of the chunk as the other from its
// end, so that all warps have as many pairs. A warp takes the keys one by one: a thread has a quarter of the dimensions
// of two queries of a tile and of a key, and makes two terms in one instruction. They are the first factor of a
// product; the second is one in the column of the key. So tensor cores add terms up in float32, and sums of 16 queries
// and 8 keys lie where the product with the values takes them from. Of add_riesz
//
//     |s| + |t| - |s - t|  is twice  max(s, 0) + max(-t, 0) - max(s - t, 0)  or  max(s, 0) + max(t, 0) - max(s, t)
//
// and half of the terms are of either kind, as different units make them at the same time. Heads with points that are
// too far out for differences in float16 have terms in float32; points in bfloat16 are halves, times a power of two.
//
// Set by finish.py: DIMS, CHUNK (points), GP (nodes), SHARED (bytes), SHORT (whether points and outputs are bfloat16).

#include "halves.cu"

constexpr int CHANNELS = 64, THREADS = CHUNK, TILES = CHUNK / 16;
// two dimensions in a word; a thread has a quarter of them
constexpr int WORDS = DIMS / 8;
// bytes of a row in shared memory: eight rows have banks of their own
constexpr int KEY = DIMS * 2 + 16, ROW = CHANNELS * 2 + 16;
constexpr int ROWS = CHUNK * KEY, SUMS = ROWS + CHUNK * ROW, ROOM = SUMS + CHUNK * 4;
static_assert(ROOM + CHUNK / 2 * ROW <= SHARED, "finish.py asks for less shared memory than is used");
constexpr unsigned ONES = 0x3c003c00, MINUS = 0xbc00bc00, SIGNS = 0x80008000;

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
// Two bfloat16 as halves, times a power of two.
inline unsigned halves_of(unsigned both, float up) {
    float2 x = unpack_short(both);
    return pack(x.x * up, x.y * up);
}
inline void load_words(unsigned (&words)[WORDS], const void *from) {
    constexpr int EACH = sizeof(Piece) / 4;
#pragma unroll
    for (int i = 0; i < WORDS / EACH; ++i)
        *reinterpret_cast<Piece *>(words + i * EACH) = reinterpret_cast<const Piece *>(from)[i];
}
inline float sum_of_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What scores are made of sums with, and what both are multiplied with so that scores are halves.
struct Scale {
    float scale, base, by;
    // what points in bfloat16 are multiplied with, so that they are halves: those that are not 2^-28 of the largest
    // lose no digits
    float up;
    bool far;

    Scale(const float *nodes, int count, float tau, float epsilon) {
        float most = 0;
        for (int d = threadIdx.x % 32; d < DIMS; d += 32)
            most = fmaxf(most, fmaxf(fabsf(nodes[d * GP + 1]), fabsf(nodes[d * GP + count - 2])));
        most = largest_of_warp(most);
        // differences of halves may be none
        far = !SHORT && of_warp(!(most < 16384));
        scale = 32768 / (2 * power_below(fmaxf(DIMS * (2 * most / tau + epsilon), 1e-30f)));
        up = SHORT ? 8192 / power_below(fmaxf(most, 1e-30f)) : 1;
        base = DIMS * epsilon * scale, by = 2 * scale / up / tau;
    }
};

// ---- sums

// With a minus, the positive parts of two rows of points, or of what keys have in their place.
template <bool KEYS> inline void sum_parts(float (&sums)[2], const unsigned (&points)[2][WORDS]) {
    float parts[4] = {};
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
        unsigned a[4], ones[2] = {MINUS, MINUS};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = larger(KEYS ? points[h][i] ^ SIGNS : points[h][i], 0);
            a[2 + h] = larger(points[h][i + 1], 0);
        }
        multiply_halves(parts, a, ones);
    }
    sums[0] = parts[0], sums[1] = parts[2];
}
// 16 queries: a thread has those g and g + 8 of them.
struct Tile {
    alignas(16) unsigned points[2][WORDS];
    // what the positive parts of their points give, with a minus
    float begin[2];
    float found[8][4] = {}, total[2] = {};
    // in the chunk
    int first;

    Tile(int number) : first(16 * number) {}
    // of a chunk with so many queries
    void load(const uint4 *queries, long long number, const Scale &scale, const Lane &lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int m = first + lane.g + 8 * h;
            const uint4 *from = queries + (m < number ? m : 0) * (DIMS / 8);
            load_words(points[h], reinterpret_cast<const unsigned *>(from) + lane.t * WORDS);
#pragma unroll
            for (int i = 0; SHORT && i < WORDS; ++i) points[h][i] = halves_of(points[h][i], scale.up);
        }
        sum_parts<false>(begin, points);
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

// Those of the keys of the chunk, of which a warp has 32.
inline void sum_keys(const Lane &lane, float *to) {
#pragma unroll 1
    for (int n = threadIdx.x / 32 * 32; n < threadIdx.x / 32 * 32 + 32; n += 16) {
        alignas(16) unsigned points[2][WORDS];
        for (int h = 0; h < 2; ++h) load_words(points[h], memory + (n + lane.g + 8 * h) * KEY + lane.t * WORDS * 4);
        float sums[2];
        sum_parts<true>(sums, points);
        if (lane.t == 0) to[n + lane.g] = sums[0], to[n + lane.g + 8] = sums[1];
    }
}

// The keys of the chunk as halves.
inline void change_keys(float up) {
    for (int i = threadIdx.x; i < CHUNK * (DIMS / 8); i += THREADS) {
        uint4 *at = reinterpret_cast<uint4 *>(memory + i / (DIMS / 8) * KEY + i % (DIMS / 8) * 16), x = *at;
        *at = {halves_of(x.x, up), halves_of(x.y, up), halves_of(x.z, up), halves_of(x.w, up)};
    }
}

// To the sums of a tile and eight keys what a key gives, in its column.
inline void add_terms(float (&sums)[4], const Tile &tile, const unsigned (&key)[WORDS], const unsigned (&column)[2]) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
        unsigned a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = above(tile.points[h][i], key[i]);
            a[2 + h] = larger(tile.points[h][i + 1], key[i + 1]);
        }
        multiply_halves(sums, a, column);
    }
}
// The same in float32, with what queries and keys give by themselves; key `at` of eight.
inline void add_far_terms(float (&sums)[4], const Tile &tile, const unsigned (&key)[WORDS], int at, int t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            float2 x = unpack(tile.points[h][i]), y = unpack(key[i]);
            sum += fabsf(x.x - y.x) - fabsf(x.x) - fabsf(y.x) + (fabsf(x.y - y.y) - fabsf(x.y) - fabsf(y.y));
        }
        sum = sum_of_four(sum) / 2;
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
            x[c] = fmaf(sums[e / 4][e % 4 + c], -scale.by, scale.base);
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

// To a tile what 16 keys from `n` on give it.
template <bool FAR> inline void add_keys(Tile &tile, int n, const Scale &scale, const Lane &lane) {
    // with keys eight apart
    float sums[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const float *less = reinterpret_cast<const float *>(memory + SUMS) + n + 8 * part + 2 * lane.t;
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[part][e] = FAR ? 0 : tile.begin[e / 2] + less[e % 2];
    }
    const unsigned char *keys = memory + n * KEY + lane.t * WORDS * 4;
#pragma unroll(FAR ? 1 : 8)
    for (int j = 0; j < 8; ++j) {
        unsigned one = lane.g == j ? ONES : 0, column[2] = {one, one};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            alignas(16) unsigned key[WORDS];
            load_words(key, keys + (8 * part + j) * KEY);
            if (FAR)
                add_far_terms(sums[part], tile, key, j, lane.t);
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

// Of chunk x of head y: to `out (heads, length, 64)` and `totals (heads, length)` what the keys up to its own place
// give a query, `queries` and `keys (heads, length, DIMS)`, `rows (heads, length, 64)`. The sums of earlier chunks are
// in `sums (units, length, 64)`, times `unscale (units)`, and `parts (units, length)`; of head p in those from p `each`
// on, from head `split` on in twice as many. Rows have been multiplied with `powers (heads)`, if it is there. Where
// `flags` or `others (heads)` are raised the output is NaN.
extern "C" __global__ void __launch_bounds__(THREADS, DIMS > 64 ? 3 : 4)
    finish(const uint4 *queries, const uint4 *keys, const uint4 *rows, const float *nodes, const float *bandwidth,
           const uint4 *sums, const float *parts, const float *unscale, const float *powers, const int *flags,
           const int *others, uint4 *out, float *totals, long long split, long long each, long long length,
           long long count, long long normalise, double epsilon) {
    // what was written last comes first: it may still be in the cache
    long long head = gridDim.y - 1 - blockIdx.y, chunk = gridDim.x - 1 - blockIdx.x;
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
    if (SHORT) {
        change_keys(scale.up);
        __syncthreads();
    }
    if (!scale.far) sum_keys(lane, reinterpret_cast<float *>(memory + SUMS));
    __syncthreads();
    Units units{sums,
                parts,
                unscale,
                head < split ? head * each : (2 * head - split) * each,
                head < split ? (head + 1) * each : (2 * head + 2 - split) * each,
                length};
    bool broken = flags[head] + others[head] > 0;
    float power = powers ? powers[head] : 1;
    int warp = of_warp(threadIdx.x / 32), room = ROOM + warp * 16 * ROW;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        Tile tile(i ? TILES - 1 - warp : warp);
        if (tile.first >= left) continue;
        tile.load(queries + start * PIECES, left, scale, lane);
#pragma unroll 1
        for (int n = 0; n <= tile.first; n += 16) {
            if (scale.far)
                add_keys<true>(tile, n, scale, lane);
            else
                add_keys<false>(tile, n, scale, lane);
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
