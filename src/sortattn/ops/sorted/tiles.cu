// Sums of rows that are kept in registers and taken apart by tensor cores.
//
// There are eight, with channels from top to bottom of a product and sums side by side: a lane has two sums, from
// lane % 4 * 2 on, and of every eight channels the one with the number lane / 4. That is where a product of weights
// with these sums, as with rows, wants them. Behind the channels is the extra scalar, in a tile whose rows are alike.
//
// Macros: those of tensor.cu, which comes before.

// channels of a tile, and tiles of a row
constexpr int TILE = 16, TILES = WIDTH / TILE;

// What a lane has of eight sums.
struct Eight {
    real at[TILES + 1][4];

    // Two of a channel of every eight, and of the extra scalar for the last of these.
    __device__ real at_eight(int eight, int k) const { return at[eight / 2][eight % 2 * 2 + k]; }
};
// Of thirty-two keys those that a lane has, two neighbours in a word: weights for the sum lane / 4, or scalars.
struct Words {
    unsigned at[4];

    __device__ Columns columns(int half) const { return {{at[2 * half], at[2 * half + 1]}}; }
    // the same for all channels
    __device__ Weights rows(int half) const {
        return {{at[2 * half], at[2 * half], at[2 * half + 1], at[2 * half + 1]}};
    }
};

// Numbers of thirty-two keys, those that a lane has side by side: `of_part[lane % 4]`.
template <typename T> struct alignas(16) Keys {
    struct alignas(16) Some {
        T at[8];
    } of_part[4];

    __device__ T &of(int key) { return of_part[key % 8 / 2].at[key / 8 * 2 + key % 2]; }
};
__device__ inline Words words_of(const Keys<half_t> &numbers, int part) {
    Words words;
    Keys<half_t>::Some some = numbers.of_part[part];
#pragma unroll
    for (int i = 0; i < 4; i++) words.at[i] = some.at[2 * i] | unsigned(some.at[2 * i + 1]) << 16;
    return words;
}

// The digits of a number that tensor cores see, and those behind them.
__device__ inline real seen_of(real x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
__device__ inline real rest_of(real x) { return x - seen_of(x); }
// What they see of that is the number nearest to one.
__device__ inline real rounded(real x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// Shares of sixteen sums in eight others: of lane / 4 and eight behind in one of lane % 4 * 2, then in the next one.
struct Shares {
    real at[4];
};
// Add shares of others, of which a lane has two. Only the first digits of each number are seen.
__device__ inline void multiply(real (&sum)[4], const Shares &shares, real first, real second) {
#ifdef __CUDA_ARCH__
    auto bits = [](real x) { return __float_as_uint(x); };
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(bits(shares.at[0])), "r"(bits(shares.at[1])), "r"(bits(shares.at[2])), "r"(bits(shares.at[3])),
          "r"(bits(first)), "r"(bits(second)));
#else
    static real held[32][32][6];
    real(&warp)[32][6] = held[threadIdx.x / 32];
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 6; i++) warp[lane][i] = seen_of(i < 4 ? shares.at[i] : i == 4 ? first : second);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; k++)
            sum[i] += warp[row * 4 + k % 4][k / 4 * 2 + i / 2] * warp[column * 4 + k % 4][4 + k / 4];
    }
    __syncwarp();
#endif
}

// Every sixteen channels of sixteen rows, from top to bottom, and their extra scalars: `visit(tile, rows, half)`.
template <typename F>
__device__ inline void each_tile(const Brought &brought, const Words &scalars, int lane, F visit) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) visit(i, brought.upright(half * 16, i * 2, lane), half);
        visit(TILES, scalars.rows(half), half);
    }
}
