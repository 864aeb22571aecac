// Terms of add_riesz, which are differences of maxima; a part of finish.cu. Of two points
//
//     |s| + |t| - |s - t|  is twice  max(s, 0) + max(-t, 0) - max(s - t, 0)  or  max(s, 0) + max(t, 0) - max(s, t)
//
// and half of the terms are of either kind, as different units make them at the same time, two in one instruction.
// Heads with points that are too far out for differences in float16 have terms in float32; points in bfloat16 are
// halves, times a power of two.

constexpr unsigned ONES = 0x3c003c00, MINUS = 0xbc00bc00, SIGNS = 0x80008000;

// Of word i of a query and of a key.
inline unsigned term(const unsigned (&query)[ALL], const unsigned (&key)[ALL], int i) {
    return i % 2 ? larger(query[i], key[i]) : above(query[i], key[i]);
}
inline void multiply_terms(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply_halves(sums, a, b);
}

// Two bfloat16 as halves, times a power of two.
inline unsigned halves_of(unsigned both, float up) {
    float2 x = unpack_short(both);
    return pack(x.x * up, x.y * up);
}

// With a minus, the positive parts of two rows of points, or of what keys have in their place.
template <bool KEYS> inline void sum_parts(float (&sums)[2], const unsigned (&points)[2][WORDS]) {
    float parts[4] = {};
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
        unsigned a[4], ones[2] = {MINUS, MINUS};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[h] = larger(KEYS ? points[h][i] ^ SIGNS : points[h][i], 0);
            a[2 + h] = larger(points[h][i + 1], 0);
        }
        multiply_halves(parts, a, ones);
    }
    sums[0] = parts[0], sums[1] = parts[2];
}

// Those of the keys of the chunk, of which a warp has 32.
inline void sum_keys(const Lane &lane, float *to) {
#pragma unroll 1
    for (int n = threadIdx.x / 32 * 32; n < threadIdx.x / 32 * 32 + 32; n += 16) {
        alignas(16) unsigned points[2][WORDS];
        for (int h = 0; h < 2; ++h) load_words(points[h], memory + (n + lane.g + 8 * h) * KEY + lane.t * WORDS * 4);
        float sums[2];
        sum_parts<true>(sums, points);
        if (lane.t == 0) to[n + lane.g] = sums[0], to[n + lane.g + 8] = sums[1];
    }
}

// The keys of the chunk as halves.
inline void halve_keys(float up) {
    for (int i = threadIdx.x; i < CHUNK * (DIMS / 8); i += THREADS) {
        uint4 *at = reinterpret_cast<uint4 *>(memory + i / (DIMS / 8) * KEY + i % (DIMS / 8) * 16), x = *at;
        *at = {halves_of(x.x, up), halves_of(x.y, up), halves_of(x.z, up), halves_of(x.w, up)};
    }
}

// What scores are made of sums with, and what both are multiplied with so that scores are halves.
struct Scale {
    float scale, base, by;
    // what points in bfloat16 are multiplied with, so that they are halves: those that are not 2^-28 of the largest
    // lose no digits
    float up;
    bool far;

    Scale(const float *nodes, int count, float tau, float epsilon) {
        float most = 0;
        for (int d = threadIdx.x % 32; d < DIMS; d += 32)
            most = fmaxf(most, fmaxf(fabsf(nodes[d * GP + 1]), fabsf(nodes[d * GP + count - 2])));
        most = largest_of_warp(most);
        // differences of halves may be none
        far = !SHORT && of_warp(!(most < 16384));
        scale = 32768 / (2 * power_below(fmaxf(DIMS * (2 * most / tau + epsilon), 1e-30f)));
        up = SHORT ? 8192 / power_below(fmaxf(most, 1e-30f)) : 1;
        base = DIMS * epsilon * scale, by = 2 * scale / up / tau;
    }
    float score(float sum) const { return fmaf(sum, -by, base); }
    // with what queries and keys give by themselves
    float far_term(float s, float t) const { return fabsf(s - t) - fabsf(s) - fabsf(t); }
    float far_sum(float sum) const { return sum / 2; }
    // What terms are made of, in place of points; whether they are too far out for that.
    bool change(unsigned (&points)[2][ALL], float (&begin)[2], const Lane &) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; SHORT && i < WORDS; ++i) points[h][i] = halves_of(points[h][i], up);
        sum_parts<false>(begin, points);
        return far;
    }
    // the same of all keys of the chunk, in shared memory
    bool change_keys(const Lane &lane) const {
        if (SHORT) {
            halve_keys(up);
            __syncthreads();
        }
        if (!far) sum_keys(lane, reinterpret_cast<float *>(memory + SUMS));
        __syncthreads();
        return far;
    }
};
