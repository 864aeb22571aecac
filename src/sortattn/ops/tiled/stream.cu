// A walk over keys and values that chunks.cu has made ready; a part of forward.cu. Nothing is changed or split here,
// and no barrier holds the warps of a block together.

// the queries as they are wanted, of rows in `raw`; two threads have one
inline void change_queries(Shared &shared, const float *raw, const Setting &setting) {
    int row = thread() / 2, half = thread() % 2;
    float4 *to = reinterpret_cast<float4 *>(shared.streamed.query);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // neighbours begin at different banks
        int at = half * 32 + (i ^ half * 4) * 4;
        float4 found = *reinterpret_cast<const float4 *>(raw + row * STRIDE + at);
        float x[4] = {found.x, found.y, found.z, found.w}, y[FOUR];
        if constexpr (ORIGIN) {
            float4 from = *reinterpret_cast<const float4 *>(shared.origin + at);
            x[0] -= from.x, x[1] -= from.y, x[2] -= from.z, x[3] -= from.w;
        }
        make_quick<false>(x, at, setting, y);
#pragma unroll
        for (int e = 0; e < FOUR; e += 4) to[unit_at(at, row) + e / 4 * 64] = {y[e], y[e + 1], y[e + 2], y[e + 3]};
    }
}

// the sums of a tile's terms: of floats, or of integers until all dimensions are in them
struct Sums {
    float x[4][EACH] = {};
    int whole[4][EACH] = {};
};

// sums += what units of a chunk add, two at a time
template <int R, int J>
inline void add_chunk(const float4 *own, const float4 *other, int dims, const Setting &setting, Sums &sums) {
#pragma unroll 1
    for (int d = 0; d < dims; d += 2 * UNIT_DIMS, own += unit_at(2 * UNIT_DIMS, 0), other += unit_at(2 * UNIT_DIMS, 0))
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 *from = own + unit_at(i * UNIT_DIMS, 0), *to = other + unit_at(i * UNIT_DIMS, 0);
            if constexpr (FACTORS) {
                add_products<R, J, 1>(from, to, sums.x);
                continue;
            }
            float4 mine[R];
#pragma unroll
            for (int r = 0; r < R; ++r) mine[r] = from[r * 8];
#pragma unroll
            for (int j = 0; j < J; ++j) {
                float4 yours = to[j / 2 * 8 + j % 2];
                float y[4] = {yours.x, yours.y, yours.z, yours.w};
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    float x[4] = {mine[r].x, mine[r].y, mine[r].z, mine[r].w};
                    add_four(x, y, setting, sums.whole[r][j], sums.x[r][j]);
                }
            }
        }
}
inline void add_chunk(const float4 *own, const float4 *other, int dims, const Setting &setting, Part part, Sums &sums) {
    if (part.empty()) return;
    if (part.rows > 8 && part.keys > 8) return add_chunk<4, EACH>(own, other, dims, setting, sums);
    if (part.rows > 8) return add_chunk<4, 2>(own, other, dims, setting, sums);
    if (part.keys > 8) return add_chunk<1, EACH>(own, other, dims, setting, sums);
    add_chunk<1, 2>(own, other, dims, setting, sums);
}

// The sums over the keys before `end`, of which no query sees some from `least` on; `left` rows are left from the first
// of the block on, and mark(n) is that of a key.
template <class Mark> inline void stream(Walk walk, const Shared &shared, const Setting &setting, int end, int left,
                                         int least, Mark mark, float (&total)[4], float (&running)[2][8][4]) {
    Place place;
    int lane = threadIdx.x % 32;
    const float4 *queries = reinterpret_cast<const float4 *>(shared.streamed.query) + place.row(0);
    walk.begin();
#pragma unroll 1
    for (int start = 0; start < end; start += OTHER) {
        Sums sums;
        Part part{left - place.down, end - start - place.across};
#pragma unroll 1
        for (int d = 0; d < setting.dims; d += CHUNK_DIMS) {
            const float4 *keys = walk.take() + place.column(0);
            add_chunk(queries + unit_at(d, 0), keys, min(setting.dims - d, CHUNK_DIMS), setting, part, sums);
            walk.leave();
        }
        float (&scores)[4][EACH] = sums.x;
        if constexpr (!FACTORS)
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int j = 0; j < EACH; ++j) scores[r][j] = float(unsigned(sums.whole[r][j])) * setting.back;
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
