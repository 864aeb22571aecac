// Numbers of 16 bits, for those who include it.
//
// Macros: HALF_PRECISION (1 bfloat16, 2 float16).

constexpr int EXPONENT = HALF_PRECISION == 1 ? 0x7f80 : 0x7c00;

__device__ inline float widen(unsigned short x) {
#if HALF_PRECISION == 1
    return __uint_as_float(unsigned(x) << 16);
#elif defined(__CUDA_ARCH__)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return half_to_float(x);
#endif
}

// Rounded to the nearest, ties to even.
__device__ inline unsigned short narrow(float x) {
#if HALF_PRECISION == 1
    unsigned bits = __float_as_uint(x);
    if (!(x == x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#elif defined(__CUDA_ARCH__)
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    return float_to_half(x);
#endif
}
