// What a block of slopes.cu holds in shared memory, the rows that it reads, and where its gradients go.

constexpr int OWN = 64, OTHER = DECAY && !COARSE ? 32 : 64;
// words of a row of halves in a tile
constexpr int PACKED_STRIDE = PACKED + 16;
// words of a row of places: neighbouring lanes meet different banks
constexpr int PLACES = OTHER / 2 + 4;
// steps that make a slope
constexpr int STEPS = KIND == ADD_BUMP ? 3 : 1;
// halves of a number; of a factor that rises, and of one that falls
constexpr int PARTS = COARSE ? 1 : 2;
constexpr int FACTORS_OF = DECAY ? 2 * PARTS : 0, SUMS = DECAY ? 2 : 1;

// what a tile holds of an other row beside its vectors: dS is their product times `scale`, and `more`
struct Row {
    float scale, more;
};

// dS as halves, of a lane, of four own rows and half of the others
struct alignas(OTHER / 4) Weights {
    unsigned x[OTHER / 16];
};

struct Shared {
    // one more row, beyond all
    float sorted[(OWN + 1) * WIDTH];
    union {
        struct {
            float points[OTHER * WIDTH];
            unsigned vectors[OTHER * PACKED_STRIDE];
        };
        // while the own points are sorted
        float runs[OWN * WIDTH];
    };
    unsigned places[STEPS + FACTORS_OF][WIDTH * PLACES];
    // of own row m, 16 dimensions b and g: those of dimensions g and g + 8
    unsigned ranks[OWN * WIDTH / 2];
    Weights weights[OWN / 16][4][2][32];
    // the largest of a row of dS, in both halves of the other rows
    float most[2][OWN];
    float totals[OWN];
    Row other[OTHER];
    int own_mark[OWN], other_mark[OTHER];
};
static_assert(sizeof(Shared) <= SHARED, "cuda_kernels.py asks for less shared memory than is used");
extern __shared__ __align__(16) unsigned char memory[];

inline void copy(unsigned *to, const unsigned *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void copy_one(unsigned *to, const unsigned *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void arrive() { asm volatile("cp.async.wait_all;"); }

// what belongs to the other rows, or to the own ones
struct Side {
    const float *points;
    const unsigned *vectors;
    const float *scale;
    int count;
};

struct Problem {
    int rows, columns, dims, each;
    bool causal;
    const float *weight, *grad_total;
    // own rows are keys
    bool keys;

    // Own marks are above the other marks that they see; those of keys that see queries have changed their signs.
    int mark(bool key, int row) const {
        int found = key ? key_mark(row, columns, weight) : query_mark(row, rows, columns, each, causal);
        return keys ? -found : found;
    }
};

// asynchronously, 64 rows from `first` on; zero where there is nothing
inline void fetch(Shared &shared, const Side &side, int first, int dims) {
#pragma unroll 4
    for (int i = threadIdx.x; i < OTHER * PACKED * PARTS / 8; i += THREADS) {
        int row = i / (PACKED * PARTS / 8), at = i % (PACKED * PARTS / 8) * 4;
        bool there = first + row < side.count;
        const unsigned *from = side.vectors + (long long)(there ? first + row : 0) * PACKED + at;
        copy(shared.vectors + row * PACKED_STRIDE + at, from, there ? 16 : 0);
    }
    const unsigned *points = reinterpret_cast<const unsigned *>(side.points);
    unsigned *to = reinterpret_cast<unsigned *>(shared.points);
    if ((reinterpret_cast<unsigned long long>(points) | dims * 4) % 16 == 0)
#pragma unroll 4
        for (int i = threadIdx.x; i < OTHER * WIDTH / 4; i += THREADS) {
            int row = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
            bool there = first + row < side.count && at < dims;
            copy(to + row * WIDTH + at, there ? points + (long long)(first + row) * dims + at : points, there ? 16 : 0);
        }
    else
#pragma unroll 1
        for (int i = threadIdx.x; i < OTHER * WIDTH; i += THREADS) {
            int row = i / WIDTH, at = i % WIDTH;
            bool there = first + row < side.count && at < dims;
            copy_one(to + i, there ? points + (long long)(first + row) * dims + at : points, there ? 4 : 0);
        }
}

// the first tile from `first` on that the block sees something of; what belongs to its rows is in shared memory then
inline int next_tile(Shared &shared, const Problem &problem, const Side &other, int first, int reach) {
    for (; first < other.count; first += OTHER) {
        bool any = false;
        if (threadIdx.x < OTHER) {
            int row = first + threadIdx.x, mark = problem.mark(!problem.keys, row);
            bool inside = row < other.count;
            shared.other_mark[threadIdx.x] = mark;
            shared.other[threadIdx.x] = {inside ? other.scale[row] : 0.0f,
                                         problem.keys && inside ? problem.grad_total[row] : 0.0f};
            any = mark < reach;
        }
        if (__syncthreads_or(any)) break;
    }
    return first;
}

// where a thread is: 16 own rows from `base` on, `half` of the other rows, and then of the dimensions
struct Lane {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, group = threadIdx.x / 32 % 4, half = threadIdx.x / 128;
    int base = group * 16;
    // of quad q, and of 16 dimensions b
    int row(int quad) const { return base + 2 * t + quad % 2 + quad / 2 * 8; }
    int dim(int b, int h) const { return 32 * half + 16 * b + 8 * h + g; }
};

// where the gradients of the own rows go
struct Gradients {
    float *to;
    const float *first_key;
    double moments = 0;

    void write(const Side &own, int row, int d, int dims, float gradient, float total, const Numbers &numbers) {
        long long place = (long long)row * dims + d;
        float point = own.points[place];
        to[place] = gradient = (gradient + norm_slope(point, 0) * total) / numbers.tau;
        // an offset of all points changes nothing but the rounding
        moments += double(point - (STATIONARY && first_key ? first_key[d] : 0.0f)) * double(gradient);
    }
    // what all threads have found
    void leave(double *moment) const {
        if (!moment) return;
        __syncthreads();
        double *sums = reinterpret_cast<double *>(memory);
        sums[threadIdx.x] = moments;
        __syncthreads();
        for (int half = THREADS / 2; half; half /= 2) {
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) *moment = sums[0];
    }
};
