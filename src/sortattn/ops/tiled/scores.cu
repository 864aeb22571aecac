// The scores of a tile, from points as the sums of their terms want them; a part of forward.cu.

template <bool KEYS> inline void store(float *to, const float (&x)[4]) {
    float4 *place = reinterpret_cast<float4 *>(to);
    if (KEYS)
        *place = {x[beside(0)], x[beside(1)], x[beside(2)], x[beside(3)]};
    else
        *place = {x[0], x[1], x[2], x[3]};
}

// The rows of `raw`, 64 columns from `column` on, as the scores want them; two threads have a row.
template <bool KEYS>
inline void change(Shared &shared, Tile &tile, const float *raw, int column, const Setting &setting) {
    int row = thread() / 2, half = thread() % 2;
    if (!KEYS && row >= OWN) return;
    float *to = (KEYS ? tile.key : shared.query) + row * POINTS;
    float norm = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // neighbours begin at different banks
        int at = half * 32 + (i ^ half * 4) * 4;
        float4 found = *reinterpret_cast<const float4 *>(raw + row * STRIDE + at);
        float x[4] = {found.x, found.y, found.z, found.w};
        if constexpr (!STATIONARY) norm += norm_of<KEYS>(x, setting.quick);
        if (setting.quick) {
            if constexpr (ORIGIN) {
                float4 origin = *reinterpret_cast<const float4 *>(shared.origin + column + at);
                x[0] -= origin.x, x[1] -= origin.y, x[2] -= origin.z, x[3] -= origin.w;
            }
            float y[FOUR];
            make_quick<KEYS>(x, column + at, setting, y);
            if constexpr (FACTORS) {
                float *place = to + at / GROUP * NUMBERS;
                if (at % GROUP < FACTOR_DIMS) {
                    float4 *both = reinterpret_cast<float4 *>(place + at % GROUP * 2);
                    both[0] = {y[0], y[1], y[2], y[3]};
                    both[1] = {y[4], y[5], y[6], y[7]};
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        x[e] = KEYS && column + at + e >= setting.dims ? infinity() : x[e] * setting.numbers.rate;
                    store<KEYS>(place + 2 * FACTOR_DIMS, x);
                }
            } else
                *reinterpret_cast<float4 *>(to + at) = {y[0], y[1], y[2], y[3]};
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            bool beyond = KEYS && column + at + e >= setting.dims;
            // far from the zeros beyond the last dimension of a query
            if constexpr (KIND == ADD_BUMP) x[e] = beyond ? 4 : x[e] * setting.numbers.scale;
            if constexpr (FACTORS) x[e] = beyond ? infinity() : x[e];
        }
        store<KEYS>(to + at, x);
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
    int down = thread() / 32 % ROW_WARPS * 32, across = thread() / 32 / ROW_WARPS * 4 * EACH;
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

// of a number that is no more than 2^-125, how many times the least number it is
inline int multiple(float small) { return __float_as_int(small); }

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

// sums += what two dimensions add of which rows, STEP apart, have factors: e^-|s - t| is e^t e^-s, times e^2(s - t)
// if that is below one. Three instructions on one pipe; what reads three registers takes two cycles, but for e^t, which
// queries of a key share, if it is the same as in the instruction before: so those of a kind stand together.
template <int R, int J, int STEP>
inline void add_products(const float4 *own, const float4 *other, float (&sums)[4][EACH]) {
    float4 mine[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mine[r] = own[r * 8 * STEP];
#pragma unroll
    for (int j = 0; j < J; ++j) {
        float4 yours = other[(j / 2 * 8 + j % 2) * STEP];
        float x[R], y[R];
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] = __saturatef(mine[r].y * yours.x);
#pragma unroll
        for (int r = 0; r < R; ++r) y[r] = __saturatef(mine[r].w * yours.z);
#pragma unroll
        for (int r = 0; r < R; ++r) x[r] *= mine[r].x;
#pragma unroll
        for (int r = 0; r < R; ++r) y[r] *= mine[r].z;
#pragma unroll
        for (int r = 0; r < R; ++r) sums[r][j] = fmaf(yours.y, x[r], sums[r][j]);
#pragma unroll
        for (int r = 0; r < R; ++r) sums[r][j] = fmaf(yours.w, y[r], sums[r][j]);
    }
}

// the same from `d` on of rows that lie one after the other
template <int R, int J>
inline void add_products_at(const Shared &shared, const Tile &tile, int d, float (&sums)[4][EACH]) {
    Place place;
    const float *own = shared.query + place.row(0) * POINTS + d, *other = tile.key + place.column(0) * POINTS + d;
    add_products<R, J, POINTS / 4>(reinterpret_cast<const float4 *>(own), reinterpret_cast<const float4 *>(other),
                                   sums);
}

// what four dimensions add, by instructions on integers; `laplace` has one of them as it is
inline void add_four(const float *own, const float *other, const Setting &setting, int &whole, float &sum) {
    if constexpr (FIXED)
#pragma unroll
        for (int e = 0; e < FIXED_DIMS; ++e) whole = distance_and_sum(own[e], other[beside(e)], whole);
    if constexpr (KIND == ADD_RIESZ)
        // these points are of half the size
        whole += 4 * multiple(__saturatef(own[FIXED_DIMS] - other[beside(FIXED_DIMS)]));
    if constexpr (KIND == LAPLACE) sum += fabsf(own[FIXED_DIMS] - other[beside(FIXED_DIMS)]);
    if constexpr (KIND == ADD_BUMP) {
        int x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = multiple(__saturatef(setting.edge - fabsf(own[e] - other[beside(e)])));
        // two of them are added in one instruction
        whole += x[0] + x[1];
        whole += x[2] + x[3];
    }
}

// sums += what `count` dimensions add
template <int R, int J> inline void add_terms_of(const Shared &shared, const Tile &tile, int count,
                                                 const Setting &setting, float (&sums)[4][EACH]) {
    if constexpr (FIXED || SMALL) {
        if (setting.quick) {
            int whole[R][J] = {};
            pairs<4, R, J, 2>(shared, tile, count, [&](int r, int j, const float *own, const float *other) {
                add_four(own, other, setting, whole[r][j], sums[r][j]);
            });
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int j = 0; j < J; ++j) sums[r][j] = fmaf(float(unsigned(whole[r][j])), setting.back, sums[r][j]);
            return;
        }
    }
    if constexpr (FACTORS && !STREAM) {
        if (setting.quick) {
            if constexpr (ROOMY) {
#pragma unroll 1
                for (int d = 0; d < 2 * count; d += 8)
#pragma unroll
                    for (int i = 0; i < 2; ++i) add_products_at<R, J>(shared, tile, d + 4 * i, sums);
                return;
            }
            auto exponential = [&](int r, int j, const float *own, const float *other) {
                float fresh[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) fresh[e] = power_of_two(-fabsf(own[e] - other[beside(e)]));
                sums[r][j] += (fresh[0] + fresh[1]) + (fresh[2] + fresh[3]);
            };
#pragma unroll 1
            for (int d = 0; d < (count + GROUP - 1) / GROUP * NUMBERS; d += NUMBERS) {
                // in the middle of the others, so that both pipes have work
#pragma unroll
                for (int at = 0; at < FACTOR_DIMS; at += 4) add_products_at<R, J>(shared, tile, d + at, sums);
                pairs_at<4, R, J>(shared, tile, d + 2 * FACTOR_DIMS, exponential);
#pragma unroll
                for (int at = FACTOR_DIMS; at < 2 * FACTOR_DIMS; at += 4)
                    add_products_at<R, J>(shared, tile, d + at, sums);
            }
            return;
        }
    }
    constexpr int STEP = TABLE ? 1 : 4;
    pairs<STEP, R, J>(shared, tile, count, [&](int r, int j, const float *own, const float *other) {
        // a few terms first: fewer additions to a number that is larger than they are
        float fresh = term_of(own[0], other[beside(0)], setting.numbers);
#pragma unroll
        for (int e = 1; e < STEP; ++e) fresh += term_of(own[e], other[beside(e)], setting.numbers);
        sums[r][j] += fresh;
    });
}
inline void add_terms(const Shared &shared, const Tile &tile, int count, const Setting &setting, Part part,
                      float (&sums)[4][EACH]) {
    if (part.empty()) return;
    // one more row than fits into the tiles before is common: the token of a class
    if (WIDE || (part.rows > 8 && part.keys > 8)) return add_terms_of<4, EACH>(shared, tile, count, setting, sums);
    if (part.rows > 8) return add_terms_of<4, 2>(shared, tile, count, setting, sums);
    if (part.keys > 8) return add_terms_of<1, EACH>(shared, tile, count, setting, sums);
    add_terms_of<1, 2>(shared, tile, count, setting, sums);
}

// Scores from the sums of terms, in units of `unit`, zero for pairs that are not seen; of `laplace` the logarithms.
inline void finish(const Shared &shared, const Tile &tile, const Setting &setting, bool masked,
                   float (&scores)[4][EACH]) {
    Place place;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float norm = 0;
        if constexpr (KIND == ADD_RIESZ) norm = float(EPSILON) * setting.dims * setting.numbers.tau;
        if (KIND == ADD_RIESZ && setting.quick) norm += shared.own_norm[place.row(r)];
        if constexpr (KIND == RIESZ) norm = sqrtf(shared.own_norm[place.row(r)]) + float(EPSILON) * setting.numbers.tau;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
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
            for (int j = 0; j < EACH; ++j)
                if (tile.mark[place.column(j)] >= shared.own_mark[place.row(r)])
                    scores[r][j] = KIND == LAPLACE ? -infinity() : 0.0f;
}

// of a thread's scores of a row
inline float sum_of(const float (&scores)[EACH]) {
    float fresh[EACH / 4];
#pragma unroll
    for (int j = 0; j < EACH; j += 4) fresh[j / 4] = (scores[j] + scores[j + 1]) + (scores[j + 2] + scores[j + 3]);
    return EACH == 8 ? fresh[0] + fresh[EACH / 4 - 1] : fresh[0];
}
