// Numbers of sixteen bits: what they stand for, integers in their order, and sorted points.
//
// Macros: BFLOAT (bfloat16, else float16) and LONG (more than 65,536 points).

typedef unsigned short half_t;
typedef long long index_t;

// The two numbers of a word, the lower half first.
__device__ inline void widen(unsigned word, float &low, float &high) {
#if BFLOAT
    low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000u);
#elif defined __CUDA_ARCH__
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(word));
#else
    low = reinterpret<_Float16>(half_t(word)), high = reinterpret<_Float16>(half_t(word >> 16));
#endif
}
__device__ inline float widen(half_t bits) {
    float low, high;
    widen(bits, low, high);
    return low;
}
// Two numbers as a word.
__device__ inline unsigned narrow(float low, float high) {
#ifdef __CUDA_ARCH__
    unsigned word;
#if BFLOAT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
#elif BFLOAT
    auto round = [](float x) {
        unsigned bits = __float_as_uint(x);
        return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
#else
    return reinterpret<half_t>(_Float16(low)) | unsigned(reinterpret<half_t>(_Float16(high))) << 16;
#endif
}

// Products of the two numbers of words.
__device__ inline unsigned times(unsigned one, unsigned other) {
#ifdef __CUDA_ARCH__
    unsigned word;
#if BFLOAT
    // a product alone is for newer architectures
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(one), "r"(other), "r"(0x80008000u));
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(one), "r"(other));
#endif
    return word;
#else
    float a, b, c, d;
    widen(one, a, b), widen(other, c, d);
    return narrow(a * c, b * d);
#endif
}

// whether it is no finite number
__device__ inline bool unfit_bits(half_t bits) {
    constexpr unsigned EXPONENT = BFLOAT ? 0x7f80 : 0x7c00;
    return (bits & EXPONENT) == EXPONENT;
}
// In the order of the numbers: -0.0 is 0.0, and so is what is no finite number.
__device__ inline unsigned code_of(half_t bits) {
    unsigned word = unfit_bits(bits) || bits == 0x8000 ? 0u : bits;
    return word & 0x8000u ? ~word & 0xffffu : word | 0x8000u;
}
// Of the two numbers of a word, if none is special: not finite, or -0.0 (some others count as such).
__device__ inline unsigned codes_of(unsigned word) {
    return word ^ ((word >> 15 & 0x00010001u) * 0xffffu | 0x80008000u);
}
__device__ inline bool is_special(unsigned word) {
    constexpr unsigned ONES = 0x00010001u, SIGNS = 0x80008000u, LOWEST = BFLOAT ? 0x0080u : 0x0400u;
    constexpr unsigned EXPONENTS = (0x8000u - LOWEST) * ONES;
    unsigned other = word ^ SIGNS;
    return ((((word & EXPONENTS) + LOWEST * ONES) | (other - ONES & ~other)) & SIGNS) != 0u;
}
__device__ inline float number_of(unsigned code) { return widen(half_t(code & 0x8000u ? code & 0x7fffu : ~code)); }

// A point on a sorted line: its code, and its index below.
#if LONG
typedef unsigned long long entry_t;
constexpr int INDEX = 32;
#else
typedef unsigned entry_t;
constexpr int INDEX = 16;
#endif
