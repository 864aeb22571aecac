// What blocks of tiled.cu, backward.cu and backward_table.cu hold, and how they read tiles.
//
// A block has OWN rows of its own, queries or keys, and walks over all rows of the other kind, OTHER at a time. A
// thread holds TM x TN numbers of such a tile in registers: distances, or products of gradients and values. They go
// through shared memory into a second product, where a thread holds TM rows x 4 columns: of values forward, of points
// backward. What a tile adds is summed afresh and then added to the running sum, so that errors grow with the number
// of tiles. There are no atomics: the same call has the same bits.
//
// Set by cuda_kernels.py: NUMBER (float or double), KERNEL (a name of Kind), OWN, CHUNKS (blocks of 64 columns, one or
// at most four: then the running sums lie in local memory), SHARED (bytes), BLOCKS (at least, on a multiprocessor),
// EPSILON (of the Riesz kernels).

#include "kinds.cu"

constexpr int THREADS = 128, DOWN = 8, ACROSS = 16;
constexpr int OTHER = 2 * OWN, TM = OWN / DOWN, TN = OTHER / ACROSS, PARTS = THREADS / OWN;
// columns of a tile; four more keep the rows of neighbouring threads in different banks
constexpr int WIDTH = 64, STRIDE = WIDTH + 4, ACROSS_STRIDE = OWN + 4;
constexpr int STEP = TABLE ? 1 : 4;

template <int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector {
    T x[N];
};

struct Shared {
    T second[OTHER * STRIDE];
    // the first tile lies where the scores go when it has been read
    T scores[OTHER * ACROSS_STRIDE];
    T own_norm[OWN], other_norm[OTHER];
    T query_total[OTHER], query_shift[OTHER];
    T halves[2][OWN], parts[PARTS][OWN];
    T change[OWN];
    int own_mark[OWN], other_mark[OTHER];
};
static_assert(sizeof(Shared) <= SHARED, "cuda_kernels.py asks for less shared memory than is used");
static_assert(OWN * STRIDE <= OTHER * ACROSS_STRIDE, "the first tile is larger than the scores");

extern __shared__ __align__(16) unsigned char memory[];

// the place of a thread in a tile: lanes are 4 x 8, warps 2 x 2
struct Place {
    int down, across;
    Place() {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        down = lane / 8 + warp % 2 * 4;
        across = lane % 8 + warp / 2 * 8;
    }
    int row(int i) const { return down + DOWN * i; }
    int column(int j) const { return across + ACROSS * j; }
};

// blockIdx.x counts tiles, problem by problem
struct Spot {
    long long problem;
    int first;
    // the last tiles first: with a causal mask they have the most to do, or for keys the least
    Spot(long long block, long long rows, bool backwards) {
        long long tiles = (rows + OWN - 1) / OWN, tile = block % tiles;
        problem = block / tiles;
        first = (backwards ? tiles - 1 - tile : tile) * OWN;
    }
};

// the own mark that sees or is seen the most
template <bool KEYS> inline int widest(const Shared &shared) {
    int mark = shared.own_mark[0];
    for (int i = 1; i < OWN; ++i) mark = seen<KEYS>(mark, shared.own_mark[i]) ? mark : shared.own_mark[i];
    return mark;
}

// rows of a matrix in global memory
struct Rows {
    const T *start;
    int count, width;
    bool whole;

    Rows(const T *start, long long count, long long width) : start(start), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) | width * sizeof(T)) % 16 == 0;
    }
    template <int N> Vector<N> get(int row, int column, T fill) const {
        Vector<N> found;
        const T *from = start + (long long)row * width + column;
        bool inside = row < count;
        if (inside && whole && column + N <= width) return *reinterpret_cast<const Vector<N> *>(from);
        for (int e = 0; e < N; ++e) found.x[e] = inside && column + e < width ? from[e] : fill;
        return found;
    }
};

// `COUNT` rows from `first` on, 64 columns from `column` on, into a tile; returns whether one of these is not tiny
template <int COUNT>
inline bool load(T *tile, const Rows &rows, int first, int column, T scale = 1, T fill = 0, T *norms = nullptr) {
    bool ordinary = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * WIDTH / 4; i += THREADS) {
        int row = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
        Vector<4> found = rows.get<4>(first + row, column + at, fill);
        for (int e = 0; e < 4; ++e) {
            if constexpr (KIND == ADD_BUMP) found.x[e] *= scale;
            ordinary |= fabs(found.x[e]) > T(TINY);
        }
        *reinterpret_cast<Vector<4> *>(tile + row * STRIDE + at) = found;
        if constexpr (!STATIONARY) {
            if (norms) {
                T sum = 0;
                for (int e = 0; e < 4; ++e) sum += norm_term(found.x[e]);
                // sixteen threads hold a row
                for (int lane = 8; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
                if (at == 0) norms[row] = column ? norms[row] + sum : sum;
            }
        }
    }
    return ordinary;
}

// the same as factors of e^(own - other), of 32 dimensions; returns whether one is out of reach
template <int COUNT>
inline bool load_factors(T *tile, const Rows &rows, int first, int column, const T *origin, T rate) {
    bool far = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * WIDTH / 4; i += THREADS) {
        int row = i / (WIDTH / 4), at = i % (WIDTH / 4) * 2;
        Vector<2> found = rows.get<2>(first + row, column + at, 0);
        Vector<4> factors;
        for (int e = 0; e < 2; ++e) {
            bool inside = first + row < rows.count && column + at + e < rows.width;
            T exponent = inside ? (found.x[e] - origin[column + at + e]) * rate : T(0);
            // not `>`, which is false for a NaN
            far |= !(fabs(exponent) <= T(REACH));
            // a dimension beyond the last adds nothing
            factors.x[2 * e] = column + at + e < rows.width ? power_of_two(exponent) : T(0);
            factors.x[2 * e + 1] = column + at + e < rows.width ? power_of_two(-exponent) : T(0);
        }
        *reinterpret_cast<Vector<4> *>(tile + row * STRIDE + at * 2) = factors;
    }
    return far;
}
