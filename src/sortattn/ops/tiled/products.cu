// Products of scores with values, on tensor cores; a part of forward.cu.

// The largest score of each row as a power of two, of the warp's part of a tile; small rows keep their digits by it.
// Not below 14, so that both powers made of it are normal numbers.
inline int exponent_of(float most) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    return max(__float_as_int(most) >> 23, 14);
}

// Halves have 11 digits, so two of them 22: three products lose hardly more than float32 does. Rows are scaled to what
// halves can hold, and back as they are added. Tensor cores truncate their sums: these are short.
// `halves(s, c, j)` are those of the values that a thread multiplies its scores with.
template <class Halves> inline void add_rows(const float (&scores)[4][EACH], float (&running)[2][8][4], Halves halves) {
    float up[4], down[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float most = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) most = fmaxf(most, fabsf(scores[r][j]));
        int exponent = exponent_of(most);
        up[r] = __int_as_float((2 * 127 + 13 - exponent) << 23), down[r] = __int_as_float((exponent - 13) << 23);
    }
    unsigned large[EACH / 4][2][4], small[EACH / 4][2][4];
#pragma unroll
    for (int s = 0; s < EACH / 4; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int r = 2 * i + e % 2, j = 4 * s + e / 2 * 2;
                split(scores[r][j] * up[r], scores[r][j + 1] * up[r], large[s][i][e], small[s][i][e]);
            }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float fresh[2][2][4] = {};
#pragma unroll
        for (int s = 0; s < EACH / 4; ++s) {
            unsigned more[2][2], less[2][2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint4 both = halves(s, c, j);
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

inline void add_rows(const Tile &tile, const float (&scores)[4][EACH], float (&running)[2][8][4]) {
    Place place;
    const float *from = tile.value + place.column(0) * STRIDE + 4 * place.g;
    add_rows(scores, running, [=](int s, int c, int j) {
        return *reinterpret_cast<const uint4 *>(from + (s * 16 + c / 2 * 8) * STRIDE + c % 2 * 64 + j * 32);
    });
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

inline void exponentiate(float (&scores)[4][EACH], float (&shift)[4], float (&total)[4],
                         float (&running)[CHUNKS][2][8][4], bool shifted) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float largest = shift[r];
#pragma unroll
        for (int j = 0; j < EACH; ++j) largest = fmaxf(largest, scores[r][j]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (!shifted) largest = 0;
        // a row that has seen nothing yet has no scale to change
        float change = shift[r] == -infinity() ? 0.0f : expf(shift[r] - largest);
        shift[r] = largest;
        float from = largest == -infinity() ? 0.0f : largest;
#pragma unroll
        for (int j = 0; j < EACH; ++j) scores[r][j] = expf(scores[r][j] - from);
        total[r] *= change;
        if (__any_sync(~0u, change != 1))
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    running[chunk][r / 2][j][r % 2 * 2] *= change, running[chunk][r / 2][j][r % 2 * 2 + 1] *= change;
    }
}
