// Powers of two, zero where they are too small to be multiplied with.
//
// Macros: those of track.cu, which comes before.

__device__ inline real power_of_two(real x) {
#ifdef __CUDA_ARCH__
    real y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    real y = exp2(x);
    return y < real(1.17549435e-38) ? real(0) : y;
#endif
}
