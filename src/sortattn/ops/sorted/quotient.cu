// From sums to attention: divide.
//
// Macros: REAL.

typedef REAL real;
typedef long long index_t;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

#include "reciprocal.cu"

// `rows = sums / total`, one row of `channels` a warp; NaN in heads that are unfit.
extern "C" __global__ void __launch_bounds__(THREADS)
    divide(const real *sums, const real *total, const int *unfit, real *rows, index_t number, index_t each,
           index_t channels, index_t stride, double floor) {
    index_t row = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    if (row >= number) return;
    real factor = unfit[row / each] ? not_a_number() : reciprocal(total[row], real(floor));
    for (index_t c = threadIdx.x % 32; c < channels; c += 32) {
        rows[row * channels + c] = factor * sums[row * stride + c];
    }
}

// The gradients of sums and total from that of the rows `sums / total`.
extern "C" __global__ void __launch_bounds__(THREADS)
    divide_backward(const real *grad, const real *sums, const real *total, const int *unfit, real *by_sums,
                    real *by_total, index_t number, index_t each, index_t channels, double floor) {
    index_t row = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    if (row >= number) return;
    real here = total[row], product = real(0);
    real factor = unfit[row / each] ? not_a_number() : reciprocal(here, real(floor));
    for (index_t c = threadIdx.x % 32; c < channels; c += 32) {
        real g = grad[row * channels + c];
        by_sums[row * channels + c] = factor * g;
        product += g * factor * sums[row * channels + c];
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) product += __shfl_xor_sync(0xffffffffu, product, offset);
    // a total below the floor has no gradient
    if (threadIdx.x % 32 == 0) by_total[row] = floor > 0.0 && here < real(floor) ? real(0) : -product * factor;
}
