// Slopes pair by pair, where neither places nor factors serve: in tiles that factors do not reach, and of few own rows;
// a part of slopes.cu.

// sums of a tile one by one, where factors are out of reach
inline void add_apart(Shared &shared, const Side &own, const float (&score)[OTHER / 16][4], int first, int dims,
                      const Numbers &numbers, float (&apart)[DECAY ? 16 : 1]) {
    if constexpr (DECAY) {
        constexpr int STRIDE = OTHER + 1;
        static_assert(OWN * STRIDE <= OTHER * PACKED_STRIDE, "the scores are larger than the vectors");
        Lane lane;
        float *scores = reinterpret_cast<float *>(shared.vectors);
#pragma unroll
        for (int j = 0; j < OTHER / 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores[(lane.base + lane.g + e / 2 * 8) * STRIDE + lane.half * OTHER / 2 + 8 * j + 2 * lane.t + e % 2] =
                    score[j][e];
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {
            int row = lane.row(i / 2 % 4), d = lane.dim(i / 8, i % 2);
            float point = first + row < own.count && d < dims ? own.points[(long long)(first + row) * dims + d] : 0.0f;
            float sum = 0;
#pragma unroll 4
            for (int n = 0; n < OTHER; ++n)
                sum += scores[row * STRIDE + n] * slope(point - shared.points[n * WIDTH + d], numbers);
            apart[i] += sum;
        }
    }
}

// for at most this many own rows, as at the end of a sequence, sorting them takes longer than one step after the other
constexpr int FEW = 8;

// the step of an own coordinate and another one, exactly
template <int STEP> inline float step_of(float own, float other, const Numbers &numbers) {
    if (below<STEP>(own, other, numbers)) return 0.0f;
    return level<STEP>(own, other, numbers) ? step(lost<STEP>(own, other, numbers)) : 1.0f;
}
inline float slope_of(float own, float other, const Numbers &numbers) {
    if constexpr (KIND != ADD_BUMP) return slope(own - other, numbers);
    own *= numbers.scale, other *= numbers.scale;
    return step_of<1>(own, other, numbers) - 2 * step_of<0>(own, other, numbers) + step_of<2>(own, other, numbers);
}

inline void slopes_of_few(const Problem &problem, const Side &own, const Side &other, int first, const Numbers &numbers,
                          Gradients gradients, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Lane lane;
    int dims = problem.dims, left = own.count - first, d = threadIdx.x % WIDTH;
    if (threadIdx.x < OWN) shared.own_mark[threadIdx.x] = problem.mark(problem.keys, first + threadIdx.x);
    __syncthreads();
    int reach = shared.own_mark[0];
    for (int i = 1; i < FEW; ++i) reach = max(reach, shared.own_mark[i]);
    Scores scores(shared, problem, own, first);
    constexpr int PARTS_OF = THREADS / WIDTH, STRIDE = OTHER + 1;
    float *tile = shared.sorted, point[FEW / PARTS_OF], sums[FEW / PARTS_OF] = {};
    auto row_of = [&](int i) { return threadIdx.x / WIDTH + i * PARTS_OF; };
    auto mine = [&](int i) { return row_of(i) < left && d < dims; };
#pragma unroll
    for (int i = 0; i < FEW / PARTS_OF; ++i)
        point[i] = mine(i) ? own.points[(long long)(first + row_of(i)) * dims + d] : 0.0f;
    int now = next_tile(shared, problem, other, 0, reach);
    if (now < other.count) fetch(shared, other, now, dims);
#pragma unroll 1
    while (now < other.count) {
        arrive();
        __syncthreads();
        int here = min(other.count - now, OTHER);
        float score[OTHER / 16][4];
        scores.make(shared, left, here, score);
        if (lane.group == 0)
#pragma unroll
            for (int j = 0; j < OTHER / 16; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    tile[lane.g * STRIDE + lane.half * OTHER / 2 + 8 * j + 2 * lane.t + e] = score[j][e];
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < FEW / PARTS_OF && mine(i); ++i) {
            float sum = 0;
#pragma unroll 4
            for (int n = 0; n < here; ++n)
                sum += tile[row_of(i) * STRIDE + n] * slope_of(point[i], shared.points[n * WIDTH + d], numbers);
            sums[i] += sum;
        }
        __syncthreads();
        now = next_tile(shared, problem, other, now + OTHER, reach);
        if (now < other.count) fetch(shared, other, now, dims);
    }
    join_totals(shared, scores);
#pragma unroll
    for (int i = 0; i < FEW / PARTS_OF; ++i)
        if (mine(i)) {
            float total = shared.totals[row_of(i)];
            gradients.write(own, first + row_of(i), d, dims, SIGNS ? total - 2 * sums[i] : sums[i], total, numbers);
        }
    gradients.leave(moment);
}
