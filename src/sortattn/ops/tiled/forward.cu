// The forward pass in float32: kernel sums of the values, tile by tile; nothing of size M x N leaves the chip.
//
// A block has 64 queries and walks over the keys, 64 at a time; a warp has 32 of both. A thread holds the scores of 4
// queries and 8 keys where tensor cores want them, so that the product with the values needs no detour. Keys are
// copied while the tile before is summed, and changed on the way into what the scores are made of. What a tile adds is
// summed afresh and then added to the running sum, so that errors grow with the number of tiles. Where there are few
// blocks, two groups of warps share one and have every other tile each. The same call has the same bits.
//
// Set by cuda.py: NUMBER (float), KERNEL (a name of Kind), CHUNKS (blocks of 64 columns, one or at most four: then the
// running sums lie in local memory), SHARED (bytes), BLOCKS (at least, on a multiprocessor), EPSILON (of the Riesz
// kernels), COARSE (1 for inputs of 16 bits: products of halves alone), REVERSED (1 for the gradients of the values:
// own rows are keys then, the others queries with the gradients of their sums in place of values), GROUPS (of warps),
// ROOMY (1 if there is shared memory for factors of all dimensions).

#include "kinds.cu"

// of a group, and of all groups
constexpr int THREADS = 128, ALL = GROUPS * THREADS, ROW_WARPS = 2;
constexpr int OWN = 64, OTHER = 64;
// columns of a tile; four more keep the rows of neighbouring threads in different banks
constexpr int WIDTH = 64, STRIDE = WIDTH + 4;
// Of 16 dimensions, so many are two factors each; the others are points, whose exponential a third pipe takes.
constexpr int GROUP = 16, FACTOR_DIMS = ROOMY ? GROUP : 12, NUMBERS = GROUP + FACTOR_DIMS;
constexpr int POINTS = (FACTORS ? WIDTH / GROUP * NUMBERS : WIDTH) + 4;
constexpr bool WIDE = CHUNKS > 1;
// |s - t| of integers is one instruction with its sum, on another pipe than float's two: of four dimensions three are
// taken so, which keeps both pipes busy
constexpr bool FIXED = KIND == ADD_RIESZ || KIND == LAPLACE;
constexpr int FIXED_DIMS = 3;
// points this much farther out than the mean leave the others too few digits
constexpr float OUTLIER = 64.0f;
constexpr int FEWEST_DIMS = 32;
// sums of e^-|s - t| as factors and distances of fixed points are measured from the first key
constexpr bool ORIGIN = KIND == ADD_LAPLACE || KIND == LAPLACE;

// what a group of warps has of the keys
struct Tile {
    float key[OTHER * POINTS];
    float raw[OTHER * STRIDE], value[OTHER * STRIDE];
    float norm[OTHER];
    int mark[OTHER];
};

// parts of a row's sums: two warps of every group have some of its keys
constexpr int PARTS = 2 * GROUPS;
struct Shared {
    float query[OWN * POINTS];
    Tile tiles[GROUPS];
    float origin[CHUNKS * WIDTH];
    float own_norm[OWN];
    // one, or NaN
    float spoilt[OWN];
    Found parts[2][ALL / 32];
    int own_mark[OWN];
    // of all marks
    int least, most;
    // of a head's points, measured from the origin, and the power of two for its values
    float reach, mean, lift;
    float total[PARTS][OWN], shift[PARTS][OWN];
};
static_assert(GROUPS == 1 || !WIDE, "groups share the queries");
static_assert(sizeof(Shared) <= SHARED, "cuda.py asks for less shared memory than is used");
extern __shared__ __align__(16) unsigned char memory[];

// of the group
inline int group() { return threadIdx.x / THREADS; }
inline int thread() { return threadIdx.x % THREADS; }
inline void barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
inline void meet() { barrier(1 + group(), THREADS); }

// ---- asynchronous copies

inline void copy(float *to, const float *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void copy_one(float *to, const float *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void arrive() { asm volatile("cp.async.wait_all;"); }

// rows of a matrix in global memory
struct Rows {
    const float *start;
    int count, width;
    bool whole;

    Rows(const float *start, long long count, long long width) : start(start), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) | width * 4) % 16 == 0;
    }
    // 64 rows from `first` on, 64 columns from `column` on; zero where there is nothing
    void fetch(float *tile, int first, int column) const {
        if (whole) {
            int row = thread() / 16, at = thread() % 16 * 4;
            const float *from = start + (long long)(first + row) * width + column + at;
            int left = column + at < width ? count - first - row : 0;
            constexpr int STEP = THREADS / 16;
#pragma unroll
            for (int i = 0; i < OTHER; i += STEP, from += STEP * width)
                // of what is beyond the last nothing is read
                copy(tile + (row + i) * STRIDE + at, from, i < left ? 16 : 0);
        } else {
            int row = thread() / WIDTH, at = thread() % WIDTH;
#pragma unroll 1
            for (; row < OTHER; row += THREADS / WIDTH) {
                bool there = column + at < width && first + row < count;
                const float *from = start + (long long)(first + row) * width + column + at;
                copy_one(tile + row * STRIDE + at, there ? from : start, there ? 4 : 0);
            }
        }
    }
};

// ---- scores

// what the block knows of its head
struct Setting {
    Numbers numbers;
    // scores are sums of fixed points, or of factors
    bool quick;
    // of a fixed point
    float scale, back;
    int dims;
};

// The rows of `raw`, 64 columns from `column` on, as the scores want them; two threads have a row.
template <bool KEYS>
inline void change(Shared &shared, Tile &tile, const float *raw, int column, const Setting &setting) {
    int row = thread() / 2, half = thread() % 2;
    float *to = (KEYS ? tile.key : shared.query) + row * POINTS;
    float norm = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // neighbours begin at different banks
        int at = half * 32 + (i ^ half * 4) * 4;
        float4 found = *reinterpret_cast<const float4 *>(raw + row * STRIDE + at);
        float x[4] = {found.x, found.y, found.z, found.w};
        if constexpr (!STATIONARY) norm += (norm_term(x[0]) + norm_term(x[1])) + (norm_term(x[2]) + norm_term(x[3]));
        if (ORIGIN && setting.quick) {
            float4 origin = *reinterpret_cast<const float4 *>(shared.origin + column + at);
            x[0] -= origin.x, x[1] -= origin.y, x[2] -= origin.z, x[3] -= origin.w;
        }
        if constexpr (FIXED) {
            if (setting.quick)
#pragma unroll
                for (int e = 0; e < FIXED_DIMS; ++e) x[e] = __int_as_float(__float2int_rn(x[e] * setting.scale));
        }
        if constexpr (KIND == ADD_BUMP) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[e] *= setting.numbers.scale;
                // far from the zeros beyond the last dimension of a query
                if (KEYS && column + at + e >= setting.dims) x[e] = 4;
            }
        }
        if constexpr (FACTORS) {
            if (setting.quick) {
                float *place = to + at / GROUP * NUMBERS, y[8];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    bool inside = column + at + e < setting.dims;
                    x[e] *= setting.numbers.rate;
                    // a dimension beyond the last adds nothing
                    y[2 * e] = inside ? power_of_two(x[e]) : 0.0f;
                    y[2 * e + 1] = inside ? power_of_two(-x[e]) : 0.0f;
                    if (KEYS && !inside) x[e] = infinity();
                }
                if (at % GROUP < FACTOR_DIMS) {
                    float4 *both = reinterpret_cast<float4 *>(place + at % GROUP * 2);
                    both[0] = {y[0], y[1], y[2], y[3]};
                    both[1] = {y[4], y[5], y[6], y[7]};
                } else
                    *reinterpret_cast<float4 *>(place + 2 * FACTOR_DIMS) = {x[0], x[1], x[2], x[3]};
                continue;
            }
            if (KEYS)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (column + at + e >= setting.dims) x[e] = infinity();
        }
        *reinterpret_cast<float4 *>(to + at) = {x[0], x[1], x[2], x[3]};
    }
    if constexpr (!STATIONARY) {
        norm += __shfl_xor_sync(~0u, norm, 1);
        float &place = (KEYS ? tile.norm : shared.own_norm)[row];
        if (half == 0) place = column ? place + norm : norm;
    }
}

// a thread's place in a tile: of queries g + 8 r, of keys 2 t + 8 s + e
struct Place {
    int g = thread() % 32 / 4, t = thread() % 4;
    int down = thread() / 32 % ROW_WARPS * 32, across = thread() / 32 / ROW_WARPS * 32;
    int row(int r) const { return down + g + 8 * r; }
    int column(int j) const { return across + 2 * t + j / 2 * 8 + j % 2; }
};

// how much of a warp's part of a tile there is: at the ends of a sequence tiles have fewer rows
struct Part {
    int rows, keys;
    bool empty() const { return rows <= 0 || keys <= 0; }
};

// Own marks are above the other marks that they see; reversed, both change their signs.
inline int own_mark(int row, int rows, int columns, int each, bool causal, const float *weights) {
    return REVERSED ? -key_mark(row, rows, weights) : query_mark(row, rows, columns, each, causal);
}
inline int other_mark(int row, int rows, int columns, int each, bool causal, const float *weights) {
    return REVERSED ? -query_mark(row, columns, rows, each, causal) : key_mark(row, columns, weights);
}

inline int distance_and_sum(float s, float t, int sum) {
    int result;
    asm("sad.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(__float_as_int(s)), "r"(__float_as_int(t)), "r"(sum));
    return result;
}

// op(r, j, own, other) for N numbers of the rows from `d` on, of 8 R rows and 4 J keys
template <int N, int R, int J, class Op> inline void pairs_at(const Shared &shared, const Tile &tile, int d, Op op) {
    struct alignas(4 * N) Vector {
        float x[N];
    };
    Place place;
    const float *own = shared.query + place.row(0) * POINTS, *other = tile.key + place.column(0) * POINTS;
    Vector mine[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mine[r] = *reinterpret_cast<const Vector *>(own + r * 8 * POINTS + d);
#pragma unroll
    for (int j = 0; j < J; ++j) {
        Vector yours = *reinterpret_cast<const Vector *>(other + (j / 2 * 8 + j % 2) * POINTS + d);
#pragma unroll
        for (int r = 0; r < R; ++r) op(r, j, mine[r].x, yours.x);
    }
}

// The same for `count` numbers of the rows, N at a time; TIMES that together have fewer waits for shared memory.
// Numbers beyond the last, up to a multiple of that, add nothing.
template <int N, int R, int J, int TIMES = 1, class Op>
inline void pairs(const Shared &shared, const Tile &tile, int count, Op op) {
#pragma unroll 1
    for (int d = 0; d < count; d += TIMES * N)
#pragma unroll
        for (int i = 0; i < TIMES; ++i) pairs_at<N, R, J>(shared, tile, d + i * N, op);
}

// sums += what `count` dimensions add
template <int R, int J> inline void add_terms_of(const Shared &shared, const Tile &tile, int count,
                                                 const Setting &setting, float (&sums)[4][8]) {
    if constexpr (FIXED) {
        if (setting.quick) {
            int whole[R][J] = {};
            pairs<4, R, J, 2>(shared, tile, count, [&](int r, int j, const float *own, const float *other) {
#pragma unroll
                for (int e = 0; e < FIXED_DIMS; ++e) whole[r][j] = distance_and_sum(own[e], other[e], whole[r][j]);
                sums[r][j] += fabsf(own[FIXED_DIMS] - other[FIXED_DIMS]);
            });
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int j = 0; j < J; ++j) sums[r][j] = fmaf(float(unsigned(whole[r][j])), setting.back, sums[r][j]);
            return;
        }
    }
    if constexpr (FACTORS) {
        if (setting.quick) {
            // e^-|s - t| is e^s e^-t or e^-s e^t, and the other one is not below one: three instructions on one pipe
            auto product = [&](int r, int j, const float *own, const float *other) {
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    sums[r][j] =
                        fmaf(__saturatef(own[e] * other[e + 1]), __saturatef(own[e + 1] * other[e]), sums[r][j]);
            };
            if constexpr (ROOMY) {
                pairs<4, R, J, 2>(shared, tile, 2 * count, product);
                return;
            }
            auto exponential = [&](int r, int j, const float *own, const float *other) {
                float fresh[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) fresh[e] = power_of_two(-fabsf(own[e] - other[e]));
                sums[r][j] += (fresh[0] + fresh[1]) + (fresh[2] + fresh[3]);
            };
#pragma unroll 1
            for (int d = 0; d < (count + GROUP - 1) / GROUP * NUMBERS; d += NUMBERS) {
                // in the middle of the others, so that both pipes have work
#pragma unroll
                for (int at = 0; at < FACTOR_DIMS; at += 4) pairs_at<4, R, J>(shared, tile, d + at, product);
                pairs_at<4, R, J>(shared, tile, d + 2 * FACTOR_DIMS, exponential);
#pragma unroll
                for (int at = FACTOR_DIMS; at < 2 * FACTOR_DIMS; at += 4)
                    pairs_at<4, R, J>(shared, tile, d + at, product);
            }
            return;
        }
    }
    constexpr int STEP = TABLE ? 1 : 4;
    pairs<STEP, R, J>(shared, tile, count, [&](int r, int j, const float *own, const float *other) {
        // a few terms first: fewer additions to a number that is larger than they are
        float fresh = term_of(own[0], other[0], setting.numbers);
#pragma unroll
        for (int e = 1; e < STEP; ++e) fresh += term_of(own[e], other[e], setting.numbers);
        sums[r][j] += fresh;
    });
}
inline void add_terms(const Shared &shared, const Tile &tile, int count, const Setting &setting, Part part,
                      float (&sums)[4][8]) {
    if (part.empty()) return;
    // one more row than fits into the tiles before is common: the token of a class
    if (WIDE || (part.rows > 8 && part.keys > 8)) return add_terms_of<4, 8>(shared, tile, count, setting, sums);
    if (part.rows > 8) return add_terms_of<4, 2>(shared, tile, count, setting, sums);
    if (part.keys > 8) return add_terms_of<1, 8>(shared, tile, count, setting, sums);
    add_terms_of<1, 2>(shared, tile, count, setting, sums);
}

// Scores from the sums of terms, in units of `unit`, zero for pairs that are not seen; of `laplace` the logarithms.
inline void finish(const Shared &shared, const Tile &tile, const Setting &setting, bool masked, float (&scores)[4][8]) {
    Place place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float norm = 0;
        if constexpr (KIND == ADD_RIESZ) norm = float(EPSILON) * setting.dims * setting.numbers.tau;
        if (KIND == ADD_RIESZ && setting.quick) norm += shared.own_norm[place.row(r)];
        if constexpr (KIND == RIESZ) norm = sqrtf(shared.own_norm[place.row(r)]) + float(EPSILON) * setting.numbers.tau;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float &score = scores[r][j];
            if constexpr (KIND == ADD_RIESZ)
                score = setting.quick ? norm + tile.norm[place.column(j)] - score : fmaf(2, score, norm);
            if constexpr (KIND == RIESZ) score = norm + sqrtf(tile.norm[place.column(j)]) - sqrtf(score);
            if constexpr (KIND == LAPLACE) score = -score / setting.numbers.tau;
        }
    }
    if (masked)
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (tile.mark[place.column(j)] >= shared.own_mark[place.row(r)])
                    scores[r][j] = KIND == LAPLACE ? -infinity() : 0.0f;
}

// ---- products with the values

// The largest score of each row as a power of two, of the warp's part of a tile; small rows keep their digits by it.
// Not below 14, so that both powers made of it are normal numbers.
inline int exponent_of(float most) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    return max(__float_as_int(most) >> 23, 14);
}

// Halves have 11 digits, so two of them 22: three products lose hardly more than float32 does. Rows are scaled to what
// halves can hold, and back as they are added. Tensor cores truncate their sums: these are short.
inline void add_rows(const Tile &tile, const float (&scores)[4][8], float (&running)[2][8][4]) {
    Place place;
    float up[4], down[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float most = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(scores[r][j]));
        int exponent = exponent_of(most);
        up[r] = __int_as_float((2 * 127 + 13 - exponent) << 23), down[r] = __int_as_float((exponent - 13) << 23);
    }
    unsigned large[2][2][4], small[2][2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int r = 2 * i + e % 2, j = 4 * s + e / 2 * 2;
                split(scores[r][j] * up[r], scores[r][j + 1] * up[r], large[s][i][e], small[s][i][e]);
            }
    const float *from = tile.value + place.column(0) * STRIDE + 4 * place.g;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float fresh[2][2][4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            unsigned more[2][2], less[2][2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint4 both =
                    *reinterpret_cast<const uint4 *>(from + (s * 16 + c / 2 * 8) * STRIDE + c % 2 * 64 + j * 32);
                more[j][0] = both.x, more[j][1] = both.y, less[j][0] = both.z, less[j][1] = both.w;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (!COARSE) multiply_halves(fresh[i][j], large[s][i], less[j]);
                    if (!COARSE) multiply_halves(fresh[i][j], small[s][i], more[j]);
                    multiply_halves(fresh[i][j], large[s][i], more[j]);
                }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &sum = running[i][c * 2 + j][e];
                    sum = fmaf(fresh[i][j][e], down[2 * i + e / 2], sum);
                }
    }
}

// Values as halves, where they lie: of four keys as a thread of a product has them, two and two of them neighbours, and
// of every column the large halves and then the small ones. All are multiplied by a power of two where halves could not
// hold them, or not with all their digits.
inline void split_values(const Shared &shared, Tile &tile) {
    float lift = shared.lift;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = thread() / 32; i < OTHER / 4; i += THREADS / 32) {
        float *rows = tile.value + (i / 4 * 16 + i % 4 * 2) * STRIDE;
        float2 x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            x[k] = *reinterpret_cast<const float2 *>(rows + (k / 2 * 8 + k % 2) * STRIDE + 2 * lane);
            if (lift != 1) x[k].x *= lift, x[k].y *= lift;
        }
        uint4 words[2];
        split(x[0].x, x[1].x, words[0].x, words[0].z), split(x[2].x, x[3].x, words[0].y, words[0].w);
        split(x[0].y, x[1].y, words[1].x, words[1].z), split(x[2].y, x[3].y, words[1].y, words[1].w);
        // all lanes have read
        __syncwarp();
        uint4 *to = reinterpret_cast<uint4 *>(rows + lane / 16 * 8 * STRIDE + lane % 16 * 8);
        to[0] = words[0], to[1] = words[1];
    }
    meet();
}

// ---- the softmax of `laplace`: a warp keeps the largest logarithm of its part of a row

inline void exponentiate(float (&scores)[4][8], float (&shift)[4], float (&total)[4], float (&running)[CHUNKS][2][8][4],
                         bool shifted) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float largest = shift[r];
#pragma unroll
        for (int j = 0; j < 8; ++j) largest = fmaxf(largest, scores[r][j]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (!shifted) largest = 0;
        // a row that has seen nothing yet has no scale to change
        float change = shift[r] == -infinity() ? 0.0f : expf(shift[r] - largest);
        shift[r] = largest;
        float from = largest == -infinity() ? 0.0f : largest;
#pragma unroll
        for (int j = 0; j < 8; ++j) scores[r][j] = expf(scores[r][j] - from);
        total[r] *= change;
        if (__any_sync(~0u, change != 1))
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    running[chunk][r / 2][j][r % 2 * 2] *= change, running[chunk][r / 2][j][r % 2 * 2 + 1] *= change;
    }
}

// ---- the kernel

// what this thread finds in rows of a matrix
inline void look_at(const Rows &rows, const float *origin, Found &found) {
    int count = rows.count * rows.width;
    if (rows.whole)
#pragma unroll 4
        for (int i = threadIdx.x * 4; i < count; i += ALL * 4) {
            float4 x = *reinterpret_cast<const float4 *>(rows.start + i);
            const float *from = origin + (origin ? i % rows.width : 0);
            look(x.x, origin ? from[0] : 0.0f, found), look(x.y, origin ? from[1] : 0.0f, found);
            look(x.z, origin ? from[2] : 0.0f, found), look(x.w, origin ? from[3] : 0.0f, found);
        }
    else
        for (int i = threadIdx.x; i < count; i += ALL)
            look(rows.start[i], origin ? origin[i % rows.width] : 0.0f, found);
}

// The extent of the head's points and of its values, and which rows hold what is no number: from what survey.cu found
// or, in a short head, by looking at all of it. A barrier follows.
inline void look_around(Shared &shared, const Found *found, const Rows &queries, const Rows &keys, const Rows &values,
                        int first, int each, int heads, int slices) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Found points = {}, numbers = {};
    if (found) {
        int parts = (heads + 2) * slices;
        for (int i = lane; warp == 0 && i < parts; i += 32) {
            bool value = i >= parts - slices;
            // of grouped heads, which have their own queries, below
            Found part = found[i];
            if (heads > 1 && i < heads * slices) part.largest = 0;
            join(value ? numbers : points, part);
        }
    } else {
        const float *origin = ORIGIN && keys.count ? keys.start : nullptr;
        look_at(queries, origin, points);
        look_at(keys, origin, points);
        look_at(values, nullptr, numbers);
    }
    points = join_lanes(points), numbers = join_lanes(numbers);
    if (lane == 0) shared.parts[0][warp] = points, shared.parts[1][warp] = numbers;
    __syncthreads();
    for (int w = 0; w < ALL / 32; ++w)
        if (w != warp) join(points, shared.parts[0][w]), join(numbers, shared.parts[1][w]);
    int thread = threadIdx.x;
    if (thread < OWN) {
        float most = fmaxf(points.largest, numbers.largest);
        int row = min(first + thread, queries.count - 1);
        if (heads > 1) most = fmaxf(most, largest(found + row / each * slices, slices));
        shared.spoilt[thread] = poison(most);
    }
    if (thread == 0) {
        int exponent;
        frexp(numbers.largest, &exponent);
        shared.lift = exponent > 0 && exponent < 16 ? 1.0f : ldexp(1.0f, min(12 - exponent, 126));
        shared.reach = points.reach;
        shared.mean = points.sum / (float(queries.count + keys.count) * keys.width);
    }
    for (int d = thread; ORIGIN && d < CHUNKS * WIDTH; d += ALL)
        shared.origin[d] = d < keys.width && keys.count ? keys.start[d] : 0.0f;
}

inline Setting settle(const Shared &shared, Numbers numbers, int dims) {
    Setting setting{numbers, false, 1, 1, dims};
    if constexpr (FIXED) {
        float reach = shared.reach;
        setting.quick = dims >= FEWEST_DIMS && reach <= OUTLIER * shared.mean && reach > 0x1p-60f && reach < 0x1p60f;
        int exponent;
        frexp(reach, &exponent);
        // two of these differ by less than 2^25, and 64 such differences fit into 32 bits
        setting.scale = ldexp(1.0f, 24 - exponent);
        setting.back = ldexp(1.0f, exponent - 24);
    }
    // not `>`, which is false for a NaN
    if constexpr (FACTORS) setting.quick = shared.reach * numbers.rate <= REACH;
    return setting;
}

extern "C" __global__ void __launch_bounds__(ALL, BLOCKS)
    forward(const float *query, const float *key, const float *value, const float *weight, const float *bandwidth,
            const float *table, const Found *found, float *out, float *copy_out, float *total_out, float *shift_out,
            long long rows, long long columns, long long dims, long long channels, long long each, long long causal,
            long long count, long long normalised, long long slices, double tau) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Tile &tile = shared.tiles[group()];
    unsigned tiles = (rows + OWN - 1) / OWN;
    long long p = blockIdx.x / tiles;
    // the last tiles first: with a causal mask they have the most to do
    int first = (tiles - 1 - blockIdx.x % tiles) * OWN;
    int heads = REVERSED ? 1 : unsigned(rows) / unsigned(each);
    Rows queries(query + p * rows * dims, rows, dims), keys(key + p * columns * dims, columns, dims);
    Rows values(value + p * columns * channels, columns, channels);
    const float *weights = weight ? weight + p * (REVERSED ? rows : columns) : nullptr;
    // of one head, the queries that see the first key of the block
    int begin = REVERSED && causal && each == columns ? max(first + int(each - rows), 0) / OTHER * OTHER : 0;
    begin += group() * OTHER;
    if constexpr (!WIDE) {
        if (group() == 0) queries.fetch(tile.value, first, 0);
        keys.fetch(tile.raw, begin, 0);
    }
    if (threadIdx.x < OWN) {
        // rows beyond the last see what it sees, and are not written
        int row = min(first + int(threadIdx.x), int(rows) - 1);
        shared.own_mark[threadIdx.x] = own_mark(row, rows, columns, each, causal, weights);
    }
    look_around(shared, found ? found + p * (heads + 2) * slices : nullptr, queries, keys, values, first, each, heads,
                slices);
    arrive();
    __syncthreads();
    Setting setting = settle(shared, Numbers(bandwidth ? bandwidth[p] : float(tau), table, count), dims);
    if (threadIdx.x < 32) {
        int least = min(shared.own_mark[threadIdx.x], shared.own_mark[threadIdx.x + 32]);
        int most = max(shared.own_mark[threadIdx.x], shared.own_mark[threadIdx.x + 32]);
        least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
        if (threadIdx.x == 0) shared.least = least, shared.most = most;
    }
    auto mark_keys = [&](int start) {
        if (thread() < OTHER) tile.mark[thread()] = other_mark(start + thread(), rows, columns, each, causal, weights);
    };
    if constexpr (!WIDE) {
        if (group() == 0) change<false>(shared, tile, tile.value, 0, setting);
        change<true>(shared, tile, tile.raw, 0, setting);
        mark_keys(begin);
    }
    __syncthreads();
    int least = shared.least, end = REVERSED ? columns : shared.most;
    bool always = weights || (REVERSED && causal);
    if (REVERSED) least = columns;
    if (weights && !REVERSED) {
        // keys behind the last that takes part need no look
        int last = 0;
        for (int n = threadIdx.x; n < end; n += ALL)
            if (weights[n] != 0) last = n + 1;
        last = __reduce_max_sync(~0u, last);
        // nobody reads these before the next barrier
        if (threadIdx.x % 32 == 0) shared.total[0][threadIdx.x / 32] = last;
        __syncthreads();
        end = 0;
        for (int w = 0; w < ALL / 32; ++w) end = max(end, int(shared.total[0][w]));
    }

    float running[CHUNKS][2][8][4] = {}, total[4] = {}, shift[4];
    for (int r = 0; r < 4; ++r) shift[r] = -infinity();
#pragma unroll 1
    for (int start = begin; start < end; start += GROUPS * OTHER) {
        float scores[4][8];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < 8; ++j) scores[r][j] = 0;
        int next = start + GROUPS * OTHER;
        Place place;
        Part part{int(rows) - first - place.down, end - start - place.across};
        if constexpr (!WIDE) {
            values.fetch(tile.value, start, 0);
            if (next < end) keys.fetch(tile.raw, next, 0);
            add_terms(shared, tile, TABLE ? int(dims) : int(dims + 3) / 4 * 4, setting, part, scores);
        } else {
#pragma unroll 1
            for (int d = 0; d < dims; d += WIDTH) {
                meet();
                queries.fetch(tile.value, first, d);
                keys.fetch(tile.raw, start, d);
                arrive();
                meet();
                change<false>(shared, tile, tile.value, d, setting);
                change<true>(shared, tile, tile.raw, d, setting);
                if (d == 0) mark_keys(start);
                meet();
                int left = min(int(dims) - d, WIDTH);
                add_terms(shared, tile, TABLE ? left : (left + 3) / 4 * 4, setting, part, scores);
            }
        }
        if (!part.empty()) {
            finish(shared, tile, setting, always || start + OTHER > least, scores);
            if constexpr (KIND == LAPLACE) exponentiate(scores, shift, total, running, normalised);
#pragma unroll
            for (int r = 0; r < 4; ++r)
                total[r] += ((scores[r][0] + scores[r][1]) + (scores[r][2] + scores[r][3])) +
                            ((scores[r][4] + scores[r][5]) + (scores[r][6] + scores[r][7]));
        }
        if constexpr (!WIDE) {
            arrive();
            meet();
            if (next < end) {
                change<true>(shared, tile, tile.raw, 0, setting);
                mark_keys(next);
            }
            split_values(shared, tile);
            if (!part.empty()) add_rows(tile, scores, running[0]);
            meet();
        } else {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS && chunk * WIDTH < channels; ++chunk) {
                meet();
                values.fetch(tile.value, start, chunk * WIDTH);
                arrive();
                meet();
                split_values(shared, tile);
                if (!part.empty()) add_rows(tile, scores, running[chunk]);
            }
        }
    }

    // warps that share rows put their parts together
    Place place;
    int mine = 2 * group() + (place.across != 0);
    auto part_at = [&](int part) { return part % 2 ? shared.tiles[part / 2].raw : shared.tiles[part / 2].value; };
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        for (int x = 1; x < 4; x *= 2) total[r] += __shfl_xor_sync(~0u, total[r], x);
        if (place.t == 0) shared.total[mine][place.row(r)] = total[r], shared.shift[mine][place.row(r)] = shift[r];
    }
    float scale = unit(setting.numbers) / shared.lift;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk && chunk * WIDTH >= channels) break;
        if (chunk) __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                *reinterpret_cast<float2 *>(part_at(mine) + place.row(r) * STRIDE + j * 8 + 2 * place.t) = {
                    running[chunk][r / 2][j][r % 2 * 2], running[chunk][r / 2][j][r % 2 * 2 + 1]};
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < OWN * 16; i += ALL) {
            int row = i / 16, at = i % 16 * 4, column = chunk * WIDTH + at;
            if (first + row >= rows) break;
            float from = 0, whole = 0, x[4] = {};
            if constexpr (KIND == LAPLACE) {
                float most = -infinity();
                for (int part = 0; part < PARTS; ++part) most = fmaxf(most, shared.shift[part][row]);
                from = most == -infinity() ? 0.0f : most;
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float share = KIND == LAPLACE ? expf(shared.shift[part][row] - from) : 1.0f;
                whole = fmaf(shared.total[part][row], share, whole);
                float4 more = *reinterpret_cast<const float4 *>(part_at(part) + row * STRIDE + at);
                x[0] = fmaf(more.x, share, x[0]), x[1] = fmaf(more.y, share, x[1]);
                x[2] = fmaf(more.z, share, x[2]), x[3] = fmaf(more.w, share, x[3]);
            }
            whole *= unit(setting.numbers);
            // as in normalise.py; what divides is made after the sums, which may be as small
            bool empty = fabsf(whole) < 0x1p-126f;
            float inverse = normalised ? (empty ? 0.0f : 1 / whole) : 1.0f;
            inverse *= shared.spoilt[row];
            for (int e = 0; e < 4; ++e) x[e] = x[e] * inverse * scale;
            long long place = p * rows + first + row;
            auto write = [&](float *to) {
                to += place * channels + column;
                if (values.whole && column + 4 <= channels)
                    *reinterpret_cast<float4 *>(to) = {x[0], x[1], x[2], x[3]};
                else
                    for (int e = 0; e < 4; ++e)
                        if (column + e < channels) to[e] = x[e];
            };
            write(out);
            // for the backward pass, whatever becomes of the rows
            if (copy_out) write(copy_out);
            if (column) continue;
            if (total_out) total_out[place] = whole * shared.spoilt[row];
            if (KIND == LAPLACE && shift_out) shift_out[place] = from;
        }
    }
}
