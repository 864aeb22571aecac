// Along a head of a causal call, with the tables of a few dimensions in registers: queries read them chunk by chunk,
// each before its keys are added.
//
// A block has DIMS dimensions of one head, 256 * TABLES rows of a table: GP nodes each. Groups of four warps have 256
// rows as sums of products and walk along the keys; at the end of a chunk they leave their rows as halves in shared
// memory. One more group multiplies the ramps of the queries with these, and one brings what all need next. So one
// group makes weights while products of another are under way, and tables never go to memory.
//
// In ramps the kernel of add_riesz is diagonal, and its correction adds neighbours, see riesz.py: to the change of F
// behind node i a key with ramps r adds
//
//     (p_i + n_i + c_i + c_i+1) r_i - c_i r_i-1 - c_i+1 r_i+1 - n_i
//
// times its row, of which the last column is a power of two, for the sums of the weights. F at the first node comes
// from starts.py.
//
// Set by march.py: GP, TABLES, CHUNK (points), STATS (lines of what is known of a dimension), SHARED (bytes).

#include "warpgroup.cu"

constexpr int CHANNELS = 64, WIDE = CHANNELS + 8, STAGES = 3;
constexpr int ROWS = 256 * TABLES, DIMS = ROWS / GP, THREADS = 128 * (TABLES + 2);
// rows lie in blocks of 8 x 8 halves, as tensor cores read them
constexpr int EIGHT = WIDE / 8 * 128;
constexpr int TABLE = ROWS / 8 * EIGHT, VALUES = CHUNK / 8 * EIGHT;
// of the codes of a dimension: with 32 bytes more, threads of two dimensions have banks of their own
constexpr int LINE = 2 * CHUNK + 32, CODES = DIMS * LINE;
constexpr int STAGE = VALUES + 2 * CODES + (WIDE * 4 + 127) / 128 * 128;
constexpr int BARRIERS = 2 * TABLE + STAGES * STAGE;
static_assert(BARRIERS + 128 <= SHARED, "march.py asks for less shared memory than is used");

extern __shared__ __align__(128) unsigned char memory[];

// what was brought, what of it is used up, which tables can be read, and which have been
inline unsigned full(int stage) { return shared_address(memory) + BARRIERS + 8 * stage; }
inline unsigned used(int stage) { return full(STAGES + stage); }
inline unsigned ready(int buffer) { return full(2 * STAGES + buffer); }
inline unsigned freed(int buffer) { return full(2 * STAGES + 2 + buffer); }

struct Head {
    const short *queries, *keys;
    const unsigned short *rows;
    const float *nodes, *extra;
    float rate;
    int length, count, chunks;

    // what the correction adds at a node of a dimension of this block
    float correction(int dim, int i) const { return i < count ? 2 * extra[dim * STATS * GP + i] : 0; }
    // of the cell behind a node, twice what is above zero and what is below, in bandwidths
    float above(int dim, int i) const {
        const float *line = nodes + dim * GP + i;
        return i < count - 1 ? (fmaxf(line[1], 0) - fmaxf(line[0], 0)) * rate : 0;
    }
    float below(int dim, int i) const {
        const float *line = nodes + dim * GP + i;
        return i < count - 1 ? (fmaxf(-line[0], 0) - fmaxf(-line[1], 0)) * rate : 0;
    }
    float own(int dim, int i) const {
        return i < count - 1 ? above(dim, i) + below(dim, i) + correction(dim, i) + correction(dim, i + 1) : 0;
    }
};

// Powers of two: what weights of keys are multiplied with, what tables are as halves, what the rows of all keys hold
// for a sum of weights, and what sums are multiplied with as halves. Every warp finds them by itself.
struct Scales {
    float weight, table, one, sum;

    Scales(const Head &head, const float *line, int dims, const float *largest, float power, float epsilon) {
        int lane = threadIdx.x % 32;
        float most = 0, cell = 0, reach = 0;
        bool known = true;
        for (int i = lane; i < head.chunks; i += 32) {
            known = known && largest[i] < __int_as_float(0x7f800000);
            most = fmaxf(most, largest[i]);
        }
        known = !__any_sync(~0u, !known);
        most = largest_of_warp(most) * power;
        for (int i = lane; i < ROWS; i += 32) cell = fmaxf(cell, head.own(i / GP, i % GP));
        cell = fmaxf(largest_of_warp(cell), 1e-30f);
        for (int d = lane; d < dims; d += 32)
            reach += fmaxf(fabsf(line[d * GP]), fabsf(line[d * GP + head.count - 1])) * head.rate * 2 + epsilon;
        reach = sum_of_warp(reach);
        one = most > 0 ? power_below(fmaxf(most, 6e-8f)) : 1;
        // a weight is at most one, and the sum of all keys at most 2^15; both at once would take the weights' digits
        // where values are large or many
        weight = 1 / (2 * power_below(cell));
        table = 32768 / (2 * power_below(2 * one * head.length));
        sum = 32768 / (2 * power_below(fmaxf(reach * 2 * one * head.length, 1e-30f)));
        if (!known) sum = __int_as_float(0x7fffffff);
    }
};

// ---- tables

// How eight nodes weigh a key. Two numbers lie in a register: 25 registers would be too many.
struct Weights {
    // of a node its factor and what is added; of two nodes what is taken off for neighbours
    unsigned own[8], correction[5];

    Weights(const Head &head, int dim, int node, float scale) {
        // ramps are 2^-15 for one
        float up = scale * 32768;
#pragma unroll
        for (int x = 0; x < 8; ++x) own[x] = pack(head.own(dim, node + x) * up, -head.below(dim, node + x) * scale);
#pragma unroll
        for (int x = 0; x < 10; x += 2)
            correction[x / 2] = pack(-head.correction(dim, node + x) * up, -head.correction(dim, node + x + 1) * up);
    }

    // Those of the nodes 2 M and 2 M + 1 for four keys: rows eight apart of a product, and keys eight apart. Nodes are
    // counted from the one before the first, so that places less the nodes are those of the next ones too.
    template <int M> void make(unsigned (&weights)[4], unsigned low, unsigned high, unsigned limit) const {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            unsigned r[4], place = part ? high : low;
#pragma unroll
            for (int x = 0; x < 4; ++x) r[x] = ramps(place, (0x10000 - 512 * (2 * M + x)) % 0x10000 * 0x10001u, limit);
            unsigned one = multiply_add(own[2 * M], r[1]), two = multiply_add(own[2 * M + 1], r[2]);
            one = multiply_add_low(correction[M], r[0], one), two = multiply_add_high(correction[M], r[1], two);
            one = multiply_add_high(correction[M], r[2], one), two = multiply_add_low(correction[M + 1], r[3], two);
            weights[part * 2] = one, weights[part * 2 + 1] = two;
        }
    }
};

struct Slab {
    int lane, g, t, dim, node, row;
    // 64 rows of tables, of warp `warp` among those that have tables
    Slab(int warp) {
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        dim = warp * (64 / GP) + g * 8 / GP, node = g * 8 % GP, row = warp * 64;
    }
};

// The next product: its weights lie where those of the fourth one before it did. From the first to the last instruction
// a product takes some 250 cycles, of which tensor cores are busy for 36.
template <int M> inline void add_product(float (&sums)[4][36], unsigned (&own)[4][4], const Weights &weights,
                                         unsigned low, unsigned high, unsigned limit, unsigned long long rows) {
    wait_for_products<3>();
    hold(own[M]);
    weights.make<M>(own[M], low, high, limit);
    begin_products();
    multiply(sums[M], own[M], rows);
    end_products();
}

inline void add_keys(const Head &head, int warp, const Scales &scales) {
    Slab slab(warp);
    Weights weights(head, slab.dim, slab.node, scales.weight);
    float by = scales.table;
    unsigned start = shared_address(memory);
    // the ramps of the node before the first one are places less that node
    unsigned shift = kept(unsigned(0x10000 + 512 - 512 * slab.node) % 0x10000 * 0x10001u), limit = kept(0x02000200);
    float sums[4][36] = {};
    // a lane has the address of a row of one of four blocks: rows and columns eight on
    unsigned to = start + (slab.row / 8 + slab.lane / 8 % 2) * EIGHT + slab.lane / 16 * 128 + slab.lane % 8 * 16;
    for (int chunk = 0; chunk < head.chunks - 1; ++chunk) {
        int stage = chunk % STAGES, buffer = chunk % 2;
        unsigned begin = 2 * TABLE + stage * STAGE;
        const unsigned *codes =
            reinterpret_cast<const unsigned *>(memory + begin + VALUES + slab.dim * LINE + slab.t * 4);
        unsigned long long rows = rows_at(start + begin, EIGHT);
        wait(full(stage), chunk / STAGES % 2);
        unsigned own[4][4], next = codes[0], other = codes[4];
#pragma unroll 1
        for (int step = 0; step < CHUNK / 16; ++step) {
            unsigned low = add_places(next, shift), high = add_places(other, shift);
            // behind the last ones are others, which are not used
            codes += 8;
            next = codes[0], other = codes[4];
            add_product<0>(sums, own, weights, low, high, limit, rows);
            add_product<1>(sums, own, weights, low, high, limit, rows);
            add_product<2>(sums, own, weights, low, high, limit, rows);
            add_product<3>(sums, own, weights, low, high, limit, rows);
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

// The codes of two queries, as pairs of the same, less the first node of a thread.
inline void split_codes(unsigned codes, unsigned shift, unsigned &one, unsigned &two) {
    one = add_places(__byte_perm(codes, 0, 0x1010), shift);
    two = add_places(__byte_perm(codes, 0, 0x3232), shift);
}
// The sums of 64 queries, of which a thread has two from `codes` on, by a table. The weights of a product lie where
// those of the eighth one before it did.
inline void multiply_ramps(float (&sums)[36], const unsigned *codes, unsigned table, unsigned shift, unsigned limit) {
    constexpr int NEXT = 64 / GP * LINE / 4;
    unsigned own[8][4], next[2] = {codes[0], codes[NEXT]};
    unsigned long long rows = rows_at(table, EIGHT);
#pragma unroll 1
    for (int slab = 0; slab < ROWS / 64; slab += 2) {
        codes += 2 * NEXT;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned low, high;
            split_codes(next[half], shift, low, high);
            if (slab + 2 < ROWS / 64) next[half] = codes[half * NEXT];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                unsigned (&weights)[4] = own[half * 4 + part];
                wait_for_products<7>();
                hold(weights);
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    // and that of the node eight on
                    unsigned node = (0x10000 - 512 * (2 * part + x)) % 0x10000 * 0x10001u;
                    weights[2 * x] = ramps(low, node, limit), weights[2 * x + 1] = ramps(high, node, limit);
                }
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
    unsigned start = shared_address(memory), node = t * 16 % GP, limit = kept(0x02000200);
    unsigned shift =
        kept(unsigned(0x10000 - 512 * node) % 0x10000 | unsigned(0x10000 - 512 * (node + 8)) % 0x10000 << 16);
#pragma unroll 1
    for (int chunk = 0; chunk < head.chunks; ++chunk) {
        int stage = chunk % STAGES, buffer = (chunk + 1) % 2;
        const unsigned char *brought = memory + 2 * TABLE + stage * STAGE + VALUES + CODES;
        wait(full(stage), chunk / STAGES % 2);
        if (chunk) wait(ready(buffer), (chunk - 1) / 2 % 2);
#pragma unroll 1
        for (int tile = 0; tile < CHUNK / 64; ++tile) {
            // lanes whose queries are not there have left out some of the tile before
            __syncwarp();
            int first = tile * 64 + warp * 16 + 2 * g;
            float sums[36] = {};
            if (chunk) {
                const unsigned char *codes = brought + t * 16 / GP * LINE + first * 2;
                multiply_ramps(sums, reinterpret_cast<const unsigned *>(codes), start + buffer * TABLE, shift, limit);
            }
            const float *base = reinterpret_cast<const float *>(brought + CODES) + 2 * t;
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
                        float2 from = *reinterpret_cast<const float2 *>(base + 8 * j);
                        found[i] = pack(fmaf(x[0], target.by, from.x), fmaf(x[1], target.by, from.y));
                    }
                    target.out[m * 8 + half * 4 + t] = {found[0], found[1], found[2], found[3]};
                }
                if (t == 0) target.totals[m] = fmaf(sums[32 + 2 * h], target.by_total, base[CHANNELS]);
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

// Rows and codes of the keys of a chunk, codes of its queries.
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
    to += VALUES;
#pragma unroll 1
    for (int i = thread; i < DIMS * (CHUNK / 8); i += 128) {
        int dim = i / (CHUNK / 8), n = i % (CHUNK / 8) * 8;
        bool there = first + n < head.length;
        long long at = (long long)dim * head.length + (there ? first + n : 0);
        copy(to + dim * LINE + n * 2, head.keys + at, there);
        copy(to + CODES + dim * LINE + n * 2, head.queries + at, there);
    }
}

// All chunks one after the other; to each of them F at the first node, for the keys before it, of which `starts
// (chunks, 72)` has what the keys of a chunk give.
inline void bring(const Head &head, const float *starts, float scale) {
    int thread = threadIdx.x % 128;
    float base = 0, next = 0;
    if (thread >= CHANNELS) scale = 1;
#pragma unroll 1
    for (int chunk = 0; chunk <= head.chunks; ++chunk) {
        if (chunk < head.chunks) {
            int stage = chunk % STAGES;
            if (chunk >= STAGES) wait(used(stage), (chunk / STAGES - 1) % 2);
            copy_chunk(head, chunk);
            if (thread < WIDE) {
                base += next;
                float *to = reinterpret_cast<float *>(memory + 2 * TABLE + stage * STAGE + VALUES + 2 * CODES);
                to[thread] = base * scale;
                // there before the next chunk is
                next = starts ? starts[(long long)chunk * WIDE + thread] : 0;
            }
        }
        end_copies();
        if (chunk) {
            wait_for_copies();
            show();
            arrive(full((chunk - 1) % STAGES));
        }
    }
}

// Of head `first` + y and the dimensions of block x: to `out (units, length, 64)`, times `unscale (units)`, what the
// keys of all chunks before its own give a query of `queries (heads, dims, length)`, and to `totals (units, length)`
// the sums of the weights. A unit is a block: `unit` is that of the first one. Rows have been multiplied with `powers
// (heads)`, if it is there; what is said of them in `starts` and `largest` has not.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    march(const short *queries, const short *keys, const unsigned short *rows, const float *nodes, const float *stats,
          const float *bandwidth, const float *starts, const float *largest, const float *powers, uint4 *out,
          float *totals, float *unscale, long long first, long long unit, long long length, long long dims,
          long long count, double epsilon) {
    long long head_at = first + blockIdx.y, line = head_at * dims + blockIdx.x * DIMS;
    unit += (long long)blockIdx.y * gridDim.x + blockIdx.x;
    int chunks = (length + CHUNK - 1) / CHUNK, warp = threadIdx.x / 32;
    Head head{queries + line * length,
              keys + line * length,
              rows + head_at * length * CHANNELS,
              nodes + line * GP,
              stats + (line * STATS + STATS - 1) * GP,
              2 / bandwidth[head_at],
              int(length),
              int(count),
              chunks};
    float power = powers ? powers[head_at] : 1;
    Scales scales(head, nodes + head_at * dims * GP, dims, largest + head_at * chunks, power, epsilon);
    // columns behind the channels: the first one has a power of two in every row
    for (int i = threadIdx.x; i < STAGES * CHUNK; i += THREADS) {
        int n = i % CHUNK;
        unsigned char *row = memory + 2 * TABLE + i / CHUNK * STAGE + n / 8 * EIGHT + 8 * 128 + n % 8 * 16;
        *reinterpret_cast<uint4 *>(row) = {pack(scales.one, 0), 0, 0, 0};
    }
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
        float by = 32768 / (scales.weight * scales.table);
        read_tables(head, {out + unit * length * 8, totals + unit * length, by * scales.sum, by / scales.one});
    } else {
        leave_registers<24>();
        bring(head, blockIdx.x ? nullptr : starts + head_at * chunks * WIDE, scales.sum * power);
    }
}
