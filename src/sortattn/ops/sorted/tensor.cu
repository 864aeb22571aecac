// Thirty-two rows of sixteen bits that a warp has in shared memory, and sums of them by tensor cores.
//
// A product has sixteen sums, of which a lane has two, lane / 4 and eight behind, and of every eight channels the two
// from lane % 4 * 2 on. Behind the channels is the extra scalar, as one of eight more of which the others are zero.
//
// Macros: those of half.cu and track.cu, which come before, and WEIGHED (whether keys have weights, zero or one).

constexpr int KEYS = 32, TALL = 16, EIGHTS = WIDTH / 8;
// two neighbouring numbers of a row; such of a row and of the extra scalar with seven zeros
struct alignas(8) Two {
    real at[2];
};
constexpr int COLUMNS = (EIGHTS + 1) * 4;
// pieces of sixteen bytes that a row has, and rows that a warp brings at a time
constexpr int PIECES = EIGHTS, AT_ONCE = 32 / PIECES;
static_assert(WIDTH == 32 || WIDTH == 64, "a warp brings whole rows");

// What a lane has of sixteen sums.
struct Sixteen {
    real at[EIGHTS + 1][4];
};
// Weights of sixteen sums for sixteen keys, and of these for eight channels, as tensor cores want them: neighbouring
// keys are in one word.
struct Weights {
    unsigned word[4];
};
struct Columns {
    unsigned word[2];
};

__device__ inline void multiply(real (&sum)[4], const Weights &a, const Columns &b) {
#ifdef __CUDA_ARCH__
#if BFLOAT
#define MULTIPLY "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MULTIPLY "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
    asm(MULTIPLY "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]));
#else
    // what all lanes hold, for each of them to read
    static unsigned held[32][32][6];
    unsigned (&warp)[32][6] = held[threadIdx.x / 32];
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 6; i++) warp[lane][i] = i < 4 ? a.word[i] : b.word[i - 4];
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            auto number = [&](unsigned word) { return widen(half_t(k % 2 ? word >> 16 : word)); };
            unsigned left = warp[row * 4 + k % 8 / 2][k / 8 * 2 + i / 2];
            sum[i] += number(left) * number(warp[column * 4 + k % 8 / 2][4 + k / 8]);
        }
    }
    __syncwarp();
#endif
}

// Read what is not written to here.
template <typename T> __device__ inline T read(const T *from) {
#ifdef __CUDA_ARCH__
    return __ldg(from);
#else
    return *from;
#endif
}
// Have a pointer in registers: the compiler would find it afresh wherever it is wanted, if it knew how.
template <typename T> __device__ inline void keep(const T *&pointer) {
#ifdef __CUDA_ARCH__
    index_t number = reinterpret_cast<index_t>(pointer);
    pointer = reinterpret_cast<const T *>(__shfl_sync(ALL, number, threadIdx.x % 32));
#endif
}

// Rows in shared memory; pieces change places such that eight rows have theirs in different banks.
struct alignas(128) Brought {
    half_t at[KEYS * WIDTH];

    __device__ static constexpr int place(int row, int piece) {
        return row * WIDTH + (piece ^ (WIDTH == 64 ? row : row / 2) % PIECES) * 8;
    }
    // Rows that lanes want, one each, on their way; `start` is this lane's piece of the first row.
    __device__ void bring(const char *start, int index, int lane) {
        // of neighbouring groups of rows, which have the same places for their pieces every other time, or every time
        constexpr int OTHER = (WIDTH == 64 ? AT_ONCE : AT_ONCE / 2) % PIECES * 8;
        int first = place(lane / PIECES, lane % PIECES);
#pragma unroll
        for (int i = 0; i < 32; i += AT_ONCE) {
            int which = __shfl_sync(ALL, index, i + lane / PIECES);
            static_assert(place(2 * AT_ONCE, 0) == 2 * AT_ONCE * WIDTH, "twice as many rows have them at the same");
            begin_copy_around(at + (i / AT_ONCE % 2 ? first ^ OTHER : first) + i * WIDTH,
                              start + index_t(unsigned(which)) * (STRIDE * 2));
        }
    }
#ifdef __CUDA_ARCH__
    // Where a lane finds its part of sixteen rows and sixteen channels, for what it has of the first ones: others are
    // as far from there as they are from these, but for bits that change.
    __device__ unsigned address(int own, int first_key, int first) const {
        return (unsigned(__cvta_generic_to_shared(at)) + unsigned(own * 2) ^ unsigned(first * 16)) +
               unsigned(first_key * WIDTH * 2);
    }
#endif
    // Of sixteen keys, two times eight channels.
    __device__ void load(Columns (&two)[2], int first_key, int first, int lane) const {
#ifdef __CUDA_ARCH__
        unsigned from = address(place(lane % 16, lane / 16), first_key, first);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(two[0].word[0]), "=r"(two[0].word[1]), "=r"(two[1].word[0]), "=r"(two[1].word[1])
                     : "r"(from)
                     : "memory");
#else
        for (int i = 0; i < 4; i++) {
            int key = first_key + i % 2 * 8 + lane % 4 * 2;
            auto number = [&](int key) { return unsigned(at[place(key, first + i / 2) + lane / 4]); };
            two[i / 2].word[i % 2] = number(key) | number(key + 1) << 16;
        }
#endif
    }
    // The same as weights, whose sums are channels.
    __device__ Weights upright(int first_key, int first, int lane) const {
        Weights all;
#ifdef __CUDA_ARCH__
        unsigned from = address(place(lane / 16 * 8 + lane % 8, lane / 8 % 2), first_key, first);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(all.word[0]), "=r"(all.word[1]), "=r"(all.word[2]), "=r"(all.word[3])
                     : "r"(from)
                     : "memory");
#else
        Columns two[2];
        load(two, first_key, first, lane);
        for (int i = 0; i < 4; i++) all.word[i] = two[i % 2].word[i / 2];
#endif
        return all;
    }
    // Add the rows times their weights, those of sixteen keys each: some channels, by eights from one of these on.
    template <int SOME>
    __device__ void add_some(real (&sums)[SOME][4], int from, const Weights (&weights)[2], int lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i + 1 < SOME; i += 2) {
                Columns two[2];
                load(two, half * 16, from + i, lane);
                multiply(sums[i], weights[half], two[0]);
                multiply(sums[i + 1], weights[half], two[1]);
            }
        }
    }
    // All of them, and the scalars.
    __device__ void add_to(Sixteen &sums, const Weights (&weights)[2], const Columns (&scalars)[2], int lane) const {
        add_some(sums.at, 0, weights, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) multiply(sums.at[EIGHTS], weights[half], scalars[half]);
    }
};

// Words of sixteen bits of the keys that a lane has of thirty-two.
__device__ inline unsigned two_of(const half_t *numbers, int eight, int lane) {
    return reinterpret_cast<const unsigned *>(numbers)[eight * 4 + lane % 4];
}

// Copies to shared memory that belong together; all but the last ones are there after `wait_for_older`.
__device__ inline void end_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
__device__ inline void wait_for_older() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

// The keys of a line in order, with the codes of their classes.
struct Ordered {
    const entry_t *entries;
    const half_t *codes;
    int count;

    __device__ entry_t entry(int n) const { return read(entries + min(n, count - 1)); }
    __device__ static int index(entry_t entry) { return int(entry & ((entry_t(1) << INDEX) - 1)); }
    __device__ half_t code(entry_t entry) const { return read(codes + int(entry >> INDEX)); }
};
// Their values, as a lane reads them, and their weights.
struct Values {
    const char *start;
    const real *scalars;
};

// Stretches of thirty-two keys, one after the other, STEP from one to the next. While one is summed, rows of the next
// one are on their way, and what leads to those behind it: `find(code)` is the point of a class. `also(to, stretch)`
// may bring more, to one of two rooms.
template <int STEP, typename Find, typename Also> struct Stretches {
    const Ordered &points;
    const Values &values;
    Brought *rooms;
    Find find;
    Also also;
    int coming, last, held = 0;
    // of the stretches behind this one
    entry_t entry, second, third;
    half_t code;
    // of the key of a lane in this stretch, in the next one, and behind it
    decltype(Find()(half_t())) point, next_point, later_point;
    real scalar, next_scalar;

    __device__ Stretches(Int<STEP>, const Ordered &points, const Values &values, Brought *rooms, int first, int lane,
                         Find find, Also also)
        : points(points), values(values), rooms(rooms), find(find), also(also), coming(first),
          last((points.count + KEYS - 1) / KEYS - 1) {
        entry_t now = entry_at(0, lane);
        entry = entry_at(1, lane), second = entry_at(2, lane), third = entry_at(3, lane);
        next_point = find(points.code(now)), later_point = find(points.code(entry)), code = points.code(second);
        next_scalar = scalar_of(now);
        bring(now, lane);
    }
    // Go on to the next stretch, whose rows are there; those behind it are brought.
    __device__ const Brought &next(int lane) {
        coming += STEP;
        point = next_point, next_point = later_point;
        scalar = next_scalar, next_scalar = scalar_of(entry);
        bring(entry, lane);
        wait_for_older();
        __syncwarp();
        return rooms[held];
    }
    // What leads to stretches behind, once for each, and when other loads are there: those that are waited for would
    // have to wait for these too.
    __device__ void look_ahead(int lane) {
        later_point = find(code), code = points.code(third);
        entry = second, second = third, third = entry_at(3, lane);
    }
    // The extra scalars of the stretch, of the keys that a lane has, by way of `room`.
    __device__ void weigh(unsigned (&words)[4], half_t *room, bool there, int lane) const {
        if (WEIGHED) {
            room[lane] = half_t(narrow(there ? scalar : real(0), real(0)));
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = WEIGHED ? two_of(room, i, lane) : narrow(real(1), real(1));
    }
    // The same as a column.
    __device__ void weigh(Columns (&columns)[2], half_t *room, bool there, int lane) const {
        unsigned words[4];
        weigh(words, room, there, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) columns[i / 2].word[i % 2] = lane < 4 ? words[i] : 0u;
    }
    // before other rows are brought to the same rooms
    __device__ void end() const {
        wait_for_copies();
        __syncwarp();
    }

  private:
    __device__ real scalar_of(entry_t entry) const { return WEIGHED ? values.scalars[Ordered::index(entry)] : real(1); }
    __device__ int at(int i) const { return min(max(coming + i * STEP, 0), last); }
    __device__ entry_t entry_at(int i, int lane) const { return points.entry(at(i) * KEYS + lane); }
    __device__ void bring(entry_t entry, int lane) {
        rooms[held].bring(values.start, Ordered::index(entry), lane);
        also(held, at(0));
        end_copies();
        held ^= 1;
    }
};

// Have what was read, here and not before: the compiler would take it apart as soon as it is read, and wait for it.
__device__ inline void arrive(half_t &code) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+h"(code));
#endif
}

// A line as a lane walks along it, and where its sums go.
struct Route {
    Ordered points;
    Classes classes;
    Values given;
    half_t *table;
    real *extras;

    __device__ Route(const entry_t *entries, const half_t *key_codes, const half_t *codes, const int *counts,
                     const index_t *offsets, const half_t *values, const real *weights, half_t *table, real *extras,
                     index_t line, index_t dims, index_t count, index_t most, index_t key_most, int lane)
        : points{entries + line * count, key_codes + line * key_most, int(count)},
          classes{codes + line * most, counts[line]}, table(table + offsets[line] * STRIDE + blockIdx.y * WIDTH),
          extras(extras + offsets[line]) {
        index_t first = line / dims * count;
        given.start = reinterpret_cast<const char *>(values + first * STRIDE + blockIdx.y * WIDTH) + lane % PIECES * 16;
        given.scalars = WEIGHED ? weights + first : nullptr;
        keep(given.start), keep(points.entries), keep(points.codes);
    }
};

// Two sums of a lane as means in sixteen bits, in the order of order.cu: of thirty-two channels.
__device__ inline void store_some(half_t *row, const real (*sums)[4], int from, int second, real share, int lane) {
    unsigned at[4];
#pragma unroll
    for (int k = 0; k < 4; k++) at[k] = narrow(share * sums[k][2 * second], share * sums[k][2 * second + 1]);
    half_t *to = row + from * 8 + lane % 4 * 8;
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
                 : "memory");
#else
    memcpy(to, at, 16);
#endif
}
// The same of all channels.
__device__ inline void store_means(half_t *row, const Sixteen &sums, int second, real share, int lane) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i += 4) store_some(row, sums.at + i, i, second, share, lane);
}
