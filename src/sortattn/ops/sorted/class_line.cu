// What the walks along lines of sixteen-bit coordinates have in common, see classes.cu: the mean of the rows of every
// class of keys, and for every class of queries a mean of these, all in sixteen bits.
//
// Macros: those of track.cu, for sums of what is below, half.cu, CREW (warps of a block), VALUES and RING (rows of
// values and of sums that a lane has on their way).

#include "half.cu"
#include "track.cu"

#include "packed.cu"

static_assert(sizeof(real) == 4 && !BOTH && !HALVES && ADDED && !SLOPES, "sums of what is below");

// Sums in shared memory.
template <typename T> struct Shelf {
    T at[SUMS][VEC][32];
    T extra[SUMS];

    template <typename U> __device__ void store(const Numbers<U> &sums, int lane) {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) at[l][c][lane] = sums.at[l][c];
            if (lane == 0) extra[l] = sums.extra[l];
        }
    }
    __device__ void load(Numbers<T> &sums, int lane) const {
#pragma unroll
        for (int l = 0; l < SUMS; l++) {
#pragma unroll
            for (int c = 0; c < VEC; c++) sums.at[l][c] = at[l][c][lane];
            sums.extra[l] = extra[l];
        }
    }
};

// The classes of a line.
struct Classes {
    const half_t *codes;
    int count;

    __device__ real place(int i) const { return number_of(codes[i]); }
};

// A line as one lane sees it.
struct Own {
    // values and their weights, and of every class of keys the mean and the sum
    const char *values;
    half_t *rows;
    Scalars scalars;
    real *extras;
    int lane;

    __device__ Packed load(int index) const {
        return *reinterpret_cast<const Packed *>(values + index_t(unsigned(index)) * (STRIDE * 2));
    }
    __device__ Packed row(int i) const { return *reinterpret_cast<const Packed *>(rows + index_t(i) * STRIDE); }
};

// What sums are multiplied with before they are rounded to sixteen bits: one over that of the weights, as a mean of
// values fits.
__device__ inline real inverse(real extra) {
    if (extra < real(1.17549435e-38)) return real(0);
#ifdef __CUDA_ARCH__
    // a division has branches for numbers that are none of these
    real result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(extra));
    return result;
#else
    return real(1) / extra;
#endif
}

// The extra scalar of a class, whose last bit says whether its sums have lost digits.
__device__ inline real marked(real extra, bool unsure) {
    return __uint_as_float((__float_as_uint(extra) & ~1u) | unsigned(unsure));
}

// Sum the rows of classes of keys, from `entries[end - 1]` down to `entries[begin]`, and store their means.
//
// `prepare(lane, rank)` is called for every key and `visit(i, rank, mean, weight)` for every class, with the lane of
// its last key. `list` has room for 64 numbers.
template <typename P, typename F>
__device__ void collect(const Own &own, const entry_t *entries, int begin, int end, int *list, P prepare, F visit) {
    constexpr entry_t MASK = (entry_t(1) << INDEX) - 1;
    static_assert(32 % VALUES == 0, "a batch has whole rings");
    int lane = own.lane;
    if (begin >= end) return;
    entry_t next = end - 1 - lane >= begin ? entries[end - 1 - lane] : entry_t(0);
    list[lane] = int(next & MASK);
    __syncwarp();
    Packed ring[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) ring[i] = own.load(list[i]);
    Row sum = {};
    real carried = real(0);
    for (int top = end, half = 0; top > begin; top -= 32, half ^= 32) {
        bool there = top - 1 - lane >= begin;
        int rank = int(next >> INDEX), index = int(next & MASK);
        real scalar = there ? own.scalars[index] : real(0);
        next = top - 33 - lane >= begin ? entries[top - 33 - lane] : entry_t(0);
        // of the key below
        int other = __shfl_sync(ALL, rank, (lane + 1) % 32), behind = __shfl_sync(ALL, int(next >> INDEX), 0);
        if (lane == 31) other = behind;
        bool ends = there && (top - 1 - lane == begin || other != rank);
        unsigned mask = __ballot_sync(ALL, ends), before = mask & ((1u << lane) - 1);
        // the sum of the weights of a class, at its last key
        real all = scan(scalar, lane), start = __shfl_sync(ALL, all, before ? 31 - __clz(before) : 0);
        real extra = before ? all - start : all + carried;
        carried = __shfl_sync(ALL, all, 31) + (mask ? real(0) : carried);
        real last = __shfl_sync(ALL, all, mask ? 31 - __clz(mask) : 0);
        if (mask) carried -= last;
        if (ends) own.extras[rank] = extra;
        list[(half ^ 32) + lane] = int(next & MASK);
        prepare(lane, rank);
        __syncwarp();
#pragma unroll 1
        for (int part = 0; part < 32; part += VALUES) {
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                Row row = ring[i].row();
                ring[i] = own.load(list[(half + part + i + VALUES) % 64]);
#pragma unroll
                for (int c = 0; c < VEC; c++) sum.at[c] += row.at[c];
                if (mask >> (part + i) & 1) {
                    int which = __shfl_sync(ALL, rank, part + i);
                    real weight = __shfl_sync(ALL, extra, part + i), share = inverse(weight);
#pragma unroll
                    for (int c = 0; c < VEC; c++) sum.at[c] *= share;
                    Packed mean = Packed::of(sum);
                    *reinterpret_cast<Packed *>(own.rows + index_t(which) * STRIDE) = mean;
                    visit(part + i, which, mean.row(), weight);
                    sum = {};
                }
            }
        }
        __syncwarp();
    }
}

// A line cut into pieces, such that none has many more keys than another, nor classes of them: where each begins. The
// warps of a block take one piece after the other, as they come.
template <int PIECES> struct Cuts {
    // the first class, as a multiple of UNIT, and its first key
    int rank[PIECES + 1], key[PIECES + 1];
    int next;

    // by all threads of a block
    template <int UNIT> __device__ void make(const entry_t *entries, int count, int classes) {
        static_assert(32 * CREW > PIECES, "a thread for each");
        int i = threadIdx.x;
        __syncthreads();
        if (i <= PIECES) {
            auto rank_of = [&](int n) { return int(entries[n] >> INDEX); };
            // roughly where both are shared out by then, counted alike
            double goal = 2.0 * i / PIECES;
            int low = 0, high = count;
            while (high - low > count / 512 + 1) {
                int half = (low + high) / 2;
                if (double(half) / count + double(rank_of(half)) / classes < goal)
                    low = half;
                else
                    high = half;
            }
            int first = i == 0 ? 0 : i == PIECES ? (classes + UNIT - 1) / UNIT : (rank_of(low) + UNIT / 2) / UNIT;
            rank[i] = first;
            for (low = 0, high = count; low < high;) {
                int half = (low + high) / 2;
                if (rank_of(half) < first * UNIT)
                    low = half + 1;
                else
                    high = half;
            }
            key[i] = low;
        }
        if (i == 0) next = 0;
        __syncthreads();
    }
    // the next piece for a warp, by all of its lanes
    __device__ int take(int lane) {
        int piece = lane == 0 ? atomicAdd(&next, 1) : 0;
        return __shfl_sync(ALL, piece, 0);
    }
};
