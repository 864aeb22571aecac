// dS, the gradients by the scores of a tile, and as an operand of tensor cores; a part of slopes.cu.

// dS of own rows g and g + 8 of a lane's group and of half of the other rows, 8 j + 2 t + e
struct Scores {
    const uint4 *vectors[2];
    float scale[2], more[2], total[2] = {};
    int mark[2];

    Scores(const Shared &shared, const Problem &problem, const Side &own, int first) {
        Lane lane;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = lane.base + lane.g + 8 * r, there = min(first + row, own.count - 1);
            vectors[r] = reinterpret_cast<const uint4 *>(own.vectors + (long long)there * PACKED) + lane.t;
            scale[r] = own.scale[there];
            more[r] = problem.keys ? 0.0f : problem.grad_total[there];
            mark[r] = shared.own_mark[row];
        }
    }

    // Zero beyond the last of `left` own rows and `here` others; the largest of each row is in shared memory then.
    void make(Shared &shared, int left, int here, float (&score)[OTHER / 16][4]) {
        Lane lane;
        if (lane.base >= left || lane.half * OTHER / 2 >= here) {
            for (int i = 0; i < OTHER / 4; ++i) score[i / 4][i % 4] = 0;
            for (int r = 0; r < 2; ++r) shared.most[lane.half][lane.base + lane.g + 8 * r] = 0;
            return;
        }
        // 16 columns by 16; large halves and small ones
        uint4 mine[2][2][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) mine[i / 4][i / 2 % 2][i % 2] = vectors[i / 4][i / 2 % 2 * 8 + i % 2 * 4];
        float most[2] = {}, fresh[2] = {};
#pragma unroll
        for (int j = 0; j < OTHER / 16; ++j) {
            int first = lane.half * OTHER / 2 + 8 * j;
            const uint4 *row = reinterpret_cast<const uint4 *>(shared.vectors + (first + lane.g) * PACKED_STRIDE);
            uint4 yours[2][2];
#pragma unroll
            for (int part = 0; part < 2; ++part)
#pragma unroll
                for (int c = 0; c < 2; ++c) yours[part][c] = row[part * 8 + c * 4 + lane.t];
            // three products at a time do not wait for each other
            float sums[3][4] = {};
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int product = COARSE ? 2 : 0; product < 3; ++product) {
                    uint4 up = mine[0][product == 1][c], low = mine[1][product == 1][c], b = yours[product == 0][c];
                    multiply_halves(sums[product], {up.x, low.x, up.y, low.y}, {b.x, b.y});
                }
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int product = COARSE ? 2 : 0; product < 3; ++product) {
                    uint4 up = mine[0][product == 1][c], low = mine[1][product == 1][c], b = yours[product == 0][c];
                    multiply_halves(sums[product], {up.z, low.z, up.w, low.w}, {b.z, b.w});
                }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int n = first + 2 * lane.t + e % 2, r = e / 2;
                Row its = shared.other[n];
                float sum = sums[2][e] + (sums[0][e] + sums[1][e]);
                sum = fmaf(sum, scale[r] * its.scale, more[r] + its.more);
                score[j][e] = sum = shared.other_mark[n] < mark[r] ? sum : 0.0f;
                most[r] = fmaxf(most[r], fabsf(sum));
                fresh[r] += sum;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
            shared.most[lane.half][lane.base + lane.g + 8 * r] = most[r];
            total[r] += fresh[r];
        }
    }
};

// dS as columns of the other operand, of a lane and half of the other rows: large halves of an own row, its small ones
inline void keep_weights(Shared &shared, const float (&score)[OTHER / 16][4]) {
    Lane lane;
    Weights quads[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int row = lane.base + lane.g + 8 * r;
        float up, down;
        reach_of(fmaxf(shared.most[0][row], shared.most[1][row]), up, down);
#pragma unroll
        for (int j = 0; j < OTHER / 16; ++j) {
            unsigned large, small;
            split(score[j][2 * r] * up, score[j][2 * r + 1] * up, large, small);
            // of the neighbouring row
            small = COARSE ? 0 : __shfl_xor_sync(~0u, small, 4);
            quads[2 * r].x[j] = lane.g % 2 ? small : large;
            quads[2 * r + 1].x[j] = lane.g % 2 ? large : small;
        }
    }
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) shared.weights[lane.group][quad][lane.half][threadIdx.x % 32] = quads[quad];
}

// the two warps of 16 own rows put the totals of dS together
inline void join_totals(Shared &shared, Scores &scores) {
    Lane lane;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        for (int x = 1; x < 4; x *= 2) scores.total[r] += __shfl_xor_sync(~0u, scores.total[r], x);
        if (lane.half == 0) shared.totals[lane.base + lane.g + 8 * r] = scores.total[r];
    }
    __syncthreads();
    if (lane.half && lane.t == 0)
        for (int r = 0; r < 2; ++r) shared.totals[lane.base + lane.g + 8 * r] += scores.total[r];
    __syncthreads();
}
