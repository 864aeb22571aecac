// Along a head of a causal call, with the tables of a few dimensions in registers: queries read them chunk by chunk,
// each before its keys are added.
//
// A block has DIMS dimensions of one head, 256 * TABLES rows of a table: GP nodes each. Groups of four warps have 256
// rows as sums of products and walk along the keys; at the end of a chunk they leave their rows as halves in shared
// memory. One more group multiplies the weights of the queries with these, and one brings what all need next. So one
// group makes weights while products of another are under way, and tables never go to memory. The last column of the
// keys' rows is a power of two, for the sums of the weights.
//
// What a row of a table is, how keys weigh in it and how queries read it, is in ramps.cu for add_riesz and in levels.cu
// for kernels of which F itself has all digits.
//
// Set by march.py: KIND (RIESZ, BUMP or LAPLACE), GP, TABLES, CHUNK (points), STAGES, SHORT (whether points are
// bfloat16), STATS (lines of what is known of a dimension), SHARED (bytes).

#include "warpgroup.cu"

#include "kinds.cu"

constexpr int CHANNELS = 64, WIDE = CHANNELS + 8;
constexpr int ROWS = 256 * TABLES, DIMS = ROWS / GP, THREADS = 128 * (TABLES + 2);
// rows lie in blocks of 8 x 8 halves, as tensor cores read them
constexpr int EIGHT = WIDE / 8 * 128;
constexpr int TABLE = ROWS / 8 * EIGHT, VALUES = CHUNK / 8 * EIGHT;

extern __shared__ __align__(128) unsigned char memory[];

struct Head {
    const short *queries;
    const void *keys;
    const unsigned short *rows;
    const float *nodes, *extra;
    float rate;
    int length, dims, count, chunks;

    // what the correction adds at a node of a dimension of this block
    float correction(int dim, int i) const { return i < count ? 2 * extra[dim * STATS * GP + i] : 0; }
};

// The largest of the values of a head; no number if there is none among them. Every warp finds it by itself.
inline float largest_value(const Head &head, const float *largest) {
    float most = 0;
    bool known = true;
    for (int i = threadIdx.x % 32; i < head.chunks; i += 32) {
        known = known && largest[i] < __int_as_float(0x7f800000);
        most = fmaxf(most, largest[i]);
    }
    known = !__any_sync(~0u, !known);
    most = largest_of_warp(most);
    return known ? most : __int_as_float(0x7fffffff);
}

// 64 rows of tables, of warp `warp` among those that have tables: a thread has eight nodes of a dimension, two in every
// product.
struct Slab {
    int lane, g, t, dim, node, row;
    Slab(int warp) {
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        dim = warp * (64 / GP) + g * 8 / GP, node = g * 8 % GP, row = warp * 64;
    }
};

#if KIND == RIESZ
#include "ramps.cu"
#else
#include "levels.cu"
#endif

// of the points of a chunk; what queries get that is in no table
constexpr int BASE = KIND == RIESZ ? (WIDE * 4 + 127) / 128 * 128 : 0;
constexpr int STAGE = VALUES + KEYS + QUERIES + BASE;
constexpr int BARRIERS = 2 * TABLE + STAGES * STAGE, KNOWN = BARRIERS + 128;
static_assert(KNOWN + KNOWN_BYTES <= SHARED, "march.py asks for less shared memory than is used");

// what was brought, what of it is used up, which tables can be read, and which have been
inline unsigned full(int stage) { return shared_address(memory) + BARRIERS + 8 * stage; }
inline unsigned used(int stage) { return full(STAGES + stage); }
inline unsigned ready(int buffer) { return full(2 * STAGES + buffer); }
inline unsigned freed(int buffer) { return full(2 * STAGES + 2 + buffer); }

// ---- tables

// The next product: its weights lie where those of the fourth one before it did. From the first to the last instruction
// a product takes some 250 cycles, of which tensor cores are busy for 36.
template <int M> inline void add_product(float (&sums)[4][36], unsigned (&own)[4][4], const Weights &weights,
                                         Keys &keys, unsigned long long rows) {
    wait_for_products<3>();
    hold(own[M]);
    weights.make<M>(own[M], keys);
    begin_products();
    multiply(sums[M], own[M], rows);
    end_products();
}

inline void add_keys(const Head &head, int warp, const Scales &scales) {
    Slab slab(warp);
    Weights weights(head, slab, scales, memory + KNOWN);
    float by = scales.table;
    unsigned start = shared_address(memory);
    float sums[4][36] = {};
    // a lane has the address of a row of one of four blocks: rows and columns eight on
    unsigned to = start + (slab.row / 8 + slab.lane / 8 % 2) * EIGHT + slab.lane / 16 * 128 + slab.lane % 8 * 16;
    for (int chunk = 0; chunk < head.chunks - 1; ++chunk) {
        int stage = chunk % STAGES, buffer = chunk % 2;
        unsigned begin = 2 * TABLE + stage * STAGE;
        unsigned long long rows = rows_at(start + begin, EIGHT);
        wait(full(stage), chunk / STAGES % 2);
        unsigned own[4][4];
        Keys keys(memory + begin + VALUES, slab, weights);
#pragma unroll 1
        for (int step = 0; step < CHUNK / 16; ++step) {
            keys.step(weights);
            add_product<0>(sums, own, weights, keys, rows);
            add_product<1>(sums, own, weights, keys, rows);
            add_product<2>(sums, own, weights, keys, rows);
            add_product<3>(sums, own, weights, keys, rows);
            rows += 2 * EIGHT >> 4;
        }
        wait_for_products<0>();
#pragma unroll
        for (int m = 0; m < 4; ++m) hold(own[m]);
#pragma unroll
        for (int m = 0; m < 4; ++m) hold(sums[m]);
        __syncwarp();
        if (slab.lane == 0) arrive(used(stage));
        if (chunk >= 2) wait(freed(buffer), (chunk / 2 - 1) % 2);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            unsigned at = to + buffer * TABLE + m * 2 * EIGHT;
            const float *x = sums[m];
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const float *y = x + 4 * j;
                store_four(at + j * 128, pack(y[0] * by, y[1] * by), pack(y[2] * by, y[3] * by),
                           pack(y[4] * by, y[5] * by), pack(y[6] * by, y[7] * by));
            }
            store_two(at + 8 * 128, pack(x[32] * by, x[33] * by), pack(x[34] * by, x[35] * by));
        }
        show();
        __syncwarp();
        if (slab.lane == 0) arrive(ready(buffer));
    }
}

// ---- queries

// The sums of 64 queries, of which a thread has two from `places` on, by a table. The weights of a product lie where
// those of the eighth one before it did.
inline void multiply_queries(float (&sums)[36], const Pair *places, unsigned table, const Reader &reader) {
    constexpr int NEXT = 64 / GP * LINE / sizeof(Pair);
    unsigned own[8][4];
    Pair next[2] = {places[0], places[NEXT]};
    unsigned long long rows = rows_at(table, EIGHT);
#pragma unroll 1
    for (int slab = 0; slab < ROWS / 64; slab += 2) {
        places += 2 * NEXT;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Two queries(next[half], reader);
            if (slab + 2 < ROWS / 64) next[half] = places[half * NEXT];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                unsigned (&weights)[4] = own[half * 4 + part];
                wait_for_products<7>();
                hold(weights);
                queries.weigh(weights, part, reader);
                begin_products();
                multiply(sums, weights, rows);
                end_products();
                rows += 2 * EIGHT >> 4;
            }
        }
    }
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) hold(own[i]);
    hold(sums);
}

// Where the sums of this block go: as halves `out (length, 64)`, the columns of every half of them in the order of the
// threads that have them, and sums of weights `totals (length)`.
struct Target {
    uint4 *out;
    float *totals;
    float by, by_total;
};

inline void read_tables(const Head &head, const Target &target) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned start = shared_address(memory);
    Reader reader(t * 16 % GP);
#pragma unroll 1
    for (int chunk = 0; chunk < head.chunks; ++chunk) {
        int stage = chunk % STAGES, buffer = (chunk + 1) % 2;
        const unsigned char *brought = memory + 2 * TABLE + stage * STAGE + VALUES + KEYS;
        wait(full(stage), chunk / STAGES % 2);
        if (chunk) wait(ready(buffer), (chunk - 1) / 2 % 2);
#pragma unroll 1
        for (int tile = 0; tile < CHUNK / 64; ++tile) {
            // lanes whose queries are not there have left out some of the tile before
            __syncwarp();
            int first = tile * 64 + warp * 16 + 2 * g;
            float sums[36] = {};
            if (chunk) {
                const unsigned char *places = brought + t * 16 / GP * LINE + first * (sizeof(Pair) / 2);
                multiply_queries(sums, reinterpret_cast<const Pair *>(places), start + buffer * TABLE, reader);
            }
            const float *base = reinterpret_cast<const float *>(brought + QUERIES) + 2 * t;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                long long m = (long long)chunk * CHUNK + first + h;
                if (m >= head.length) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    unsigned found[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int j = 4 * half + i;
                        const float *x = sums + 4 * j + 2 * h;
                        float2 from = BASE ? *reinterpret_cast<const float2 *>(base + 8 * j) : float2{0, 0};
                        found[i] = pack(fmaf(x[0], target.by, from.x), fmaf(x[1], target.by, from.y));
                    }
                    target.out[m * 8 + half * 4 + t] = {found[0], found[1], found[2], found[3]};
                }
                if (t == 0) target.totals[m] = fmaf(sums[32 + 2 * h], target.by_total, BASE ? base[CHANNELS] : 0);
            }
        }
        __syncwarp();
        if (lane == 0) {
            arrive(used(stage));
            if (chunk) arrive(freed(buffer));
        }
    }
}

// ---- what they need

// Rows and points of the keys of a chunk, places of its queries.
inline void copy_chunk(const Head &head, int chunk) {
    int thread = threadIdx.x % 128, first = chunk * CHUNK;
    unsigned to = shared_address(memory) + 2 * TABLE + chunk % STAGES * STAGE;
    // not unrolled, as these warps have few registers
#pragma unroll 1
    for (int i = thread; i < CHUNK * 8; i += 128) {
        // lanes have eight rows each, whose blocks have all banks
        int n = i / 64 * 8 + i % 8, column = i / 8 % 8;
        bool there = first + n < head.length;
        copy(to + n / 8 * EIGHT + column * 128 + n % 8 * 16,
             head.rows + (long long)(there ? first + n : 0) * CHANNELS + column * 8, there);
    }
    copy_points(head, first, to + VALUES);
}

// All chunks one after the other; to each of them F at the first node, for the keys before it, of which `starts
// (chunks, 72)` has what the keys of a chunk give.
inline void bring(const Head &head, const float *starts, float scale) {
    int thread = threadIdx.x % 128;
    float base = 0, next = 0;
    if (thread >= CHANNELS) scale = 1;
#pragma unroll 1
    for (int chunk = 0; chunk <= head.chunks; ++chunk) {
        if (STAGES == 2 && chunk) {
            // what is used up is waited for next, by when the chunk before is there
            wait_for_all_copies();
            show();
            arrive(full((chunk - 1) % STAGES));
        }
        if (chunk < head.chunks) {
            int stage = chunk % STAGES;
            if (chunk >= STAGES) wait(used(stage), (chunk / STAGES - 1) % 2);
            copy_chunk(head, chunk);
            if (BASE && thread < WIDE) {
                base += next;
                float *to = reinterpret_cast<float *>(memory + 2 * TABLE + stage * STAGE + VALUES + KEYS + QUERIES);
                to[thread] = base * scale;
                // there before the next chunk is
                next = starts ? starts[(long long)chunk * WIDE + thread] : 0;
            }
        }
        end_copies();
        if (STAGES > 2 && chunk) {
            wait_for_copies();
            show();
            arrive(full((chunk - 1) % STAGES));
        }
    }
}

// Of head `first` + y and the dimensions of block x: to `out (units, length, 64)`, times `unscale (units)`, what the
// keys of all chunks before its own give a query of `queries (heads, dims, length)`, and to `totals (units, length)`
// the sums of the weights. A unit is a block. Rows have been multiplied with `powers (heads)`, if it is there; what is
// said of them in `starts` and `largest` has not. Of add_riesz `keys (heads, dims, length)` are places, as queries are,
// of others points as they came, `(heads, length, dims)`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    march(const short *queries, const short *keys, const unsigned short *rows, const float *nodes, const float *stats,
          const float *bandwidth, const float *starts, const float *largest, const float *powers, uint4 *out,
          float *totals, float *unscale, long long first, long long length, long long dims, long long count,
          double epsilon) {
    long long head_at = first + blockIdx.y, line = head_at * dims + blockIdx.x * DIMS;
    long long unit = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    int chunks = (length + CHUNK - 1) / CHUNK, warp = threadIdx.x / 32;
    Head head{queries + line * length * (sizeof(Pair) / 4),
              keys + (KIND == RIESZ ? line * length : head_at * length * dims + blockIdx.x * DIMS),
              rows + head_at * length * CHANNELS,
              nodes + line * GP,
              stats + (line * STATS + STATS - 1) * GP,
              RATE / bandwidth[head_at],
              int(length),
              int(dims),
              int(count),
              chunks};
    float power = powers ? powers[head_at] : 1;
    float most = largest_value(head, largest + head_at * chunks) * power;
    Scales scales(head, nodes + head_at * dims * GP, most, epsilon);
    // columns behind the channels: the first one has a power of two in every row
    for (int i = threadIdx.x; i < STAGES * CHUNK; i += THREADS) {
        int n = i % CHUNK;
        unsigned char *row = memory + 2 * TABLE + i / CHUNK * STAGE + n / 8 * EIGHT + 8 * 128 + n % 8 * 16;
        *reinterpret_cast<uint4 *>(row) = {pack(scales.one, 0), 0, 0, 0};
    }
    know(head, memory + KNOWN);
    show();
    if (threadIdx.x == 0) {
        unscale[unit] = 1 / scales.sum / power;
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(full(i), 128);
            make_barrier(used(i), 4 * (TABLES + 1));
        }
        for (int i = 0; i < 2; ++i) {
            make_barrier(ready(i), 4 * TABLES);
            make_barrier(freed(i), 4);
        }
    }
    __syncthreads();
    if (warp < 4 * TABLES) {
        // with two groups that have tables 512 in all, for four threads of different groups
        take_registers<TABLES == 2 ? 192 : 224>();
        add_keys(head, warp, scales);
    } else if (warp < 4 * TABLES + 4) {
        leave_registers<104>();
        float by = scales.weights();
        read_tables(head, {out + unit * length * 8, totals + unit * length, by * scales.sum, by / scales.one});
    } else {
        leave_registers<24>();
        bring(head, blockIdx.x ? nullptr : starts + head_at * chunks * WIDE, scales.sum * power);
    }
}
