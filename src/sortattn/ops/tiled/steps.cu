// Sums of steps times dS, on tensor cores; a part of slopes.cu.

// how many times 16 other rows a thread holds the places of
constexpr int TOGETHER = STEPS + FACTORS_OF > 2 ? 2 : OTHER / 16;
// in both halves
constexpr unsigned MINUS_TWO = 0xc000c000;

// two sums of halves, not below zero and not above one
inline unsigned add_halves(unsigned one, unsigned other) {
    unsigned sums;
    asm("add.rn.sat.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(one), "r"(other));
    return sums;
}
// two steps: of one own coordinate, the first or the second of a pair, and two others
template <bool SECOND> inline unsigned steps_of(unsigned pair, unsigned others) {
    return add_halves(__byte_perm(pair, 0, SECOND ? 0x3232 : 0x1010), others);
}

inline unsigned times(unsigned one, unsigned other) {
    unsigned result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));
    return result;
}
// x less `part` of it
inline unsigned rest(unsigned part, unsigned x) {
    unsigned result;
    asm("{.reg .b32 minus; neg.f16x2 minus, %1; fma.rn.f16x2 %0, minus, %2, %2;}" : "=r"(result) : "r"(part), "r"(x));
    return result;
}

// what S times 16 other rows from `start` on add to four own rows in 16 dimensions
template <int S> inline void add_steps(const Weights (&all)[2][32], int start, const unsigned (&rank)[4],
                                       const unsigned (&place)[STEPS + FACTORS_OF][S][4], float (&sums)[SUMS][4][4]) {
    auto steps_at = [&](int i, const unsigned (&at)[4], unsigned (&steps)[4]) {
        steps[0] = steps_of<false>(rank[i], at[0]), steps[1] = steps_of<true>(rank[i], at[1]);
        steps[2] = steps_of<false>(rank[i], at[2]), steps[3] = steps_of<true>(rank[i], at[3]);
    };
#pragma unroll
    for (int s = 0; s < S; ++s) {
        constexpr int EACH = OTHER / 16;
        int at = 2 * (start + s);
        const unsigned *from = all[at / EACH][threadIdx.x % 32].x + at % EACH;
        unsigned weights[2] = {from[0], from[1]};
        if constexpr (DECAY) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned steps[4];
                steps_at(i, place[0][s], steps);
#pragma unroll
                for (int small = PARTS - 1; small >= 0; --small) {
                    unsigned rise[4], fall[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        rise[e] = times(steps[e], place[1 + small][s][e]);
                        fall[e] = rest(steps[e], place[1 + PARTS + small][s][e]);
                    }
                    multiply_halves(sums[0][i], rise, weights);
                    multiply_halves(sums[1][i], fall, weights);
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned those[2] = {weights[0], weights[1]};
                if (STEPS > 1 && step == 0)
                    those[0] = times(those[0], MINUS_TWO), those[1] = times(those[1], MINUS_TWO);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    unsigned steps[4];
                    steps_at(i, place[step][s], steps);
                    multiply_halves(sums[0][i], steps, those);
                }
            }
        }
    }
}

// of four own rows that of lane t, from its columns of large and small halves
inline float of_four(const float (&sums)[4][4], int e) {
    int t = threadIdx.x % 4;
    float one = t % 2 ? sums[1][e] + sums[1][e + 1] : sums[0][e] + sums[0][e + 1];
    float two = t % 2 ? sums[3][e] + sums[3][e + 1] : sums[2][e] + sums[2][e + 1];
    return t / 2 ? two : one;
}

// what S times 16 other rows from `start` on add to 16 own rows in half of the dimensions
template <int S>
inline void add_rows(const Shared &shared, int start, const float (&back)[4], float (&running)[SUMS][2][4][2]) {
    Lane lane;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        unsigned place[STEPS + FACTORS_OF][S][4];
#pragma unroll
        for (int step = 0; step < STEPS + FACTORS_OF; ++step)
#pragma unroll
            for (int i = 0; i < 4 * S; ++i) {
                const unsigned *row = shared.places[step] + lane.dim(b, i % 2) * PLACES;
                place[step][i / 4][i % 4] = row[8 * (start + i / 4) + i % 4 / 2 * 4 + lane.t];
            }
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            unsigned rank[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = lane.base + 2 * i + quad % 2 + quad / 2 * 8;
                rank[i] = shared.ranks[(row * 4 + 2 * lane.half + b) * 8 + lane.g];
            }
            float sums[SUMS][4][4] = {};
            add_steps<S>(shared.weights[lane.group][quad], start, rank, place, sums);
#pragma unroll
            for (int which = 0; which < SUMS; ++which)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float &sum = running[which][b][quad][h];
                    sum = fmaf(of_four(sums[which], 2 * h), back[quad], sum);
                }
        }
    }
}
