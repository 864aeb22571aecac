// A walk over keys and values that chunks.cu has made ready; a part of forward.cu. Nothing is changed or split here,
// and no barrier holds the warps of a block together.

// factors of the queries, e^-s and e^2s, of rows in `raw`
inline void change_queries(Streamed &streamed, const float *raw, const float *origin, int dims, float rate) {
    int row = thread() % OWN;
    float4 *to = reinterpret_cast<float4 *>(streamed.query);
    constexpr int TURNS = THREADS / OWN;
#pragma unroll
    for (int i = 0; i < WIDTH / 4 / TURNS; ++i) {
        int at = (i * TURNS + thread() / OWN) * 4;
        float4 found = *reinterpret_cast<const float4 *>(raw + row * STRIDE + at);
        float4 from = *reinterpret_cast<const float4 *>(origin + at);
        float x[4] = {found.x - from.x, found.y - from.y, found.z - from.z, found.w - from.w}, y[8];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            bool inside = at + e < dims;
            x[e] *= rate;
            y[2 * e] = inside ? power_of_two(-x[e]) : 0.0f, y[2 * e + 1] = inside ? power_of_two(2 * x[e]) : 0.0f;
        }
        to[factors_at(at, row)] = {y[0], y[1], y[2], y[3]};
        to[factors_at(at + 2, row)] = {y[4], y[5], y[6], y[7]};
    }
}

// sums += what the dimensions of a chunk add
template <int R, int J>
inline void add_chunk(const float4 *own, const float4 *other, int dims, float (&sums)[4][EACH]) {
#pragma unroll 1
    for (int d = 0; d < dims; d += 4, own += factors_at(4, 0), other += factors_at(4, 0))
#pragma unroll
        for (int i = 0; i < 2; ++i)
            add_products<R, J, 1>(own + factors_at(2 * i, 0), other + factors_at(2 * i, 0), sums);
}
inline void add_chunk(const float4 *own, const float4 *other, int dims, Part part, float (&sums)[4][EACH]) {
    if (part.empty()) return;
    if (part.rows > 8 && part.keys > 8) return add_chunk<4, EACH>(own, other, dims, sums);
    if (part.rows > 8) return add_chunk<4, 2>(own, other, dims, sums);
    if (part.keys > 8) return add_chunk<1, EACH>(own, other, dims, sums);
    add_chunk<1, 2>(own, other, dims, sums);
}

// The sums over the keys before `end`, of which no query sees some from `least` on; `left` rows are left from the first
// of the block on, and mark(n) is that of a key.
template <class Mark> inline void stream(Walk walk, const Shared &shared, int end, int dims, int left, int least,
                                         Mark mark, float (&total)[4], float (&running)[2][8][4]) {
    Place place;
    int lane = threadIdx.x % 32;
    const float4 *queries = reinterpret_cast<const float4 *>(shared.streamed.query) + place.row(0);
    walk.begin();
#pragma unroll 1
    for (int start = 0; start < end; start += OTHER) {
        float scores[4][EACH];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int j = 0; j < EACH; ++j) scores[r][j] = 0;
        Part part{left - place.down, end - start - place.across};
#pragma unroll 1
        for (int d = 0; d < dims; d += CHUNK_DIMS) {
            const float4 *keys = walk.take() + place.column(0);
            add_chunk(queries + factors_at(d, 0), keys, min(dims - d, CHUNK_DIMS), part, scores);
            walk.leave();
        }
        if (start + OTHER > least)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                int other = mark(start + place.column(j));
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    if (other >= shared.own_mark[place.row(r)]) scores[r][j] = 0;
            }
#pragma unroll
        for (int r = 0; r < 4; ++r) total[r] += sum_of(scores[r]);
        // those of this warp's keys
        const float4 *one = walk.take(), *two = walk.take(), *mine = place.across < CHUNK_KEYS ? one : two;
        if (!part.empty())
            add_rows(scores, running, [=](int s, int c, int j) {
                return *reinterpret_cast<const uint4 *>(mine + halves_at(s, c * 16 + j * 8, 0) + lane);
            });
        walk.leave(2);
        walk.leave(1);
    }
}
