// Keys to nodes on Hopper: of eight dimensions of a head, the ramps of all keys times their rows, see collect.py.
//
// Two groups of four warps have half of the rows of the table each as sums of products, whose weights they make in
// registers from the places of keys. Two more groups find the places of the next keys, each of which is needed here
// alone, so places never go to memory; the copy engine brings their rows. A last column of ones, the same for all rows,
// makes the sums of the weights.
//
// Set by hopper.py: GP, FACTORED, SHORT (bfloat16), STATS, SHARED (bytes).

constexpr int UNIT = SHORT ? 256 : 512;

#include "warpgroup.cu"

#include "bins.cu"

// with 32 nodes products of 128 keys take less time than these keys need to arrive
constexpr int DIMS = 8, CHANNELS = 64, KEYS = GP == 64 ? 128 : 256, STAGES = 4;
// tiles of 64 rows that a group has, and products that it begins together: a product takes some 250 cycles from the
// first to the last instruction, of which tensor cores are busy for 36, so those of two turns are under way
constexpr int TILES = GP * DIMS / 128, BATCH = 4, STEPS = BATCH / TILES;
constexpr int BRINGERS = 256, THREADS = 256 + BRINGERS;
// bytes of the rows of a stage, of its codes of a dimension, and of all
constexpr int VALUES = KEYS * ROW, CODES = 2 * KEYS;
constexpr int STAGE = VALUES + (FACTORED ? 2 : 1) * DIMS * CODES;
static_assert(CHANNELS * 2 == ROW && STAGE % EIGHT_ROWS == 0, "a stage begins where eight rows may");
// what is known of a dimension: bins, of exponentials cells behind them
constexpr int LOOK_UPS = BINS + FACTORED * GP;
// behind the stages 16 rows of ones, which tensor cores see behind any 16 rows
constexpr int ONES = STAGES * STAGE, TABLES_OF_BINS = ONES + 2 * EIGHT_ROWS;
constexpr int KNOWN = TABLES_OF_BINS + DIMS * LOOK_UPS * 8, BARRIERS = KNOWN + DIMS * 8;
static_assert(BARRIERS + 16 * STAGES <= SHARED, "hopper.py asks for less shared memory than is used");
// stages after which sums of weights are taken off: up to there they are whole numbers that tensor cores have
constexpr int SPAN = 4096 / KEYS;

extern __shared__ __align__(1024) unsigned char memory[];

// what was brought, and what of it is used up
inline unsigned full(int stage) { return shared_address(memory) + BARRIERS + 8 * stage; }
inline unsigned used(int stage) { return full(STAGES + stage); }

// ---- sums

// A warp has one dimension, of which a tile has 16 nodes: so codes are loaded once for all tiles.
struct Own {
    int dim, node;
    // minus the first node of a thread, twice; what is added at the last tile's second ones, twice
    unsigned first, last;

    Own(int group) {
        int warp = threadIdx.x / 32 % 4;
        dim = group * 4 + warp, node = threadIdx.x % 32 / 4;
        first = kept(twice(-node));
        // the last ramp is one everywhere
        last = kept(twice(node == 7 ? 8 : 8 - GP));
    }
    static unsigned twice(int nodes) { return unsigned(UNIT * nodes) % 0x10000 * 0x10001u; }
};

// The codes and factors of four keys, two in a register; codes less the first node of a thread.
struct Four {
    uint2 codes, factors;

    void load(const unsigned char *at) {
        codes = *reinterpret_cast<const uint2 *>(at);
        // makes numbers of their usual range from bits of integers, see `coarse_ramp`
        factors = {0x7f007f00, 0x7f007f00};
        if (FACTORED) factors = *reinterpret_cast<const uint2 *>(at + DIMS * CODES);
    }
    void move(unsigned first) { codes = {add_places(codes.x, first), add_places(codes.y, first)}; }
    // their weights at two nodes of a tile
    void weigh(unsigned (&weights)[4], int tile, const Own &own, unsigned limit) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned shift = i % 2 && tile == TILES - 1 ? own.last : Own::twice(-16 * tile - i % 2 * 8);
            weights[i] = ramps(i < 2 ? codes.x : codes.y, shift, limit);
            unsigned factor = i < 2 ? factors.x : factors.y;
            if (FACTORED || SHORT) weights[i] = SHORT ? times_short(weights[i], factor) : times(weights[i], factor);
        }
    }
};

struct Target {
    float *table, *counts;
    int *largest;
};

inline void add_keys(int group, int chunks, const Target &target) {
    int lane = threadIdx.x % 32, t = lane % 4;
    Own mine(group);
    unsigned start = shared_address(memory), limit = kept(UNIT * 0x10001);
    float sums[TILES][36] = {}, counts[TILES][2] = {};
    unsigned own[2][BATCH][4];
#pragma unroll 1
    for (int first = 0; first < chunks; first += SPAN) {
        int stop = min(first + SPAN, chunks);
#pragma unroll 1
        for (int chunk = first; chunk < stop; ++chunk) {
            int stage = chunk % STAGES;
            const unsigned char *codes = memory + stage * STAGE + VALUES + mine.dim * CODES + t * 8;
            unsigned long long rows = turned_rows_at(start + stage * STAGE, start + ONES);
            wait(full(stage), chunk / STAGES % 2);
            Four next[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) next[i].load(codes + i * 32);
#pragma unroll 1
            for (int step = 0; step < KEYS / 16; step += 2 * STEPS) {
#pragma unroll
                for (int turn = 0; turn < 2; ++turn) {
                    wait_for_products<1>();
#pragma unroll
                    for (int i = 0; i < BATCH; ++i) hold(own[turn][i]);
                    // products of the chunk before are over; all lanes say so, as one for its warp takes longer
                    if (turn && step == 0 && chunk > first) arrive(used((chunk - 1) % STAGES));
                    codes += STEPS * 32;
#pragma unroll
                    for (int i = 0; i < STEPS; ++i) {
                        next[i].move(mine.first);
#pragma unroll
                        for (int m = 0; m < TILES; ++m) next[i].weigh(own[turn][i * TILES + m], m, mine, limit);
                        if (turn == 0 || step + 2 * STEPS < KEYS / 16) next[i].load(codes + i * 32);
                    }
                    begin_products();
#pragma unroll
                    for (int i = 0; i < BATCH; ++i) {
                        if constexpr (SHORT)
                            multiply_short(sums[i % TILES], own[turn][i], rows);
                        else
                            multiply(sums[i % TILES], own[turn][i], rows);
                        if (i % TILES == TILES - 1) rows += TURNED_STEP;
                    }
                    end_products();
                }
            }
        }
        wait_for_products<0>();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) hold(own[0][i]), hold(own[1][i]);
#pragma unroll
        for (int m = 0; m < TILES; ++m) hold(sums[m]);
        arrive(used((stop - 1) % STAGES));
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            counts[m][0] += sums[m][32], counts[m][1] += sums[m][34];
            sums[m][32] = sums[m][34] = 0;
        }
    }
    // see `unit` in language.py
    float unit = SHORT ? 0.25f : FACTORED ? 1 : 32768;
    unsigned most = 0;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            long long row = mine.dim * GP + mine.node + 16 * m + 8 * h;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float2 found = {sums[m][4 * j + 2 * h] * unit, sums[m][4 * j + 2 * h + 1] * unit};
                most = max(most, max(__float_as_uint(fabsf(found.x)), __float_as_uint(fabsf(found.y))));
                *reinterpret_cast<float2 *>(target.table + row * CHANNELS + 8 * j + 2 * t) = found;
            }
            if (t == 0) target.counts[row] = counts[m][h] * unit;
        }
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) atomicMax(target.largest, int(most));
}

// ---- what they need

struct Head {
    const unsigned short *keys;
    Line first;
    // of exponentials log2(e) over the bandwidth
    float tau, rate;
    int length, dims, chunks;
    bool crowded;
};
inline uint2 *look_ups() { return reinterpret_cast<uint2 *>(memory + TABLES_OF_BINS); }

// Where the code of a key lies among the 16 of a product: threads of tensor cores have two keys that are neighbours and
// the two eight on, whose codes are neighbours.
inline int place_of_code(int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n % 2 + n % 16 / 8 * 2; }

// The places of a key in some dimensions of this block, from two numbers in every word.
constexpr int PARTS = DIMS * KEYS / BRINGERS;
struct __align__(2 * PARTS) Words {
    unsigned pairs[PARTS / 2];
};

inline Words load_words(const Head &head, int n, int first) {
    return *reinterpret_cast<const Words *>(head.keys + (long long)min(n, head.length - 1) * head.dims + first);
}

inline void leave_place(const Place &place, unsigned char *to) {
    *reinterpret_cast<unsigned short *>(to) = place.code;
    if (FACTORED) {
        // of bfloat16 times 2^127
        unsigned factor = SHORT ? pack_short(place.factor * 5.192296858534828e33f, 0) : pack(place.factor, 0);
        *reinterpret_cast<unsigned short *>(to + DIMS * CODES) = factor;
    }
}

inline void find_places(const Head &head, const Words &words, unsigned char *to, int first) {
    if (head.crowded) {
        // not unrolled, as these warps have few registers
#pragma unroll 1
        for (int i = 0; i < PARTS; ++i) {
            unsigned word = words.pairs[0];
#pragma unroll
            for (int j = 1; j < PARTS / 2; ++j) word = i / 2 == j ? words.pairs[j] : word;
            leave_place(search_place(widen(i % 2 ? word >> 16 : word).x, head.first.beside(first + i), head.tau),
                        to + (first + i) * CODES);
        }
    } else {
        // of two dimensions
        const float4 *known = reinterpret_cast<const float4 *>(memory + KNOWN) + first / 2;
        const uint2 *bins = look_ups() + first * LOOK_UPS;
        // all are looked up before the first is used
        Piece pieces[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; i += 2) {
            float2 pair = widen(words.pairs[i / 2]);
            float4 both = known[i / 2];
            pieces[i].load(pair.x, bins + i * LOOK_UPS, both.x, both.y);
            pieces[i + 1].load(pair.y, bins + (i + 1) * LOOK_UPS, both.z, both.w);
        }
        Place places[PARTS];
        float2 cells[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            places[i] = {pieces[i].code(head.first.count), 32768};
            if (FACTORED)
                cells[i] = reinterpret_cast<const float2 *>(bins + i * LOOK_UPS + BINS)[places[i].code / UNIT];
        }
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            float2 pair = widen(words.pairs[i / 2]);
            if (FACTORED) places[i].factor = factor_in(cells[i], i % 2 ? pair.y : pair.x, head.rate);
            leave_place(places[i], to + (first + i) * CODES);
        }
    }
}

inline void bring(const Head &head, const Map &rows) {
    int thread = threadIdx.x % KEYS, part = threadIdx.x % BRINGERS / KEYS, first = part * PARTS;
    Words next = load_words(head, thread, first);
#pragma unroll 1
    for (int chunk = 0; chunk < head.chunks; ++chunk) {
        int stage = chunk % STAGES, n = chunk * KEYS + thread;
        if (chunk >= STAGES) wait(used(stage), (chunk / STAGES - 1) % 2);
        if (threadIdx.x % BRINGERS == 0) {
            arrive_expecting(full(stage), VALUES);
            bring_rows(shared_address(memory) + stage * STAGE, rows, chunk * KEYS, blockIdx.y, full(stage));
        }
        Words words = next;
        next = load_words(head, n + KEYS, first);
        unsigned char *to = memory + stage * STAGE + VALUES + 2 * place_of_code(thread);
        find_places(head, words, to, first);
        // a cell before the first one: no weight at any node
        if (n >= head.length)
            for (int i = 0; i < PARTS; ++i) *reinterpret_cast<short *>(to + (first + i) * CODES) = -UNIT;
        arrive(full(stage));
    }
}

// Of head y and the dimensions of block x, to `table (heads, dims, GP, 64)` and `counts (heads, dims, GP)` what the
// `keys (heads, length, dims)` and their `rows (heads, length, 64)`, in boxes of KEYS rows, leave there; `largest
// (heads)` is raised to the largest number of the table, as bits.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    collect(const unsigned short *keys, const __grid_constant__ Map rows, const float *nodes, const float *stats,
            const float *bandwidth, float *table, float *counts, int *largest, long long length, long long dims,
            long long count) {
    long long at = blockIdx.y, line = at * dims + blockIdx.x * DIMS;
    Head head{keys + at * length * dims + blockIdx.x * DIMS,
              {nodes + line * GP, stats + line * STATS * GP, int(count)},
              bandwidth[at],
              1.4426950408889634f / bandwidth[at],
              int(length),
              int(dims),
              int((length + KEYS - 1) / KEYS),
              false};
    int steps = 0;
    // all are loaded at a time
#pragma unroll
    for (int dim = 0; dim < DIMS; ++dim) steps = max(steps, head.first.beside(dim).steps());
    head.crowded = steps > 1;
    for (int i = threadIdx.x; i < DIMS * LOOK_UPS; i += THREADS)
        look_ups()[i] = head.first.beside(i / LOOK_UPS).look_ups()[i % LOOK_UPS];
    if (threadIdx.x < DIMS) {
        Line own = head.first.beside(threadIdx.x);
        reinterpret_cast<float2 *>(memory + KNOWN)[threadIdx.x] = {own.per_bin(), own.zero()};
    }
    if (threadIdx.x < 16) {
        // in the first of its columns, where turned rows have that
        int row = threadIdx.x, place = row % 8 * 16;
        *reinterpret_cast<uint4 *>(memory + ONES + row * ROW + place) = {SHORT ? 0x3f80u : 0x3c00u, 0, 0, 0};
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(full(i), BRINGERS + 1);
            make_barrier(used(i), 256);
        }
    }
    // ones and barriers
    show();
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group < 2) {
        // with 200 the assembler has products wait for each other: 0.851 ms instead of 0.677 at 16,384 points
        take_registers<GP == 64 ? 208 : 160>();
        add_keys(group, head.chunks, {table + line * GP * CHANNELS, counts + line * GP, largest + at});
    } else {
        leave_registers<GP == 64 ? 48 : 96>();
        bring(head, rows);
    }
}
