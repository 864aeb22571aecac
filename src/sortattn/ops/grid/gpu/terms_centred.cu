// Terms of add_bump and add_laplace, which are of differences alone; a part of finish.cu. With the bandwidth tau
//
//     max(1 - |s - t| / tau, 0)  and  exp(-|s - t| / tau) = min(exp(s / tau) exp(-t / tau), exp(-s / tau) exp(t / tau))
//
// so points may be less a number of their dimension, the middle node: of smaller ones float16 has more digits, and
// exponentials are in reach of bfloat16, which has both of a point in a word of its own. Two terms are made by two
// instructions, or by three, of which one is for another unit. Points that are too far out for that are infinite, and
// their terms with others are none, as they should; where both keys and queries have such points, terms are in float32.

// what no score is above is 32768 at most
constexpr int POWER = 15 - (DIMS > 64 ? 7 : DIMS > 32 ? 6 : DIMS > 16 ? 5 : 4);
// times that power of two: in bfloat16 as their terms, or in float16
constexpr unsigned ONES = (KIND == LAPLACE ? (127 + POWER) << 7 : (15 + POWER) << 10) * 0x10001u;

// max(1 - |s - t|, 0)
inline unsigned bump(unsigned s, unsigned t) {
    unsigned result;
    asm("{.reg .b32 d; sub.f16x2 d, %1, %2; abs.f16x2 d, d; sub.sat.f16x2 %0, %3, d;}"
        : "=r"(result)
        : "r"(s), "r"(t), "r"(0x3c003c00));
    return result;
}
// min(s / t, t / s), of numbers and what is one over them
inline unsigned smaller_ratio(unsigned s, unsigned one_by_s, unsigned t, unsigned one_by_t) {
    unsigned result;
    asm("{.reg .b32 p, q; mul.bf16x2 p, %1, %4; mul.bf16x2 q, %2, %3; min.bf16x2 %0, p, q;}"
        : "=r"(result)
        : "r"(s), "r"(one_by_s), "r"(t), "r"(one_by_t));
    return result;
}
// `multiply_halves` of bfloat16
inline void multiply_shorts(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Of word i of a query and of a key.
inline unsigned term(const unsigned (&query)[ALL], const unsigned (&key)[ALL], int i) {
    constexpr int OTHER = ALL - WORDS;
    return KIND == LAPLACE ? smaller_ratio(query[i], query[OTHER + i], key[i], key[OTHER + i]) : bump(query[i], key[i]);
}
inline void multiply_terms(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if (KIND == LAPLACE)
        multiply_shorts(sums, a, b);
    else
        multiply_halves(sums, a, b);
}

// What points are multiplied with, and scores so that they are halves.
struct Scale {
    static constexpr float scale = 1 << POWER;
    // how far out points may be, so divided. Of add_laplace they are exponents of two, and bfloat16 ends with 127: of a
    // point beyond that and one before 100 the term is below 2^-26. Of add_bump it is none where halves end, with 65504
    static constexpr float most = KIND == LAPLACE ? 100 : 16384;
    // one over the bandwidth
    float by;

    Scale(const float *nodes, int count, float tau, float) {
        // equal points are so for any bandwidth
        by = fminf((KIND == LAPLACE ? 1.4426950408889634f : 1) / tau, 3e38f);
        float *middle = reinterpret_cast<float *>(memory + SUMS);
        for (int d = threadIdx.x; d < DIMS; d += THREADS) middle[d] = nodes[d * GP + count / 2] * by;
    }
    float score(float sum) const { return sum; }
    float far_term(float s, float t) const {
        float apart = fabsf(s - t) * by;
        return KIND == LAPLACE ? power_of_two(-apart) : fmaxf(1 - apart, 0);
    }
    float far_sum(float sum) const { return sum * scale; }
    // What terms are made of, in place of a word of points, and as `other`; whether they are too far out for that.
    bool change_word(unsigned &word, unsigned &other, int place) const {
        // the same for queries and keys, so their difference is rounded as that of points is
        float2 x = point(word), middle = reinterpret_cast<const float2 *>(memory + SUMS)[place];
        x = {fmaf(x.x, by, -middle.x), fmaf(x.y, by, -middle.y)};
        if (KIND == LAPLACE) {
            word = pack_short(power_of_two(x.x), power_of_two(x.y));
            other = pack_short(power_of_two(-x.x), power_of_two(-x.y));
        } else
            word = pack(x.x, x.y);
        // those that are no numbers are not
        return !(fabsf(x.x) < most && fabsf(x.y) < most);
    }
    // Those of a tile.
    bool change(unsigned (&points)[2][ALL], float (&)[2], const Lane &lane) const {
        bool far = false;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
                far |= change_word(points[h][i], points[h][ALL - WORDS + i], lane.t * WORDS + i);
        return __any_sync(~0u, far);
    }
    // Those of all keys of the chunk, in shared memory.
    bool change_keys(const Lane &) const {
        constexpr int PIECES = DIMS / 8;
        bool far = false;
        for (int i = threadIdx.x; i < CHUNK * PIECES; i += THREADS) {
            uint4 *at = reinterpret_cast<uint4 *>(memory + i / PIECES * KEY) + i % PIECES, x = *at;
            unsigned words[4] = {x.x, x.y, x.z, x.w}, others[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) far |= change_word(words[e], others[e], i % PIECES * 4 + e);
            at[0] = {words[0], words[1], words[2], words[3]};
            if (KIND == LAPLACE) at[PIECES] = {others[0], others[1], others[2], others[3]};
        }
        return __syncthreads_or(far);
    }
};
